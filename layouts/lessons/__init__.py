"""The numbers and source texts of the study path, which `layouts/web/lessons*.js` shows.

The traces run the building blocks of `cuteflash.reference`; the schedules follow the kernels' own order of calls, and
name the lines of those kernels, so that a page shows each step in the source.
"""

from __future__ import annotations

from typing import Any, cast

from cuteflash.dispatch import Choice, choose_shipped
from cuteflash.problem import FwdProblem
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import LengthClass
from cuteflash.traits.sm80 import FwdTraitsSm80

from ..rows import Drawn, scene_id
from .eight_bits import fp8_data, fp8_row
from .gradients import backward_row, gradient_data
from .loops import loop_data
from .pipeline import pipeline_data
from .ring import ring_data
from .seesaw import latent_lesson_row, seesaw_data
from .shares import cache_row, share_data, split_row
from .softmax import softmax_data
from .turns import turn_data

_LESSON_PROBLEM = FwdProblem.dense(dtype="bf16", head_dim=128, head_dim_v=128, mask="full")
_LESSON_ROWS: tuple[tuple[str, Family], ...] = (("sm_80", "sm80"), ("sm_90a", "sm90"))
_LESSON_LENGTHS: LengthClass = (
    "short"  # its rows keep Q in registers and share no memory, which makes the lessons simpler
)
_BACKWARD_HEAD_DIM = 128


def lesson_scenes() -> dict[str, tuple[Drawn, str, Choice]]:
    """The rows that a page embeds for its lessons: (problem, target, choice) of one row of each family's forward, of
    one backward, of one forward on 8-bit operands, of those that decode with split keys, from a cache of 16 and of 8
    bits, and of latent attention, by the name that lessons give them.

    They are rows of the galleries, so that a page with all rows does not embed them twice.
    """
    problem = _LESSON_PROBLEM
    forward: dict[str, tuple[Drawn, str, Choice]] = {
        family: (problem, target, choose_shipped(problem, target, family, _LESSON_LENGTHS))
        for target, family in _LESSON_ROWS
    }
    others = {"split": split_row(), "cache": cache_row(), "mla": latent_lesson_row()}
    return forward | {"backward": backward_row(_BACKWARD_HEAD_DIM), "fp8": fp8_row()} | others


def lesson_data() -> dict[str, Any]:
    """All data of the lessons beside the scenes, as JSON values without NaN or infinity."""
    scenes = lesson_scenes()
    _, ampere, choice = scenes["sm80"]
    return {
        "scenes": {name: scene_id(*scene) for name, scene in scenes.items()},
        "softmax": softmax_data(),
        "loops": loop_data(),
        "pipeline": pipeline_data(cast(FwdTraitsSm80, choice.traits), _LESSON_PROBLEM, ampere),
        "ring": ring_data(),
        "turns": turn_data(),
        "gradients": gradient_data(),
        "fp8": fp8_data(),
        "shares": share_data(),
        "seesaw": seesaw_data(),
    }
