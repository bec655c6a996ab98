"""From a call on a GPU to its launch: target, row, kernel and scalars, each asked for once.

    call    sizes, strides, element types, devices and options: all that a launch depends on
    kind    what of a call decides code and scalars: lengths only by their class, strides not at all
    plan    of a kind: the row, the kernel with and without packed heads, and the scalars
    launch  of a call: a plan's kernel, with what the output looks like

Only the first call of a kind is checked in full and asks for rows and kernels. A later one with other sizes is compared
with what is usual; one that is not usual is checked in full as well, and passes or raises as a first one does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from cuteflash.arguments import FwdOptions, FwdScalars
from cuteflash.compile import compiled
from cuteflash.dispatch import choose, current_target, table_key
from cuteflash.problem import LENGTH_MAX, PACK_GQA_MAX, Dtype, FwdProblem, mask_of_window
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import length_class_of
from cuteflash.traits.row import TableKey
from cuteflash.validate import ALIGNMENT, check_fwd

Result = Any  # Tensor without LSE, (Tensor, Tensor) with it
Kernel = Callable[..., object]
Launch = Callable[[Tensor, Tensor, Tensor], Result]
# Shapes of q, k and v, their strides, element types and device indices, and the options: flat, because it is hashed at
# every call, and a nested tuple costs 0.1 us more.
Call = tuple[Any, ...]

DTYPE_NAMES: dict[torch.dtype, Dtype] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
PLANS_MAX = 4096  # scales and windows are part of a kind, and may differ from call to call


def call_of(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Call:
    """What a launch depends on. RuntimeError: a sparse tensor has no strides, a nested one no shape."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), options,
    )  # fmt: skip


def kind_of(call: Call) -> Hashable:
    """What of a call decides its plan; None if the shapes do not belong together, are empty or are too long."""
    q_shape, k_shape, v_shape = call[0], call[1], call[2]
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        return None
    batch, seqlen_q, heads, head_dim = q_shape
    k_batch, seqlen_k, kv_heads, k_head_dim = k_shape
    v_batch, v_seqlen, v_heads, head_dim_v = v_shape
    if (
        batch == k_batch == v_batch != 0
        and head_dim == k_head_dim
        and seqlen_k == v_seqlen
        and kv_heads == v_heads != 0 != heads
        and heads % kv_heads == 0
        and 0 < seqlen_q <= LENGTH_MAX
        and 0 < seqlen_k <= LENGTH_MAX
    ):
        heads_per_kv = heads // kv_heads
        fits_packed = seqlen_q * heads_per_kv <= LENGTH_MAX
        lengths = length_class_of(seqlen_q, seqlen_k)
        return call[6:], head_dim, head_dim_v, heads_per_kv, fits_packed, lengths, seqlen_q == 1
    return None


class Planner:
    """The launches of one forward operator.

    Args:
        has_lse: whether it returns the log-sum-exp, too.
    """

    def __init__(self, has_lse: bool) -> None:
        self.has_lse = has_lse
        self._plans: dict[Hashable, Plan] = {}

    def launch(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Launch:
        """A checked launch for this call and all that are equal to it; what it keeps holds no tensor.

        Raises:
            TypeError, ValueError, NotImplementedError: as `check_fwd`, `table_of` and `choose` do.
        """
        plan = self._plans.get(kind_of(call))
        if plan is not None and plan.can_address(call):
            return plan.launch(call)
        options = FwdOptions(*call[-1])
        check_fwd(q, k, v, options)
        table = table_of(q.device, options.family)
        if q.numel() == 0 or k.shape[1] == 0:
            return _without_kernel((*q.shape[:3], v.shape[3]), self.has_lse)
        if plan is None:
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            plan = self._plans[kind_of(call)] = Plan(q, k, v, options, table, self.has_lse)
        return plan.launch(call, [usable_strides(strides, plan.step) for strides in call[3:6]])


class Plan:
    """The kernels and scalars of one kind of calls, made from the first of them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: FwdOptions, table: TableKey, has_lse: bool) -> None:
        seqlen_q, head_dim, head_dim_v = q.shape[1], q.shape[3], v.shape[3]
        mask, left, right = mask_of_window(options.window_left, options.window_right, seqlen_q)
        dtype = DTYPE_NAMES[q.dtype]
        self.problem = FwdProblem.dense(dtype, head_dim, head_dim_v, mask, softcap=options.softcap > 0, lse=has_lse)
        lengths = length_class_of(seqlen_q, k.shape[1])
        self.target = table.target
        self.choice = choose(self.problem, table.target, table.family, lengths)
        self.pack_gqa = options.pack_gqa
        self.heads_per_kv = q.shape[2] // k.shape[2]
        self.scalars = fwd_scalars(options, (left, right), head_dim, q.device)
        self.step: int = ALIGNMENT // q.element_size()  # elements
        self._kernels: dict[bool, Kernel] = {}

    def can_address(self, call: Call) -> bool:
        """Whether its kernels can take the strides of a call as they are."""
        (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3) = call[3:6]
        return bool(q3 == k3 == v3 == 1 and (q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2) % self.step == 0)

    def kernel(self, seqlen_q: int) -> Kernel:
        """The kernel for `seqlen_q` queries, with or without packed heads."""
        packs = self.pack_gqa
        if packs is None:
            packs = should_pack(seqlen_q, self.heads_per_kv, self.choice.traits.tile_m)
        found = self._kernels.get(packs)
        if found is None:
            problem = self.problem.packed(self.heads_per_kv) if packs else self.problem
            found = compiled(self.choice.kernel_cls, self.choice.traits, problem, self.target)
            self._kernels[packs] = found
        return found

    def launch(self, call: Call, restrides: Sequence[tuple[int, ...] | None] = ()) -> Launch:
        """A launch for a checked call of this kind.

        Args:
            call: whose results it returns.
            restrides: of q, k and v the strides that their kernel gets instead of their own; None keeps those.
        """
        (b, s_q, h, d), q_strides = call[0], call[3]
        d_v = self.problem.operands.head_dim_v
        kernel, scalars, has_lse = self.kernel(s_q), self.scalars, self.problem.has_lse
        o_shape, lse_shape = (b, s_q, h, d_v), (b, h, s_q)
        # empty_like is 0.5 us faster than new_empty, and the same thing if q is laid out as the output is.
        like_q = d == d_v and q_strides == (s_q * h * d, h * d, d, 1)
        restride = any(restrides)

        def launch(q: Tensor, k: Tensor, v: Tensor) -> Result:
            o = torch.empty_like(q) if like_q else q.new_empty(o_shape)
            if restride:
                q, k, v = (x.as_strided(x.shape, s) if s else x for x, s in zip((q, k, v), restrides, strict=True))
            if not has_lse:
                kernel(q, k, v, o, None, *scalars)  # in the order of FwdTensors and FwdScalars
                return o
            lse = q.new_empty(lse_shape, dtype=torch.float32)
            kernel(q, k, v, o, lse, *scalars)
            return o, lse

        return launch


def should_pack(seqlen_q: int, heads_per_kv: int, tile_m: int) -> bool:
    """Whether folding a KV head's query heads into the rows of a tile pays (the `pack_gqa=None` heuristic).

    Each row block of a head reads all of K and V. Apart, the heads need ``heads_per_kv * ceil(seqlen_q / tile_m)``
    blocks, which for a short `seqlen_q` are mostly padding; packed, every 64 rows of a tile hold as many whole tokens
    as fit. Packed rows are gathered from several heads, so packing has to save a tenth of the blocks.
    """
    if heads_per_kv == 1 or heads_per_kv > PACK_GQA_MAX or seqlen_q * heads_per_kv > LENGTH_MAX:
        return False
    tokens = tile_m // PACK_GQA_MAX * (PACK_GQA_MAX // heads_per_kv)
    return 10 * -(-seqlen_q // tokens) <= 9 * heads_per_kv * -(-seqlen_q // tile_m)


def fwd_scalars(options: FwdOptions, window: tuple[int, int], head_dim: int, device: torch.device) -> FwdScalars:
    """The scalars of a launch; `window` has the sides as kernels take them, see `mask_of_window`."""
    definition = options.definition(head_dim) | {"window_left": window[0], "window_right": window[1]}
    return FwdScalars(**definition, num_sms=torch.cuda.get_device_properties(device).multi_processor_count)


def table_of(device: torch.device, family: str | None) -> TableKey:
    """The table of rows for a GPU of this machine. NotImplementedError if no kernel, or not the family, runs on it."""
    return table_key("fwd", current_target(device.index), cast(Family | None, family))


def _without_kernel(o_shape: tuple[int, ...], has_lse: bool) -> Launch:
    """The results if no query sees a key: O = 0 and LSE = -inf, both possibly empty."""
    b, s_q, h, _ = o_shape

    def fill(q: Tensor, k: Tensor, v: Tensor) -> Result:
        o = q.new_zeros(o_shape)
        return (o, q.new_full((b, h, s_q), float("-inf"), dtype=torch.float32)) if has_lse else o

    return fill


def usable_strides(strides: tuple[int, ...], step: int) -> tuple[int, ...] | None:
    """Strides for the kernel if a dimension of size 1 has one that is not a multiple of 16 bytes (`step` elements).

    Such a stride is never used to address, but a TMA descriptor cannot hold it. None if there is none.
    """
    if all(stride % step == 0 for stride in strides[:-1]):
        return None
    return (*(stride if stride % step == 0 else step for stride in strides[:-1]), strides[-1])
