"""Rows of bwd/sm_90a/sm90, by hand.

One pass up to head dim 128. Two passes serve what one pass has no registers left for: wider heads, softcaps, and
deterministic calls with a window at head dim 128. Long loops take more queries a step, since much of a step is latency.
Brief sequences are bound by memory: a block that has all keys of a head stores dQ once it is complete. At head dim 128
shared memory does not hold all of it, so that parts go to memory and back. In short loops the last block that adds to
dQ rounds it; blocks that take turns know which one that is, but wait for each other where loops of a head differ.
Under a full mask each begins a step after the one before it, which waves of blocks have to make up for. A block that
has all keys of a head is as long as several, and those of few heads, or of a last wave, leave multiprocessors without
one; if parts of dQ go to memory, less makes up for it, and under a full mask nothing does beyond 256 keys.
"""

from __future__ import annotations

from typing import Any

from cuteflash.traits.row import (
    BRIEF,
    CAUSAL,
    DETERMINISTIC,
    FULL,
    LONG,
    MEDIUM,
    MODERATE,
    SHORT,
    SMALL,
    SOFTCAP,
    TINY,
    VARLEN,
    WINDOW,
    Row,
    bwd_sm90,
    bwd_two_pass_sm90,
)

UP_TO_BRIEF = TINY + SMALL + BRIEF
UP_TO_MODERATE = SHORT + MODERATE
UP_TO_MEDIUM = UP_TO_MODERATE + MEDIUM
FROM_MODERATE = MODERATE + MEDIUM
APART: dict[str, Any] = {"dq": "apart", "pingpong": False}
# Of up to 64 columns: a warpgroup for dQ, K and V in registers, and persistent blocks, since a tile is done so soon.
PERSISTENT = APART | {
    "k_in_regs": True,
    "v_in_regs": True,
    "kv_stage": 2,
    "q_stage": 3,
    "do_stage": 3,
    "persistent": True,
}
NARROW = PERSISTENT | {"keep_thread": True}
LATE = APART | {"delta_early": False, "keep_thread": True}
LONE_96 = APART | {"persistent": True, "lone_tiles": True}

ROWS: tuple[Row, ...] = (
    bwd_sm90(32, 64, lengths=UP_TO_BRIEF, without=SOFTCAP, filled=0.5, lone_tiles=True, held_dq=8, **NARROW),
    bwd_sm90(32, 64, lengths=UP_TO_BRIEF, without=SOFTCAP, lone_tiles=True, **NARROW),
    bwd_sm90(
        32, 64, FULL, lengths=UP_TO_MEDIUM, without=SOFTCAP + VARLEN, waves=6, in_turn=True, last_rounds=True, **NARROW
    ),
    bwd_sm90(32, 64, CAUSAL, lengths=UP_TO_MODERATE, without=SOFTCAP + DETERMINISTIC, last_rounds=True, **NARROW),
    bwd_sm90(32, 64, without=SOFTCAP, **NARROW),
    bwd_two_pass_sm90(32, 64, k_stage=3, v_stage=3),
    bwd_sm90(64, 64, lengths=UP_TO_BRIEF, without=SOFTCAP, filled=0.5, lone_tiles=True, held_dq=4, **PERSISTENT),
    bwd_sm90(64, 64, lengths=UP_TO_BRIEF, without=SOFTCAP, lone_tiles=True, **PERSISTENT),
    bwd_sm90(
        64,
        64,
        FULL,
        lengths=UP_TO_MEDIUM,
        without=SOFTCAP + VARLEN,
        waves=6,
        in_turn=True,
        last_rounds=True,
        **PERSISTENT,
    ),
    bwd_sm90(64, 64, FULL, lengths=FROM_MODERATE, without=SOFTCAP + DETERMINISTIC, last_rounds=True, **PERSISTENT),
    bwd_sm90(64, 64, CAUSAL, lengths=UP_TO_MEDIUM, without=SOFTCAP + DETERMINISTIC, last_rounds=True, **PERSISTENT),
    bwd_sm90(64, 96, FULL, lengths=LONG, without=SOFTCAP, keep_thread=True, q_stage=3, do_stage=3, **APART),
    bwd_sm90(64, 96, CAUSAL, lengths=LONG, without=SOFTCAP + DETERMINISTIC, keep_thread=True, **APART),
    bwd_sm90(64, 64, without=SOFTCAP, **PERSISTENT),
    bwd_two_pass_sm90(64, 64, k_stage=3, v_stage=3),
    bwd_sm90(96, 64, lengths=UP_TO_BRIEF, without=SOFTCAP, filled=0.5, held_dq=4, **LONE_96),
    bwd_sm90(96, 64, lengths=UP_TO_BRIEF, without=SOFTCAP, **LONE_96),
    bwd_sm90(96, 64, FULL, lengths=UP_TO_MODERATE, without=SOFTCAP, waves=3, in_turn=True, last_rounds=True, **LATE),
    bwd_sm90(96, 64, CAUSAL, lengths=SHORT, without=SOFTCAP, in_turn=True, last_rounds=True, **LATE),
    bwd_sm90(96, 64, without=SOFTCAP, **LATE),
    bwd_two_pass_sm90(96, 64, k_stage=3, v_stage=3),
    bwd_sm90(
        128,
        80,
        FULL,
        lengths=LONG,
        without=SOFTCAP + DETERMINISTIC,
        delta_early=False,
        keep_thread=True,
        dq="transposed",
    ),
    bwd_sm90(
        128,
        64,
        CAUSAL,
        lengths=UP_TO_BRIEF,
        without=SOFTCAP + VARLEN + DETERMINISTIC,
        filled=0.85,
        delta_early=False,
        persistent=True,
        lone_tiles=True,
        held_dq=64,
    ),
    bwd_sm90(128, 64, FULL + CAUSAL, lengths=UP_TO_BRIEF, without=SOFTCAP, lone_tiles=True),
    bwd_sm90(128, 64, WINDOW, lengths=UP_TO_BRIEF, without=SOFTCAP + DETERMINISTIC, lone_tiles=True),
    bwd_sm90(128, 64, CAUSAL, lengths=SHORT, without=SOFTCAP + VARLEN, in_turn=True, last_rounds=True),
    bwd_sm90(128, 64, CAUSAL, lengths=MODERATE, without=SOFTCAP + VARLEN + DETERMINISTIC),
    bwd_sm90(128, 64, FULL + CAUSAL, lengths=UP_TO_MODERATE, without=SOFTCAP + DETERMINISTIC, last_rounds=True),
    bwd_sm90(128, 64, FULL + CAUSAL, lengths=UP_TO_MODERATE, without=SOFTCAP + VARLEN, last_rounds=True),
    bwd_sm90(128, 64, FULL + CAUSAL, without=SOFTCAP),
    bwd_sm90(128, 64, WINDOW, without=SOFTCAP + DETERMINISTIC),
    bwd_two_pass_sm90(128, 64, k_stage=2, v_stage=2),
    bwd_two_pass_sm90(160, 64, WINDOW, k_stage=4, v_stage=2),  # three stages of both: the producer spills
    bwd_two_pass_sm90(160, 64, k_stage=3, v_stage=3),
    bwd_two_pass_sm90(192, 64, k_stage=3, v_stage=2),
    bwd_two_pass_sm90(224, 48, k_stage=2, v_stage=2),
    bwd_two_pass_sm90(256, 48),
)
