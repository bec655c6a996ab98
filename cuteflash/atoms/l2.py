"""What L2 is told of data that need not go to memory: a launch writes them, and reads them again once."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64, Uint32

LINE = 128  # bytes
EVICT_LAST = 0x14F0000000000000  # the policy that `createpolicy.fractional.L2::evict_last.b64` makes of a fraction of 1


def store_kept(values: cute.Tensor, target: cute.Tensor) -> None:
    """Store 8 or 16 bytes of registers in global memory, aligned to as much; L2 keeps them as long as it can."""
    words = cute.recast_tensor(values, Uint32)
    count = cute.size(words)
    stored = ", ".join(f"{{$r{1 + i}}}" for i in range(count))
    cute.arch.inline_ptx(
        f"st.global.L2::cache_hint.v{count}.b32 [{{$r0}}], {{{stored}}}, {{$r{1 + count}}};",
        read_only_args=[target.iterator, *(words[i] for i in range(count)), Int64(EVICT_LAST)],
    )


def forget(line: cute.Pointer) -> None:
    """Let L2 drop a `LINE` of global memory, aligned to as much, without writing it back: its contents are lost."""
    cute.arch.inline_ptx(f"discard.global.L2 [{{$r0}}], {LINE};", read_only_args=[line])
