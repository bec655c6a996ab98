"""The scene of an sm80 forward row on e4m3 caches: what differs from 16 bits, read from the kernel's own objects.

cp.async and ldmatrix move pairs of bytes of K and V, of which operands of fp16 are made in registers. Which elements a
lane gets is that of `kernels/sm80/cache_mma.py`: products take the columns in another order than the DSL's partition.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Final, Literal

from cuteflash.traits.sm80 import MMA_K

from .algebra import Layout, composition, concatenate, right_inverse
from .ampere import ALL, ONCE, WARPS
from .bytes_in_registers import CONVERSION, FIT, FITTED, IN_FOURS, IN_PAIRS, NEIGHBOURS, TURNED
from .parts import IN_PLACE, MERGED, quads, store_registers
from .read import ELEMENT_BYTES, Placed, byte_tile, shuffled
from .read_sm80 import ReaderSm80
from .scene import Fragment, Step, Tile, Touch

PAIR_BYTES, QUAD_BYTES = 2 * ELEMENT_BYTES, 4 * ELEMENT_BYTES  # of a lane's access to Q and to O
PAIR_BLOCKS = 2  # k-blocks of a product, or groups of V's columns, that those of pairs of bytes become
SORTED: Final = "sQ_sorted"
ROWS_OF_A_PHASE: Final = "16 lanes are a phase: of four rows 32 bytes each, which lie in the same banks two by two."


class ReaderCacheSm80(ReaderSm80):
    """Reads one sm80 kernel of e4m3 caches; make and use it inside `layouts.dsl.context`."""

    def make_registers(self) -> Any:
        """As of 16 bits, with K and V as pairs of bytes."""
        from cutlass import Float32

        from cuteflash.kernels.sm80.cache_mma import with_row_scales

        no_scales: Any = types.SimpleNamespace(of_scores=lambda tile: Float32(1))
        no_tile: Any = None
        return with_row_scales(self.kernel, super().make_registers(), no_scales, no_tile)

    def operands(self) -> dict[str, Placed]:
        """As of 16 bits, with the columns in the products' order."""
        found = super().operands()
        for tensor, of_16 in (("Q", IN_FOURS), ("K", IN_FOURS), ("V", IN_PAIRS), ("O", IN_PAIRS)):
            found[tensor] = shuffled(found[tensor], self.frame.shape(tensor), of_16)
        return found

    def tiles(self) -> tuple[Tile, ...]:
        """As of 16 bits, and where a Q lies that does not stay in registers."""
        found = super().tiles()
        if self.traits.q_in_regs:
            return found
        at = next(i for i, tile in enumerate(found) if tile.id == "sQ")
        return *found[: at + 1], self._sorted(found[at]), *found[at + 1 :]

    def _sorted(self, tile: Tile) -> Tile:
        """Q's place with its columns in the products' order."""
        order = self.of["Q"].order
        assert order is not None
        layout = composition(composition(tile.layout, right_inverse(order)), Layout(tile.shape))
        note = "The same place, in which a warp has put back its rows: fp16, columns in the order of the products."
        return dataclasses.replace(tile, id=SORTED, layout=layout, note=note)

    def loaded_tile(self, tensor: str, layout: Any, start: int) -> Tile:
        """K or V in shared memory."""
        note = "e4m3, as memory has it; pairs of bytes move as one element."
        return byte_tile(f"s{tensor}", tensor, layout, start, note, swizzle_bytes=False)

    def fragments(self) -> tuple[Fragment, ...]:
        """As of 16 bits; K and V are made into fp16 a k-block at a time."""
        return tuple(map(self._made, super().fragments()))

    def _made(self, fragment: Fragment) -> Fragment:
        """A fragment with what of it is live."""
        ahead = 1 + self.traits.ahead
        if fragment.id == "rQ" and not self.traits.q_in_regs:
            blocks = self.traits.head_dim // MMA_K
            count = min(PAIR_BLOCKS * ahead, blocks)
            note = f"{count} of its k-blocks are live at a time; all are while they are sorted, before the loop."
            return dataclasses.replace(fragment, live=fragment.registers * count // blocks, note=note)
        if fragment.id not in ("rK", "rV"):
            return fragment
        blocks, stored, made = self._blocks(fragment.tensor)
        count = min(ahead, blocks)
        note = (
            f"fp16, made of e4m3 where it is multiplied, a k-block at a time: {made} registers. Beside it are "
            f"{count} times {stored} registers of bytes, as ldmatrix brings them. Every warp needs all of it."
        )
        return dataclasses.replace(fragment, live=count * stored + made, note=note)

    def _blocks(self, tensor: str) -> tuple[int, int, int]:
        """K-blocks of bytes, registers of one as ldmatrix brings it, and of the operand of a product made of it."""
        import cutlass.cute as cute

        from cuteflash.kernels.sm80.cache_mma import operand_b

        held = self.registers.rK if tensor == "K" else self.registers.rVt
        _, groups, blocks = (cute.size(mode) for mode in held.shape)
        _, words = operand_b(self.kernel, groups if tensor == "K" else PAIR_BLOCKS * groups)
        return blocks, cute.size(held) * held.element_type.width // 32 // blocks, cute.size(words)

    def operand_registers(self, tensor: Literal["K", "V"]) -> Any:
        """Registers with all of an operand of which the kernel has only a k-block at a time."""
        import cutlass.cute as cute

        return cute.make_rmem_tensor(cute.make_layout(self.of[tensor].values.shape), self.kernel.dtype)

    def load(self, tensor: str, note: str) -> Step:
        """K and V by pairs of bytes."""
        if tensor == "Q":
            return super().load(tensor, note)
        words = self.traits.loaded_columns["KV".index(tensor)]
        return self.draw.load_pairs(tensor, self.kernel.load_copy(words), note)

    def fetch(self, tensor: str, copy: Any, once: bool = False) -> Step:
        """K and V by pairs of bytes; of Q what has been sorted."""
        if tensor == "K":
            return self.draw.fetch_pairs("K", copy, False, CONVERSION, NEIGHBOURS)
        if tensor == "V":
            return self.draw.fetch_pairs("V", copy, True, f"prmt.b32, {CONVERSION}", TURNED)
        step, order = super().fetch(tensor, copy, once), self.of["Q"].order
        assert order is not None
        tvs = (concatenate(*(composition(order, mode) for mode in touch.tv.modes())) for touch in step.touches)
        read, write = (dataclasses.replace(touch, tv=tv) for touch, tv in zip(step.touches, tvs, strict=True))
        return dataclasses.replace(step, touches=(dataclasses.replace(read, id=SORTED), write))

    def bring_q(self) -> tuple[Step, ...]:
        """Q by four neighbours a lane, in the order in which K's bytes come; if it does not stay, it is put back."""
        pair, row, half, m, k = _of_a(self.of["Q"])
        threads = self.of["Q"].threads
        fours = concatenate(threads, concatenate(pair, half), concatenate(k, row, m))
        touches: tuple[Touch, ...] = (Touch("sQ", "read", fours, lane_bytes=QUAD_BYTES),)
        if self.traits.q_in_regs:
            touches += (Touch("rQ", "write", fours),)
        note = (
            "Four neighbouring elements of a row are two registers of the operand, as a lane has four neighbouring "
            f"bytes of K. {ROWS_OF_A_PHASE}"
        )
        read = Step(
            "read_q", "Q: shared memory → registers", "ld.shared", "ld.shared.v2.b32", WARPS, ONCE, "prologue",
            touches, note,
        )  # fmt: skip
        if not self.traits.q_in_regs:
            return read, self._put_back(), *super().bring_q()
        if not self.kernel.fits_q:
            return (read,)
        rows = concatenate(threads, concatenate(pair, half, k), concatenate(row, m))
        both = Touch("rQ", "read", rows), Touch("rQ", "write", rows)
        return read, Step("fit_q", "Q: made into fp16", "convert", FIT, WARPS, ONCE, "prologue", both, FITTED)

    def _put_back(self) -> Step:
        """Q where ldmatrix finds the fragments, two elements at a time."""
        pair, row, half, m, k = _of_a(self.of["Q"])
        tv = concatenate(self.of["Q"].threads, pair, concatenate(half, k, row, m))
        fit, fitted = (f"{FIT}, ", f" {FITTED}") if self.kernel.fits_q else ("", "")
        note = (
            "It does not stay in registers. A lane's four neighbours of each 16 columns go where ldmatrix finds them "
            f"for the same registers: the first two into the first eight columns. A warp has rows of its own.{fitted}"
        )
        title = "Q: made into fp16, its columns sorted" if fit else "Q: its columns sorted"
        return Step(
            "sort_q", f"{title} → shared memory", "st.shared", f"{fit}st.shared.b32", WARPS, ONCE, "prologue",
            (Touch(SORTED, "write", tv, lane_bytes=PAIR_BYTES),), note,
        )  # fmt: skip

    def stage(self) -> Step:
        """O from its accumulators to shared memory, by four neighbours."""
        tv, _ = quads(self.of["O"])
        touches = Touch("acc_O", "read", tv), Touch("sO", "write", tv, lane_bytes=QUAD_BYTES)
        note = (
            "Divided by the row sums, times V's scale, and rounded. A lane has four neighbours of each 16 columns. "
            f"{ROWS_OF_A_PHASE}"
        )
        return Step(
            "stage_o", "O: registers → shared memory", "st.shared", "st.shared.v2.b32", ALL, ONCE, "epilogue",
            touches, note,
        )  # fmt: skip

    def store_part(self) -> Step:
        """A part of O, of a block's share of the keys, to its slot."""
        _, tv = quads(self.of["O"])
        return store_registers(self.frame, "gO_part", "st.global.v2.b32", (tv, tv), f"{IN_PLACE} {MERGED}")


def _of_a(q: Placed) -> tuple[Layout, Layout, Layout, Layout, Layout]:
    """What an A operand's values count: pairs of columns, rows 8 apart, halves of 16 columns, tiles of M, k-blocks."""
    atom, m, k = q.values.modes()
    pair, row, half = atom.modes()
    return pair, row, half, m, k
