"""The arguments a kernel is compiled with: fakes that fix the types and leave lengths, strides and scalars open."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cuteflash.problem import FwdProblem

ALIGN_BYTES = 16  # one cp.async or the base of a TMA box
ALIGN_ELEMENTS = ALIGN_BYTES // 2  # fp16 and bf16

CUTE_DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16}


def fwd_fake_args(problem: FwdProblem) -> tuple[Any, ...]:
    """Fake arguments of a forward kernel's `__call__`, in its order.

    Q (b, s_q, h_q, d), K (b, s_k, h_k, d), V (b, s_k, h_k, d_v), O (b, s_q, h_q, d_v): every length is symbolic, every
    stride but the last is a symbolic 64-bit multiple of 8 elements, base pointers are 16-byte aligned.
    LSE (b, h_q, s_q) is compact fp32, or None where the problem has none. Then softmax_scale and softcap (fp32),
    window_left, window_right and num_sms (int32), and torch's current stream.
    """
    dtype = CUTE_DTYPES[problem.operands.qk_dtype]
    batch, seqlen_q, seqlen_k, heads_q, heads_k = (
        cute.sym_int32(symbol=name) for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k")
    )

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
    return (
        operand(seqlen_q, heads_q, problem.operands.head_dim),
        operand(seqlen_k, heads_k, problem.operands.head_dim),
        operand(seqlen_k, heads_k, problem.operands.head_dim_v),
        operand(seqlen_q, heads_q, problem.operands.head_dim_v),
        lse,
        cutlass.Float32(0.0),
        cutlass.Float32(0.0),
        cutlass.Int32(0),
        cutlass.Int32(0),
        cutlass.Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
