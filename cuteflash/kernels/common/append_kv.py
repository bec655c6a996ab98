"""New tokens into a KV cache, K rotated by position on the way, and Q rotated into a new tensor: one launch for all.

It does nothing but move memory. A thread has 16 columns of a row, two loads of 16 bytes: with a rotary embedding of
halves those that it rotates into each other, otherwise neighbours. Blocks of Q come first, then those of K, then of V.
A token whose position lies outside of its cache, or whose page does not exist, is not written.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.append_problem import AppendProblem, AppendScalars, AppendTensors
from cuteflash.core.signature import ALIGN_BYTES, CUTE_DTYPES
from cuteflash.kernels.common.append_signature import append_fake_args
from cuteflash.kernels.common.quantize_tile import rounded
from cuteflash.traits.append import CHUNK, AppendTraits, units

WARP = 32


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a call.

    Attributes:
        sequence: its number in the batch.
        index: its number in its sequence.
        exists: it is not one of those after the last packed sequence.
    """

    sequence: Int32
    index: Int32
    exists: Boolean


@dataclasses.dataclass(frozen=True)
class Place:
    """The cache row that a token is written to; `exists` says whether there is one."""

    entry: Int32
    slot: Int32
    exists: Boolean


class AppendKv:
    """The kernel for a problem."""

    def __init__(self, traits: AppendTraits, problem: AppendProblem) -> None:
        self.traits = traits
        self.problem = problem

    def fake_args(self) -> tuple[Any, ...]:
        """See `append_fake_args`."""
        return append_fake_args(self.problem)

    @cute.jit
    def __call__(self, *arguments: Any):
        count = len(AppendTensors._fields)
        tensors, scalars = AppendTensors(*arguments[:count]), AppendScalars(*arguments[count:-1])
        blocks_q, blocks_k, blocks_v = (self.blocks(x) for x in (tensors.q, tensors.k, tensors.v))
        self.kernel.set_name_prefix("flash_append_kv", remove_cutlass_symbol=True)
        self.kernel(tensors, scalars, Int32(blocks_q), Int32(blocks_k)).launch(
            grid=(blocks_q + blocks_k + blocks_v, 1, 1), block=(self.traits.num_threads, 1, 1), stream=arguments[-1]
        )

    def blocks(self, x: cute.Tensor | None) -> Any:
        """Blocks that a tensor takes."""
        if x is None:
            return 0
        return self.traits.blocks(cute.size(x.shape[:-1]) * units(x.shape[-1]))

    @cute.kernel
    def kernel(self, tensors: AppendTensors, scalars: AppendScalars, blocks_q: Int32, blocks_k: Int32):
        block = cute.arch.block_idx()[0]
        if const_expr(not self.problem.appends):
            self.rotate_q(tensors, scalars, block)
        else:
            if const_expr(self.problem.q != "none"):
                if block < blocks_q:
                    self.rotate_q(tensors, scalars, block)
            if block >= blocks_q + blocks_k:
                self.append(tensors, scalars, block - blocks_q - blocks_k, is_k=False)
            elif block >= blocks_q:
                if const_expr(self.problem.counts):
                    self.count(tensors, block - blocks_q, blocks_k)
                self.append(tensors, scalars, block - blocks_q, is_k=True)

    @cute.jit
    def count(self, tensors: AppendTensors, block: Int32, blocks: Int32):
        """Write how many tokens each sequence has after the call; the blocks of K share the sequences."""
        batch, ends = cute.size(tensors.seqlens_after.shape), tensors.cu_seqlens_k_new
        sequence = block * self.traits.num_threads + cute.arch.thread_idx()[0]
        while sequence < batch:
            new = tensors.k.shape[1] if const_expr(ends is None) else ends[sequence + 1] - ends[sequence]
            tensors.seqlens_after[sequence] = tensors.cache_seqlens[sequence] + new
            sequence += blocks * self.traits.num_threads

    @cute.jit
    def rotate_q(self, tensors: AppendTensors, scalars: AppendScalars, block: Int32):
        """Rotate a block's part of Q into the new tensor; tokens after the last sequence are copied as they are."""
        row, unit = self.item(block, self.problem.head_dim)
        token_number, head, exists = self.row(tensors.q, row)
        token = self.token(tensors.q, tensors.cu_seqlens_q, token_number, block)
        if exists:
            pieces = self.pieces(unit, self.problem.head_dim, turns=True)
            turned = self.widen(self.load(tensors.q, token_number, head, pieces))
            if token.exists:
                position = self.position(tensors, scalars, token.sequence) + token.index * scalars.q_step
                self.rotate(turned, tensors, scalars, position, unit)
            address = self.address(tensors.q_out, token_number, head)
            self.store(turned, address, pieces, CUTE_DTYPES[self.problem.dtype])

    @cute.jit
    def append(self, tensors: AppendTensors, scalars: AppendScalars, block: Int32, is_k: cutlass.Constexpr[bool]):
        """Write a block's part of K or V to its cache."""
        problem = self.problem
        source, cache = (tensors.k, tensors.k_cache) if const_expr(is_k) else (tensors.v, tensors.v_cache)
        head_dim = problem.head_dim if const_expr(is_k) else problem.head_dim_v
        row, unit = self.item(block, head_dim)
        token_number, head, exists = self.row(source, row)
        token = self.token(source, tensors.cu_seqlens_k_new, token_number, block)
        if exists and token.exists:
            pieces = self.pieces(unit, head_dim, turns=is_k)
            loaded = self.load(source, token_number, head, pieces)
            place = self.place(tensors, cache, token.sequence, tensors.cache_seqlens[token.sequence] + token.index)
            if place.exists:
                values = self.widen(loaded)
                if const_expr(is_k and problem.rotary_dim > 0):
                    position = self.position(tensors, scalars, token.sequence) + token.index
                    self.rotate(values, tensors, scalars, position, unit)
                if const_expr(problem.quantises):
                    descale = tensors.k_descale if const_expr(is_k) else tensors.v_descale
                    factor = 1.0 / descale[token.sequence, head]
                    for e in cutlass.range_constexpr(2 * CHUNK):
                        values[e] = values[e] * factor
                batch, row_stride, head_stride, _ = cache.stride
                offset = Int64(batch) * place.entry + Int64(row_stride) * place.slot + Int64(head_stride) * head
                address = cache.iterator.toint() + offset * (cache.element_type.width // 8)
                self.store(values, address, pieces, cache.element_type)

    def item(self, block: Int32, head_dim: int) -> tuple[Int32, Int32]:
        """(row, unit) of the calling thread: a row is a head of a token."""
        number = block * self.traits.num_threads + cute.arch.thread_idx()[0]
        return number // units(head_dim), number % units(head_dim)

    def row(self, x: cute.Tensor, row: Int32) -> tuple[Int32, Int32, Boolean]:
        """(token, head, whether it exists) of a row of (batch, seqlen, heads, head_dim) or (total, heads, head_dim)."""
        heads = x.shape[-2]
        return row // heads, row % heads, row < cute.size(x.shape[:-1])

    @cute.jit
    def token(self, x: cute.Tensor, ends: cute.Tensor | None, number: Int32, block: Int32):
        """The token of a number; a whole warp calls it."""
        if const_expr(ends is None):
            seqlen = x.shape[1]
            return Token(number // seqlen, number % seqlen, Boolean(True))
        batch = cute.size(ends.shape) - 1
        first = block * self.traits.num_threads // units(x.shape[-1]) // x.shape[-2]
        sequence = last_begun(ends, cutlass.min(first, x.shape[0] - 1))
        end = ends[cutlass.min(sequence + 1, batch)]
        while (sequence < batch) & (end <= number):
            sequence += 1
            end = ends[cutlass.min(sequence + 1, batch)]
        return Token(sequence, number - ends[sequence], sequence < batch)

    def position(self, tensors: AppendTensors, scalars: AppendScalars, sequence: Int32) -> Int32:
        """Where a sequence's rotary positions begin."""
        begins = tensors.rotary_seqlens if self.problem.has_rotary_seqlens else tensors.cache_seqlens
        return scalars.offset if begins is None else scalars.offset + begins[sequence]

    @cute.jit
    def place(self, tensors: AppendTensors, cache: cute.Tensor, sequence: Int32, position: Int32):
        """The cache row of a position of a sequence."""
        entry, slot = sequence, position
        entries, slots = cache.shape[0], cache.shape[1]
        exists = position >= 0
        if const_expr(self.problem.has_batch_idx):
            entry = tensors.cache_batch_idx[sequence]
        if const_expr(self.problem.is_paged):
            page = position // slots
            rows, pages = tensors.page_table.shape
            exists = exists & (page < pages) & (entry >= 0) & (entry < rows)
            found = Int32(-1)
            if exists:
                found = tensors.page_table[entry, page]
            entry, slot = found, position - page * slots
        else:
            exists = exists & (position < slots)
        return Place(entry, slot, exists & (entry >= 0) & (entry < entries))

    def address(self, x: cute.Tensor, number: Int32, head: Int32) -> Int64:
        """The address of a head of a token."""
        *of_batch, of_token, of_head, _ = x.stride
        if of_batch:
            seqlen = x.shape[1]
            offset = Int64(of_batch[0]) * (number // seqlen) + Int64(of_token) * (number % seqlen)
        else:
            offset = Int64(of_token) * number
        return x.iterator.toint() + (offset + Int64(of_head) * head) * (x.element_type.width // 8)

    def pieces(self, unit: Int32, head_dim: int, turns: bool) -> tuple[Int32, Int32]:
        """Which two pieces of 8 columns a thread has; the last two may be the same. `turns`: these rows are rotated."""
        last, half = head_dim // CHUNK - 1, self.problem.rotary_dim // 2 // CHUNK
        first, second = 2 * unit, cutlass.min(2 * unit + 1, last)
        if half == 0 or not turns or self.problem.rotary_interleaved:
            return first, second
        turned = unit < half
        return cutlass.select_(turned, unit, first), cutlass.select_(turned, unit + half, second)

    def load(self, x: cute.Tensor, number: Int32, head: Int32, pieces: tuple[Int32, Int32]) -> cute.Tensor:
        """(8, 2) a thread's columns."""
        loaded = cute.make_rmem_tensor((CHUNK, 2), x.element_type)
        address = self.address(x, number, head)
        atom = cute.make_copy_atom(CopyUniversalOp(), x.element_type, num_bits_per_copy=ALIGN_BYTES * 8)
        for i, number in enumerate(pieces):
            cute.copy(atom, elements(address + number * ALIGN_BYTES, x.element_type, CHUNK), loaded[None, i])
        return loaded

    def widen(self, loaded: cute.Tensor) -> cute.Tensor:
        """(2 * 8,) the same in fp32."""
        values = cute.make_rmem_tensor((2 * CHUNK,), Float32)
        values.store(loaded.load().to(Float32).reshape((2 * CHUNK,)))
        return values

    @cute.jit
    def rotate(self, values: cute.Tensor, tensors: AppendTensors, scalars: AppendScalars, position: Int32, unit: Int32):
        """Rotate a thread's columns if the rotary embedding does; a position past the table takes its last row."""
        problem = self.problem
        if unit < problem.rotary_dim // (2 * CHUNK):
            row = cutlass.max(cutlass.min(position, tensors.cos.shape[0] - 1), 0)
            cos, sin = (load_table(x, row, unit) for x in (tensors.cos, tensors.sin))
            for e in cutlass.range_constexpr(CHUNK):
                i, j = (2 * e, 2 * e + 1) if const_expr(problem.rotary_interleaved) else (e, e + CHUNK)
                a, b, c, s = values[i], values[j], cos[e], sin[e] * scalars.sign
                values[i] = a * c - b * s
                values[j] = a * s + b * c

    def store(self, values: cute.Tensor, address: Int64, pieces: tuple[Int32, Int32], dtype: Any) -> None:
        """Round a thread's columns to a row's element type, what is too large for 8 bits to 448, and write them."""
        for i, number in enumerate(pieces):
            nbytes = CHUNK * dtype.width // 8
            words = cute.make_rmem_tensor((nbytes // 4,), Uint32)
            if dtype.width == 8:
                for w in range(2):
                    words[w] = rounded(*(values[i * CHUNK + w * 4 + b] for b in range(4)), "e4m3")
            else:
                part = cute.make_rmem_tensor((CHUNK,), dtype)
                for e in range(CHUNK):
                    part[e] = values[i * CHUNK + e].to(dtype)
                words = cute.recast_tensor(part, Uint32)
            atom = cute.make_copy_atom(CopyUniversalOp(), Uint32, num_bits_per_copy=nbytes * 8)
            cute.copy(atom, words, elements(address + number * nbytes, Uint32, nbytes // 4, align=nbytes))


@cute.jit
def last_begun(ends: cute.Tensor, number: Int32):
    """The last sequence that begins at or before a token, which may be the end of all. A warp's lanes search together:
    each step leaves one part in 33.
    """
    first, count = Int32(0), cute.size(ends.shape)
    while count > 1:
        part = (count + WARP) // (WARP + 1)
        probe = first + (cute.arch.lane_idx() + 1) * part
        begins = Boolean(False)
        if probe < first + count:
            begins = ends[probe] <= number
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(begins)) * part
        first += passed
        count = cutlass.min(part, count - passed)
    return first


def elements(address: Int64, dtype: Any, size: int, align: int = ALIGN_BYTES) -> cute.Tensor:
    """(size,) elements in global memory."""
    pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(size))


def load_table(table: cute.Tensor, row: Int32, unit: Int32) -> cute.Tensor:
    """8 neighbouring cosines or sines of a row, fp32."""
    dtype = table.element_type
    nbytes, step = CHUNK * dtype.width // 8, ALIGN_BYTES * 8 // dtype.width
    loaded = cute.make_rmem_tensor((step, nbytes // ALIGN_BYTES), dtype)
    address = table.iterator.toint() + Int64(table.stride[0]) * row * (dtype.width // 8) + unit * nbytes
    atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=ALIGN_BYTES * 8)
    for i in range(nbytes // ALIGN_BYTES):
        cute.copy(atom, elements(address + i * ALIGN_BYTES, dtype, step), loaded[None, i])
    values = cute.make_rmem_tensor((CHUNK,), Float32)
    values.store(loaded.load().to(Float32).reshape((CHUNK,)))
    return values
