# mypy: ignore-errors
"""A kernel that issues one kind of shared-memory instruction, with addresses from a CuTe layout, and times it.

    registers, shared memory  <- data from the host
    barrier, clock
    loop: 16 different instructions of each warp, whose lanes' addresses were computed before it
    clock, barrier
    cycles, addresses, registers, shared memory -> global

The addresses are those of the forward kernels' own tiled copies over `atoms.sm80`'s swizzles; the instruction itself is
inline PTX. Two things that ptxas does, and that the tests therefore check in machine code: it moves plain loads out of
the loop (only those of the last pass are needed, hence `volatile`), and it waits for each load at once if an operation
on its result follows, which would measure latency (hence none follows: a pass overwrites the registers of the one
before). The addresses grow by a run-time number (zero) in each pass, so the compiler cannot merge passes.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from cuteflash.atoms import row_copies, sm80, sm90
from cuteflash.traits import chunks

from .bank_patterns import COLS, INSTRUCTIONS, LANES, REGISTERS, ROWS, Case, Instruction

ALIGN = 1024  # bytes: the period of the widest swizzle
DTYPE = cutlass.Float16  # any 16-bit type
WORDS = ROWS * COLS // 2
MAX_WARPS = 8  # two a scheduler, each with 16 instructions in flight, keep the pipe full; more lack registers

# {$w0} is written, {$r0} read; the first read operand is the address. Loads write four registers.
FOUR = "{{ {{${0}0}}, {{${0}1}}, {{${0}2}}, {{${0}3}} }}"
PTX = {
    "ldmatrix.x4": f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {FOUR.format('w')}, [{{$r0}}];",
    "ldmatrix.x4.trans": f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {FOUR.format('w')}, [{{$r0}}];",
    "ld.shared.v4": f"ld.volatile.shared.v4.b32 {FOUR.format('w')}, [{{$r0}}];",
    "stmatrix.x4": "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
    "st.shared.b32": "st.shared.b32 [{$r0}], {$r1};",
    "cp.async.16": "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
}


class BankProbe:
    """The kernel of one case. Every warp of the block issues the same instructions."""

    family = "bank_probe"

    def __init__(self, traits: Case, problem: Instruction) -> None:
        self.case = traits
        self.what = problem
        self.ptx = PTX[problem.name.split()[0]]

    def fake_args(self) -> tuple:
        """Arguments of `__call__`: INSTRUCTIONS x LANES x REGISTERS words a fragment, LANES x warps threads."""
        warps = cute.sym_int32(symbol="warps")

        def words(*shape):
            return make_fake_compact_tensor(
                Int32, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16
            )

        return (
            words(WORDS),
            words(INSTRUCTIONS, LANES, REGISTERS),
            words(warps, INSTRUCTIONS, LANES, REGISTERS),
            words(INSTRUCTIONS, LANES),
            make_fake_compact_tensor(Int64, (warps, 2), stride_order=(1, 0), assumed_align=8),
            Int32(1),
            Int32(0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    def layout(self) -> cute.ComposedLayout:
        """(ROWS, COLS), row-major, chunks of 8 elements XORed with the row."""
        outer = cute.make_layout((ROWS, COLS), stride=(COLS, 1))
        return cute.make_composed_layout(cute.make_swizzle(self.case.swizzle_bits, 3, 3), 0, outer)

    def coordinates(self, lane):
        """(atom's (elements, repetitions), rest, rest) -> (row, column), as the forward kernels partition a tile."""
        identity = cute.make_identity_tensor((ROWS, COLS))
        mma = sm80.tiled_mma(DTYPE, 1)
        name = self.what.name
        if name == "ldmatrix.x4":
            return cute.make_tiled_copy_A(sm80.ldmatrix(DTYPE), mma).get_slice(lane).partition_S(identity)
        if name == "ldmatrix.x4.trans":
            # (column, row), as V is read: the product's N runs along the tile's columns.
            return cute.make_tiled_copy_B(sm80.ldmatrix(DTYPE, True), mma).get_slice(lane).partition_S(identity)
        if name == "stmatrix.x4":
            return sm90.store_copy(DTYPE, mma).get_slice(lane).partition_D(identity)
        if name == "st.shared.b32":
            return sm80.store_pairs(DTYPE, mma).get_slice(lane).partition_D(identity)
        if self.what.pattern == "rows":
            return row_copies.store_copy(DTYPE, LANES, COLS).get_slice(lane).partition_S(identity)
        atom = cute.make_copy_atom(CopyUniversalOp(), DTYPE, num_bits_per_copy=row_copies.CHUNK_BITS)
        if self.what.pattern == "halves":
            owners = cute.make_layout(((4, 2, 4), chunks.CHUNK), stride=((8 * chunks.CHUNK, 4, 1), 8))
            return cute.make_tiled_copy(atom, owners, (8, COLS // 2)).get_slice(lane).partition_S(identity)
        lanes, chunk = cute.make_layout((LANES, 1)), cute.make_layout((1, chunks.CHUNK))
        return cute.make_tiled_copy_tv(atom, lanes, chunk).get_slice(lane).partition_S(identity)

    def offsets(self, lane) -> list:
        """Byte offset from the tile's base at which `lane` points, for each instruction."""
        coords, layout = self.coordinates(lane), self.layout()
        repetitions, rest = cute.size(coords.shape[0][1]), cute.size(coords.shape[1])
        found = []
        for j in range(INSTRUCTIONS):
            row, col = coords[(0, j % repetitions), j // repetitions % rest, j // repetitions // rest]
            if self.what.transposes:
                row, col = col, row
            found.append(cute.crd2idx((row, col), layout) * (DTYPE.width // 8))
        return found

    def issue(self, address, held, source, j):
        """Instruction `j` at a lane's `address`: the registers of a load; None for a store or a copy."""
        if self.what.path == "load":
            return cute.arch.inline_ptx(self.ptx, write_only_types=[Int32] * REGISTERS, read_only_args=[address])
        if self.what.path == "copy":
            return cute.arch.inline_ptx(self.ptx, read_only_args=[address, source + j * LANES * REGISTERS * 4])
        data = [held[j, r] for r in range(self.what.lane_bytes // 4)]
        return cute.arch.inline_ptx(self.ptx, read_only_args=[address, *data])

    @cute.jit
    def __call__(
        self,
        mTile: cute.Tensor,  # (WORDS,) raw shared memory, before and after
        mSource: cute.Tensor,  # (INSTRUCTIONS, LANES, REGISTERS) data to store or copy
        mLoaded: cute.Tensor,  # (warps, INSTRUCTIONS, LANES, REGISTERS) data that the last pass loaded
        mAddress: cute.Tensor,  # (INSTRUCTIONS, LANES) byte offsets in the tile
        mClock: cute.Tensor,  # (warps, 2) cycle counter before and after the loop
        passes: Int32,
        step: Int32,  # bytes that addresses grow by in each pass: 0, unknown to the compiler
        stream,
    ):
        self.kernel.set_name_prefix("bank_probe", remove_cutlass_symbol=True)
        self.kernel(mTile, mSource, mLoaded, mAddress, mClock, passes, step).launch(
            grid=(1, 1, 1),
            block=(LANES * mClock.shape[0], 1, 1),
            max_number_threads=(LANES * MAX_WARPS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mTile: cute.Tensor,
        mSource: cute.Tensor,
        mLoaded: cute.Tensor,
        mAddress: cute.Tensor,
        mClock: cute.Tensor,
        passes: Int32,
        step: Int32,
    ):
        thread = cute.arch.thread_idx()[0]
        threads = cute.arch.block_dim()[0]
        warp, lane = thread // LANES, thread % LANES
        memory = SmemAllocator().allocate_array(Int32, WORDS, byte_alignment=ALIGN)
        sTile = cute.make_tensor(memory, cute.make_layout(WORDS))
        for word in cutlass.range(thread, WORDS, threads, unroll=1):
            sTile[word] = mTile[word]

        offsets = self.offsets(lane)
        if warp == 0:
            for j in cutlass.range_constexpr(INSTRUCTIONS):
                mAddress[j, lane] = offsets[j]
        address = cute.make_rmem_tensor(INSTRUCTIONS, Int32)
        held = cute.make_rmem_tensor((INSTRUCTIONS, REGISTERS), Int32)
        for j in cutlass.range_constexpr(INSTRUCTIONS):
            address[j] = memory.toint() + offsets[j]
            for r in cutlass.range_constexpr(REGISTERS):
                held[j, r] = mSource[j, lane, r] if const_expr(self.what.path == "store") else Int32(0)
        source = mSource.iterator.toint() + Int64(lane * REGISTERS * 4)

        cute.arch.sync_threads()
        start = cute.arch.clock64()
        for _ in cutlass.range(passes, unroll=1):
            loaded = [self.issue(address[j], held, source, j) for j in range(INSTRUCTIONS)]
            for j in cutlass.range_constexpr(INSTRUCTIONS):
                address[j] = address[j] + step
                if const_expr(self.what.path == "load"):
                    for r in cutlass.range_constexpr(REGISTERS):
                        held[j, r] = loaded[j][r]
        if const_expr(self.what.path == "copy"):
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
        end = cute.arch.clock64()
        cute.arch.sync_threads()

        if lane == 0:
            mClock[warp, 0] = start
            mClock[warp, 1] = end
        for j in cutlass.range_constexpr(INSTRUCTIONS):
            for r in cutlass.range_constexpr(REGISTERS):
                mLoaded[warp, j, lane, r] = held[j, r]
        for word in cutlass.range(thread, WORDS, threads, unroll=1):
            mTile[word] = sTile[word]
