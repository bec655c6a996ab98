"""The arguments a kernel is compiled with: fakes that fix the types and leave lengths, strides and scalars open."""

from __future__ import annotations

from typing import Any, get_type_hints

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cuteflash.arguments import FwdArguments, FwdScalars, FwdTensors
from cuteflash.problem import FwdProblem

ALIGN_BYTES = 16  # one cp.async or the base of a TMA box
ALIGN_ELEMENTS = ALIGN_BYTES // 2  # fp16 and bf16

CUTE_DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16}
FAKE_SCALARS = {float: cutlass.Float32(0.0), int: cutlass.Int32(0)}


def fwd_fake_args(problem: FwdProblem) -> tuple[Any, ...]:
    """Fake arguments of a forward kernel's `__call__`.

    Every length is symbolic, every stride but the last a symbolic 64-bit multiple of 8 elements; base pointers are
    16-byte aligned. LSE is compact. The stream is torch's current one.
    """
    batch, seqlen_q, seqlen_k, heads_q, heads_k = (
        cute.sym_int32(symbol=name) for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k")
    )
    operands = problem.operands
    dtype, head_dim, head_dim_v = CUTE_DTYPES[operands.qk_dtype], operands.head_dim, operands.head_dim_v

    def operand(seqlen: Any, heads: Any, head_dim: int) -> Any:
        strides = tuple(cute.sym_int64(divisibility=ALIGN_ELEMENTS) for _ in range(3))
        return make_fake_tensor(
            dtype, (batch, seqlen, heads, head_dim), stride=(*strides, 1), assumed_align=ALIGN_BYTES
        )

    lse = None
    if problem.has_lse:
        lse = make_fake_compact_tensor(
            cutlass.Float32, (batch, heads_q, seqlen_q), stride_order=(2, 1, 0), assumed_align=4
        )
    tensors = FwdTensors(
        q=operand(seqlen_q, heads_q, head_dim),
        k=operand(seqlen_k, heads_k, head_dim),
        v=operand(seqlen_k, heads_k, head_dim_v),
        o=operand(seqlen_q, heads_q, head_dim_v),
        lse=lse,
    )
    scalars = FwdScalars(**{name: FAKE_SCALARS[kind] for name, kind in get_type_hints(FwdScalars).items()})
    return FwdArguments(tensors, scalars, make_fake_stream(use_tvm_ffi_env_stream=True)).flat()
