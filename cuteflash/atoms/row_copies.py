"""Copies of rows between global and shared memory by all threads, 16 bytes each: cp.async, or through registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync

from cuteflash.traits.chunks import CHUNK, swizzle_width

CHUNK_BITS = 128


def _row_copy(atom: cute.CopyAtom, num_threads: int, cols: int) -> cute.TiledCopy:
    lanes = swizzle_width(cols) // CHUNK
    threads = cute.make_layout((num_threads // lanes, lanes), stride=(lanes, 1))
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, CHUNK)))


def load_copy(dtype: type[cutlass.Numeric], num_threads: int, cols: int, asynchronous: bool = True) -> cute.TiledCopy:
    """Global to shared memory, 128 bits at a time; neighbouring lanes take neighbouring chunks of a row.

    By cp.async past L1, or else by a load to registers and a store from there.
    """
    op = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL) if asynchronous else CopyUniversalOp()
    return _row_copy(cute.make_copy_atom(op, dtype, num_bits_per_copy=CHUNK_BITS), num_threads, cols)


def load(copy: cute.TiledCopy, source: cute.Tensor, target: cute.Tensor, inside: cute.Tensor | None) -> None:
    """Copy chunks of global memory to shared memory, zeros for a chunk that is not `inside` (a predicate a chunk).

    cp.async writes the zeros itself and runs on after this returns. Any other copy goes through registers.
    """
    if isinstance(copy.op, cpasync.CopyG2SOp):
        cute.copy(copy, source, target, pred=inside)
        return
    staged = cute.make_rmem_tensor_like(target)
    staged.fill(0.0)
    cute.copy(copy, source, staged, pred=inside)
    cute.copy(copy, staged, target)


def store_copy(dtype: type[cutlass.Numeric], num_threads: int, cols: int) -> cute.TiledCopy:
    """Shared memory to registers to global memory, 128 bits at a time, the lanes as in `load_copy`."""
    return _row_copy(cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=CHUNK_BITS), num_threads, cols)
