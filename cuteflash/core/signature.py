"""The arguments a kernel is compiled with: fakes that fix the types and leave lengths, strides and scalars open."""

from __future__ import annotations

from typing import Any, get_type_hints

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cuteflash.arguments import FwdArguments, FwdScalars, FwdTensors, PackedTensors, ScaleTensors, SplitTensors
from cuteflash.problem import DTYPE_BYTES, SHARED_COLUMNS, Dtype, FwdProblem, Scores

ALIGN_BYTES = 16  # one cp.async or the base of a TMA box
ALIGN_ELEMENTS = ALIGN_BYTES // 2  # fp16 and bf16

CUTE_DTYPES = {
    "fp16": cutlass.Float16,
    "bf16": cutlass.BFloat16,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
    "fp32": cutlass.Float32,
}
FAKE_SCALARS = {float: cutlass.Float32(0.0), int: cutlass.Int32(0)}


def fwd_fake_args(problem: FwdProblem) -> tuple[Any, ...]:
    """Fake arguments of a forward kernel's `__call__`.

    Every length is symbolic, every stride but the last a symbolic 64-bit multiple of 16 bytes; base pointers are
    16-byte aligned. LSE and the vectors of packed sequences are compact. The stream is torch's current one.
    """
    batch, seqlen_q, seqlen_k, heads_q, heads_k, sequences, ends, keys = (
        cute.sym_int32(symbol=name)
        for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "sequences", "ends", "keys")
    )
    operands, storage = problem.operands, problem.storage
    head_dim, head_dim_v = operands.head_dim, operands.head_dim_v
    shared = SHARED_COLUMNS if operands.shares_k else 0
    batch_q = () if storage.q == "varlen" else (batch,)
    batch_k = {"dense": (batch,), "varlen": (), "paged": (cute.sym_int32(symbol="pages"),)}[storage.k]

    def operand(dtype: Dtype, *shape: Any) -> Any:
        step = ALIGN_BYTES // DTYPE_BYTES[dtype]
        strides = tuple(cute.sym_int64(divisibility=step) for _ in shape[1:])
        return make_fake_tensor(CUTE_DTYPES[dtype], shape, stride=(*strides, 1), assumed_align=ALIGN_BYTES)

    def vector(size: Any, is_given: bool) -> Any:
        return make_fake_compact_tensor(cutlass.Int32, (size,), assumed_align=4) if is_given else None

    lse = None
    if problem.has_lse:
        shape = (*batch_q, heads_q, seqlen_q)
        lse = make_fake_compact_tensor(
            cutlass.Float32, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=4
        )
    v_shape = (heads_k, head_dim_v, keys) if operands.transposed_v else (seqlen_k, heads_k, head_dim_v)
    tensors = FwdTensors(
        q=operand(operands.qk_dtype, *batch_q, seqlen_q, heads_q, head_dim),
        k=operand(operands.k_dtype, *batch_k, seqlen_k, heads_k, head_dim - shared),
        v=operand(operands.v_dtype, *batch_k, *v_shape),
        o=operand(operands.o_dtype, *batch_q, seqlen_q, heads_q, head_dim_v),
        lse=lse,
    )
    packed = PackedTensors(
        cu_seqlens_q=vector(ends, storage.q == "varlen"),
        cu_seqlens_k=vector(ends, storage.k == "varlen"),
        seqused_q=vector(sequences, storage.used_q),
        seqused_k=vector(sequences, storage.used_k),
        tile_counter=vector(1, storage.q == "varlen" and not problem.is_split),
        page_table=_table() if storage.has_page_table else None,
        cache_batch_idx=vector(sequences, storage.has_cache_batch_idx),
        cache_leftpad=vector(sequences, storage.has_leftpad),
    )
    scales = _scales(problem, batch, heads_k)
    split = SplitTensors()
    if problem.is_split:
        size, blocks = (cute.sym_int32(symbol=name) for name in ("partials", "blocks"))
        partials = make_fake_compact_tensor(cutlass.Float32, (size,), assumed_align=ALIGN_BYTES)
        split = SplitTensors(partials, vector(blocks, True), FAKE_SCALARS[int], FAKE_SCALARS[int])
    scalars = FwdScalars(**{name: FAKE_SCALARS[kind] for name, kind in get_type_hints(FwdScalars).items()})
    sinks, stream = fake_sinks(problem.scores, heads_q), make_fake_stream(use_tvm_ffi_env_stream=True)
    tree = vector(cute.sym_int32(symbol="words"), problem.scores.tree)
    one = cute.sym_int32(symbol="one")  # head, but descriptors of packed sequences need a mode whose size is not static
    shared_k = operand(operands.qk_dtype, *batch_k, seqlen_k, one, shared) if shared else None
    return FwdArguments(tensors, packed, scales, scalars, sinks, stream, split, tree, shared_k).flat()


def _scales(problem: FwdProblem, batch: Any, heads: Any) -> ScaleTensors:
    """The scales of 8-bit operands, or of K and V of an 8-bit cache; none of others."""
    operands = problem.operands
    if not operands.has_scales:
        return ScaleTensors()
    if not operands.is_fp8:
        entries = cute.sym_int32(symbol="scaled")
        return ScaleTensors(k_descale=_per_head(entries, heads), v_descale=_per_head(entries, heads))
    blocks = ((cute.sym_int32(symbol=f"blocks_{name}"),) for name in ("q", "k", "v"))
    entries = 1 if operands.has_block_scales and problem.storage.q == "varlen" else batch
    factors = (_per_head(entries, heads, *(some if operands.has_block_scales else ())) for some in blocks)
    return ScaleTensors(*factors, _per_head(batch, heads, operands.head_dim_v) if operands.has_v_mean else None)


def fake_sinks(scores: Scores, heads: Any) -> Any:
    """The logit of each query head, with a free stride; None if there are no sinks."""
    if scores.sink is None:
        return None
    dtype = CUTE_DTYPES[scores.sink]
    return make_fake_tensor(dtype, (heads,), stride=(cute.sym_int64(),), assumed_align=dtype.width // 8)


def _table() -> Any:
    """A page table: rows may lie apart."""
    shape = cute.sym_int32(symbol="entries"), cute.sym_int32(symbol="slots")
    return make_fake_tensor(cutlass.Int32, shape, stride=(cute.sym_int64(), 1), assumed_align=4)


def _per_head(batch: Any, heads: Any, *columns: Any) -> Any:
    """One factor or row a head; strides are free, as the same one may stand for several heads."""
    free = cute.sym_int64(), cute.sym_int64()
    return make_fake_tensor(
        cutlass.Float32, (batch, heads, *columns), stride=(*free, *(1 for _ in columns)), assumed_align=4
    )
