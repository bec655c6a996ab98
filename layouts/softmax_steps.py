"""The steps between the two products of a key block: exponentials, rounding, rescaling, as a row's traits have them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from cuteflash.kernels.sm90.fixed_max import LARGEST_SUM
from cuteflash.problem import E4M3_MAX, FwdProblem

from .read import Frame, Placed, ptx_type
from .scene import Kind, Step, Touch

REPAIR_LOG2: Final = int(math.log2(LARGEST_SUM))
EVERY = "every key block"
FOUR_KEYS = (
    " A register takes four values of a row: two neighbouring keys of one group of 8, and the same two of the next one."
)
CUT = "those cut by the mask or by the end of the keys"
EXPONENTIAL = "fma.rn.f32, ex2.approx.f32"
Mode = Literal["read", "write"]


@dataclasses.dataclass(frozen=True, slots=True)
class SoftmaxSteps:
    """The row's properties that the steps depend on.

    Attributes:
        of: the operands of both products by tensor.
        role: the warps that execute the steps.
        fixed_max: the trait: key blocks that are seen whole do not update the row maxima.
    """

    frame: Frame
    of: Mapping[str, Placed]
    problem: FwdProblem
    role: str
    fixed_max: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether P has 8 bits."""
        return self.problem.operands.is_fp8

    @property
    def moves(self) -> str:
        """Which blocks update the row maxima."""
        return f"the tile's first key block, and {CUT}" if self.fixed_max else EVERY

    def moving(self, fused: bool = True, early_rows: int | None = None) -> Step:
        """The softmax of a block that updates the row maxima.

        Args:
            fused: the scale is folded into the exponent's multiply-add, row sums are reduced once a tile.
            early_rows: of a thread's two rows, those whose exponentials are taken before the wait for the PV product
                that runs beside them; None if no product does.
        """
        note = (
            "Row by row of each thread: the maximum over its columns, then over the four lanes of the quad; "
            "exponentials in place."
        )
        if fused:
            note += " The row sum stays with the thread until the epilogue."
        else:
            note += " Scores are scaled first, and row sums are reduced over the quad with every block."
        if early_rows == 0:
            note += " The compiler places the wait for the PV product that runs beside it, which it does early."
        elif early_rows is not None:
            note += f" {_exponentials(early_rows)} before the wait for the PV product that runs beside it."
        instruction = f"max.f32, shfl.sync.bfly.b32, {EXPONENTIAL}"
        touches = [self._rows("acc_S", "S", "read"), self._rows("acc_S", "S", "write")]
        return self._step(
            "softmax", "Online softmax of S", "softmax", self._capped(instruction), self.moves, touches, note
        )

    def convert(self) -> Step:
        """P in registers of its own, as the product reads it."""
        return self._step(
            "convert_p",
            "P: rounded to the element type",
            "convert",
            self._rounding(),
            self.moves,
            [self._p_blocks("acc_S", "read"), self._p_blocks("rP", "write")],
            "No data moves between threads." + (FOUR_KEYS if self.is_fp8 else ""),
        )

    def rescale(self, when: str) -> Step:
        """O after an update of the maxima."""
        return self._step(
            "rescale_o",
            "O: rescaled to the new maxima",
            "rescale",
            "mul.f32",
            f"of the key blocks, {CUT}" if self.fixed_max else EVERY,
            [self._rows("acc_O", "O", "read"), self._rows("acc_O", "O", "write")],
            f"Each row is multiplied with exp2(old maximum - new maximum), as its sum is. {when}",
        )

    def fixed(self, early_rows: int) -> Step:
        """The softmax of a block that does not update the row maxima."""
        note = (
            "A block that is seen whole uses the present maxima of its rows, without a search for larger scores and "
            "without rescaling. S stays in its registers, and the rounded exponentials go to P's own. Each thread adds "
            f"up its part of a row; if the sum of any lane exceeds {self._limit()}, its warp repairs the block."
        )
        if early_rows == 0:
            note += (
                " The compiler takes them before or after the wait for the PV product of the block before; they are "
                "rounded after it, since that product reads P until then."
            )
        else:
            early = f" {_exponentials(early_rows)} while the PV product of the block before runs."
            note += f"{early} They are rounded after it, since it reads P until then."
        return self._step(
            "fixed_softmax",
            "P from S, fixed maxima",
            "fixed softmax",
            self._capped(f"{EXPONENTIAL}, {self._rounding()}, vote.sync.any"),
            "every key block seen whole except the first",
            [self._p_blocks("acc_S", "read"), self._p_blocks("rP", "write")],
            note,
        )

    def repair(self) -> Step:
        """The repair by a warp if a score of its rows lies far above their fixed maxima."""
        return self._step(
            "repair",
            "Repair: the block's softmax with new maxima",
            "repair",
            f"max.f32, shfl.sync.bfly.b32, {EXPONENTIAL}, {self._rounding()}, mul.f32",
            "seldom: after a vote",
            [
                self._p_blocks("acc_S", "read"),
                self._p_blocks("rP", "write"),
                self._rows("acc_O", "O", "read"),
                self._rows("acc_O", "O", "write"),
            ],
            "The warp takes the block's maxima from S, which it still holds, exponentiates and rounds again, and "
            "rescales O and the row sums. All of its products have finished before.",
        )

    def _step(
        self, id: str, title: str, kind: Kind, instruction: str, repeat: str, touches: Sequence[Touch], note: str
    ) -> Step:
        return Step(id, title, kind, instruction, self.role, repeat, "loop", tuple(touches), note)

    def _rows(self, id: str, tensor: str, mode: Mode) -> Touch:
        return self.frame.row_touch(id, mode, self.of[tensor])

    def _p_blocks(self, id: str, mode: Mode) -> Touch:
        return self.of["P"].touch_k_blocks(id, mode, self.frame.first_thread)

    def _limit(self) -> str:
        if self.is_fp8:
            return f"{E4M3_MAX:.0f}, the largest number of e4m3"
        return f"2^{REPAIR_LOG2} = {2**REPAIR_LOG2}"

    def _rounding(self) -> str:
        saturating = ".satfinite" if self.is_fp8 else ""
        return f"cvt.rn{saturating}.{ptx_type(self.problem.operands.product_dtype)}x2.f32"

    def _capped(self, instruction: str) -> str:
        return f"tanh.approx.f32, {instruction}" if self.problem.scores.softcap else instruction


def _exponentials(rows: int) -> str:
    return f"The exponentials of {('one', 'both')[rows - 1]} of a thread's two rows are taken"
