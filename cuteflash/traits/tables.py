"""The shipped rows: which traits run which problem on which target.

If no row is made for a pair (head_dim, head_dim_v), the square rows of the larger one lend their tile. The first row
whose traits pass `check` is used: a special row stands above the general one, a row that lends its tile below. Rows
are in files of their own, written by hand or by `cuteflash.tune.tables`; notes on whole tables are here. Tuning edits
the rows only, and rows are not part of a compiled kernel's cache key.

sm_90a/sm90: three consumer warpgroups up to head dim 64, two beyond: the O accumulator grows with head_dim_v. Q stays
in registers if they suffice. 192x128 is multi-head latent attention. On the widest heads Q and O share their
memory, which takes equal head dims; the smaller tile below lends itself to the rest.

sm_90a/sm90 of 8-bit operands: rows without `turns_v` are given V^T, and no others. O and the product beside it
(`two_level`) fit into the registers up to 160 columns. Beyond, a sum over many keys is cut to 13 fraction bits in each
step, which shows if V has a mean: 18 % at 16k keys. The mean is then better taken out of V, and added to O.
Of packed sequences the warps that turn V also hand out tiles. The registers that this takes are those in which 128
columns of V, under a mask, hold a row of P that is rounded ahead.

sm_80/sm80: A100, 163 KiB a block. Four warps on 128 rows read shared memory least, but run out of registers from head
dim 96 on; so do windows (two masked loops) on wide heads.

sm_90a/sm80: 227 KiB a block, two blocks of the widest head fit into a multiprocessor. Problems without a row of its
own use the rows of A100.

bwd/sm_90a/sm80: at head dim 64 two blocks of four warps share a multiprocessor, whose warps hold 32 keys each, so that
P and dS stay in registers; 1.1 times one block of eight warps. They fit without a spill only if no softcap needs
registers. Their deterministic calls pass on the turns of four steps together, those of other rows have two warps for
the turns; rows that would spill with these leave deterministic calls to the next one. From head dim 160 on the dK and
dV accumulators leave room for 64 keys. Rows whose warps divide no product finer than 32 columns lend themselves to
every pair of head dims. Tiny and small sequences take blocks that hold one, as many on a multiprocessor as find
registers without a spill, which need no kernel before and none after them.

bwd/sm_80/sm80: as on Hopper, with one stage from head dim 224 on. No A100 has timed it.

sm_86, sm_89, sm_120: RTX 30/40/50 and their workstation siblings, 99 KiB a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from cuteflash.mla_problem import AnyOperation
from cuteflash.problem import UNBOUNDED
from cuteflash.traits import (
    rows_bwd_sm80,
    rows_bwd_sm80_hopper,
    rows_bwd_sm80_small,
    rows_bwd_sm90,
    rows_cache_sm80,
    rows_cache_sm90,
    rows_few_sm90,
    rows_fp8_sm90,
    rows_sm80,
    rows_sm80_hopper,
    rows_sm80_small,
    rows_sm90,
    rows_split_sm80,
    rows_split_sm90,
)
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import LengthClass
from cuteflash.traits.row import Row, TableKey

# The modules whose rows make up a table, in order. The first is the table's own, which its sweep writes.
MODULES: dict[TableKey, tuple[ModuleType, ...]] = {
    TableKey("fwd", "sm_90a", "sm90"): (rows_sm90, rows_fp8_sm90),
    TableKey("fwd", "sm_90a", "sm80"): (rows_sm80_hopper, rows_sm80),
    TableKey("fwd", "sm_80", "sm80"): (rows_sm80,),
    TableKey("fwd", "sm_86", "sm80"): (rows_sm80_small,),
    TableKey("fwd", "sm_89", "sm80"): (rows_sm80_small,),
    TableKey("fwd", "sm_120", "sm80"): (rows_sm80_small,),
    TableKey("bwd", "sm_90a", "sm90"): (rows_bwd_sm90,),
    TableKey("bwd", "sm_90a", "sm80"): (rows_bwd_sm80_hopper,),
    TableKey("bwd", "sm_80", "sm80"): (rows_bwd_sm80,),
    TableKey("bwd", "sm_86", "sm80"): (rows_bwd_sm80_small,),
    TableKey("bwd", "sm_89", "sm80"): (rows_bwd_sm80_small,),
    TableKey("bwd", "sm_120", "sm80"): (rows_bwd_sm80_small,),
}
# Which family a call gets that names none, and of how many query rows at most, where it is not the first of the
# target's: (operation, target, lengths).
BEST_FAMILIES: dict[tuple[AnyOperation, str, LengthClass], tuple[Family, int]] = {
    # A block of the sm90 family has a multiprocessor to itself.
    ("bwd", "sm_90a", "tiny"): ("sm80", UNBOUNDED),
    ("bwd", "sm_90a", "small"): ("sm80", UNBOUNDED),
    # A tile of the sm90 family has 64 rows, and takes longer to begin and to end: worth it if a third of it is full.
    ("mla", "sm_90a", "decode"): ("sm80", 16),
}
TABLES: dict[TableKey, tuple[Row, ...]] = {
    table: tuple(row for module in modules for row in module.ROWS) for table, modules in MODULES.items()
}

# Rows that split keys, of the forward's families on all targets, written by hand.
SPLIT_MODULES: dict[Family, tuple[ModuleType, ...]] = {"sm90": (rows_split_sm90,), "sm80": (rows_split_sm80,)}
# Rows of e4m3 caches that are swept and drawn, those that split keys and others: likewise.
CACHE_MODULES: dict[Family, tuple[ModuleType, ...]] = {"sm90": (rows_cache_sm90,), "sm80": ()}
SPLIT_ROWS, SWEPT_CACHE_ROWS = (
    {family: tuple(row for module in modules for row in module.ROWS) for family, modules in form.items()}
    for form in (SPLIT_MODULES, CACHE_MODULES)
)
CACHE_ROWS: dict[Family, tuple[Row, ...]] = {"sm90": SWEPT_CACHE_ROWS["sm90"], "sm80": rows_cache_sm80.ROWS}

# Rows of few query rows, split keys and e4m3 caches: tiles that are smaller than those of `CACHE_ROWS`.
FEW_ROWS: dict[Family, tuple[Row, ...]] = {"sm90": rows_few_sm90.ROWS, "sm80": ()}


class RowSet(NamedTuple):
    """Rows that dispatch looks through for the same problems.

    Attributes:
        table: the table that they belong to; rows of split keys and of e4m3 caches belong to all of their family's.
        modules: that contain them.
    """

    table: TableKey
    modules: tuple[ModuleType, ...]
    rows: tuple[Row, ...]


def row_sets(operation: AnyOperation) -> Iterator[RowSet]:
    """Shipped rows of an operation: table by table, then those of split keys and the swept ones of e4m3 caches."""
    for table, rows in tables_of(operation).items():
        yield RowSet(table, MODULES[table], rows)
    if operation == "fwd":
        for modules, rows_of in ((SPLIT_MODULES, SPLIT_ROWS), (CACHE_MODULES, SWEPT_CACHE_ROWS)):
            for table in tables_of(operation):
                yield RowSet(table, modules[table.family], rows_of[table.family])


def tables_of(operation: AnyOperation) -> dict[TableKey, tuple[Row, ...]]:
    """The tables of one operation."""
    return {key: rows for key, rows in TABLES.items() if key.operation == operation}
