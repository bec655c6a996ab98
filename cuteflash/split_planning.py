"""When the keys of query tiles are split between blocks, and what such a launch needs beside its tensors.

The host knows shapes only: lengths that lie on the device may make a split useless, never wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, empty_like

from cuteflash.compile import compiled
from cuteflash.core.split_slots import LEAST_KEYS, partials_size
from cuteflash.dispatch import Choice, choose
from cuteflash.problem import FwdProblem
from cuteflash.strides import fp32_template
from cuteflash.torch_internals import current_stream
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import LengthClass

MOST_PARTS = 1 << 30  # of a tile, if nothing limits them
ROWS = 64  # of a query tile of kernels that split
PLAIN_ROWS = 128  # of others, as a rule
FEW_KEYS = 512  # what a tile of many rows reads at least if it is worth a split
LINE_MAX = 1 << 30  # key blocks of all tiles, whose numbers are 32-bit
CAPTURED_CALLS = 1024  # that find counters which are 0 already
IDLE_PERCENT = 5  # of the blocks, if heads in step are to be worth them: memory is as busy without


def may_split(num_splits: int, seqlen_k: int) -> bool:
    """Whether this option and so many keys allow a split at all: for most calls all that decides, without `Tiles`."""
    return num_splits != 1 and seqlen_k > LEAST_KEYS


class Tiles(NamedTuple):
    """The size of a problem: `batch` sequences of at most `seqlen_q` queries and `seqlen_k` keys, `heads` KV heads."""

    batch: int
    heads: int
    heads_per_kv: int
    seqlen_q: int
    seqlen_k: int

    def should_split(self, num_splits: int, num_sms: int) -> bool:
        """Whether a launch with this option runs a kernel that splits keys."""
        if not may_split(num_splits, self.seqlen_k):
            return False
        rows = self.seqlen_q * self.heads_per_kv
        if self.batch * self.heads * -(-rows // ROWS) * self.seqlen_k >= LINE_MAX:
            return False
        if num_splits > 1 or rows <= ROWS:  # few rows: the time is that of reading K and V
            return True
        plain = (
            self.batch * self.heads * min(-(-rows // PLAIN_ROWS), self.heads_per_kv * -(-self.seqlen_q // PLAIN_ROWS))
        )
        return 10 * plain <= 8 * num_sms and self.seqlen_k >= FEW_KEYS


class Arrivals:
    """The counters of parts that have come, for the launches of one device; each launch leaves its own at 0.

    Launches on one stream follow each other, and share them. A call that is captured into a graph gets its own, as the
    graph may be replayed on any stream: of those that are 0 already, or else cleared at each replay.
    """

    def __init__(self) -> None:
        self._of_stream: dict[tuple[int, int, int], Tensor] = {}
        self._ready: dict[tuple[int, int], list[Tensor]] = {}

    def of(self, device: torch.device, blocks: int) -> Tensor:
        """(blocks,) int32, for a launch on the device's current stream."""
        index, stream = current_stream(device)
        ready = self._ready.get((index, blocks))
        if ready is None:
            ready = self._ready[index, blocks] = []
        if torch.cuda.is_current_stream_capturing():
            return ready.pop() if ready else torch.zeros(blocks, dtype=torch.int32, device=device)
        if len(ready) <= CAPTURED_CALLS // 2:
            ready.extend(torch.zeros(CAPTURED_CALLS, blocks, dtype=torch.int32, device=device))
        key = index, stream, blocks
        found = self._of_stream.get(key)
        if found is None:
            found = self._of_stream[key] = torch.zeros(blocks, dtype=torch.int32, device=device)
        return found


arrivals = Arrivals()


class SplitLaunch(NamedTuple):
    """What the launches of one kernel that splits keys need beside their tensors.

    Attributes:
        blocks: of a launch.
        lanes: lines of tiles, see `cuteflash.core.split`.
        most_parts: of a tile, at least 2.
        partials: what `empty_like` makes a launch's partial results from.
    """

    blocks: int
    lanes: int
    most_parts: int
    partials: Tensor

    @classmethod
    def of(
        cls, traits: Any, tiles: Tiles, packed_heads: int, num_splits: int, num_sms: int, device: torch.device
    ) -> SplitLaunch:
        """That of a kernel with these traits."""
        blocks, lanes = grid_of(traits, tiles, packed_heads, num_sms)
        size = partials_size(blocks, traits.tile_m, traits.head_dim_v + 1)
        return cls(blocks, lanes, num_splits or MOST_PARTS, fp32_template((size,), device))

    def arguments(self, metadata: Tensor | None = None) -> tuple[Any, ...]:
        """In the order of `cuteflash.arguments.SplitTensors`, for a launch on the current stream.

        Args:
            metadata: that of a launch that is scheduled.
        """
        counters = arrivals.of(self.partials.device, self.blocks) if metadata is None else metadata
        return empty_like(self.partials), counters, self.most_parts, self.lanes


def grid_of(traits: Any, tiles: Tiles, packed_heads: int, num_sms: int) -> tuple[int, int]:
    """(blocks, lanes) of the launches of a kernel with these traits."""
    most = num_sms * traits.blocks_per_sm
    heads = tiles.heads * tiles.heads_per_kv // packed_heads
    lanes = lanes_of(heads, most)
    of_line = tiles.batch * heads // lanes * -(-tiles.seqlen_q * packed_heads // ROWS)
    return lanes * shares_of(of_line, most // lanes, -(-most * (100 - IDLE_PERCENT) // 100 // lanes)), lanes


def lanes_of(heads: int, blocks: int) -> int:
    """How many heads go in step: as many as leave few of the blocks without work."""
    return next(n for n in range(heads, 0, -1) if heads % n == 0 and 100 * (blocks % n) <= IDLE_PERCENT * blocks)


def shares_of(tiles: int, most: int, least: int) -> int:
    """How many shares a line of `tiles` tiles has, at most and, as a rule, at least so many.

    If they can, borders of shares are borders of tiles of the same length: less is merged.
    """
    found = most // tiles * tiles if tiles <= most else -(-tiles // -(-tiles // most))
    return found if found >= least else most


@dataclasses.dataclass
class SplitKernels:
    """The kernels that split keys of one kind of calls, with and without packed heads.

    Attributes:
        problem: of these calls, not packed and not split.
        target, family, lengths: see `cuteflash.dispatch.choose`.
        num_splits: the option.
        num_sms: multiprocessors of `device`.
        fitted: a problem as a kernel with given traits has it.
        is_scheduled: the launches get metadata.
    """

    problem: FwdProblem
    target: str
    family: Family
    lengths: str
    num_splits: int
    num_sms: int
    device: torch.device
    fitted: Callable[[FwdProblem, Any], FwdProblem] = lambda problem, _: problem
    is_scheduled: bool = False

    def __post_init__(self) -> None:
        self._found: dict[tuple[bool, int], tuple[Callable[..., object], Any] | None] = {}

    def of(self, tiles: Tiles, packs: bool) -> tuple[Callable[..., object], SplitLaunch] | None:
        """The kernel for a call, with what it needs; None if it is not to be split, or no row does that."""
        if not tiles.should_split(self.num_splits, self.num_sms):
            return None
        packed_heads = tiles.heads_per_kv if packs else 1
        key = packs, self._tile_rows(tiles, packed_heads)
        if key not in self._found:
            self._found[key] = self._kernel(packed_heads, key[1])
        found = self._found[key]
        if found is None:
            return None
        kernel, traits = found
        launch = SplitLaunch.of(traits, tiles, packed_heads, self.num_splits, self.num_sms, self.device)
        return kernel, launch

    def choice(self, tiles: Tiles, packed_heads: int) -> Choice | None:
        """The row of that kernel; None as above."""
        if not tiles.should_split(self.num_splits, self.num_sms):
            return None
        return self._choice(self._tile_rows(tiles, packed_heads))

    def _tile_rows(self, tiles: Tiles, packed_heads: int) -> int:
        """Query rows of a tile, at most `ROWS`. Of packed queries only a mean of one says that all are few."""
        is_known = self.problem.storage.q == "dense" or tiles.seqlen_q == 1
        return min(tiles.seqlen_q * packed_heads, ROWS) if is_known else ROWS

    def _choice(self, tile_rows: int) -> Choice | None:
        problem = dataclasses.replace(self.problem, is_split=True)
        try:
            return choose(problem, self.target, self.family, cast(LengthClass, self.lengths), tile_rows)
        except NotImplementedError:
            return None

    def _kernel(self, packed_heads: int, tile_rows: int) -> tuple[Callable[..., object], Any] | None:
        """The kernel of these calls, and its traits; None if no row splits keys."""
        choice = self._choice(tile_rows)
        if choice is None:
            return None
        problem = dataclasses.replace(self.problem.packed(packed_heads), is_split=True, is_scheduled=self.is_scheduled)
        kernel = compiled(choice.kernel_cls, choice.traits, self.fitted(problem, choice.traits), self.target)
        return kernel, choice.traits
