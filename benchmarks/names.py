"""The names of the implementations, in the results and on the command line.

`sm90` and `sm80` are this project's kernel families, the others the peers of `cuteflash.tune.peers`. A name that ends
in `-det` stands for the same with a deterministic backward.
"""

from __future__ import annotations

from cuteflash.tune.peers import PEERS

OURS = ("sm90", "sm80")
DETERMINISTIC = "-det"
TITLES = {
    "sm90": "ours sm90",
    "sm80": "ours sm80",
    "sm90-det": "sm90 det.",
    "sm80-det": "sm80 det.",
    "fa4": "FA4",
    "fa4-det": "FA4 det.",
    "cudnn": "cuDNN",
    "fa2": "FA2",
    "materialised": "materialised",
}


def base_of(name: str) -> str:
    """The name without `-det`."""
    return name.removesuffix(DETERMINISTIC)


def is_deterministic(name: str) -> bool:
    """Whether a name asks for a deterministic backward."""
    return name.endswith(DETERMINISTIC)


def is_of_peer(name: str) -> bool:
    """Whether a name is that of a peer."""
    return base_of(name) in PEERS
