"""The scene of an sm90 forward row on 8-bit operands: what differs from 16 bits, read from the kernel's own objects.

The product reads V^T, whose keys lie in an order of their own. Tiles and fragments are drawn by key all the same, so
that each element of P and V has one place on the page: `KEYS` is the key at each position of that order.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from cuteflash.traits.fp8_sm90 import TURNED_COLUMNS, TURNED_KEYS, TURNING_WARPS
from cuteflash.traits.sm90 import WARPGROUP

from .algebra import Layout, Swizzle, composition, concatenate, right_inverse
from .banks import WARP
from .hopper import EXAMPLE_TOKENS, MATRIX_ROWS, STMATRIX, Transfer, When
from .read import Placed, products, shared_tile
from .read_sm90 import BLOCK, ReaderSm90
from .scene import Fragment, Role, Step, Tile, Touch

LDMATRIX_TRANS: Final = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
TURNING: Final = "every producer warp"
# Position 4 t + 2 j + b of each 16 holds key 8 j + 2 t + b: modes b, j and t of a position, as strides of the key.
KEYS: Final = Layout((2, 2, 4), (1, 8, 2))
PART_REGS: Final = TURNED_KEYS * TURNED_COLUMNS // WARP // 4  # of a lane, for a part that its warp turns


def keys_in_order(count: int, stride: int = 1) -> Layout:
    """Position to `stride` times its key, of `count` keys."""
    inner = Layout(KEYS.shape, tuple(step * stride for _, step in KEYS.flat_modes()))
    return concatenate(inner, Layout(count // KEYS.size(), KEYS.size() * stride))


def positions_of_keys(count: int) -> Layout:
    """Key to its position, of `count` keys."""
    return concatenate(right_inverse(KEYS), Layout(count // KEYS.size(), KEYS.size()))


class ReaderFp8Sm90(ReaderSm90):
    """Reads one sm90 kernel of 8-bit operands; make and use it inside `layouts.dsl.context`."""

    def operands(self) -> dict[str, Placed]:
        """As of 16 bits, but for the order of keys in the PV product."""
        found, pv = products(self.frame, self.kernel), self.kernel.tiled_mma_pv()
        rows, keys = self.frame.shape("S")
        of_p = concatenate(Layout(rows, 1), keys_in_order(keys, rows))
        return found | {
            "P": self.frame.placed(pv, "A", "P", order=of_p),
            "V": self.frame.placed(pv, "B", "V", transposed=True, order=self.order_of_v()),
        }

    def order_of_v(self) -> Layout:
        """(position, column) to element of V's tile."""
        keys, columns = self.frame.shape("V")
        return concatenate(keys_in_order(keys), Layout(columns, keys))

    def roles(self) -> tuple[Role, ...]:
        """As of 16 bits; a producer that turns V has work for all of its warps."""
        producer, *consumers = super().roles()
        if not self.kernel.turns_v:
            return (producer, *consumers)
        does = "warp 0 issues every TMA load; all warps turn V into V^T"
        return (Role(producer.name, producer.first_thread, producer.threads, does), *consumers)

    def global_v(self) -> Tile:
        """V as its rows are stored, or V^T by key."""
        if self.kernel.turns_v:
            return super().global_v()
        keys, columns = self.frame.shape("V")
        note = (
            "One block of V^T, whose rows are columns of V. Of each 16 keys, position 4 t + 2 j + b holds key "
            f"8 j + 2 t + b. Drawn by key, for a (batch, heads, {self.problem.operands.head_dim_v}, {EXAMPLE_TOKENS} "
            "keys) tensor."
        )
        layout = concatenate(positions_of_keys(keys), Layout(columns, EXAMPLE_TOKENS))
        valid = keys, self.problem.operands.head_dim_v
        return Tile("gV", "V", "global", (keys, columns), layout, valid=valid, note=note, element_bytes=1)

    def tiles_of_v(self) -> tuple[Tile, ...]:
        """V^T as the product reads it, and V as its rows are stored if the kernel turns it."""
        plan, keys = self.traits.smem_plan, self.frame.shape("V")[0]
        laid = shared_tile("V", self.kernel.smem_layout_vt(), plan["v"].start, True, "", element_bytes=1)
        columns, positions, *stages = laid.layout.modes()
        by_key = composition(positions, positions_of_keys(keys))
        note = "V^T: rows are columns of V, as WGMMA takes 8-bit operands. Drawn by key; of each 16 keys, position "
        note += "4 t + 2 j + b holds key 8 j + 2 t + b."
        read = Tile(
            id="sV",
            tensor="V",
            space="shared",
            shape=self.frame.shape("V"),
            layout=concatenate(by_key, columns, *stages),
            swizzle=laid.swizzle,
            base=laid.base,
            stages=laid.stages,
            note=note,
            element_bytes=1,
        )
        if not self.kernel.turns_v:
            return (read,)
        layout, start = self.kernel.smem_layout_stored_v(), plan["stored_v"].start
        stored = shared_tile("V", layout, start, True, "As TMA brings it: rows are keys.", element_bytes=1)
        return (dataclasses.replace(stored, id="sV_stored"), read)

    def fragments(self) -> tuple[Fragment, ...]:
        """As of 16 bits, with the accumulator beside O, and what the producer's lanes hold while they turn V."""
        found = list(super().fragments())
        if self.traits.two_level:
            note = "One block's product: the tensor cores keep 13 fraction bits of a sum, so that sums stay short."
            found.append(self.frame.fragment("acc_PV", self.of["O"], self.warpgroup.acc_PV, note))
        if self.kernel.turns_v:
            live = 2 * PART_REGS  # a part is loaded while the one before is stored
            size = self.traits.tile_n * self.traits.head_dim_v // WARPGROUP // 4
            shape = self.frame.shape("V")
            loaded, sorted_bytes = (
                concatenate(*(tv.mode(0), concatenate(tv.mode(1), tv.mode(2)))) for tv in self._turned()
            )
            notes = (
                "As ldmatrix.trans leaves it: two columns of two keys a register.",
                "Four keys of a column a register.",
            )
            found.append(Fragment("rV", "V", shape, "", "e4m3", 0, loaded, size, "", live, notes[0]))
            mixed = self._mixed()
            found.append(Fragment("rVt", "V", shape, "", "e4m3", 0, sorted_bytes, size, "rV", live, notes[1], mixed))
        return tuple(found)

    def steps(self) -> tuple[Step, ...]:
        """As of 16 bits; with two levels, O gets each block's product once that has finished."""
        steps = super().steps()
        if not self.traits.two_level:
            return steps
        place = next(index for index, step in enumerate(steps) if step.id == "wgmma_pv") + 1
        acc = self.of["O"]
        touches = (
            self.frame.row_touch("acc_PV", "read", acc),
            self.frame.row_touch("acc_O", "read", acc),
            self.frame.row_touch("acc_O", "write", acc),
        )
        note = "In fp32, once the product has finished. With fixed maxima O is not rescaled before."
        add = Step("add_pv", "O += P V", "add", "add.f32", "every consumer warp", BLOCK, "loop", touches, note)
        return (*steps[:place], add, *steps[place:])

    def load_v(self, tma: Any, when: When, ahead: str) -> tuple[Step, ...]:
        """TMA alone brings V^T; V as stored is turned after it."""
        if not self.kernel.turns_v:
            what = Transfer("V", tma.load_v, tma.gV, self.smem.sVt, self.traits.tile_n, order=self.order_of_v())
            return (self.draw.load(what, when, ahead),)
        what = Transfer("V", tma.load_v, tma.gV, self.smem.sV, self.traits.tile_n, target="sV_stored")
        return (self.draw.load(what, when, ahead), *self._turning())

    def _turning(self) -> tuple[Step, ...]:
        """Shared memory to registers, bytes sorted, and back: by each warp 16 keys and 32 columns at a time."""
        loaded, sorted_bytes = self._turned()
        rows, columns = self._addressed()
        mixed = self._mixed()
        return (
            Step(
                "ldmatrix_v", "V: shared memory → registers, transposed by pairs of bytes", "ldmatrix",
                LDMATRIX_TRANS, TURNING, BLOCK, "loop",
                (Touch("sV_stored", "read", rows, lane_bytes=16), Touch("rV", "write", loaded)),
                f"Elements of 16 bits: two neighbouring columns travel together. {MATRIX_ROWS}",
            ),
            Step(
                "permute_v", "V: bytes sorted by column", "permute", "prmt.b32", TURNING, BLOCK, "loop",
                (Touch("rV", "read", loaded), Touch("rVt", "write", sorted_bytes, tv_swizzle=mixed)),
                "Two byte permutes make of two registers one of an even and one of an odd column, four keys each, in "
                "the order in which P's registers have them."
                + (" The upper half of a warp's lanes begins with the odd one." if mixed else ""),
            ),
            Step(
                "stmatrix_v", "V^T: registers → shared memory", "stmatrix", STMATRIX, TURNING, BLOCK, "loop",
                (
                    Touch("rVt", "read", sorted_bytes, tv_swizzle=mixed),
                    Touch("sV", "write", columns, lane_bytes=16, tv_swizzle=mixed),
                ),
                "A matrix is four even and four odd columns, so that none of its rows are 8 apart, which would share "
                "their banks."
                if mixed
                else "A matrix is eight even or eight odd columns, of which those 8 apart share their banks.",
            ),
        )  # fmt: skip

    def _mixed(self) -> Swizzle | None:
        """What exchanges even and odd columns in the second half of each 16, on the numbers of V's elements."""
        keys = self.frame.shape("V")[0]
        return Swizzle(1, keys.bit_length() - 1, 3) if self.traits.mixes_columns else None

    def _warps(self) -> tuple[Layout, Layout]:
        """(warp) and (part of a warp) to the first element of the part."""
        keys, columns = self.frame.shape("V")
        over_columns = self.traits.turning_columns
        over_keys = TURNING_WARPS // over_columns
        beside, below = TURNED_COLUMNS * keys, TURNED_KEYS
        warps = Layout((over_columns, over_keys), (beside, below))
        parts = columns // (over_columns * TURNED_COLUMNS), keys // (over_keys * TURNED_KEYS)
        return warps, Layout(parts, (beside * over_columns, below * over_keys))

    def _turned(self) -> tuple[Layout, Layout]:
        """(thread, byte of a lane's registers, part) to element: as ldmatrix leaves it, and sorted by column."""
        column, (warps, parts) = self.frame.shape("V")[0], self._warps()
        lanes = Layout((4, 8), (2, 2 * column))  # two keys, two columns
        loaded = Layout((2, 2, 2, 2), (column, 1, 8, 16 * column))  # column, key, then matrices below and beside
        sorted_bytes = Layout((2, 2, 2, 2), (1, 8, column, 16 * column))
        threads = concatenate(lanes, warps)
        return concatenate(threads, loaded, parts), concatenate(threads, sorted_bytes, parts)

    def _addressed(self) -> tuple[Layout, Layout]:
        """(thread, byte, part) to element: the rows whose addresses lanes give, of V as stored and of V^T."""
        column, (warps, parts) = self.frame.shape("V")[0], self._warps()
        stored = Layout((8, 2, 2), (1, 8, 16 * column))  # a key's 16 columns
        turned = Layout((8, 2, 2), (2 * column, column, 16 * column))  # a column's 16 keys, in their order
        return (
            concatenate(concatenate(stored, warps), Layout(16, column), parts),
            concatenate(concatenate(turned, warps), KEYS, parts),
        )
