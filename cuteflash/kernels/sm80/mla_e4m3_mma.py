"""The products of the latent-attention decode from an e4m3 cache, S = Q Kᵀ and O += P V, and their operands.

Lane 4 g + t of a warp gets from ldmatrix of pairs of bytes, for the eight keys of a matrix, the bytes 4 t to 4 t + 3 of
16 of key g: four columns of K. Transposed it gets the columns 2 g and 2 g + 1 of the keys 2 t and 2 t + 1, of which the
middle bytes change places: then either half of the word is an operand of V, of even columns and of odd ones.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp as warp_instructions

from cuteflash.core.convert import halves_of_e4m3
from cuteflash.core.scores import ScoreTile
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import aligned, rows_view
from cuteflash.kernels.common.mla_parts import QUAD, copy_chunk
from cuteflash.kernels.sm80.mla_bundles import MlaBlock
from cuteflash.kernels.sm80.mla_e4m3_bundles import E4m3Fragments
from cuteflash.kernels.sm80.mla_e4m3_query import CHUNK_BYTES, SLAB_BYTES_Q, prepare_q
from cuteflash.kernels.sm80.mla_softmax import ROW_GROUP_BARRIER, ROWS
from cuteflash.kernels.sm80.mla_steps import wait_loads
from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V
from cuteflash.traits.sm80 import MMA_K, MMA_M, MMA_N, WARP

WORDS = 4  # registers that ldmatrix fills
SLAB_CHUNKS = 4  # of a row of keys, 64 bytes, that a swizzle permutes
SLAB_BYTES = SLAB_CHUNKS * CHUNK_BYTES
KEYS_TOGETHER = 0x3120  # of two bytes of each of two keys: those of one column, then those of the other


def make_fragments(kernel, block: MlaBlock) -> E4m3Fragments:
    """Partition the block's tiles for this thread."""
    traits, tiles = kernel.traits, block.tiles
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    key_group = warp // traits.warps_m
    mma_qk, mma_s, mma_pv = kernel.tiled_mma_qk(), kernel.tiled_mma_s(), kernel.tiled_mma_pv()
    thr_pv, copy_p = mma_pv.get_slice(thread), kernel.copy_p().get_slice(thread)
    shape_S, shape_O = (traits.tile_m, traits.tile_n), (traits.tile_m, LATENT_DIM_V)
    shape = mma_qk.get_slice(0).partition_shape_C(shape_S)
    accs = tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(traits.chains))
    acc_S = accs[0]
    if traits.column_parts > 1:
        acc_S = cute.make_rmem_tensor(mma_s.get_slice(0).partition_shape_C(shape_S), Float32)
    acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C(shape_O), Float32)
    return E4m3Fragments(
        thread=thread,
        lane=thread % WARP,
        warp=warp,
        row_group=warp % traits.warps_m,
        key_group=key_group,
        key_part=key_group // traits.k_parts,
        k_part=warp % 2 if traits.trades_rows else key_group % traits.k_parts,
        mma_qk=mma_qk,
        mma_pv=mma_pv,
        rQ=cute.make_rmem_tensor(((2, 2, 2), traits.warps_m // traits.product_warps_m, traits.steps), Float16),
        rP=thr_pv.make_fragment_A(thr_pv.partition_A(tiles.sP)),
        copy_p=copy_p,
        tOsP=copy_p.partition_S(tiles.sP),
        accs_S=accs,
        acc_S=acc_S,
        acc_O=acc_O,
        scores=ScoreTile.of(mma_s, thread, acc_S, shape_S, Float32(1.0), 1),
        out=ScoreTile.of(mma_pv, thread, acc_O, shape_O, Float32(1.0), 1),
        row_max=cute.make_rmem_tensor(ROWS, Float32),
        row_sum=cute.make_rmem_tensor(ROWS, Float32),
        row_scale=cute.make_rmem_tensor(ROWS, Float32),
        bounds=cute.make_rmem_tensor((ROWS, 2), Int32),
    )


@cute.jit
def keep_q(kernel: cutlass.Constexpr, block: MlaBlock, f: E4m3Fragments, tile: QueryTile):
    """Prepare Q, fetch what is kept of it in registers, and the scales of the thread's rows."""
    wait_loads(kernel.traits.kv_stage - 1)
    prepare_q(kernel, block, f, tile)
    cute.arch.sync_threads()
    for step in cutlass.range_constexpr(kernel.traits.steps - kernel.traits.q_kept, kernel.traits.steps):
        fetch_q(kernel, block, f, step)
    for r in cutlass.range_constexpr(ROWS):
        f.row_scale[r] = block.tiles.scales[f.scores.row(r)]


def start_of(kernel, block: MlaBlock, stage: Int32) -> cute.Pointer:
    """Where the keys of a stage begin."""
    nbytes = kernel.traits.tile_n * LATENT_DIM
    return block.tiles.start_k + cute.assume(stage * nbytes, divby=nbytes)


def place_of_pair(kernel, f: E4m3Fragments, number: int) -> tuple[int, Int32 | int]:
    """(slab of 64 columns, half of it) of the `number`-th 32 columns of Q and K that a warp has.

    Warps that share columns take the same half of every slab, so that it is the slab's address alone that changes.
    """
    return (number, f.k_part) if kernel.traits.column_parts > 1 else (number // 2, number % 2)


def fetch_q(kernel, block: MlaBlock, f: E4m3Fragments, step: int) -> None:
    """The fragment of 16 columns of Q."""
    slab, half = place_of_pair(kernel, f, step // 2)
    chunk = 4 * half + step % 2 * 2 + f.lane // MMA_M
    for m in range(cute.size(f.rQ.shape[1])):
        group = f.row_group // 2 * 2 + m if kernel.traits.trades_rows else f.row_group
        row = group * MMA_M + f.lane % MMA_M
        at = slab * kernel.traits.tile_m * SLAB_BYTES_Q + row * SLAB_BYTES_Q + (chunk ^ row % 8) * CHUNK_BYTES
        words, found = cute.recast_tensor(f.rQ[None, m, step], Uint32), load_matrices(block.tiles.start_q + at, False)
        for i in range(WORDS):
            words[i] = found[i]


def fetch_pairs(start: cute.Pointer, row: Int32, chunk: Int32, slab: Int32, rows: int, turn: bool) -> cute.Tensor:
    """Four registers with pairs of bytes: this lane's address is a row of keys, a chunk of a slab of 64 bytes.

    Slabs of `rows` rows follow each other; in a slab, chunks are swizzled as `cuteflash.atoms.sm80.swizzled_tile` has
    it. `turn` as of ldmatrix.
    """
    at = slab * (rows * SLAB_BYTES) + row * SLAB_BYTES + (chunk ^ row // 2 % SLAB_CHUNKS) * CHUNK_BYTES
    return load_matrices(start + at, turn)


def load_matrices(address: cute.Pointer, turn: bool) -> cute.Tensor:
    """Four registers by ldmatrix; `turn` transposes."""
    atom = cute.make_copy_atom(warp_instructions.LdMatrix8x8x16bOp(transpose=turn, num_matrices=4), cutlass.Uint16)
    found = cute.make_rmem_tensor((2 * WORDS, 1), cutlass.Uint16)
    pointer = cute.recast_ptr(aligned(address, CHUNK_BYTES), dtype=cutlass.Uint16)
    cute.copy(atom, cute.make_tensor(pointer, cute.make_layout((2 * WORDS, 1))), found)
    return cute.recast_tensor(found, Uint32)


def operand_b(low: Uint32, high: Uint32) -> cute.Tensor:
    """A fragment of 8 columns of a product and 16 terms, from its two registers."""
    fragment = cute.make_rmem_tensor(((2, 2), 1), Float16)
    words = cute.recast_tensor(fragment, Uint32)
    words[0], words[1] = low, high
    return fragment


def columns_of(acc: cute.Tensor, n: int) -> cute.Tensor:
    """The `n`-th 8 columns of an accumulator."""
    atom, rows, _ = acc.layout.shape
    of_atom, of_rows, of_columns = acc.layout.stride
    layout = cute.make_layout((atom, rows, 1), stride=(of_atom, of_rows, of_columns))
    return cute.make_tensor(acc.iterator + n * of_columns, layout)


def product_qk(kernel, block: MlaBlock, f: E4m3Fragments, stage: Int32) -> None:
    """S = Q Kᵀ for the keys in `stage`, times the rows' scales; steps go to the accumulators in turn."""
    traits, start = kernel.traits, start_of(kernel, block, stage)
    for acc in f.accs_S:
        acc.fill(0.0)
    for pair in range(traits.steps // 2):
        slab, half = place_of_pair(kernel, f, pair)
        for step in range(2 * pair, min(2 * pair + 2, traits.steps - traits.q_kept)):
            fetch_q(kernel, block, f, step)
        for n in range(0, traits.warp_keys // MMA_N, 2):
            row = f.key_part * traits.warp_keys + n * MMA_N + f.lane % MMA_K
            found = fetch_pairs(start, row, 2 * half + f.lane // MMA_K, slab, traits.tile_n, False)
            for i in range(WORDS):
                step = 2 * pair + i // 2
                columns = columns_of(f.accs_S[step % traits.chains], n + i % 2)
                operand = operand_b(*halves_of_e4m3(found[i]))
                cute.gemm(f.mma_qk, columns, f.rQ[None, None, step], operand, columns)
    total = f.accs_S[0]
    for acc in f.accs_S[1:]:
        total.store(total.load() + acc.load())
    if traits.trades_rows:
        trade_rows(kernel, block, f)
    values = rows_view(f.acc_S if traits.trades_rows else total)
    for r in range(ROWS):
        for c in range(cute.size(values.shape[1])):
            values[r, c] = values[r, c] * f.row_scale[r]


def trade_rows(kernel, block: MlaBlock, f: E4m3Fragments) -> None:
    """S of the warp's own rows, from the products of both parts of the columns."""
    halves, product, mine = block.tiles.halves, f.accs_S[0], f.acc_S
    is_first = f.k_part == 0
    other = f.thread + cutlass.select_(is_first, WARP, -WARP)
    chunk = cute.make_rmem_tensor(QUAD, Float32)
    groups = range(cute.size(mine) // QUAD)
    for n in groups:
        for e in range(QUAD):
            low, high = product[e + 2 * QUAD * n], product[e + QUAD + 2 * QUAD * n]
            chunk[e], mine[e + QUAD * n] = cutlass.select_(is_first, high, low), cutlass.select_(is_first, low, high)
        copy_chunk(chunk, halves[None, other, n])
    barrier = ROW_GROUP_BARRIER + kernel.traits.warps_m + f.warp // 2  # of the two warps
    cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARP)
    for n in groups:
        copy_chunk(halves[None, f.thread, n], chunk)
        for e in range(QUAD):
            mine[e + QUAD * n] = mine[e + QUAD * n] + chunk[e]


def product_pv(kernel, block: MlaBlock, f: E4m3Fragments, stage: Int32) -> None:
    """O += P V for the keys in `stage`."""
    traits, start = kernel.traits, start_of(kernel, block, stage)
    chunks = traits.warp_columns // CHUNK_BYTES
    fragment = f.copy_p.retile(f.rP)
    for k in range(traits.tile_n // MMA_K):
        cute.copy(f.copy_p, f.tOsP[None, None, k], fragment[None, None, k])
        for chunk in range(0, chunks, 2):
            row, slab = k * MMA_K + f.lane % MMA_K, f.warp * (chunks // SLAB_CHUNKS) + chunk // SLAB_CHUNKS
            found = fetch_pairs(start, row, chunk % SLAB_CHUNKS + f.lane // MMA_K, slab, traits.tile_n, True)
            for i in range(2):
                lows, highs = (
                    halves_of_e4m3(Uint32(cute.arch.prmt(found[2 * i + j], Uint32(0), Uint32(KEYS_TOGETHER))))
                    for j in range(2)
                )
                for parity in range(2):
                    columns = columns_of(f.acc_O, 2 * (chunk + i) + parity)
                    operand = operand_b(lows[parity], highs[parity])
                    cute.gemm(f.mma_pv, columns, f.rP[None, None, k], operand, columns)
