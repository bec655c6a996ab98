"""One thread's part of a tile of scores, and the steps before their softmax: softcap and mask."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cuteflash.core.gqa import row_token
from cuteflash.core.tile import QueryTile
from cuteflash.core.tree import Tree, is_hidden
from cuteflash.core.views import rows_view, transposed
from cuteflash.problem import Scores


def stay_a_branch() -> None:
    """Keeps the compiler from turning the branch that this stands in into selects, which all paths would execute."""
    cute.arch.inline_ptx("// a branch")


def computed_here(value: Int32) -> Int32:
    """`value`, of which nothing is computed before the branch that this stands in: that would take registers."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


@dataclasses.dataclass(frozen=True)
class ScoreTile:
    """One thread's elements of S, or of Sᵀ, seen as (queries, keys) in both cases.

    Attributes:
        values: fp32 scores, a view of the accumulator.
        coords: the static coordinates of thread 0's elements in the accumulator's tile: (row, key), of Sᵀ (key, row).
        first_row, first_key: this thread's first element in the tile.
        inner_scale: factor of a score before tanh, if there is a softcap.
        packed_heads: query heads folded into the rows; 1 is none.
        is_transposed: whether the accumulator holds Sᵀ.
        row_scales: `inner_scale` of each row, if rows have factors of their own; None if they do not.
        tree: which new tokens each query sees, if these form a tree.
    """

    values: cute.Tensor
    coords: cute.Tensor
    first_row: Int32
    first_key: Int32
    inner_scale: Float32
    packed_heads: cutlass.Constexpr[int]
    is_transposed: cutlass.Constexpr[bool]
    row_scales: cute.Tensor | None = None
    tree: Tree | None = None

    @classmethod
    def of(
        cls,
        mma: cute.TiledMma,
        thread: Int32,
        acc: cute.Tensor,
        shape: tuple[int, int],
        inner_scale: Float32,
        packed_heads: int,
        *,
        is_transposed: bool = False,
    ) -> ScoreTile:
        """The elements that `acc`, thread `thread`'s accumulator of a product of this shape, holds."""
        identity = cute.make_identity_tensor(shape)
        values, own, coords = (
            transposed(view) if is_transposed else view
            for view in (
                rows_view(acc),
                rows_view(mma.get_slice(thread).partition_C(identity)),
                rows_view(mma.get_slice(0).partition_C(identity)),
            )
        )
        first_row, first_key = reversed(own[0, 0]) if is_transposed else own[0, 0]
        return cls(values, coords, first_row, first_key, inner_scale, packed_heads, is_transposed)

    def row(self, r: int) -> Int32:
        """The row of the query tile that this thread's `r`-th row is."""
        return self.first_row + self.coords[r, 0][1 if self.is_transposed else 0]

    def column(self, r: int, c: int) -> int:
        """How many keys after `first_key` an element is."""
        return self.coords[r, c][0 if self.is_transposed else 1]

    def token(self, r: int) -> tuple[Int32, Int32]:
        """(token, packed head) of this thread's `r`-th row, counted from the tile's first."""
        return row_token(self.row(r), self.packed_heads)

    def make_bounds(self, rows: int) -> cute.Tensor:
        """Registers for `set_bounds`: (rows, 2) Int32, with a tree (rows, 4)."""
        return cute.make_rmem_tensor((rows, 2 if self.tree is None else 4), Int32)

    @cute.jit
    def set_bounds(self, bounds: cute.Tensor, tile: QueryTile):
        """`bounds`, as `make_bounds` makes it, gets the visible keys [lo, hi) of each row of this thread.

        With a tree it also gets the row's bits, see `Tree.hidden_before`.
        """
        for r in cutlass.range_constexpr(cute.size(bounds.shape[0])):
            token, _ = self.token(r)
            bounds[r, 0], bounds[r, 1] = tile.mask.kv_bounds(tile.first_token + token)
            if const_expr(self.tree is not None):
                bounds[r, 2], bounds[r, 3] = self.tree.hidden_before(tile, token)

    @cute.jit
    def prepare(self, scores: cutlass.Constexpr[Scores], block_key: Int32, bounds: cute.Tensor | None):
        """Apply softcap and mask to the scores of a key block, in place.

        Args:
            scores: the problem's.
            block_key: first key of the block.
            bounds: each row's visible keys, as `set_bounds` writes them; None if every row sees the block whole.
        """
        if const_expr(scores.softcap):
            self.apply_softcap()
        if const_expr(bounds is not None):
            self.hide(block_key, bounds, scores.has_left_edge)
            if const_expr(self.tree is not None):
                self.hide_branches(block_key, bounds)

    @cute.jit
    def apply_softcap(self):
        """Scores become tanh(score * inner_scale); the softmax's scale then holds the cap itself."""
        if const_expr(self.row_scales is None):
            for i in cutlass.range_constexpr(cute.size(self.values)):
                self.values[i] = cute.math.tanh(self.values[i] * self.inner_scale, fastmath=True)
        else:
            for r in cutlass.range_constexpr(cute.size(self.values.shape[0])):
                for c in cutlass.range_constexpr(cute.size(self.values.shape[1])):
                    self.values[r, c] = cute.math.tanh(self.values[r, c] * self.row_scales[r], fastmath=True)

    @cute.jit
    def hide(
        self,
        block_key: Int32,
        bounds: cute.Tensor,
        has_left_edge: cutlass.Constexpr[bool],
        has_right_edge: cutlass.Constexpr[bool] = True,
    ):
        """Set scores of keys that a row does not see to -inf; without an edge, `bounds` cut no key on its side."""
        first = block_key + self.first_key
        for r in cutlass.range_constexpr(cute.size(self.values.shape[0])):
            hi = bounds[r, 1] - first
            lo = bounds[r, 0] - first
            for c in cutlass.range_constexpr(cute.size(self.values.shape[1])):
                col = self.column(r, c)
                if const_expr(has_left_edge and has_right_edge):
                    hidden = col >= hi or col < lo
                elif const_expr(has_left_edge):
                    hidden = col < lo
                else:
                    hidden = col >= hi
                self.values[r, c] = -Float32.inf if hidden else self.values[r, c]

    @cute.jit
    def hide_branches(self, block_key: Int32, bounds: cute.Tensor):
        """Set scores of new tokens that are not on a row's branch of the tree to -inf."""
        first = block_key + self.first_key
        for r in cutlass.range_constexpr(cute.size(self.values.shape[0])):
            own, words = bounds[r, 1] - 1 - first, (bounds[r, 2], bounds[r, 3])
            for c in cutlass.range_constexpr(cute.size(self.values.shape[1])):
                hidden = is_hidden(words, own - self.column(r, c))
                self.values[r, c] = -Float32.inf if hidden else self.values[r, c]
