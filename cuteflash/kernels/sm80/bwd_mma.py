"""The main loop of the sm80 backward: five products a query block, for the keys of one tile.

    S^T = K Q^T             P = exp2(S * scale - LSE), rounded
    dP^T = V dO^T           dS = P (dP - delta), rounded, to shared memory
    dV += P^T dO            P^T and dS^T from registers if warps divide the keys only, else through shared memory
    dK += dS^T Q
    dQ = dS K               added to the sum in memory
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.convert import rounded_fragment
from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import exp2
from cuteflash.core.views import acc_as_operand_a, transposed
from cuteflash.kernels.sm80.bwd_bundles import BwdTiles, Gradients, KeyWork, Operand, QuerySources
from cuteflash.kernels.sm80.bwd_load import column_statistics, load_queries
from cuteflash.kernels.sm80.fwd_mma import wait_loads


def make_gradients(kernel, tiles: BwdTiles, work: KeyWork, thread: Int32) -> Gradients:
    """Partition the block's tiles for this thread."""
    traits, dtype = kernel.traits, kernel.dtype
    mma_s, mma_dkv, mma_dq = kernel.tiled_mma_s(), kernel.tiled_mma_dkv(), kernel.tiled_mma_dq()

    def operand(mma: cute.TiledMma, sX: cute.Tensor, is_a: bool, transpose: bool = False) -> Operand:
        mine, stage = mma.get_slice(thread), sX if cute.rank(sX) == 2 else sX[None, None, 0]
        atom = atoms.ldmatrix(dtype, transpose)
        if is_a:
            fragment, tiled = mine.make_fragment_A(mine.partition_A(stage)), cute.make_tiled_copy_A(atom, mma)
        else:
            fragment, tiled = mine.make_fragment_B(mine.partition_B(stage)), cute.make_tiled_copy_B(atom, mma)
        copy = tiled.get_slice(thread)
        return Operand(fragment, copy, copy.partition_S(sX))

    def accumulator(mma: cute.TiledMma, rows: int, cols: int) -> cute.Tensor:
        return cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((rows, cols)), Float32)

    acc_S, acc_dP = (accumulator(mma_s, traits.tile_n, traits.tile_m) for _ in range(2))
    shape = traits.tile_n, traits.tile_m
    scores = ScoreTile.of(mma_s, thread, acc_S, shape, work.launch.inner_scale, 1)
    sK, sV = (sX[None, None, 0] for sX in (tiles.sK, tiles.sV))
    return Gradients(
        thread=thread,
        mma_s=mma_s,
        mma_dkv=mma_dkv,
        mma_dq=mma_dq,
        k=operand(mma_s, sK, is_a=True),
        q=operand(mma_s, tiles.sQ, is_a=False),
        v=operand(mma_s, sV, is_a=True),
        do=operand(mma_s, tiles.sdO, is_a=False),
        p=None if traits.p_in_regs else operand(mma_dkv, tiles.sP, is_a=True),
        do_t=operand(mma_dkv, transposed(tiles.sdO), is_a=False, transpose=True),
        ds=None if traits.p_in_regs else operand(mma_dkv, tiles.sdS, is_a=True),
        q_t=operand(mma_dkv, transposed(tiles.sQ), is_a=False, transpose=True),
        ds_t=operand(mma_dq, transposed(tiles.sdS), is_a=True, transpose=True),
        k_t=operand(mma_dq, transposed(sK), is_a=False, transpose=True),
        acc_S=acc_S,
        acc_dP=acc_dP,
        acc_dK=accumulator(mma_dkv, traits.tile_n, traits.head_dim),
        acc_dV=accumulator(mma_dkv, traits.tile_n, traits.head_dim_v),
        acc_dQ=accumulator(mma_dq, traits.tile_m, traits.head_dim),
        scores=scores,
        bounds=cute.make_rmem_tensor((cute.size(scores.values.shape[0]), 2), Int32),
    )


@cute.jit
def accumulate(kernel: cutlass.Constexpr, g: Gradients, loads: QuerySources, work: KeyWork):
    """Sum up dK and dV over the query blocks of all query heads, and add to dQ; K and V are issued, not committed."""
    blocks = work.blocks
    for r in cutlass.range_constexpr(cute.size(g.bounds.shape[0])):
        g.bounds[r, 0], g.bounds[r, 1] = work.tile.q_bounds(g.scores.row(r))
    if const_expr(kernel.traits.stages > 1):
        load_queries(kernel, loads, Int32(0), blocks.lo, 0)
    cute.arch.cp_async_commit_group()
    keep_keys(kernel, g)
    position = Int32(0)
    for head in cutlass.range(work.launch.heads_per_kv, unroll=1):
        for m_block in cutlass.range(blocks.lo, blocks.full_lo, unroll=1):
            step(kernel, g, loads, work, (head, m_block, position), True)
            position += 1
        for m_block in cutlass.range(blocks.full_lo, blocks.full_hi, unroll=1):
            step(kernel, g, loads, work, (head, m_block, position), False)
            position += 1
        if const_expr(kernel.problem.scores.mask == "window"):
            for m_block in cutlass.range(blocks.full_hi, blocks.hi, unroll=1):
                step(kernel, g, loads, work, (head, m_block, position), True)
                position += 1


@cute.jit
def keep_keys(kernel: cutlass.Constexpr, g: Gradients):
    """Fetch those of K and V that stay in registers."""
    traits = kernel.traits
    if const_expr(traits.k_in_regs or traits.v_in_regs):
        wait_loads(0)
        if const_expr(traits.k_in_regs):
            cute.copy(g.k.copy, g.k.source, g.k.copy.retile(g.k.fragment))
        if const_expr(traits.v_in_regs):
            cute.copy(g.v.copy, g.v.source, g.v.copy.retile(g.v.fragment))


@cute.jit
def step(
    kernel: cutlass.Constexpr,
    g: Gradients,
    loads: QuerySources,
    work: KeyWork,
    place: tuple,
    masked: cutlass.Constexpr[bool],
):
    """One query block; `place` is its (query head, block, number in the loop)."""
    traits, tiles = kernel.traits, loads.tiles
    head, m_block, position = place
    stage = load_step(kernel, loads, work, place)
    kept_k, kept_v = (None if kept else 0 for kept in (traits.k_in_regs, traits.v_in_regs))

    product(kernel, g.mma_s, g.acc_S, (g.k, kept_k), (g.q, stage))
    slopes = probabilities(kernel, g, tiles.sLSE[None, stage], work, m_block, masked)
    rP = rounded_fragment(g.acc_S, kernel.dtype)
    if const_expr(not traits.p_in_regs):
        store_scores(kernel, g, rP, tiles.sP)
    product(kernel, g.mma_s, g.acc_dP, (g.v, kept_v), (g.do, stage))
    differentiate(kernel, g, slopes, tiles.sDelta[None, stage])
    rdS = rounded_fragment(g.acc_dP, kernel.dtype)
    store_scores(kernel, g, rdS, tiles.sdS)

    if const_expr(traits.p_in_regs):
        accumulate_product(kernel, g.mma_dkv, g.acc_dV, (rP, None), (g.do_t, stage))
        accumulate_product(kernel, g.mma_dkv, g.acc_dK, (rdS, None), (g.q_t, stage))
        cute.arch.sync_threads()  # dS is written
    else:
        cute.arch.sync_threads()  # P and dS are written
        accumulate_product(kernel, g.mma_dkv, g.acc_dV, (g.p, 0), (g.do_t, stage))
        accumulate_product(kernel, g.mma_dkv, g.acc_dK, (g.ds, 0), (g.q_t, stage))
    product(kernel, g.mma_dq, g.acc_dQ, (g.ds_t, 0), (g.k_t, 0))
    add_dq(kernel, g, loads, m_block, head)


@cute.jit
def load_step(kernel: cutlass.Constexpr, loads: QuerySources, work: KeyWork, place: tuple):
    """Wait for a step's Q and dO, and with two stages issue those of the next step; returns the step's stage."""
    head, m_block, position = place
    stage = Int32(0)
    if const_expr(kernel.traits.stages == 1):
        cute.arch.sync_threads()  # every warp has read the last block
        load_queries(kernel, loads, head, m_block, 0)
        cute.arch.cp_async_commit_group()
        wait_loads(0)
    else:
        stage = position & 1
        wait_loads(0)  # and every warp has read the last block
        next_head, next_block = head, m_block + 1
        if next_block >= work.blocks.hi:
            next_head, next_block = head + 1, work.blocks.lo
        if next_head < work.launch.heads_per_kv:
            load_queries(kernel, loads, next_head, next_block, stage ^ 1)
        cute.arch.cp_async_commit_group()
    return stage


def product(kernel, mma: cute.TiledMma, acc: cute.Tensor, a: tuple, b: tuple) -> None:
    """acc = A B, see `accumulate_product`."""
    acc.fill(0.0)
    accumulate_product(kernel, mma, acc, a, b)


def accumulate_product(kernel, mma: cute.TiledMma, acc: cute.Tensor, a: tuple, b: tuple) -> None:
    """acc += A B; each is (operand, stage) in shared memory, or with stage None in registers."""
    fetches, fragments = (), []
    for operand, stage in (a, b):
        if not isinstance(operand, Operand):
            fragments.append(acc_as_operand_a(operand))
            continue
        fragments.append(operand.fragment)
        if stage is not None:
            source = operand.source if cute.rank(operand.source) == 3 else operand.source[None, None, None, stage]
            fetches += (atoms.Fetch(operand.copy, source, operand.copy.retile(operand.fragment)),)
    atoms.gemm(mma, acc, *fragments, fetches, kernel.traits.ahead)


@cute.jit
def probabilities(
    kernel: cutlass.Constexpr,
    g: Gradients,
    sLSE: cute.Tensor,
    work: KeyWork,
    m_block: Int32,
    masked: cutlass.Constexpr[bool],
):
    """Scores become P, in place. Returns the derivative of the softcap, None without one."""
    scores, values = kernel.problem.scores, g.scores.values
    slopes = None
    if const_expr(scores.softcap):
        g.scores.apply_softcap()
        slopes = cute.make_rmem_tensor_like(g.acc_S)
        for i in cutlass.range_constexpr(cute.size(slopes)):
            slopes[i] = 1.0 - g.acc_S[i] * g.acc_S[i]
    if const_expr(masked):
        g.scores.hide(m_block * kernel.traits.tile_m, g.bounds, True, scores.mask == "window")
    lse = column_statistics(sLSE, g.scores)
    for r in cutlass.range_constexpr(cute.size(values.shape[0])):
        for c in cutlass.range_constexpr(cute.size(values.shape[1])):
            values[r, c] = exp2(values[r, c] * work.launch.scale_log2 - lse[c])
    return slopes


@cute.jit
def differentiate(kernel: cutlass.Constexpr, g: Gradients, slopes: cute.Tensor | None, sDelta: cute.Tensor):
    """dP becomes dS = P (dP - delta), times the derivative of the softcap, in place."""
    delta = column_statistics(sDelta, g.scores)
    for i in cutlass.range_constexpr(cute.size(g.acc_dP)):
        # A fragment's linear order: two neighbouring columns, two rows, rows of warps, column groups.
        column = i % 2 + i // (2 * cute.size(g.scores.values.shape[0])) * 2
        weight = g.acc_S[i]
        if const_expr(slopes is not None):
            weight = weight * slopes[i]
        g.acc_dP[i] = weight * (g.acc_dP[i] - delta[column])


def store_scores(kernel, g: Gradients, rounded: cute.Tensor, sX: cute.Tensor) -> None:
    """Write a fragment of S^T's layout, rounded, to its place in shared memory."""
    copy = atoms.store_pairs(kernel.dtype, g.mma_s).get_slice(g.thread)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(sX))


def add_dq(kernel, g: Gradients, loads: QuerySources, m_block: Int32, head: Int32) -> None:
    """Add dQ of a query block to its sum in memory."""
    parts = kernel.dq_parts()
    tile = loads.workspace.tile(m_block, loads.first_head + head, loads.batch)
    target = parts.groups(tile.dq, 0, g.thread)
    source = cute.make_tensor(g.acc_dQ.iterator, cute.make_layout(target.shape))
    atoms.add_groups(source, target, kernel.traits.vector_add)
