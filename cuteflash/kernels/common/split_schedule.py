"""Where the share of each block of a launch that splits keys begins: once for all launches with the same lengths.

A warp has one block of those launches, reads the lengths of all sequences, and writes what the block would find.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cuteflash.core.lengths import Lengths, Sequence
from cuteflash.core.mask import IntervalMask
from cuteflash.core.signature import ALIGN_BYTES
from cuteflash.core.split import Line, start_of
from cuteflash.core.split_slots import START_WORDS, metadata_blocks
from cuteflash.problem import MaskKind
from cuteflash.schedule_problem import ScheduleProblem, ScheduleScalars, ScheduleTensors
from cuteflash.traits.schedule import ScheduleTraits

WARP = 32


@dataclasses.dataclass(frozen=True)
class Extent:
    """What `cuteflash.core.split` asks of the launches that are scheduled, a `Launch` with tiles of any size.

    Attributes:
        lengths, window_left, window_right, mask_kind, tile_tokens, tile_n, line: see `cuteflash.core.launch.Launch`.
    """

    lengths: Lengths
    window_left: Int32
    window_right: Int32
    tile_tokens: Int32
    tile_n: Int32
    line: Line
    mask_kind: cutlass.Constexpr[MaskKind]

    def sequence(self, index: Int32) -> Sequence:
        """The sequence of a batch entry, or the rows of Q after the last one."""
        return self.lengths.sequence(index)

    def mask_of(self, sequence: Sequence) -> IntervalMask:
        """The keys that each query of a sequence sees, but for chunks, which change no share."""
        window = self.window_left, self.window_right
        return IntervalMask(self.mask_kind, sequence.seqlen_q, sequence.seqlen_k, *window)


class SplitSchedule:
    """The kernel for a problem."""

    def __init__(self, traits: ScheduleTraits, problem: ScheduleProblem) -> None:
        self.traits = traits
        self.problem = problem

    def fake_args(self) -> tuple[Any, ...]:
        """The arguments that this kernel is compiled with: those of `ScheduleTensors` and `ScheduleScalars`."""
        words, batch, ends = (cute.sym_int32(symbol=name) for name in ("words", "batch", "ends"))

        def vector(size: Any, is_given: bool = True) -> Any:
            return make_fake_compact_tensor(Int32, (size,), assumed_align=4) if is_given else None

        tensors = ScheduleTensors(
            metadata=make_fake_compact_tensor(Int32, (words,), assumed_align=ALIGN_BYTES),
            seqused_k=vector(batch),
            cu_seqlens_q=vector(ends, self.problem.is_packed),
            cache_leftpad=vector(batch, self.problem.has_leftpad),
        )
        scalars = (Int32(0) for _ in ScheduleScalars._fields)
        return *tensors, *scalars, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, *arguments: Any):
        count = len(ScheduleTensors._fields)
        tensors, scalars = ScheduleTensors(*arguments[:count]), ScheduleScalars(*arguments[count:-1])
        blocks = metadata_blocks(tensors.metadata.shape[0])
        self.kernel.set_name_prefix("flash_split_schedule", remove_cutlass_symbol=True)
        self.kernel(tensors, scalars).launch(
            grid=(cute.ceil_div(blocks, self.traits.num_warps), 1, 1),
            block=(self.traits.num_warps * WARP, 1, 1),
            stream=arguments[-1],
        )

    @cute.kernel
    def kernel(self, tensors: ScheduleTensors, scalars: ScheduleScalars):
        metadata = tensors.metadata
        blocks = metadata_blocks(metadata.shape[0])
        block = cute.arch.block_idx()[0] * self.traits.num_warps + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if block < blocks:
            start = start_of(self.extent(tensors, scalars, blocks), block)
            if cute.arch.lane_idx() == 0:
                for i in cutlass.range_constexpr(START_WORDS):
                    metadata[block * START_WORDS + i] = start[i]
                metadata[blocks * START_WORDS + block] = Int32(0)

    def extent(self, tensors: ScheduleTensors, scalars: ScheduleScalars, blocks: Int32) -> Extent:
        """The launches that are scheduled, of so many blocks."""
        batch = tensors.seqused_k.shape[0]
        lengths = Lengths(
            seqlen_q=scalars.seqlen_q,
            seqlen_k=scalars.seqlen_k,
            cu_q=tensors.cu_seqlens_q,
            used_k=tensors.seqused_k,
            batch=batch if self.problem.is_packed else None,
            left_k=tensors.cache_leftpad,
        )
        sequences = batch + 1 if const_expr(self.problem.is_packed) else batch  # the last one: rows after all others
        lanes, most_parts = scalars.lanes, scalars.most_parts
        shares, heads = blocks // lanes, scalars.heads // lanes
        by = lanes, shares, most_parts - 1
        line = Line(sequences, heads, lanes, shares, most_parts, *by)
        return Extent(
            lengths=lengths,
            window_left=scalars.window_left,
            window_right=scalars.window_right,
            tile_tokens=scalars.tile_tokens,
            tile_n=scalars.tile_n,
            line=line,
            mask_kind=self.problem.mask,
        )
