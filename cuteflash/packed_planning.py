"""From a call with packed sequences on a GPU to its launch, see `cuteflash.planning`.

The host does not know the lengths: which kernel runs depends on sizes and on the class of lengths that the options may
name, and a CUDA graph replays with others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, empty_like

from cuteflash.arguments import BwdOptions, Fp8Options, FwdOptions, PackedTensors, mask_of_window
from cuteflash.bwd_planning import bwd_scalars
from cuteflash.compile import compiled
from cuteflash.dispatch import choose, current_target
from cuteflash.planning import (
    DTYPE_NAMES,
    Result,
    fwd_scalars,
    should_pack,
    sink_dtype,
    target_of,
)
from cuteflash.problem import BwdProblem, FwdProblem, Operands, Scores, Storage
from cuteflash.split_planning import ROWS, SplitKernels, Tiles, may_split
from cuteflash.strides import compacted, fp32_template, is_like_new, usable_strides
from cuteflash.torch_internals import current_stream
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import LengthClass, length_class_of_packed
from cuteflash.validate import ALIGNMENT, check_sinks
from cuteflash.validate_packed import PackedBwdInputs, PackedInputs, check_packed, check_packed_bwd

COUNTERS_MAX = 1024
UNPAGED = PackedTensors()[-3:]  # what follows the counter if there are no caches
SEVERAL = 2  # queries: a mask is never simplified as for a single one, since lengths are not known

Launch = Callable[..., Result]  # takes `PackedInputs`, and the sinks if there are some
BwdLaunch = Callable[..., Result]  # takes `PackedBwdInputs`, likewise


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
        key = current_stream(device)
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

    def launch(self, inputs: PackedInputs, options: FwdOptions, sinks: Tensor | None = None) -> Launch:
        """A checked launch for calls with the same sizes, strides and options; what it keeps holds no tensor.

        Raises:
            TypeError, ValueError, NotImplementedError: as `check_packed`, `target_of` and `choose` do.
        """
        check_packed(inputs, options)
        check_sinks(inputs.q, sinks)
        q, k, v = inputs[:3]
        rows, heads, head_dim = q.shape
        shapes = (rows, heads, v.shape[2]), (heads, rows)
        if is_empty(inputs):
            target_of(q.device, options.family)  # as `choose` does for the others
            return functools.partial(self._without_keys, shapes=shapes)
        target = current_target(q.device.index)
        operands, scores, storage, window = _parts_of_problem(inputs, options, sinks)
        problem = FwdProblem(operands, scores, storage, self.has_lse)
        scalars = fwd_scalars(options, window, head_dim, q.device)
        family, lengths = cast(Family | None, options.family), class_of_lengths(inputs, options)
        heads_per_kv = heads // k.shape[1]
        choice = choose(problem, target, family, lengths)
        mean_q, mean_k = (-(-x.shape[0] // inputs.batch) for x in (q, k))
        packs = functools.partial(packs_heads, options, mean_q, heads_per_kv)
        split, num_splits = None, options.num_splits
        if may_split(num_splits, mean_k):
            kernels = SplitKernels(problem, target, choice.family, lengths, num_splits, scalars.num_sms, q.device)
            split = kernels.of(Tiles(inputs.batch, k.shape[1], heads_per_kv, mean_q, mean_k), packs(ROWS))
        if split is None:
            problem = problem.packed(heads_per_kv) if packs(choice.traits.tile_m) else problem
            kernel = compiled(choice.kernel_cls, choice.traits, problem, target)
        else:
            kernel, split_launch = split
        step = ALIGNMENT // q.element_size()
        restrides = [usable_strides(x.stride(), step) for x in (q, k, v)]
        restride, fill, device = any(restrides), storage.used_q, q.device
        o_shape, like_q = shapes[0], is_like_new(q, shapes[0])
        like_lse = fp32_template(shapes[1], device) if self.has_lse else None

        def launch(inputs: PackedInputs, *sinks: Tensor) -> Result:
            q, k, v, *vectors = inputs
            lse = None if like_lse is None else empty_like(like_lse)
            if fill:
                o = q.new_zeros(o_shape)
                lse = lse if lse is None else lse.fill_(float("-inf"))
            else:
                o = empty_like(q) if like_q else q.new_empty(o_shape)
            if restride:
                q, k, v = (x.as_strided(x.shape, s) if s else x for x, s in zip((q, k, v), restrides, strict=True))
            # In the order of `FwdArguments.flat`.
            if split is None:
                kernel(q, k, v, o, lse, *vectors, counters.of(device), *UNPAGED, *scalars, *sinks)
            else:
                kernel(q, k, v, o, lse, *vectors, None, *UNPAGED, *split_launch.arguments(), *scalars, *sinks)
            return o if lse is None else (o, lse)

        return launch

    def _without_keys(
        self, inputs: PackedInputs, *sinks: Tensor, shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> Result:
        """O and LSE if no query sees a key."""
        o_shape, lse_shape = shapes
        o = inputs.q.new_zeros(o_shape)
        if not self.has_lse:
            return o
        lse = inputs.q.new_full(lse_shape, float("-inf"), dtype=torch.float32)
        if sinks:
            torch.where(counted_rows(inputs), sinks[0][:, None].float(), lse, out=lse)
        return o, lse


def counted_rows(inputs: PackedInputs) -> Tensor:
    """(total_q,) whether a row belongs to a sequence, and counts there."""
    rows = torch.arange(inputs.q.shape[0], device=inputs.q.device, dtype=torch.int32)
    if not inputs.batch:
        return rows < 0
    ends, starts = inputs.cu_seqlens_q[1:], inputs.cu_seqlens_q[:-1]
    used = ends - starts if inputs.seqused_q is None else inputs.seqused_q
    sequences = torch.searchsorted(ends, rows, right=True).clamp(max=inputs.batch - 1)
    return (rows >= starts[sequences]) & (rows < (starts + used)[sequences])


def packs_heads(options: FwdOptions, mean_q: int, heads_per_kv: int, tile_m: int) -> bool:
    """Whether the query heads of a KV head share tiles of `tile_m` rows."""
    packs = options.pack_gqa
    return should_pack(mean_q, heads_per_kv, tile_m) if packs is None else packs


def bwd_launch(inputs: PackedBwdInputs, options: BwdOptions, sinks: Tensor | None = None) -> BwdLaunch:
    """A checked launch of the backward for calls with the same sizes, strides and options, as `Planner.launch`.

    The kernels write the gradients of rows that count, and of those after the last sequence; all others are zeros.
    """
    check_packed_bwd(inputs, options)
    check_sinks(inputs.q, sinks)
    packed = inputs.forward
    q, k, v = packed[:3]
    if is_empty(packed):
        target_of(q.device, options.family)  # as `choose` does for the others
        return _zeros
    target = current_target(q.device.index)
    rows, heads, head_dim = q.shape
    operands, scores, storage, window = _parts_of_problem(packed, options, sinks)
    problem = BwdProblem(operands, scores, storage, inputs.dlse is not None, options.deterministic)
    choice = choose(problem, target, cast(Family | None, options.family), class_of_lengths(packed, options))
    kernel = compiled(choice.kernel_cls, choice.traits, problem, target)
    traits: Any = choice.traits
    places = traits.workspace_packed(packed.batch, heads, rows)
    like_workspace = fp32_template((places.size,), q.device)
    parts_shape = () if sinks is None else (heads, places.sink_parts)
    scalars = bwd_scalars(options, window, head_dim, q.device)
    step = ALIGNMENT // q.element_size()
    restrides = [usable_strides(x.stride(), step) for x in (q, k, v, inputs.out)]
    *dout_strides, dout_last = inputs.dout.stride()
    copies_dout = dout_last != 1 or any(stride % step for stride in dout_strides)
    copies_lse, copies_dlse = (x is not None and x.stride() != (rows, 1) for x in (inputs.lse, inputs.dlse))
    copies, restride, device = copies_dout or copies_lse or copies_dlse, any(restrides), q.device
    fills_q, fills_k = storage.used_q, storage.used_k
    q_like, k_like, v_like = (is_like_new(x, x.shape) for x in (q, k, v))

    def launch(inputs: PackedBwdInputs, *sinks: Tensor) -> Result:
        dout, q, k, v, out, lse, *vectors, dlse = inputs
        dq = q.new_zeros(q.shape) if fills_q else empty_like(q) if q_like else q.new_empty(q.shape)
        dk = k.new_zeros(k.shape) if fills_k else empty_like(k) if k_like else k.new_empty(k.shape)
        dv = v.new_zeros(v.shape) if fills_k else empty_like(v) if v_like else v.new_empty(v.shape)
        if restride:
            tensors = zip((q, k, v, out), restrides, strict=True)
            q, k, v, out = (x.as_strided(x.shape, s) if s else x for x, s in tensors)
        if copies:
            dout = compacted(dout) if copies_dout else dout
            lse = compacted(lse) if copies_lse else lse
            dlse = compacted(dlse) if dlse is not None and copies_dlse else dlse
        workspace = empty_like(like_workspace)
        parts = [lse.new_zeros(parts_shape) for _ in sinks]  # not every tile exists
        # In the order of `BwdArguments.flat`.
        kernel(
            q, k, v, out, lse, dout, dlse, dq, dk, dv, workspace, *vectors, counters.of(device), *UNPAGED, *scalars,
            *sinks, *parts,
        )  # fmt: skip
        if not sinks:
            return dq, dk, dv
        return dq, dk, dv, *(part.sum(dim=1).to(x.dtype) for x, part in zip(sinks, parts, strict=True))

    return launch


def _parts_of_problem(
    inputs: PackedInputs, options: FwdOptions | BwdOptions, sinks: Tensor | None
) -> tuple[Operands, Scores, Storage, tuple[int, int]]:
    """What forward and backward problems have in common, and the window as a kernel takes it."""
    mask, left, right = mask_of_window(options.window_left, options.window_right, SEVERAL, options.attention_chunk)
    dtype = DTYPE_NAMES[inputs.q.dtype]
    return (
        Operands(dtype, dtype, dtype, inputs.q.shape[2], inputs.v.shape[2]),
        Scores(mask, options.softcap > 0, options.attention_chunk > 0, sink_dtype(sinks)),
        storage_of(inputs),
        (left, right),
    )


def storage_of(inputs: PackedInputs) -> Storage:
    """How the sequences of a call lie in memory."""
    return Storage("varlen", "varlen", inputs.seqused_q is not None, inputs.seqused_k is not None)


def class_of_lengths(inputs: PackedInputs, options: FwdOptions | Fp8Options | BwdOptions) -> LengthClass:
    """The class that the options name, or that of the mean lengths."""
    found = options.lengths or length_class_of_packed(inputs.q.shape[0], inputs.k.shape[0], inputs.batch)
    return cast(LengthClass, found)


def is_empty(inputs: PackedInputs) -> bool:
    """Whether no query sees a key, whatever the lengths and the mask."""
    return inputs.q.numel() == 0 or inputs.k.shape[0] == 0 or inputs.batch == 0


def _zeros(inputs: PackedBwdInputs, *sinks: Tensor) -> Result:
    """The gradients if no query sees a key; sinks then have all the weight."""
    gradients = tuple(x.new_zeros(x.shape) for x in inputs.forward[:3])
    dlse = inputs.lse.new_zeros(1) if inputs.dlse is None else inputs.dlse.where(counted_rows(inputs.forward), 0.0)
    return *gradients, *(dlse.sum(dim=-1).to(x.dtype).expand(x.shape) for x in sinks)
