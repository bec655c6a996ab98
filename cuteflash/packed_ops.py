"""The forward operators of packed sequences, `torch.ops.cuteflash.varlen_fwd` and `varlen_fwd_lse`.

They differ from `cuteflash.ops` in what they are given: sequences lie one after the other in q, k and v, without a
batch dimension, and int32 vectors on the same device say where each begins. The host never reads these vectors, so
which kernel runs depends on sizes alone, and a CUDA graph replays with other lengths.

Rows after the last sequence's end, and those that `seqused_q` leaves out, get O = 0 and LSE = -inf. The kernels write
the former themselves. The latter lie between rows that a kernel writes, so the results are then filled beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuteflash.arguments import FwdOptions, PackedTensors
from cuteflash.compile import compiled
from cuteflash.dispatch import choose
from cuteflash.operators import Operator, define
from cuteflash.planning import DTYPE_NAMES, Result, fwd_scalars, should_pack, table_of, usable_strides
from cuteflash.problem import FwdProblem, Operands, Scores, Storage, mask_of_window
from cuteflash.reference.fa2 import flash_attention_2
from cuteflash.torch_internals import OpOverload
from cuteflash.traits.length_class import LengthClass, length_class_of
from cuteflash.transforms import register_autocast
from cuteflash.validate import ALIGNMENT, check_alignment, lse_dtype
from cuteflash.validate_packed import PackedInputs, check_packed, check_values, differences, reads_values

ALIGNMENT_MASK = ALIGNMENT - 1
LAUNCHES_MAX = 4096
COUNTERS_MAX = 1024
LONG_CACHE = 16  # keys a query, at least
SEVERAL = 2  # queries: a mask is never simplified as for a single one, since lengths are not known

Launch = Callable[[PackedInputs], Result]


def length_class_of_mean(rows_q: int, rows_k: int, batch: int) -> LengthClass:
    """The length class of sequences whose lengths are not known: that of the mean lengths.

    `decode` is a few queries against a long cache; a few queries with few keys are short sequences.
    """
    mean_q, mean_k = (-(-rows // batch) for rows in (rows_q, rows_k))
    found = length_class_of(mean_q, mean_k)
    return "short" if found == "decode" and mean_k < LONG_CACHE * mean_q else found


class TileCounters:
    """The counters from which a launch's blocks draw their tiles, one for each stream of a device.

    Each launch leaves its counter at 0, and those on one stream follow each other. A graph that is being captured gets
    one of its own, as it may be replayed on any stream.
    """

    def __init__(self) -> None:
        self._counters: dict[tuple[int, int], Tensor] = {}

    def of(self, device: torch.device) -> Tensor:
        """The counter for a launch on the device's current stream."""
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(1, dtype=torch.int32, device=device)
        stream = torch.cuda.current_stream(device)
        key = stream.device_index, stream.cuda_stream
        counter = self._counters.get(key)
        if counter is None:
            if len(self._counters) >= COUNTERS_MAX:
                self._counters.clear()
            counter = self._counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
        return counter


counters = TileCounters()


class Planner:
    """The launches of one forward operator on packed sequences.

    Args:
        has_lse: whether it returns the log-sum-exp, too.
    """

    def __init__(self, has_lse: bool) -> None:
        self.has_lse = has_lse

    def launch(self, inputs: PackedInputs, options: FwdOptions) -> Launch:
        """A checked launch for calls with the same sizes, strides and options; what it keeps holds no tensor.

        Raises:
            TypeError, ValueError, NotImplementedError: as `check_packed`, `table_of` and `choose` do.
        """
        check_packed(inputs, options)
        q, k, v = inputs[:3]
        table = table_of(q.device, options.family)
        rows, heads, head_dim = q.shape
        shapes = (rows, heads, v.shape[2]), (heads, rows)
        if q.numel() == 0 or k.shape[0] == 0 or inputs.batch == 0:
            return functools.partial(self._results, shapes=shapes, fill=True)
        lengths = length_class_of_mean(rows, k.shape[0], inputs.batch)
        mask, *window = mask_of_window(options.window_left, options.window_right, SEVERAL)
        dtype = DTYPE_NAMES[q.dtype]
        has_used = tuple(x is not None for x in (inputs.seqused_q, inputs.seqused_k))
        problem = FwdProblem(
            Operands(dtype, dtype, dtype, head_dim, v.shape[2]),
            Scores(mask, softcap=options.softcap > 0),
            Storage("varlen", "varlen", *has_used),
            self.has_lse,
        )
        choice = choose(problem, table.target, table.family, lengths)
        heads_per_kv = heads // k.shape[1]
        packs = options.pack_gqa
        if packs is None:
            packs = should_pack(-(-rows // inputs.batch), heads_per_kv, choice.traits.tile_m)
        kernel = compiled(
            choice.kernel_cls, choice.traits, problem.packed(heads_per_kv) if packs else problem, table.target
        )
        scalars = fwd_scalars(options, (window[0], window[1]), head_dim, q.device)
        step = ALIGNMENT // q.element_size()
        restrides = [usable_strides(x.stride(), step) for x in (q, k, v)]

        def launch(inputs: PackedInputs) -> Result:
            result = self._results(inputs, shapes, fill=has_used[0])
            o, lse = result if self.has_lse else (result, None)
            q, k, v = (x.as_strided(x.shape, s) if s else x for x, s in zip(inputs[:3], restrides, strict=True))
            kernel(q, k, v, o, lse, *PackedTensors(*inputs[3:], counters.of(o.device)), *scalars)
            return result

        return launch

    def _results(self, inputs: PackedInputs, shapes: tuple[tuple[int, ...], tuple[int, ...]], fill: bool) -> Result:
        """O and LSE, uninitialised or filled with what a query gets that sees no key."""
        o_shape, lse_shape = shapes
        q = inputs.q
        o = q.new_zeros(o_shape) if fill else q.new_empty(o_shape)
        if not self.has_lse:
            return o
        lse = q.new_empty(lse_shape, dtype=torch.float32)
        return o, lse.fill_(float("-inf")) if fill else lse


def cuda_forward(has_lse: bool) -> Callable[..., Result]:
    """The CUDA implementation: look the launch of an equal call up, or plan one."""
    planner = Planner(has_lse)
    launches: dict[Hashable, Launch] = {}

    def cuda(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        used_q: Tensor | None = None,
        used_k: Tensor | None = None,
        *options: Any,
    ) -> Result:
        inputs = PackedInputs(q, k, v, cu_q, cu_k, used_q, used_k)
        try:
            looks = tuple(x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in inputs)
        except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
            check_packed(inputs, FwdOptions(*options))
            raise
        call = looks, options
        launch = launches.get(call)
        if launch is None:
            launch = planner.launch(inputs, FwdOptions(*options))
            if len(launches) >= LAUNCHES_MAX:
                launches.clear()
            launches[call] = launch
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK:
            check_alignment(q, k, v)
        if reads_values():
            check_values(inputs, complete=True)
        return launch(inputs)

    return cuda


def _check(*arguments: Any) -> None:
    *tensors, options = arguments
    check_packed(PackedInputs(*tensors), options)


def _fake(*arguments: Any, has_lse: bool) -> Result:
    _check(*arguments)
    q, _, v, *_, options = arguments
    if q.device.type == "cuda" and torch.cuda.is_available():  # else traced for another machine's GPU
        table_of(q.device, options.family)
    rows, heads, _ = q.shape
    o = q.new_empty((rows, heads, v.shape[2]))
    return (o, q.new_empty((heads, rows), dtype=lse_dtype(q))) if has_lse else o


def _cpu(*arguments: Any, has_lse: bool) -> Result:
    """One sequence after the other through the reference."""
    _check(*arguments)
    *tensors, options = arguments
    inputs = PackedInputs(*tensors)
    q, k, v = inputs[:3]
    check_alignment(q, k, v)
    check_values(inputs, complete=reads_values())
    rows, heads, head_dim = q.shape
    o = q.new_zeros(rows, heads, v.shape[2])
    lse = q.new_full((heads, rows), float("-inf"), dtype=lse_dtype(q))
    definition = options.definition(head_dim)
    for of_q, of_k in zip(
        _spans(inputs.cu_seqlens_q, inputs.seqused_q), _spans(inputs.cu_seqlens_k, inputs.seqused_k), strict=True
    ):
        o_part, lse_part = flash_attention_2(q[None, of_q], k[None, of_k], v[None, of_k], **definition)
        o[of_q], lse[:, of_q] = o_part[0], lse_part[0]
    return (o, lse) if has_lse else o


def _spans(cu_seqlens: Tensor, used: Tensor | None) -> list[slice]:
    """The rows of each sequence that count."""
    ends = cu_seqlens.tolist()
    lengths = differences(ends) if used is None else used.tolist()
    return [slice(begin, begin + length) for begin, length in zip(ends, lengths, strict=False)]


def register_packed_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register autocast, the count of operations, and vmap: one call after the other, as lengths may be mapped, too."""
    torch.library.register_vmap(op.name(), functools.partial(_mapped, op), lib=library)
    register_autocast(library, op)
    register_flop_formula(op.overloadpacket, get_raw=True)(count_flops)


def _mapped(op: OpOverload, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    if not info.batch_size:
        raise ValueError("the mapped dimension has size 0; allowed: 1 or more for packed sequences")
    calls = (
        op(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims, strict=True)))
        for i in range(info.batch_size)
    )
    results = list(calls)
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(x) for x in zip(*results, strict=True)), (0, 0)


def count_flops(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any, out_val: Any = None, **named: Any
) -> int:
    """Floating-point operations of a forward: two for each product of Q K^T and of P V, whatever the mask leaves out.

    Reads the lengths. Those of fake tensors are taken to be equal.
    """
    if type(cu_q) is Tensor and cu_q.device.type != "meta":
        pairs = int((cu_q.diff().long() * cu_k.diff().long()).sum())
    else:
        pairs = q.shape[0] * k.shape[0] // max(cu_q.shape[0] - 1, 1)
    return 2 * q.shape[1] * pairs * (q.shape[2] + v.shape[2])


def _forward(name: str, returns: Any, cuda: Callable[..., Result], has_lse: bool) -> Operator:
    return Operator(
        name=name,
        tensors=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
        optional=("seqused_q", "seqused_k"),
        options=FwdOptions,
        returns=returns,
        check=_check,
        cuda=cuda,
        cpu=functools.partial(_cpu, has_lse=has_lse),
        fake=functools.partial(_fake, has_lse=has_lse),
        transforms=register_packed_transforms,
    )


varlen_fwd_cuda, varlen_fwd_lse_cuda = cuda_forward(has_lse=False), cuda_forward(has_lse=True)
VARLEN_FWD = _forward("varlen_fwd", Tensor, varlen_fwd_cuda, has_lse=False)
VARLEN_FWD_LSE = _forward("varlen_fwd_lse", tuple[Tensor, Tensor], varlen_fwd_lse_cuda, has_lse=True)
varlen_fwd, varlen_fwd_lse = define(VARLEN_FWD), define(VARLEN_FWD_LSE)
