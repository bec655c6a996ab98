"""The arguments that the quantising kernels are compiled with, see `cuteflash.core.signature`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cuteflash.core.signature import ALIGN_BYTES, CUTE_DTYPES
from cuteflash.quantize_problem import QuantizeProblem, QuantizeTensors

TABLE_DTYPES = CUTE_DTYPES | {"fp32": Float32}


def quantize_fake_args(problem: QuantizeProblem) -> tuple[Any, ...]:
    """Fake arguments of `Quantize.__call__`.

    Every length is symbolic. Rows of all but fp32 results begin on 16 bytes, at symbolic 64-bit strides; those are
    compact.
    """
    batch, seqlen_q, seqlen_k, heads, kv_heads, keys, blocks_q, blocks_k = (
        cute.sym_int32(symbol=name)
        for name in ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "keys", "blocks_q", "blocks_k")
    )
    entries, result = () if problem.is_packed else (batch,), CUTE_DTYPES[problem.to]
    dtype, head_dim, head_dim_v = CUTE_DTYPES[problem.dtype], problem.head_dim, problem.head_dim_v

    def strided(dtype: type[cutlass.Numeric], *shape: Any) -> Any:
        step = ALIGN_BYTES * 8 // dtype.width  # strides of 64 bits, also of new tensors
        strides = tuple(cute.sym_int64(divisibility=step) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=ALIGN_BYTES)

    def compact(dtype: type[cutlass.Numeric], *shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=4)

    def descale(blocks: Any) -> Any:
        if problem.granularity == "head":
            return compact(Float32, batch, kv_heads)
        return compact(Float32, 1 if problem.is_packed else batch, kv_heads, blocks)

    def table() -> Any:
        if not problem.rotary_dim:
            return None
        rows = cute.sym_int32(symbol="positions") if problem.is_packed else seqlen_q
        return strided(TABLE_DTYPES[problem.rotary_dtype], rows, problem.rotary_dim // 2)

    def vector(size: Any, is_given: bool) -> Any:
        return compact(Int32, size) if is_given else None

    rows_v = seqlen_k, kv_heads, head_dim_v
    ends, counts = cute.sym_int32(symbol="ends"), cute.sym_int32(symbol="counts")
    return *QuantizeTensors(
        q=strided(dtype, *entries, seqlen_q, heads, head_dim),
        k=strided(dtype, *entries, seqlen_k, kv_heads, head_dim),
        v=strided(dtype, *entries, *rows_v),
        q8=strided(result, *entries, seqlen_q, heads, head_dim),
        k8=strided(result, *entries, seqlen_k, kv_heads, head_dim),
        v8=strided(result, *entries, *((kv_heads, head_dim_v, keys) if problem.transposes_v else rows_v)),
        q_descale=descale(blocks_q),
        k_descale=descale(blocks_k),
        v_descale=descale(blocks_k),
        v_mean=compact(Float32, batch, kv_heads, head_dim_v) if problem.smooths_v else None,
        cos=table(),
        sin=table(),
        workspace=compact(Float32, cute.sym_int64()) if problem.measures else None,
        cu_q=vector(ends, problem.is_packed),
        cu_k=vector(ends, problem.is_packed),
        used_q=vector(counts, problem.has_used),
        used_k=vector(counts, problem.has_used),
    ), make_fake_stream(use_tvm_ffi_env_stream=True)
