"""The arguments that the latent-attention decode is compiled with, see `cuteflash.core.signature`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cuteflash.core.signature import ALIGN_BYTES, CUTE_DTYPES
from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, MlaProblem, MlaScalars, MlaTensors


def mla_fake_args(problem: MlaProblem) -> tuple[Any, ...]:
    """Fake arguments of a kernel: `MlaTensors`, `MlaScalars`, and torch's current stream.

    Every length is symbolic, and every stride but the last of Q, the cache and O a symbolic 64-bit multiple of 16
    bytes; O, LSE and the lengths are compact.
    """
    dtype = CUTE_DTYPES[problem.dtype]
    batch, rows, entries, entry_rows, pages, heads, tokens = (
        cute.sym_int32(symbol=name) for name in ("batch", "rows", "entries", "entry_rows", "pages", "heads", "tokens")
    )

    def operand(dtype: type[cutlass.Numeric], *shape: Any) -> Any:
        strides = tuple(cute.sym_int64(divisibility=8 * ALIGN_BYTES // dtype.width) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=ALIGN_BYTES)

    table = None
    if problem.is_paged:
        table = make_fake_tensor(Int32, (batch, pages), stride=(cute.sym_int64(), 1), assumed_align=4)
    partials = arrivals = None
    if problem.is_split:
        size, blocks = cute.sym_int32(symbol="size"), cute.sym_int32(symbol="blocks")
        partials = make_fake_compact_tensor(Float32, (size,), assumed_align=ALIGN_BYTES)
        arrivals = make_fake_compact_tensor(Int32, (blocks,), assumed_align=4)
    tensors = MlaTensors(
        q=operand(dtype, batch, rows, LATENT_DIM),
        kv_cache=operand(CUTE_DTYPES["e4m3"] if problem.is_e4m3 else dtype, entries, entry_rows, LATENT_DIM),
        page_table=table,
        cache_seqlens=make_fake_compact_tensor(Int32, (batch,), assumed_align=4),
        out=operand(dtype, batch, rows, LATENT_DIM_V),
        lse=make_fake_compact_tensor(Float32, (batch, heads, tokens), stride_order=(2, 1, 0), assumed_align=4),
        partials=partials,
        arrivals=arrivals,
        descale=make_fake_tensor(Float32, (batch,), stride=(cute.sym_int64(),)) if problem.is_e4m3 else None,
    )
    scalars = MlaScalars(Float32(0.0), Int32(0), Int32(1), Int32(0), Int32(2))
    return *tensors, *scalars, make_fake_stream(use_tvm_ffi_env_stream=True)
