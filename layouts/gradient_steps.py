"""The steps between the products of a backward step: P from the scores, dS from P and dP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from cuteflash.problem import BwdProblem

from .read import Frame, Placed, ptx_type
from .scene import Kind, Step, Touch

STEP = "every query block"
EXPONENTIAL = "fma.rn.f32, ex2.approx.ftz.f32"
SEVERAL = "Elements of a thread's fragments, pair by pair; no data moves between threads."


@dataclasses.dataclass(frozen=True, slots=True)
class GradientSteps:
    """The pointwise part of a row's step.

    Attributes:
        frame: the tile as the consumers divide it.
        of: the accumulators of the products, by tensor.
        role: the warps that execute the steps.
        each: how often.
    """

    frame: Frame
    of: Mapping[str, Placed]
    problem: BwdProblem
    role: str = "every consumer warp"
    each: str = STEP

    def exponentials(self, rounded: Placed) -> Step:
        """P from the scores, rounded into the operand of dV."""
        return self._exponentials(f"{EXPONENTIAL}, {self._rounding()}", rounded, "rP")

    def exponentials_in_place(self) -> Step:
        """P in fp32 in the place of the scores."""
        return self._exponentials(EXPONENTIAL, self.of["S"], "acc_S")

    def _exponentials(self, instruction: str, target: Placed, id: str) -> Step:
        if self.problem.scores.softcap:
            instruction = f"tanh.approx.f32, {instruction}"
        return self._step(
            "exponentials",
            "P = exp2(S - LSE)",
            "exponentials",
            instruction,
            (self._all("acc_S", self.of["S"], "read"), self._all(id, target, "write")),
            "The forward's log-sum-exp makes them the probabilities at once: no maximum, no sum, no rescaling. "
            f"Blocks that the mask cuts are masked before. {SEVERAL}",
        )

    def differentiate(self, weights: Placed, rounded: Placed) -> Step:
        """dS of the rounded P and dP, rounded into the operand of dK."""
        fp32, pairs = f"sub.f32, mul.f32, {self._rounding()}", f"sub.f32, {self._rounding()}, mul.rn.{self._pair()}"
        is_wide = self.problem.operands.qk_dtype == "bf16"  # has the range of fp32, see `weigh_pair`
        return self._differentiate(("rP", weights), ("rdS", rounded), pairs if is_wide else fp32)

    def differentiate_in_place(self, weights: tuple[str, Placed] | None = None) -> Step:
        """dS in fp32 in the place of dP; `weights` is a fragment that has P, by default that of the scores."""
        return self._differentiate(weights or ("acc_S", self.of["S"]), ("acc_dP", self.of["dP"]), "sub.f32, mul.f32")

    def differentiate_rounded(self, rounded: Placed) -> Step:
        """dS of P in fp32, rounded into the operand of the next product."""
        target = f"r{rounded.tensor}", rounded
        return self._differentiate(("acc_S", self.of["S"]), target, f"sub.f32, mul.f32, {self._rounding()}")

    def _differentiate(self, weights: tuple[str, Placed], target: tuple[str, Placed], instruction: str) -> Step:
        return self._step(
            "differentiate",
            "dS = P (dP - delta)",
            "differentiate",
            instruction,
            (
                self._all(*weights, "read"),
                self._all("acc_dP", self.of["dP"], "read"),
                self._all(*target, "write"),
            ),
            f"Delta is rowsum(dO O), of a kernel before this one. {SEVERAL}",
        )

    def convert(self, rounded: Placed, source: str) -> Step:
        """An accumulator as the product reads it."""
        id = f"r{rounded.tensor}"
        return self._step(
            f"convert_{rounded.tensor.lower()}",
            f"{rounded.tensor}: rounded to the element type",
            "convert",
            self._rounding(),
            (self._all(source, rounded, "read"), self._all(id, rounded, "write")),
            "No data moves between threads.",
        )

    def _step(self, id: str, title: str, kind: Kind, instruction: str, touches: tuple[Touch, ...], note: str) -> Step:
        return Step(id, title, kind, instruction, self.role, self.each, "loop", touches, note)

    def _all(self, id: str, placed: Placed, mode: Literal["read", "write"]) -> Touch:
        return placed.touch_k_blocks(id, mode, self.frame.first_thread)

    def _rounding(self) -> str:
        return f"cvt.rn.{self._pair()}.f32"

    def _pair(self) -> str:
        return f"{ptx_type(self.problem.operands.qk_dtype)}x2"
