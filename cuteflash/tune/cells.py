"""What is measured: problem cells, their operation counts and their inputs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from cuteflash.arguments import ScaleTensors
from cuteflash.mla_problem import AnyOperation, AnyProblem
from cuteflash.problem import (
    E4M3_MAX,
    FP8_DTYPES,
    MASK_KINDS,
    UNBOUNDED,
    Dtype,
    FwdProblem,
    MaskKind,
)
from cuteflash.quantize_problem import HEAD_DIM_STEP as FP8_STEP
from cuteflash.quantize_problem import QuantizeOptions
from cuteflash.reference.fp8 import dequantised, stored_rows
from cuteflash.reference.quantize import quantize
from cuteflash.traits.length_class import LengthClass, length_class_of
from cuteflash.tune.inputs import PLAIN, of_kind, parse_kind
from cuteflash.tune.operations import DEFAULT, FORMS, SPECS, SWEPT_DTYPES, Form, Rows, Spec, Task, task_of

HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
HIDDEN = 2048
WINDOW = (1024, 0)  # keys a query of a window cell sees before and after its own

TORCH_DTYPES = dict(zip(SWEPT_DTYPES, (torch.float16, torch.bfloat16, torch.float8_e4m3fn), strict=True))
OUT_DTYPE = torch.bfloat16  # of O, and of what is quantised, if the operands have 8 bits


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One attention problem: `tokens` keys in sequences of `seqlen`, as many heads as fit into `hidden`."""

    head_dim: int  # columns of Q and K
    mask: MaskKind  # a window cell has the window `WINDOW`
    seqlen: int  # keys of one sequence
    dtype: Dtype = "bf16"  # element type of all tensors; of 8 bits, O is `OUT_DTYPE`
    _: dataclasses.KW_ONLY
    head_dim_v: int = 0  # columns of V and O; 0, the default, becomes `head_dim`
    seqlen_q: int = 0  # queries of one sequence, the last ones of it; 0, the default, becomes `seqlen`
    tokens: int = TOKENS  # keys of all sequences
    hidden: int = HIDDEN  # columns of Q's heads together, at most
    inputs: str = PLAIN  # kind of the values, see `inputs`
    operation: AnyOperation = DEFAULT  # what is computed
    transposed_v: bool = False  # V of 8 bits is given as V^T
    form: Form = ""  # of few queries: their keys are split, of a cache of 16 or of 8 bits, or of latents
    group: int = 1  # query heads of a KV head, which are rows of a tile; of latents, all heads

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", str(parse_kind(self.inputs)))
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        object.__setattr__(self, "seqlen_q", self.seqlen_q or self.seqlen)
        if not 0 < self.head_dim <= self.hidden:
            raise ValueError(f"head_dim is {self.head_dim}; allowed: 1 to the hidden size {self.hidden}")
        if self.seqlen < 1 or self.tokens % self.seqlen:
            raise ValueError(f"seqlen is {self.seqlen}; it must divide the {self.tokens} tokens")
        if not 0 < self.seqlen_q <= self.seqlen:
            raise ValueError(f"seqlen_q is {self.seqlen_q}; allowed: 1 to the {self.seqlen} keys")
        if self.mask == "causal" and self.seqlen_q == 1:
            raise ValueError("seqlen_q is 1 with a causal mask; a single query takes the kernel of mask full")
        if self.group < 1 or self.heads % self.group or (self.group > 1 and not self.form):
            raise ValueError(f"group is {self.group}; allowed: 1 or, of {FORMS}, a divisor of the {self.heads} heads")
        _ = self.task  # says which operations there are on the dtype
        if self.mask not in self.spec.masks:
            raise ValueError(f"mask is {self.mask!r}; allowed for {self.task}: {', '.join(self.spec.masks)}")
        if self.spec.latent_dims is not None:
            object.__setattr__(self, "group", self.heads)
            if (self.head_dim, self.head_dim_v) != self.spec.latent_dims:
                allowed = "x".join(map(str, self.spec.latent_dims))
                raise ValueError(f"head_dim is {self.head_dim}x{self.head_dim_v}; allowed for {self.task}: {allowed}")
        for name in ("head_dim", "head_dim_v"):
            if self.dtype in FP8_DTYPES and getattr(self, name) % FP8_STEP:
                raise ValueError(f"{name} is {getattr(self, name)} with {self.dtype}; allowed: multiples of {FP8_STEP}")

    @property
    def task(self) -> Task:
        """Whose candidates compute it."""
        return task_of(self.operation, self.dtype, self.transposed_v, self.form)

    @property
    def spec(self) -> Spec:
        """What is known of its task."""
        return SPECS[self.task]

    @property
    def batch(self) -> int:
        return self.tokens // self.seqlen

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.heads // self.group

    @property
    def problem(self) -> AnyProblem:
        """The compile-time side of the cell."""
        found = self.spec.problem(self.dtype, self.head_dim, self.head_dim_v, self.mask)
        return found.packed(self.group) if isinstance(found, FwdProblem) else found

    @property
    def lengths(self) -> LengthClass:
        """The class of its lengths."""
        return length_class_of(self.seqlen_q, self.seqlen, self.operation)

    @property
    def query_rows(self) -> int:
        """Query rows of a KV head of a sequence; beyond all bounds if a kernel's tiles do not depend on them."""
        return self.seqlen_q * self.group if self.form else UNBOUNDED

    @property
    def class_of_rows(self) -> Rows:
        """What its tables know of the query rows."""
        return self.spec.class_of_rows(self.query_rows)

    @property
    def window(self) -> tuple[int, int]:
        """Keys a query sees before and after its own, as kernels get them; bottom-right aligned."""
        return {"full": (UNBOUNDED, UNBOUNDED), "causal": (UNBOUNDED, 0), "window": WINDOW}[self.mask]

    @property
    def pairs(self) -> int:
        """Scores of one head that the mask leaves; under a causal mask the diagonal's count half, by convention."""
        earlier = self.seqlen - self.seqlen_q  # keys before the first query's own
        if self.mask == "full":
            return self.seqlen_q * self.seqlen
        if self.mask == "causal":
            return self.seqlen_q * earlier + self.seqlen_q**2 // 2
        left, _ = WINDOW
        cut = max(0, min(self.seqlen_q, left - earlier))  # queries that the sequence's start leaves fewer keys
        return cut * (earlier + 1) + cut * (cut - 1) // 2 + (self.seqlen_q - cut) * (left + 1)

    @property
    def flops(self) -> int:
        """Floating-point operations of the products over the pairs that count."""
        return self.spec.flops(self.batch * self.heads * self.pairs, self.head_dim, self.head_dim_v)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together: what has to be read or written once."""
        rows = self.seqlen_q * self.group
        elements = self.spec.elements(rows, self.seqlen, self.head_dim, self.head_dim_v)
        return TORCH_DTYPES[self.dtype].itemsize * self.batch * self.kv_heads * elements

    @property
    def label(self) -> str:
        columns = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}x{self.head_dim_v}"
        length = str(self.seqlen) if self.seqlen == self.seqlen_q else f"{self.seqlen_q}x{self.seqlen}"
        kind = "" if self.inputs == PLAIN else f" {self.inputs}"
        dtype = "" if self.dtype == "bf16" else f" {self._format}"
        name = self.form or ("" if self.operation == DEFAULT else self.operation)
        size = f" batch {self.batch} heads {self.heads}/{self.kv_heads}" if self.form else ""
        return f"{f'{name} ' if name else ''}D{columns} {self.mask} {length}{size}{dtype}{kind}"

    @property
    def id(self) -> str:
        """The label with what it leaves out: equal texts, equal cells."""
        plain = dataclasses.replace(self, inputs=PLAIN).label.removesuffix(f" {self._format}")
        kind = "" if self.inputs == PLAIN else f" {self.inputs}"
        size = "" if self.form else f" batch {self.batch} heads {self.heads}"  # which those labels have
        return f"{plain} {self._format}{size}{kind}"

    @property
    def _format(self) -> str:
        return f"{self.dtype} vt" if self.transposed_v else self.dtype


def grid(
    head_dims: Iterable[int] = HEAD_DIMS,
    seqlens: Iterable[int] = SEQLENS,
    masks: Iterable[MaskKind] = ("full", "causal"),
    dtypes: Iterable[Dtype] = ("bf16",),
    inputs: Iterable[str] = (PLAIN,),
) -> list[Cell]:
    """All self-attention cells, ordered so that cells that share a kernel are neighbours."""
    product = itertools.product(dtypes, head_dims, masks, seqlens, inputs)
    return [Cell(d, mask, s, dtype, inputs=kind) for dtype, d, mask, s, kind in product]


def parse_cell(text: str, dtype: Dtype = "bf16", **more: Any) -> Cell:
    """`"128:16384:causal"` or, of 192 columns of Q and 128 of V, `"192x128:1x8192:full"`, one query a sequence.

    A kind of inputs may follow: `"128:16384:causal:sink:12"`. `more` are further fields of the cell. ValueError says
    what the form is.
    """
    try:
        columns, lengths, mask, *inputs = text.split(":", 3)
        if mask not in MASK_KINDS:
            raise ValueError(f"mask is {mask!r}")
        head_dim, _, head_dim_v = columns.partition("x")
        first, _, second = lengths.partition("x")
        kind: MaskKind = mask  # type: ignore[assignment]
        own: dict[str, Any] = {"head_dim_v": int(head_dim_v or 0), "seqlen_q": int(first) if second else 0}
        own |= {"inputs": inputs[0] if inputs else PLAIN} | more
        return Cell(int(head_dim), kind, int(second or first), dtype, **own)
    except ValueError as error:
        form = f"HEAD_DIM[xHEAD_DIM_V]:[SEQLEN_Qx]SEQLEN:{'|'.join(MASK_KINDS)}[:INPUTS]"
        raise ValueError(f"cell is {text!r}; the form is {form} ({error})") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What a forward of one cell reads.

    Attributes:
        q, k: (batch, seqlen_q, heads, head_dim) and (batch, seqlen, kv_heads, head_dim).
        v: (batch, seqlen, kv_heads, head_dim_v), or V^T as `flash_attn_func` takes it; of latents a part of k.
        scales: of 8-bit operands, or of an 8-bit cache.
    """

    cell: Cell
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scales: ScaleTensors | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.q, self.k, self.v))

    @property
    def out_dtype(self) -> torch.dtype:
        """Element type of O."""
        return OUT_DTYPE if self.cell.dtype in FP8_DTYPES else self.q.dtype

    def empty_out(self) -> torch.Tensor:
        """An output, (batch, seqlen_q, heads, head_dim_v), full of NaN."""
        shape = *self.q.shape[:3], self.cell.head_dim_v
        return self.q.new_full(shape, float("nan"), dtype=self.out_dtype)

    def rows_of_v(self) -> torch.Tensor:
        """V as rows, whether or not it is given so."""
        return stored_rows(self.v, self.cell.seqlen) if self.cell.transposed_v else self.v

    def with_stored_v(self) -> Inputs:
        """The same values with V as its rows are stored."""
        v = self.rows_of_v().contiguous()
        return dataclasses.replace(self, cell=dataclasses.replace(self.cell, transposed_v=False), v=v)

    def in_16_bits(self) -> Inputs:
        """The same cell of 16 bits, with what 8-bit operands stand for, rounded to `OUT_DTYPE`."""
        if self.scales is None:
            return self
        q, k, v = (value.to(OUT_DTYPE).contiguous() for value in self.values())
        return Inputs(dataclasses.replace(self.cell, dtype="bf16", transposed_v=False), q, k, v)

    def values(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What Q, K and the rows of V stand for, fp32."""
        tensors = self.q, self.k, self.rows_of_v()
        if self.scales is None:
            q, k, v = (tensor.float() for tensor in tensors)
        else:
            pairs = zip(tensors, self.scales[:3], strict=True)
            q, k, v = (one.float() if scale is None else dequantised(one, scale) for one, scale in pairs)
        return q, k, v


def make_inputs(cell: Cell, device: torch.device, seed: int = 0) -> Inputs:
    """Fresh inputs of the cell's kind; those of 8 bits are quantised from normal ones, with a scale a head."""
    dtype = OUT_DTYPE if cell.dtype in FP8_DTYPES else TORCH_DTYPES[cell.dtype]
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, heads: int) -> torch.Tensor:
        shape = (cell.batch, rows, heads, columns)
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    q, k = normal(cell.seqlen_q, cell.head_dim, cell.heads), normal(cell.seqlen, cell.head_dim, cell.kv_heads)
    if cell.spec.latent_dims is not None:
        q, k, _ = of_kind(cell.inputs, q, k, k[..., : cell.head_dim_v])
        return Inputs(cell, q, k, k[..., : cell.head_dim_v])
    made = of_kind(cell.inputs, q, k, normal(cell.seqlen, cell.head_dim_v, cell.kv_heads))
    if cell.form == "cache":
        (k8, k_descale), (v8, v_descale) = map(_to_cache, made[1:])
        return Inputs(cell, made[0], k8, v8, ScaleTensors(None, k_descale, v_descale))
    if cell.dtype not in FP8_DTYPES:
        return Inputs(cell, *made)
    # The reference, not the operator, whose kernels would have to be compiled here.
    found: Any = quantize(*made, None, None, QuantizeOptions(transpose_v=cell.transposed_v))
    q8, k8, v8, *scales, _ = found
    return Inputs(cell, q8, k8, v8, ScaleTensors(*scales))


def _to_cache(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K or V in e4m3, and what its heads are to be multiplied with, (batch, heads) fp32."""
    descale = (tensor.abs().amax(dim=(1, 3)).float() / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (tensor / descale[:, None, :, None]).to(torch.float8_e4m3fn), descale
