"""V^T of 8-bit rows, in the order of keys that the product of attention reads, at the speed of a copy.

A thread has 16 columns of four keys, which lie side by side in V^T; byte permutes gather each column's four.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cuteflash.core.signature import ALIGN_BYTES, CUTE_DTYPES
from cuteflash.kernels.common.quantize_tile import WORDS, Rows, Tile, put_columns
from cuteflash.kernels.common.quantize_work import HeadTiles
from cuteflash.quantize_problem import TransposeProblem
from cuteflash.traits.quantize import COLUMNS, ROWS, QuantizeTraits

LOW_PAIRS, HIGH_PAIRS = 0x5140, 0x7362  # selectors of byte permutes: bytes 0 and 1, or 2 and 3, of both by turns
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # the low, or the high, half of both


class TransposeV:
    """The kernel for a head dim."""

    def __init__(self, traits: QuantizeTraits, problem: TransposeProblem) -> None:
        self.traits = traits
        self.problem = problem

    def fake_args(self) -> tuple[Any, ...]:
        """V (batch, seqlen, heads, head_dim_v), V^T (batch, heads, head_dim_v, keys) and a stream."""
        batch, seqlen, heads, keys = (cute.sym_int32(symbol=name) for name in ("batch", "seqlen", "heads", "keys"))
        columns = self.problem.head_dim_v
        return (
            self.fake_tensor(batch, seqlen, heads, columns),
            self.fake_tensor(batch, heads, columns, keys),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    def fake_tensor(self, *shape: Any) -> Any:
        """A tensor whose rows begin on 16 bytes."""
        strides = tuple(cute.sym_int64(divisibility=ALIGN_BYTES) for _ in shape[1:])
        dtype = CUTE_DTYPES[self.problem.dtype]
        return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=ALIGN_BYTES)

    @cute.jit
    def __call__(self, v: cute.Tensor, vt: cute.Tensor, stream):
        batch, heads, _, keys = vt.shape
        tiles = HeadTiles.of(batch, cute.ceil_div(keys, self.traits.tokens), heads)
        self.kernel.set_name_prefix("flash_transpose_v", remove_cutlass_symbol=True)
        self.kernel(v, vt, tiles).launch(
            grid=(tiles.size(), 1, 1),
            block=(self.traits.num_threads, 1, 1),
            min_blocks_per_mp=self.traits.resident,
            preferred_smem_carveout=self.traits.carveout(self.problem.head_dim_v),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, v: cute.Tensor, vt: cute.Tensor, tiles: HeadTiles):
        traits, head_dim = self.traits, self.problem.head_dim_v
        cute.arch.griddepcontrol_wait()  # for whatever is launched before, which may make V
        cute.arch.griddepcontrol_launch_dependents()  # attention may begin where blocks end; its loads of V^T wait
        place = tiles.place(cute.arch.block_idx()[0])
        tile = Tile.of(place.tile * traits.tokens, Int32(v.shape[1]), head_dim, traits.quads)
        loaded = tile.load(Rows.of(v, place.batch, place.head), (tile.lane * COLUMNS,), Uint32)
        for i in cutlass.range_constexpr(ROWS):
            for w in cutlass.range_constexpr(WORDS):
                loaded[w, i] = cutlass.select_(tile.has(i), loaded[w, i], Uint32(0))
        put_columns(vt[place.batch, place.head, None, None], tile, list(columns(loaded)), traits, head_dim)


def columns(rows: cute.Tensor) -> Iterator[Uint32]:
    """Of (words, 4 rows) of bytes each column's four, the first row's in the lowest byte."""
    for w in range(WORDS):
        a, b, c, d = (rows[w, i] for i in range(ROWS))
        for pairs in (LOW_PAIRS, HIGH_PAIRS):
            first, second = cute.arch.prmt(a, b, pairs), cute.arch.prmt(c, d, pairs)
            for halves in (LOW_HALVES, HIGH_HALVES):
                yield Uint32(cute.arch.prmt(first, second, halves))
