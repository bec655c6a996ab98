"""Which shared-memory accesses of a warp collide in a bank.

Shared memory has 32 banks of 4 bytes. A warp's access is served in phases of at most 128 bytes: 32 lanes at 4 bytes
each, 16 at 8, 8 at 16. Every matrix of ldmatrix or stmatrix is a phase as well, 8 rows of 16 bytes. In one pass a bank
serves one 4-byte word; lanes that access the same word share it, further words take further passes. cp.async differs:
a phase takes a pass for every 128-byte line that it writes to, regardless of banks.
`python -m benchmarks.bank_conflicts --ncu` measures both on a GPU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BANKS = 32
WORD = 4  # bytes
PHASE_BYTES = BANKS * WORD
WARP = 32

Addresses = npt.NDArray[np.int64]


def phase_lanes(lane_bytes: int) -> int:
    """Lanes served together when each accesses `lane_bytes` (4, 8 or 16)."""
    if lane_bytes not in (4, 8, 16):
        raise ValueError(f"lane_bytes is {lane_bytes}; allowed: 4, 8, 16")
    return min(WARP, PHASE_BYTES // lane_bytes)


def words_by_bank(addresses: Addresses, lane_bytes: int) -> npt.NDArray[np.int64]:
    """Distinct words that each phase of an access reads from or writes to each bank.

    Args:
        addresses: byte address of every lane's access, a multiple of `lane_bytes`; up to 32 lanes, whole phases.
        lane_bytes: bytes a lane accesses.

    Returns:
        (phases, 32).
    """
    phases = np.asarray(addresses, np.int64).reshape(-1, phase_lanes(lane_bytes))
    words = (phases[:, :, None] + np.arange(0, lane_bytes, WORD)) // WORD
    table = np.zeros((len(phases), BANKS), np.int64)
    for phase, wanted in enumerate(words.reshape(len(phases), -1)):
        table[phase] = np.bincount(np.unique(wanted) % BANKS, minlength=BANKS)
    return table


def ways(addresses: Addresses, lane_bytes: int, asynchronous: bool = False) -> npt.NDArray[np.int64]:
    """Passes that each phase takes, 1 if it is free of conflicts.

    The largest number of words in one bank; for an asynchronous copy, the number of 128-byte lines.
    """
    if asynchronous:
        lines = np.sort(np.asarray(addresses, np.int64).reshape(-1, phase_lanes(lane_bytes)) // PHASE_BYTES, axis=1)
        found: npt.NDArray[np.int64] = 1 + np.count_nonzero(np.diff(lines, axis=1), axis=1)
    else:
        found = words_by_bank(addresses, lane_bytes).max(axis=1)
    return found
