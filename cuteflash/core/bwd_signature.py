"""The arguments a backward kernel is compiled with, see `cuteflash.core.signature`."""

from __future__ import annotations

from typing import Any, get_type_hints

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cuteflash.arguments import BwdArguments, BwdScalars, BwdTensors, PackedTensors, SinkTensors
from cuteflash.core.signature import ALIGN_BYTES, ALIGN_ELEMENTS, CUTE_DTYPES, FAKE_SCALARS, fake_sinks
from cuteflash.problem import BwdProblem


def bwd_fake_args(problem: BwdProblem) -> tuple[Any, ...]:
    """Fake arguments of a backward kernel's `__call__`.

    Every length is symbolic, every stride but the last a symbolic 64-bit multiple of 8 elements; base pointers are
    16-byte aligned. LSE and its gradient are compact. The stream is torch's current one.
    """
    batch, seqlen_q, seqlen_k, heads_q, heads_k, sequences, ends = (
        cute.sym_int32(symbol=name)
        for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "sequences", "ends")
    )
    operands, storage = problem.operands, problem.storage
    dtype, head_dim, head_dim_v = CUTE_DTYPES[operands.qk_dtype], operands.head_dim, operands.head_dim_v
    batch_q, batch_k = (() if kind == "varlen" else (batch,) for kind in (storage.q, storage.k))

    def operand(rows: tuple[Any, ...], heads: Any, head_dim: int) -> Any:
        shape = (*rows, heads, head_dim)
        strides = tuple(cute.sym_int64(divisibility=ALIGN_ELEMENTS) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=ALIGN_BYTES)

    def statistic() -> Any:
        shape = (*batch_q, heads_q, seqlen_q)
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=order, assumed_align=4)

    def vector(size: Any, is_given: bool) -> Any:
        return make_fake_compact_tensor(cutlass.Int32, (size,), assumed_align=4) if is_given else None

    workspace = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int64(),), assumed_align=ALIGN_BYTES)
    tensors = BwdTensors(
        q=operand((*batch_q, seqlen_q), heads_q, head_dim),
        k=operand((*batch_k, seqlen_k), heads_k, head_dim),
        v=operand((*batch_k, seqlen_k), heads_k, head_dim_v),
        o=operand((*batch_q, seqlen_q), heads_q, head_dim_v),
        lse=statistic(),
        do=operand((*batch_q, seqlen_q), heads_q, head_dim_v),
        dlse=statistic() if problem.has_dlse else None,
        dq=operand((*batch_q, seqlen_q), heads_q, head_dim),
        dk=operand((*batch_k, seqlen_k), heads_k, head_dim),
        dv=operand((*batch_k, seqlen_k), heads_k, head_dim_v),
        workspace=workspace,
    )
    packed = PackedTensors(
        cu_seqlens_q=vector(ends, storage.q == "varlen"),
        cu_seqlens_k=vector(ends, storage.k == "varlen"),
        seqused_q=vector(sequences, storage.used_q),
        seqused_k=vector(sequences, storage.used_k),
        tile_counter=vector(1, storage.k == "varlen"),
    )
    scalars = BwdScalars(**{name: FAKE_SCALARS[kind] for name, kind in get_type_hints(BwdScalars).items()})
    sinks = SinkTensors()
    if problem.scores.sink is not None:
        parts = make_fake_compact_tensor(
            cutlass.Float32, (heads_q, cute.sym_int32(symbol="parts")), stride_order=(1, 0), assumed_align=4
        )
        sinks = SinkTensors(fake_sinks(problem.scores, heads_q), parts)
    return BwdArguments(tensors, packed, scalars, sinks, make_fake_stream(use_tvm_ffi_env_stream=True)).flat()
