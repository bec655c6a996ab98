"""The names of the implementations, in the results and on the command line.

`sm90` and `sm80` are this project's kernel families, and `default` is the one that a call gets which names none. The
others are the peers of `cuteflash.tune.peers`. A name that ends in `-det` stands for the same with a deterministic
backward, one that ends in `-dense` for a dense batch of what others compute as packed sequences. One that ends in
`-fp8` has 8-bit operands, V as it is stored; with `-fp8-vt` it gets Vᵀ.
"""

from __future__ import annotations

from cuteflash.tune.peers import PEERS

OURS = ("sm90", "sm80")
UNNAMED = "default"
DETERMINISTIC = "-det"
DENSE = "-dense"
FP8, FP8_VT = "-fp8", "-fp8-vt"
FP8_OURS = ("sm90" + FP8_VT, "sm90" + FP8)
FP8_NAMES = (*FP8_OURS, "cudnn" + FP8)
TITLES = {
    UNNAMED: "ours",
    "sm90": "ours sm90",
    "sm80": "ours sm80",
    "sm90-fp8-vt": "FP8 Vᵀ",
    "sm90-fp8": "FP8 V",
    UNNAMED + DETERMINISTIC: "ours det.",
    "sm90-det": "sm90 det.",
    "sm80-det": "sm80 det.",
    UNNAMED + DENSE: "ours dense",
    "sm90-dense": "sm90 dense",
    "sm80-dense": "sm80 dense",
    "fa4": "FA4",
    "fa4-det": "FA4 det.",
    "cudnn": "cuDNN",
    "cudnn-fp8": "cuDNN FP8",
    "fa2": "FA2",
    "materialised": "materialised",
}


def base_of(name: str) -> str:
    """The name without what it ends in."""
    for ending in (DETERMINISTIC, DENSE, FP8, FP8_VT):
        name = name.removesuffix(ending)
    return name


def family_of(name: str) -> str | None:
    """The kernel family that a name of ours asks for; None leaves it to the call."""
    base = base_of(name)
    return None if base == UNNAMED else base


def is_ours(name: str) -> bool:
    """Whether a name is that of a kernel family of this project, or of the one that a call gets."""
    return base_of(name) in (UNNAMED, *OURS)


def is_deterministic(name: str) -> bool:
    """Whether a name asks for a deterministic backward."""
    return name.endswith(DETERMINISTIC)


def is_of_peer(name: str) -> bool:
    """Whether a name is that of a peer."""
    return base_of(name) in PEERS


def is_fp8(name: str) -> bool:
    """Whether a name asks for 8-bit operands."""
    return name.endswith((FP8, FP8_VT))
