"""The rings and tiles of a block of the sm90 forward in its shared memory, as the traits' plan has them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cuteflash.atoms.barriers import CopyRing, StageRing, TmaRing
from cuteflash.core.views import transposed
from cuteflash.kernels.sm90.bundles import Rings, Tiles


def make_rings(kernel, base: cute.Pointer) -> Rings:
    """Q, K and V rings over the mbarriers at the start of the block's shared memory."""
    traits = kernel.traits
    q_bytes = kernel.tile_tokens * kernel.problem.operands.packed_heads * traits.head_dim * traits.element_bytes
    k_bytes, v_bytes = (traits.tile_n * d * traits.element_bytes for d in (traits.head_dim, traits.head_dim_v))
    barriers = cute.recast_ptr(base + traits.smem_plan["barriers"].start, dtype=cutlass.Int64)
    q, kv = traits.q_stage, traits.kv_stage
    at_v, at_stored_v = (barriers + 2 * (q + n * kv) for n in (1, 2))
    if kernel.converts:
        return make_converting_rings(kernel, barriers, (at_v, at_stored_v), (q_bytes, k_bytes // 2, v_bytes // 2))
    if kernel.problem.storage.gathers:
        k, v = (CopyRing.create(start, kv) for start in (barriers + 2 * q, at_v))
        return Rings(TmaRing.create(barriers, q, q_bytes), k, v)
    return Rings(
        q=TmaRing.create(barriers, q, q_bytes),
        k=TmaRing.create(barriers + 2 * q, kv, k_bytes),
        v=StageRing.create(at_v, kv) if kernel.turns_v else TmaRing.create(at_v, kv, v_bytes),
        stored_v=TmaRing.create(at_stored_v, traits.stored_v_stage, v_bytes) if kernel.turns_v else None,
    )


def make_converting_rings(
    kernel, barriers: cute.Pointer, starts: tuple[cute.Pointer, cute.Pointer], nbytes: tuple[int, int, int]
) -> Rings:
    """The rings of a kernel that converts, with the barriers of V and of stored tiles at `starts`.

    `nbytes` are of a tile of Q, and of K and V as they are stored.
    """
    traits, (at_v, at_stored) = kernel.traits, starts
    q, kv, stored = traits.q_stage, traits.kv_stage, traits.stored_stage
    at_stored_v = at_stored + 2 * stored
    if kernel.problem.storage.gathers:
        stored_k, stored_v = (CopyRing.create(start, stored) for start in (at_stored, at_stored_v))
    else:
        stored_k = TmaRing.create(at_stored, stored, nbytes[1])
        stored_v = TmaRing.create(at_stored_v, stored, nbytes[2])
    return Rings(
        q=TmaRing.create(barriers, q, nbytes[0]),
        k=StageRing.create(barriers + 2 * q, kv),
        v=StageRing.create(at_v, kv),
        stored_v=stored_v,
        stored_k=stored_k,
    )


def make_tiles(kernel, base: cute.Pointer) -> Tiles:
    """The shared-memory tensors, laid out by the traits' plan; V also as the operand that the product reads."""
    plan = kernel.traits.smem_plan

    def tile(name: str, layout: cute.ComposedLayout) -> cute.Tensor:
        dtype = kernel.out_dtype if name == "o" else kernel.dtype
        start = cute.recast_ptr(base + plan[name].start, layout.inner, dtype=dtype)
        return cute.make_tensor(start, layout.outer)

    def boxed(tensor: cute.Tensor, layout: cute.ComposedLayout) -> cute.Tensor:
        return cute.make_tensor(tensor.iterator, kernel.smem_box_layout(layout).outer)

    sQ = tile("q", kernel.smem_layout_q())
    sO = tile("o", kernel.smem_layout_o()) if kernel.traits.stages_o else None
    sK = loaded_k = tile("k", kernel.smem_layout_k())
    turned_v = stored_v = None
    if kernel.problem.operands.is_fp8:
        sV = sVt = tile("v", kernel.smem_layout_vt())
        if kernel.turns_v:
            sV = tile("stored_v", kernel.smem_layout_stored_v())
            turned_v, stored_v = (base + plan[name].start for name in ("v", "stored_v"))
    else:
        sV = tile("v", kernel.smem_layout_v())
        sVt = transposed(sV)
    if kernel.converts:
        loaded_k, sV = (
            tile(name, kernel.smem_layout_loaded(columns))
            for name, columns in zip(("stored_k", "stored_v"), kernel.loaded_columns, strict=True)
        )
    return Tiles(
        sQ=sQ,
        sQ_boxes=boxed(sQ, kernel.smem_layout_q()),
        sK=sK,
        loaded_k=loaded_k,
        sV=sV,
        sVt=sVt,
        sO=sO,
        sO_boxes=None if sO is None else boxed(sO, kernel.smem_layout_o()),
        sP=None if kernel.traits.p_in_regs else tile("p", kernel.smem_layout_p()),
        turned_v=turned_v,
        stored_v=stored_v,
        base=base if kernel.converts else None,
    )
