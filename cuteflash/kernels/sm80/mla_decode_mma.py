"""The products of the sm80 latent-attention decode: S = Q Kᵀ and O += P V."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.scores import ScoreTile
from cuteflash.kernels.sm80.mla_bundles import MlaBlock
from cuteflash.kernels.sm80.mla_decode_bundles import DecodeFragments
from cuteflash.kernels.sm80.mla_softmax import ROWS
from cuteflash.kernels.sm80.mla_steps import wait_loads
from cuteflash.mla_problem import LATENT_DIM_V
from cuteflash.traits.mla_sm80 import STEP
from cuteflash.traits.sm80 import MMA_K, WARP


def make_fragments(kernel, block: MlaBlock) -> DecodeFragments:
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
    return DecodeFragments(
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


def keep_q(kernel, f: DecodeFragments) -> None:
    """Fetch what is kept of Q in registers, before what follows takes its place in shared memory."""
    if kernel.traits.q_kept > 0:
        wait_loads(kernel.traits.kv_stage - 1)
        for step in range(*kept_fetches(kernel.traits)):
            fetch_q(f, step)


def kept_fetches(traits) -> tuple[int, int]:
    """Which fetches of a warp's columns of Q are kept in registers: from the first to the end."""
    of_step = STEP // traits.fetch
    return (traits.steps - traits.q_kept) * of_step, traits.steps * of_step


def fetch_q(f: DecodeFragments, number: int) -> None:
    """The fragments of some columns of Q."""
    cute.copy(f.copy_q, f.tSsQ[None, None, number], f.copy_q.retile(f.rQ)[None, None, number])


def product_qk(kernel, f: DecodeFragments, stage: Int32) -> None:
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


def product_pv(f: DecodeFragments, stage: Int32) -> None:
    """O += P V for the keys in `stage`."""
    fetches = (
        atoms.Fetch(f.copy_p, f.tOsP, f.copy_p.retile(f.rP)),
        atoms.Fetch(f.copy_v, f.tOsVt[None, None, None, stage], f.copy_v.retile(f.rVt)),
    )
    atoms.gemm(f.mma_pv, f.acc_O, f.rP, f.rVt, fetches, ahead=0)
