"""The products of the sm80 forward with an e4m3 cache: fragments of bytes from ldmatrix, made into fp16 in registers.

Lane 4 g + t holds of a B fragment the elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of the k extent, of column g. What
ldmatrix brings as pairs of bytes is assigned so that it need not change lanes:

    K   a register has columns 4 t .. 4 t + 3 of 16 of a key: one fragment, if Q's columns are permuted alike
    V   transposed, a register has columns 2 g and 2 g + 1 of two keys, which change places: fragments of the even and
        of the odd ones of 16 columns, so that a lane's accumulators are columns 4 t .. 4 t + 3 of O

The scale of K, and those of the rows of a Q of bf16 (`cuteflash.core.fit_half`), are in the scales of the scores; P is
multiplied with a power of two, and O with V's scale when a tile ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.convert import halves_of_e4m3, rounded_fragment
from cuteflash.core.fit_half import TOP, exponent_of, fitted, larger_exponent, power_of_two
from cuteflash.core.mask import Index
from cuteflash.core.scales import Scales
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import aligned
from cuteflash.kernels.sm80.bundles import Fragments
from cuteflash.traits.sm80 import MMA_K

PAIR, QUAD = 2, 4  # columns of a register; neighbours that a lane has of 16 columns, and lanes that have a row
WORDS = 4  # registers of an A fragment
KEYS_TOGETHER = 0x3120  # of two bytes of each of two keys: those of one column, then those of the other


def with_row_scales(kernel, f: Fragments, scales: Scales, tile: QueryTile) -> Fragments:
    """The fragments with K's scale in those of each row's scores, and with operands whose registers are in order."""
    traits, capped = kernel.traits, kernel.problem.scores.softcap
    row_scales = cute.make_rmem_tensor(cute.size(f.softmax.row_scale), Float32)
    row_scales.fill((f.scores.inner_scale if capped else f.softmax.scale_log2) * scales.of_scores(tile))
    mine, (columns, columns_v) = f.mma.get_slice(f.thread), traits.loaded_columns
    f = dataclasses.replace(
        f,
        rQ=cute.make_rmem_tensor(mine.partition_shape_A((traits.tile_m, traits.head_dim)), kernel.dtype),
        rK=cute.make_rmem_tensor(mine.partition_shape_B((traits.tile_n, columns)), kernel.dtype),
        rVt=cute.make_rmem_tensor(mine.partition_shape_B((columns_v, traits.tile_n)), kernel.dtype),
        row_scales=row_scales,
    )
    if capped:
        return dataclasses.replace(f, scores=dataclasses.replace(f.scores, row_scales=row_scales))
    return dataclasses.replace(f, softmax=dataclasses.replace(f.softmax, row_scales=row_scales))


def take_q(kernel, f: Fragments) -> None:
    """Read this thread's rows of Q, of each 16 columns four neighbours, and make them into fp16.

    If they do not stay in registers, they are put back in the order in which ldmatrix brings the same fragments. A
    warp reads and writes only its own rows.
    """
    words = cute.recast_tensor(f.rQ, Uint32)
    _, tiles, blocks = (cute.size(mode) for mode in f.rQ.shape)
    for r in range(2 * tiles):
        places = [r % 2 + WORDS * (r // 2 + tiles * k) for k in range(blocks)]
        for k, place in enumerate(places):
            column = MMA_K * k + QUAD * (f.thread % QUAD)
            pair = cute.recast_tensor(elements_at(f.sQ, f.scores.row(r), column, QUAD), Uint32)
            words[place], words[place + 2] = pair[0], pair[1]
        if kernel.fits_q:
            fit_row(f, words, [place + half for place in places for half in (0, 2)], r)
    if not kernel.traits.q_in_regs:
        cute.arch.sync_warp()
        for r in range(2 * tiles):
            for k in range(blocks):
                for half in range(2):
                    column = MMA_K * k + MMA_K // 2 * half + PAIR * (f.thread % QUAD)
                    target = cute.recast_tensor(elements_at(f.sQ, f.scores.row(r), column, PAIR), Uint32)
                    target[0] = words[r % 2 + WORDS * (r // 2 + tiles * k) + 2 * half]
        cute.arch.sync_warp()


def fit_row(f: Fragments, words: cute.Tensor, places: list[int], row: int) -> None:
    """Make this thread's part of a row of bf16 into fp16; its factor goes to the scale of the row's scores."""
    peak = Uint32(0)
    for place in places:
        peak = larger_exponent(peak, words[place])
    for lanes in (1, 2):
        peak = cutlass.max(peak, cute.arch.shuffle_sync_bfly(peak, offset=lanes))
    exponent = exponent_of(peak)
    into = power_of_two(TOP - exponent)
    for place in places:
        words[place] = fitted(words[place], into)
    f.row_scales[row] = f.row_scales[row] * power_of_two(exponent - TOP)


def elements_at(tile: cute.Tensor, row: Index, column: Index, count: int) -> cute.Tensor:
    """So many neighbours in a swizzled tile, of which they are a multiple from the first column on."""
    start = tile.iterator + cute.crd2idx((row, column), tile.layout)
    return cute.make_tensor(aligned(start, count * tile.element_type.width // 8), cute.make_layout(count))


def product_qk(kernel, f: Fragments, stage: Index) -> None:
    """S += Q K^T for the K tile in `stage`."""
    fetches = (atoms.Fetch(f.copy_k, f.tSsK[None, None, None, stage], f.copy_k.retile(f.rK)),)
    if not kernel.traits.q_in_regs:
        fetches += (FetchQ(atoms.Fetch(f.copy_q, f.tSsQ, f.copy_q.retile(f.rQ))),)
    stored = cute.recast_tensor(f.rK, Uint32)
    _, keys, blocks = (cute.size(mode) for mode in f.rK.shape)
    for k in fetched(fetches, blocks, kernel.traits.ahead):
        for half in range(2):
            rB, words = operand_b(kernel, keys)
            for n in range(keys):
                words[2 * n], words[2 * n + 1] = halves_of_e4m3(stored[half + 2 * (n + keys * k)])
            cute.gemm(f.mma, f.acc_S, f.rQ[None, None, 2 * k + half], rB, f.acc_S)


def product_pv(kernel, f: Fragments, rP: cute.Tensor, stage: Index) -> None:
    """O += P V for the V tile in `stage`."""
    fetch = atoms.Fetch(f.copy_v, f.tOsVt[None, None, None, stage], f.copy_v.retile(f.rVt))
    stored = cute.recast_tensor(f.rVt, Uint32)
    _, pairs, blocks = (cute.size(mode) for mode in f.rVt.shape)
    for k in fetched((fetch,), blocks, kernel.traits.ahead):
        rB, words = operand_b(kernel, 2 * pairs)
        for n in range(pairs):
            for half in range(2):
                one_column = cute.arch.prmt(stored[half + 2 * (n + pairs * k)], Uint32(0), Uint32(KEYS_TOGETHER))
                words[4 * n + half], words[4 * n + 2 + half] = halves_of_e4m3(Uint32(one_column))
        cute.gemm(f.mma, f.acc_O, rP[None, None, k], rB, f.acc_O)


@dataclasses.dataclass(frozen=True)
class FetchQ:
    """Q's fragments of two products for each block of pairs of bytes."""

    fetch: atoms.Fetch

    def __call__(self, k: int) -> None:
        for half in range(2):
            self.fetch(2 * k + half)


def fetched(fetches: tuple[atoms.Fetch | FetchQ, ...], blocks: int, ahead: int) -> Iterator[int]:
    """The k-blocks in order, fetched `ahead` blocks early."""
    for k in range(-ahead, blocks):
        if k + ahead < blocks:
            for fetch in fetches:
                fetch(k + ahead)
        if k >= 0:
            yield k


def operand_b(kernel, tiles: int) -> tuple[cute.Tensor, cute.Tensor]:
    """The B operand of a k-block, (2, 2) elements of each of so many groups of 8 columns, and its registers."""
    rB = cute.make_rmem_tensor(((2, 2), tiles), kernel.dtype)
    return rB, cute.recast_tensor(rB, Uint32)


def quads_view(acc: cute.Tensor) -> cute.Tensor:
    """The accumulators of O as (rows of this thread, columns of this thread), the latter in order."""
    (_, m, n), (_, d_m, d_n) = acc.layout.shape, acc.layout.stride
    layout = cute.make_layout(((2, m), (2, 2, n // 2)), stride=((2, d_m), (d_n, 1, 2 * d_n)))
    return cute.make_tensor(acc.iterator, layout)


def columns_of_out(f: Fragments, identity: cute.Tensor) -> cute.Tensor:
    """The coordinates of a row's elements in `quads_view`, of a tile's coordinates: (1, columns of this thread)."""
    own = cute.domain_offset((0, QUAD * (f.thread % QUAD)), identity)
    columns = cute.make_layout((QUAD, cute.size(f.out.shape[1]) // QUAD), stride=(1, MMA_K))
    return cute.composition(own, (1, columns))


def stage_quads(f: Fragments, sO: cute.Tensor) -> None:
    """Round the accumulators of O and store them in its tile, four neighbours at a time."""
    dtype = sO.element_type
    atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=QUAD * dtype.width)
    for r in range(cute.size(f.out.shape[0])):
        for i in range(cute.size(f.out.shape[1]) // QUAD):
            quad = cute.make_rmem_tensor(QUAD, Float32)
            for e in range(QUAD):
                quad[e] = f.out[r, QUAD * i + e]
            target = elements_at(sO, f.scores.row(r), MMA_K * i + QUAD * (f.thread % QUAD), QUAD)
            cute.copy(atom, rounded_fragment(quad, dtype), target)
