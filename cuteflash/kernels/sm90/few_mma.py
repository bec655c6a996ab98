"""The consumers of the sm90 kernel for few rows: each warp attends to some keys of each block, by itself.

Lane 4 g + t of a warp holds of a fragment of Sᵀ or Oᵀ the rows g and g + 8, keys or columns of V, and the columns 2 t
and 2 t + 1, queries. Operands come from ldmatrix as pairs of bytes. A pair of K are neighbours in the head dim, as the
product wants them: within 16 columns those of K and Q are permuted alike, so that a register becomes two of one lane.
Of V, which is loaded transposed, a register has two columns of two keys, which change places; O's rows g and g + 8
then are neighbouring columns.
"""

from __future__ import annotations

import dataclasses
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp as warp_instructions

from cuteflash.core.convert import halves_of_e4m3, round_pair
from cuteflash.core.fit_half import TOP, exponent_of, fitted, larger_exponent, power_of_two
from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import scale_rows
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import aligned, rows_view, transposed
from cuteflash.kernels.sm90.few_bundles import FewBlock, FewWarp
from cuteflash.kernels.sm90.few_finish import ColumnSoftmax, finish_tile
from cuteflash.kernels.sm90.handout import visit_tiles
from cuteflash.kernels.sm90.swizzle import chunk_beside, swizzled
from cuteflash.traits.few_sm90 import MMA_KEYS, MMA_ROWS
from cuteflash.traits.sm90 import WARPGROUP

LANES_OF_ROW = 4  # that hold one of the eight rows of a fragment
WORDS = 4  # registers that ldmatrix fills
KEYS_TOGETHER = 0x3120  # of two bytes of each of two keys: those of one column, then those of the other


def make_warp(kernel, block: FewBlock) -> FewWarp:
    """The fragments of this thread's warp."""
    traits, launch = kernel.traits, block.launch
    index = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPGROUP // 32
    lane, mma = cute.arch.lane_idx(), kernel.tiled_mma()
    slice_ = mma.get_slice(lane)
    shape = traits.warp_keys, traits.tile_m
    acc_S = cute.make_rmem_tensor(slice_.partition_shape_C(shape), Float32)
    acc_O = cute.make_rmem_tensor(slice_.partition_shape_C((traits.head_dim_v, traits.tile_m)), Float32)
    scores = ScoreTile.of(mma, lane, acc_S, shape, launch.inner_scale, launch.packed_heads, is_transposed=True)
    scores = dataclasses.replace(scores, first_key=scores.first_key + index * traits.warp_keys)
    rows = cute.size(scores.values.shape[0])
    return FewWarp(
        index=index,
        lane=lane,
        lane_rows=tuple(
            swizzled(index * traits.warp_keys + lane % MMA_KEYS, lane // MMA_KEYS, traits.tile_n, columns)
            for columns in (traits.head_dim, traits.head_dim_v)
        ),
        mma=mma,
        rQ=cute.make_rmem_tensor(slice_.partition_shape_B((traits.tile_m, traits.head_dim)), kernel.dtype),
        acc_S=acc_S,
        acc_O=acc_O,
        scores=scores,
        out=transposed(rows_view(acc_O)),
        softmax=ColumnSoftmax.create(rows, launch.scale_log2, True, traits.p_offset),
        bounds=scores.make_bounds(rows),
    )


@cute.jit
def consume(kernel: cutlass.Constexpr, block: FewBlock):
    """Attend and write every tile of this block; all consumer warps call it."""
    own = make_warp(kernel, block)
    visit_tiles(block.handout, block.launch, functools.partial(consume_tile, kernel, block, own))


@cute.jit
def consume_tile(
    kernel: cutlass.Constexpr, block: FewBlock, own: FewWarp, tile: QueryTile, q_pos: Int32, kv_pos: Int32
):
    """Attend this block's share of a tile and write what it finds; returns the next K/V position."""
    rings, blocks = block.rings, tile.visited_blocks()
    own.acc_O.fill(0.0)
    own.softmax.reset()
    own.scores.set_bounds(own.bounds, tile)
    factor = block.scales.of_scores(tile)
    rings.q.wait(q_pos)
    load_q(kernel, own, block.tiles.base)
    rings.q.release_loaded(q_pos)
    own = with_factors(kernel, own, factor)
    n_block = blocks.hi
    for _ in cutlass.range(blocks.hi - blocks.lo, unroll=1):
        n_block -= 1
        attend_block(kernel, block, own, n_block, kv_pos)
        kv_pos += 1
    finish_tile(kernel, block, own, tile)
    return kv_pos


@cute.jit
def load_q(kernel: cutlass.Constexpr, own: FewWarp, base: cute.Pointer):
    """Q as the operand Qᵀ: of each 16 columns a lane has four neighbours."""
    traits, words = kernel.traits, cute.recast_tensor(own.rQ, Uint32)
    rows, columns = traits.tile_m, 2 * traits.head_dim
    start = base + traits.smem_plan["q"].start
    group, t = own.lane // LANES_OF_ROW, own.lane % LANES_OF_ROW
    tiles = rows // MMA_ROWS
    for k in cutlass.range_constexpr(traits.head_dim // MMA_KEYS):
        for n in cutlass.range_constexpr(tiles):
            place = swizzled(n * MMA_ROWS + group, 2 * k + t // 2, rows, columns) + t % 2 * 8
            pair = cute.recast_ptr(aligned(start + place, 8), dtype=Uint32)
            source = cute.make_tensor(pair, cute.make_layout(2))
            for i in cutlass.range_constexpr(2):
                words[i + 2 * (n + tiles * k)] = source[i]


def with_factors(kernel, own: FewWarp, factor: Float32) -> FewWarp:
    """The warp with the scale of K, and of each row of Q that is made into fp16, in the scales of its scores.

    See `fit_q.py`: a row is multiplied with a power of two.
    """
    capped = kernel.problem.scores.softcap
    scale = (own.scores.inner_scale if capped else own.softmax.scale_log2) * factor
    rows = cute.size(own.scores.values.shape[0])
    scales = cute.make_rmem_tensor(rows, Float32)
    scales.fill(scale)
    if kernel.fits_q:
        words, tiles = cute.recast_tensor(own.rQ, Uint32), rows // 2
        for n in range(tiles):
            places = [i + 2 * (n + tiles * k) for k in range(cute.size(words) // rows) for i in range(2)]
            peak = Uint32(0)
            for i in places:
                peak = larger_exponent(peak, words[i])
            for lanes in (1, 2):
                peak = cutlass.max(peak, cute.arch.shuffle_sync_bfly(peak, offset=lanes))
            exponent = exponent_of(peak)
            into = power_of_two(TOP - exponent)
            for i in places:
                words[i] = fitted(words[i], into)
            for b in range(2):  # rows 2 t and 2 t + 1 of the fragments of S, of which this lane has row g of Q's
                of_row = cute.arch.shuffle_sync(exponent, (own.lane % LANES_OF_ROW * 2 + b) * LANES_OF_ROW)
                scales[2 * n + b] = scale * power_of_two(of_row - TOP)
    if capped:
        return dataclasses.replace(own, scores=dataclasses.replace(own.scores, row_scales=scales))
    return dataclasses.replace(own, softmax=dataclasses.replace(own.softmax, row_scales=scales))


@cute.jit
def attend_block(kernel: cutlass.Constexpr, block: FewBlock, own: FewWarp, n_block: Int32, position: Int32):
    """S, softmax and PV product of the warp's keys of one block."""
    traits, rings, problem = kernel.traits, block.rings, kernel.problem
    rings.k.wait(position)
    multiply_k(kernel, own, tile_start(kernel, block, "k", position))
    rings.k.release_loaded(position)
    own.scores.prepare(problem.scores, n_block * traits.tile_n, own.bounds)
    own.softmax.take_peaks(own.scores.values, False)
    for row in cutlass.range_constexpr(cute.size(own.scores.values.shape[0])):
        own.softmax.exponentiate(own.scores.values, row)
    scale_rows(own.out, own.softmax.row_scale)
    rings.v.wait(position)
    multiply_v(kernel, own, tile_start(kernel, block, "v", position))
    rings.v.release_loaded(position)


def tile_start(kernel, block: FewBlock, name: str, position: Int32) -> cute.Pointer:
    """Where the tile of K or V at `position` begins."""
    traits = kernel.traits
    nbytes = traits.tile_n * (traits.head_dim if name == "k" else traits.head_dim_v)
    stage = (block.rings.k if name == "k" else block.rings.v).stage(position)
    return block.tiles.base + traits.smem_plan[name].start + cute.assume(stage * nbytes, divby=nbytes)


def fetch(lane_row: Int32, place: tuple[int, int], shape: tuple[int, int], turn: bool) -> cute.Tensor:
    """Four registers with 16 keys of 32 columns of a tile of `shape`, which begin at `place` of the warp's keys.

    The first two have eight keys each of the first 16 columns. `lane_row` is where the lane's first row begins; `turn`
    as of ldmatrix.
    """
    atom = cute.make_copy_atom(warp_instructions.LdMatrix8x8x16bOp(transpose=turn, num_matrices=4), cutlass.Uint16)
    found = cute.make_rmem_tensor((2 * WORDS, 1), cutlass.Uint16)
    cute.copy(atom, chunk_beside(lane_row, *place, shape), found)
    return cute.recast_tensor(found, Uint32)


@cute.jit
def multiply_k(kernel: cutlass.Constexpr, own: FewWarp, start: cute.Pointer):
    """Sᵀ = K Qᵀ of the warp's keys."""
    traits = kernel.traits
    keys, shape = traits.warp_keys, (traits.tile_n, traits.head_dim)
    lane_row = start.toint() + own.lane_rows[0]
    own.acc_S.fill(0.0)
    for pair in cutlass.range_constexpr(traits.head_dim // (2 * MMA_KEYS)):
        for j in cutlass.range_constexpr(keys // MMA_KEYS):
            found = fetch(lane_row, (j * MMA_KEYS, 2 * pair), shape, False)
            for half in cutlass.range_constexpr(2):
                rA, words = operand_a(kernel)
                for i in cutlass.range_constexpr(2):
                    words[i], words[2 + i] = halves_of_e4m3(found[2 * half + i])
                cute.gemm(
                    own.mma, part_of(own.acc_S, j), rA, own.rQ[None, None, 2 * pair + half], part_of(own.acc_S, j)
                )


@cute.jit
def multiply_v(kernel: cutlass.Constexpr, own: FewWarp, start: cute.Pointer):
    """Oᵀ += Vᵀ Pᵀ of the warp's keys, P being in S's registers."""
    traits = kernel.traits
    keys, shape = traits.warp_keys, (traits.tile_n, traits.head_dim_v)
    lane_row = start.toint() + own.lane_rows[1]
    for j in cutlass.range_constexpr(keys // MMA_KEYS):
        rP = operand_p(kernel, own, j)
        for pair in cutlass.range_constexpr(traits.head_dim_v // (2 * MMA_KEYS)):
            found = fetch(lane_row, (j * MMA_KEYS, 2 * pair), shape, True)
            for half in cutlass.range_constexpr(2):
                rA, words = operand_a(kernel)
                for i in cutlass.range_constexpr(2):
                    sorted_bytes = cute.arch.prmt(found[2 * half + i], Uint32(0), Uint32(KEYS_TOGETHER))
                    words[2 * i], words[2 * i + 1] = halves_of_e4m3(Uint32(sorted_bytes))
                acc = part_of(own.acc_O, 2 * pair + half)
                cute.gemm(own.mma, acc, rA, rP, acc)


def operand_a(kernel) -> tuple[cute.Tensor, cute.Tensor]:
    """A fragment of 16 x 16 elements of K or Vᵀ, and its four registers."""
    rA = cute.make_rmem_tensor(((2, 2, 2), 1), kernel.dtype)
    return rA, cute.recast_tensor(rA, Uint32)


def part_of(acc: cute.Tensor, m: int) -> cute.Tensor:
    """16 rows of an accumulator."""
    atom, _, tiles = acc.layout.shape
    strides, step, tile_stride = acc.layout.stride
    return cute.make_tensor(
        acc.iterator + m * step, cute.make_layout((atom, 1, tiles), stride=(strides, 0, tile_stride))
    )


def operand_p(kernel, own: FewWarp, j: int) -> cute.Tensor:
    """Pᵀ of 16 keys as an operand, ((2, 2), rows / 8): each 8 x 8 elements of Sᵀ are transposed between lanes."""
    tiles = kernel.traits.tile_m // MMA_ROWS
    rP = cute.make_rmem_tensor(((2, 2), tiles), kernel.dtype)
    words = cute.recast_tensor(rP, Uint32)
    for n in range(tiles):
        for half in range(2):
            low, high = (own.acc_S[(b, half), j, n] for b in range(2))
            words[2 * n + half] = transposed_matrix(round_pair(low, high, kernel.dtype))
    return rP


def transposed_matrix(word: Uint32) -> Uint32:
    """An 8 x 8 matrix of 16-bit elements, two neighbours of a row in each lane, transposed."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[word]
    )
