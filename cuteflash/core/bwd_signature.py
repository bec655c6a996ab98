"""The arguments a backward kernel is compiled with, see `cuteflash.core.signature`."""

from __future__ import annotations

from typing import Any, get_type_hints

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cuteflash.arguments import BwdArguments, BwdScalars, BwdTensors
from cuteflash.core.signature import ALIGN_BYTES, ALIGN_ELEMENTS, CUTE_DTYPES, FAKE_SCALARS
from cuteflash.problem import BwdProblem


def bwd_fake_args(problem: BwdProblem) -> tuple[Any, ...]:
    """Fake arguments of a backward kernel's `__call__`.

    Every length is symbolic, every stride but the last a symbolic 64-bit multiple of 8 elements; base pointers are
    16-byte aligned. LSE and its gradient are compact. The stream is torch's current one.
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

    def statistic() -> Any:
        shape = (batch, heads_q, seqlen_q)
        return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=(2, 1, 0), assumed_align=4)

    workspace = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int64(),), assumed_align=ALIGN_BYTES)
    tensors = BwdTensors(
        q=operand(seqlen_q, heads_q, head_dim),
        k=operand(seqlen_k, heads_k, head_dim),
        v=operand(seqlen_k, heads_k, head_dim_v),
        o=operand(seqlen_q, heads_q, head_dim_v),
        lse=statistic(),
        do=operand(seqlen_q, heads_q, head_dim_v),
        dlse=statistic() if problem.has_dlse else None,
        dq=operand(seqlen_q, heads_q, head_dim),
        dk=operand(seqlen_k, heads_k, head_dim),
        dv=operand(seqlen_k, heads_k, head_dim_v),
        workspace=workspace,
    )
    scalars = BwdScalars(**{name: FAKE_SCALARS[kind] for name, kind in get_type_hints(BwdScalars).items()})
    return BwdArguments(tensors, scalars, make_fake_stream(use_tvm_ffi_env_stream=True)).flat()
