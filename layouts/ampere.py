"""Ampere's instructions as steps of a scene: cp.async, ldmatrix, mma.sync, and rows on their way out."""

from __future__ import annotations

import dataclasses
from typing import Any

from .algebra import Layout, composition, concatenate
from .bytes_in_registers import ADDRESSED
from .read import WORD, Frame, Placed, ptx_type
from .scene import AXES, Phase, Step, Touch

CP_ASYNC = "cp.async.cg.shared.global [dst], [src], 16"
THROUGH_REGISTERS = "ld.global.v4.b32, then st.shared.v4.b32"
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
LDMATRIX_TRANS = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32"
ALL = "every thread"
WARPS = "every warp"
ONCE = "once a tile"


@dataclasses.dataclass(frozen=True, slots=True)
class AmpereSteps:
    """The instructions of one kernel, all of whose warps do the same.

    Attributes:
        frame: the block's tile.
        dtype: element type of the operands.
        often: how often the loop's steps run, "every key block".
        role: the warps that compute.
    """

    frame: Frame
    dtype: str
    often: str
    role: str = WARPS

    def _when(self, once: bool) -> tuple[str, Phase]:
        return (ONCE, "prologue") if once else (self.often, "loop")

    def load(self, tensor: str, copy: Any, note: str, once: bool, past_registers: bool = True) -> Step:
        """Global to shared memory by all threads."""
        source = self.frame.copy(copy.layout_src_tv_tiled, copy.tiler_mn, tensor, everyone=True)
        target = self.frame.copy(copy.layout_dst_tv_tiled, copy.tiler_mn, tensor, everyone=True)
        repeat, phase = self._when(once)
        way = "past L1 and past the registers"
        if not past_registers:
            way = "through registers, so that every load is waited for"
        return Step(
            id=f"load_{tensor.lower()}",
            title=f"{tensor}: global → shared memory",
            kind="cp.async" if past_registers else "st.shared",
            instruction=CP_ASYNC if past_registers else THROUGH_REGISTERS,
            role=ALL,
            repeat=repeat,
            phase=phase,
            touches=(Touch(f"g{tensor}", "read", source), Touch(f"s{tensor}", "write", target, lane_bytes=16)),
            note=f"{note}Neighbouring lanes take neighbouring 16 bytes of a row, {way}.",
        )

    def fetch(
        self, fragment: str, tensor: str, copy: Any, orientation: tuple[bool, bool], once: bool = False, why: str = ""
    ) -> Step:
        """ldmatrix: an operand's fragments from `s{tensor}`.

        Args:
            orientation: whether the operand's rows are the tile's columns, and whether ldmatrix transposes.
            why: of a transposition.
        """
        transposed, trans = orientation
        source = self.frame.copy(copy.layout_src_tv_tiled, copy.tiler_mn, tensor, transposed)
        target = self.frame.copy(copy.layout_dst_tv_tiled, copy.tiler_mn, tensor, transposed)
        repeat, phase = self._when(once)
        note = "Lane i gives the address of a row of 8 elements; a phase is the 8 rows of one matrix."
        return Step(
            id=f"ldmatrix_{fragment[1:].lower()}",
            title=f"{tensor}: shared memory → registers",
            kind="ldmatrix",
            instruction=LDMATRIX_TRANS if trans else LDMATRIX,
            role=self.role,
            repeat=repeat,
            phase=phase,
            touches=(Touch(f"s{tensor}", "read", source, lane_bytes=16), Touch(fragment, "write", target)),
            note=f"{note} {why}".strip() if trans else note,
        )

    def load_pairs(self, tensor: str, copy: Any, note: str) -> Step:
        """`load` of a block's tile of bytes; the copy moves pairs of them as one element."""
        return self._by_bytes(tensor, self._counting_pairs(tensor).load(tensor, copy, note, False))

    def fetch_pairs(self, tensor: str, copy: Any, transposed: bool, conversion: str, why: str) -> Step:
        """`fetch` from a tile of bytes, likewise, of which `conversion` makes operands of 16 bits in registers."""
        fetched = self._counting_pairs(tensor).fetch(f"r{tensor}", tensor, copy, (transposed, transposed))
        step = self._by_bytes(tensor, fetched)
        return dataclasses.replace(
            step,
            title=f"{step.title}, e4m3 → fp16",
            instruction=f"{step.instruction}, {conversion}",
            note=f"{ADDRESSED} {why}",
        )

    def _counting_pairs(self, tensor: str) -> AmpereSteps:
        """The steps on tiles of which two neighbouring columns of `tensor` count as one."""
        axis, (_, columns) = AXES[tensor][1], self.frame.shape(tensor)
        return dataclasses.replace(
            self, frame=dataclasses.replace(self.frame, sizes={**self.frame.sizes, axis: columns // WORD})
        )

    def _by_bytes(self, tensor: str, step: Step) -> Step:
        """A step on pairs of columns, column by column."""
        rows, columns = self.frame.shape(tensor)
        first_bytes = Layout((rows, columns // WORD), (1, WORD * rows))

        def moved(touch: Touch) -> Touch:
            threads, pairs, instructions = (composition(first_bytes, mode) for mode in touch.tv.modes())
            tv = concatenate(threads, concatenate(Layout(WORD, rows), pairs), instructions)
            return dataclasses.replace(touch, tv=tv)

        return dataclasses.replace(step, touches=tuple(map(moved, step.touches)))

    def product(self, id: str, title: str, *operands: tuple[Placed, str]) -> Step:
        """mma.sync of operands A, B and an accumulator, each with its fragment."""
        (a, a_id), (b, b_id), (c, c_id) = operands
        counts = (a.values.mode(1).size(), b.values.mode(1).size(), a.values.mode(2).size())
        first = self.frame.first_thread
        touches = (
            a.touch(a_id, "read", counts, first),
            b.touch(b_id, "read", counts, first),
            c.touch(c_id, "write", counts, first),
        )
        note = "An instruction is a tile of 16 x 8 and a k-block of 16, for all warps at once."
        return Step(id, title, "mma", MMA.format(ptx_type(self.dtype)), self.role, self.often, "loop", touches, note)

    def stage(
        self, tensor: str, copy: Any, source: str, note: str, loop: bool = False, transposed: bool = False
    ) -> Step:
        """An accumulator, rounded, to shared memory, two neighbouring columns of the product at a time."""
        pairs = self.frame.copy(copy.layout_src_tv_tiled, copy.tiler_mn, tensor, transposed)
        touches = (Touch(source, "read", pairs), Touch(f"s{tensor}", "write", pairs, lane_bytes=4))
        epilogue: tuple[str, Phase] = (ONCE, "epilogue")
        repeat, phase = self._when(once=False) if loop else epilogue
        return Step(
            f"stage_{tensor.lower()}",
            f"{tensor}: registers → shared memory",
            "st.shared",
            "st.shared.b32",
            ALL,
            repeat,
            phase,
            touches,
            note,
        )

    def store(self, tensor: str, copy: Any) -> tuple[Step, Step]:
        """Rows from shared memory to registers, and from there to global memory."""
        rows = self.frame.copy(copy.layout_src_tv_tiled, copy.tiler_mn, tensor, everyone=True)
        return (
            Step(
                f"read_{tensor.lower()}",
                f"{tensor}: shared memory → registers",
                "ld.shared",
                "ld.shared.v4.b32",
                ALL,
                ONCE,
                "epilogue",
                (Touch(f"s{tensor}", "read", rows, lane_bytes=16),),
                "So that the store below takes whole rows.",
            ),
            Step(
                f"store_{tensor.lower()}",
                f"{tensor}: registers → global memory",
                "st.global",
                "st.global.v4.b32",
                ALL,
                ONCE,
                "epilogue",
                (Touch(f"g{tensor}", "write", rows),),
                "Rows and columns that do not exist are left out.",
            ),
        )
