"""The arguments that the appending kernel is compiled with, see `cuteflash.core.signature`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cuteflash.append_problem import AppendProblem, AppendScalars, AppendTensors, Rows
from cuteflash.core.signature import ALIGN_BYTES, CUTE_DTYPES

ROTARY_DTYPES = CUTE_DTYPES | {"fp32": Float32}


def append_fake_args(problem: AppendProblem) -> tuple[Any, ...]:
    """Fake arguments of `AppendKv.__call__`.

    Every length is symbolic, every stride but the last a symbolic number of 64 bits; that rows begin on 16 bytes is the
    caller's to see to.
    """
    names = (
        "batch",
        "ends",
        "heads",
        "kv_heads",
        "seqlen_q",
        "seqlen_k",
        "entries",
        "slots",
        "rows",
        "pages",
        "positions",
    )
    size = {name: cute.sym_int32(symbol=name) for name in names}

    def rows(kind: Rows, seqlen: str, heads: str, head_dim: int) -> Any:
        if kind == "none":
            return None
        first = (size["batch"],) if kind == "dense" else ()
        return strided(CUTE_DTYPES[problem.dtype], ALIGN_BYTES, *first, size[seqlen], size[heads], head_dim)

    def cache(head_dim: int) -> Any:
        if problem.cache_dtype is None:
            return None
        shape = size["entries"], size["slots"], size["kv_heads"], head_dim
        return strided(CUTE_DTYPES[problem.cache_dtype], ALIGN_BYTES, *shape)

    def vector(name: str, is_given: bool) -> Any:
        return make_fake_compact_tensor(Int32, (size[name],), assumed_align=4) if is_given else None

    def table() -> Any:
        if not problem.rotary_dim:
            return None
        dtype = ROTARY_DTYPES[problem.rotary_dtype]
        return strided(dtype, ALIGN_BYTES, size["positions"], problem.rotary_dim // 2)

    tensors = AppendTensors(
        q=rows(problem.q, "seqlen_q", "heads", problem.head_dim),
        q_out=rows(problem.q, "seqlen_q", "heads", problem.head_dim),
        k=rows(problem.k, "seqlen_k", "kv_heads", problem.head_dim),
        v=rows(problem.k, "seqlen_k", "kv_heads", problem.head_dim_v),
        k_cache=cache(problem.head_dim),
        v_cache=cache(problem.head_dim_v),
        cache_seqlens=vector("batch", problem.has_seqlens),
        rotary_seqlens=vector("batch", problem.has_rotary_seqlens),
        cu_seqlens_q=vector("ends", problem.q == "packed"),
        cu_seqlens_k_new=vector("ends", problem.k == "packed"),
        page_table=strided(Int32, 4, size["rows"], size["pages"]) if problem.is_paged else None,
        cache_batch_idx=vector("batch", problem.has_batch_idx),
        cos=table(),
        sin=table(),
        **{name: _descale(size) if problem.quantises else None for name in ("k_descale", "v_descale")},
        seqlens_after=vector("batch", problem.counts),
    )
    scalars = AppendScalars(Int32(0), Int32(1), Float32(1.0))
    return *tensors, *scalars, make_fake_stream(use_tvm_ffi_env_stream=True)


def strided(dtype: type[cutlass.Numeric], align: int, *shape: Any, last: Any = 1) -> Any:
    """A tensor whose strides but the last are symbols."""
    strides = tuple(cute.sym_int64() for _ in shape[1:])
    return make_fake_tensor(dtype, shape, stride=(*strides, last), assumed_align=align)


def _descale(size: dict[str, Any]) -> Any:
    """One factor a head; strides are free, as the same one may stand for several sequences."""
    return strided(Float32, 4, size["batch"], size["kv_heads"], last=cute.sym_int64())
