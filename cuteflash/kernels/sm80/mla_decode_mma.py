"""The main loop of the sm80 latent-attention decode: S = Q Kᵀ, softmax, O += P V, and the loads of later steps."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.latent import place_of
from cuteflash.core.scores import ScoreTile
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm80.mla_decode_bundles import Fragments, MlaBlock
from cuteflash.kernels.sm80.mla_decode_load import load_keys, load_q
from cuteflash.kernels.sm80.mla_decode_softmax import ROWS, scale_out, soften
from cuteflash.mla_problem import LATENT_DIM_V
from cuteflash.traits.mla_sm80 import STEP
from cuteflash.traits.sm80 import MMA_K, WARP

NO_MAXIMUM = -1e30  # of a row before its first key; finite, so that no difference of maxima is NaN


def make_fragments(kernel, block: MlaBlock) -> Fragments:
    """Partition the block's tiles for this thread."""
    traits, tiles = kernel.traits, block.tiles
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row_group, key_group = warp % traits.warps_m, warp // traits.warps_m
    k_part = key_group % traits.k_parts
    thread_qk = (key_group // traits.k_parts * traits.warps_m + row_group) * WARP + thread % WARP
    mma_qk, mma_s, mma_pv = kernel.tiled_mma_qk(), kernel.tiled_mma_s(), kernel.tiled_mma_pv()
    thr_qk, thr_s, thr_pv = mma_qk.get_slice(thread_qk), mma_s.get_slice(thread), mma_pv.get_slice(thread)
    copy_q, copy_k = (copy.get_slice(thread_qk) for copy in (kernel.copy_q(), kernel.copy_k()))
    copy_p, copy_v = (copy.get_slice(thread) for copy in (kernel.copy_p(), kernel.copy_v()))
    shape_S, shape_O = (traits.tile_m, traits.tile_n), (traits.tile_m, LATENT_DIM_V)
    accs = tuple(cute.make_rmem_tensor(thr_qk.partition_shape_C(shape_S), Float32) for _ in range(traits.chains))
    acc_S = accs[0]
    if traits.k_parts > 1:
        acc_S = cute.make_rmem_tensor(thr_s.partition_shape_C(shape_S), Float32)
    acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C(shape_O), Float32)
    tSsQ, tSsK = copy_q.partition_S(tiles.sQ), copy_k.partition_S(tiles.sK)
    if traits.k_parts > 1:  # every other 32 columns, in two fetches each
        mine = (None, k_part), None
        tSsQ, tSsK = (cute.group_modes(x, 2, 4) for x in (tSsQ[None, None, mine], tSsK[None, None, mine, None]))
    return Fragments(
        thread=thread,
        row_group=row_group,
        key_group=key_group,
        k_part=k_part,
        mma_qk=mma_qk,
        mma_pv=mma_pv,
        rQ=thr_qk.make_fragment_A(thr_qk.partition_A(tiles.sQ)),
        rK=thr_qk.make_fragment_B(thr_qk.partition_B(tiles.sK[None, None, 0])),
        rP=thr_pv.make_fragment_A(thr_pv.partition_A(tiles.sP)),
        rVt=thr_pv.make_fragment_B(thr_pv.partition_B(tiles.sVt[None, None, 0])),
        copy_q=copy_q,
        copy_k=copy_k,
        copy_p=copy_p,
        copy_v=copy_v,
        tSsQ=tSsQ,
        tSsK=tSsK,
        tOsP=copy_p.partition_S(tiles.sP),
        tOsVt=copy_v.partition_S(tiles.sVt),
        accs_S=accs,
        acc_S=acc_S,
        acc_O=acc_O,
        scores=ScoreTile.of(mma_s, thread, acc_S, shape_S, Float32(1.0), 1),
        out=ScoreTile.of(mma_pv, thread, acc_O, shape_O, Float32(1.0), 1),
        row_max=cute.make_rmem_tensor(ROWS, Float32),
        row_sum=cute.make_rmem_tensor(ROWS, Float32),
        bounds=cute.make_rmem_tensor((ROWS, 2), Int32),
    )


def wait_loads(pending: int) -> None:
    """Wait until all but the last `pending` groups of copies are in shared memory, those of every thread."""
    cute.arch.cp_async_wait_group(pending)
    cute.arch.sync_threads()


@cute.jit
def attend(kernel: cutlass.Constexpr, block: MlaBlock, f: Fragments, tile: QueryTile):
    """Accumulate O over a tile's keys, or over this block's share of them, which may be none."""
    f.acc_O.fill(0.0)
    f.row_sum.fill(0.0)
    f.row_max.fill(NO_MAXIMUM)
    blocks = tile.visited_blocks()
    if blocks.hi > blocks.lo:
        place = load_first(kernel, block, f, tile, blocks.lo, blocks.hi)
        attend_steps(kernel, block, f, tile, (blocks.lo, blocks.hi), place)


@cute.jit
def load_first(kernel: cutlass.Constexpr, block: MlaBlock, f: Fragments, tile: QueryTile, first: Int32, end: Int32):
    """Issue the loads of Q and of all stages but the last, fetch what is kept of Q; where the next keys lie."""
    stages = kernel.traits.kv_stage
    load_q(kernel, block, tile)
    cute.arch.cp_async_commit_group()
    for stage in cutlass.range_constexpr(stages - 1):
        page = first + stage
        load_step(kernel, block, tile, (page, end), place_of(block, tile, page, end), Int32(stage + 1))
    place = place_of(block, tile, first + stages - 1, end)
    if const_expr(kernel.traits.q_kept > 0):
        wait_loads(stages - 1)
        for step in cutlass.range_constexpr(*kept_fetches(kernel.traits)):
            fetch_q(f, step)
    return place


@cute.jit
def attend_steps(
    kernel: cutlass.Constexpr,
    block: MlaBlock,
    f: Fragments,
    tile: QueryTile,
    pages: tuple[Int32, Int32],
    place: tuple[Int32, Int32],
):
    """`attend` of the steps `pages`, one or more, each after the other.

    A step's keys are loaded `kv_stage - 1` steps ahead, and looked up one more; `place` is that of the next ones.
    """
    first, end = pages
    stages = kernel.traits.kv_stage
    for page in cutlass.range(first, end, unroll=1):
        wait_loads(stages - 2)  # this step's keys are loaded, and every warp has read the last step's
        following = page + stages - 1
        load_step(kernel, block, tile, (following, end), place, stage_of(kernel, first, following))
        place = place_of(block, tile, following + 1, end)
        stage = stage_of(kernel, first, page)
        product_qk(kernel, f, stage)
        soften(kernel, block, f, tile, page)
        cute.arch.sync_threads()  # P is written, and the factors
        scale_out(block, f)
        product_pv(f, stage)


@cute.jit
def load_step(
    kernel: cutlass.Constexpr,
    block: MlaBlock,
    tile: QueryTile,
    pages: tuple[Int32, Int32],
    place: tuple[Int32, Int32],
    stage: Int32,
):
    """Issue the loads of a step as one group, which is empty if the tile has no such step; `pages` (step, end)."""
    page, end = pages
    if page < end:
        load_keys(kernel, block, tile, page, place, stage)
    cute.arch.cp_async_commit_group()


def stage_of(kernel, first: Int32, page: Int32) -> Int32:
    """The stage of a step's keys: stage 0 is loaded last, for the time that Q lies there."""
    return (page - first + 1) % kernel.traits.kv_stage


def kept_fetches(traits) -> tuple[int, int]:
    """Which fetches of a warp's columns of Q are kept in registers: from the first to the end."""
    of_step = STEP // traits.fetch
    return (traits.steps - traits.q_kept) * of_step, traits.steps * of_step


def fetch_q(f: Fragments, number: int) -> None:
    """The fragments of some columns of Q."""
    cute.copy(f.copy_q, f.tSsQ[None, None, number], f.copy_q.retile(f.rQ)[None, None, number])


def product_qk(kernel, f: Fragments, stage: Int32) -> None:
    """S = Q Kᵀ for the keys in `stage`; k-blocks go to the accumulators in turn."""
    traits, together = kernel.traits, kernel.traits.fetch // MMA_K
    first_kept, count = kept_fetches(traits)
    fragment = f.copy_k.retile(f.rK)
    for acc in f.accs_S:
        acc.fill(0.0)
    for number in range(count):
        cute.copy(f.copy_k, f.tSsK[None, None, number, stage], fragment[None, None, number])
        if number < first_kept:
            fetch_q(f, number)
        for k in range(number * together, (number + 1) * together):
            acc = f.accs_S[k % traits.chains]
            cute.gemm(f.mma_qk, acc, f.rQ[None, None, k], f.rK[None, None, k], acc)
    total = f.accs_S[0]
    for acc in f.accs_S[1:]:
        total.store(total.load() + acc.load())


def product_pv(f: Fragments, stage: Int32) -> None:
    """O += P V for the keys in `stage`."""
    fetches = (
        atoms.Fetch(f.copy_p, f.tOsP, f.copy_p.retile(f.rP)),
        atoms.Fetch(f.copy_v, f.tOsVt[None, None, None, stage], f.copy_v.retile(f.rVt)),
    )
    atoms.gemm(f.mma_pv, f.acc_O, f.rP, f.rVt, fetches, ahead=0)
