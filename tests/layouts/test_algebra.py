"""The layout algebra against its own laws and against the CuTe DSL, over generated layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import cutlass.cute as cute
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from layouts import algebra, dsl
from layouts.algebra import AlgebraError, ComposedLayout, Layout, Swizzle, Tiler
from tests.layouts import oracle
from tests.layouts.strategies import (
    any_layouts,
    ordered_layouts,
    powers,
    shapes,
    swizzles,
    tilers,
    tiles,
    unravelled,
    with_strides,
)

laws = settings(
    derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
few = settings(laws, max_examples=30)  # for what runs once for each of several functions
DIVIDES = ["logical_divide", "zipped_divide", "tiled_divide", "flat_divide"]
PRODUCTS = ["logical_product", "zipped_product", "tiled_product"]
layout_and_tiler = ordered_layouts().flatmap(lambda layout: st.tuples(st.just(layout), tilers(layout)))


def existing(operation: Callable[..., Layout], *operands: Tiler) -> Layout:
    """The operation's result; another example where there is none."""
    try:
        return operation(*operands)
    except AlgebraError:
        assume(False)
        raise


class TestEvaluation:
    @laws
    @given(any_layouts())
    def test_indices_are_digits_times_strides(self, layout: Layout) -> None:
        assert layout.indices().tolist() == unravelled(layout)
        assert layout.cosize() == max(unravelled(layout)) + 1
        assert layout.size() == len(unravelled(layout))

    @laws
    @given(any_layouts())
    def test_an_integer_an_array_and_a_coordinate_agree(self, layout: Layout) -> None:
        offsets = layout.indices()
        assert layout(layout.size() - 1) == offsets[-1]
        assert np.array_equal(layout(np.arange(layout.size())), offsets)
        extents = [mode.size() for mode in layout.modes()]
        grid = tuple(np.ix_(*map(np.arange, extents)))
        if isinstance(layout.shape, tuple):
            assert np.array_equal(layout(grid).ravel(order="F"), offsets)

    def test_an_index_beyond_the_size_goes_on_in_the_last_mode(self) -> None:
        layout = Layout((4, 2), (1, 10))
        assert layout(9) == 1 + 2 * 10
        assert layout((1, 2)) == layout(9)

    def test_without_a_stride_compact_column_major(self) -> None:
        assert str(Layout((2, (4, 1), 3))) == "(2,(4,1),3):(1,(2,0),8)"
        assert str(Layout([8])) == "(8):(1)"
        assert Layout([2, [3, 4]], [1, [2, 6]]) == Layout((2, (3, 4)), (1, (2, 6)))
        assert len({Layout(8), Layout(8, 1), Layout((8,))}) == 2

    def test_a_tile_is_swizzled_as_one_array(self, monkeypatch: pytest.MonkeyPatch) -> None:
        swizzled: list[int] = []
        apply = Swizzle.__call__
        monkeypatch.setattr(Swizzle, "__call__", lambda self, at: swizzled.append(np.size(at)) or apply(self, at))
        tile = ComposedLayout(Swizzle(3, 3, 3), 0, Layout((128, (64, 4)), (64, (1, 8192))))
        assert len(np.unique(tile.indices())) == 128 * 256
        assert swizzled == [128 * 256]

    @laws
    @given(swizzles(), st.integers(0, 2**20))
    def test_a_swizzle_undoes_itself_and_knows_arrays(self, swizzle: Swizzle, offset: int) -> None:
        assert swizzle(swizzle(offset)) == offset
        assert swizzle(np.array([offset]))[0] == swizzle(offset)

    @laws
    @given(swizzles(), st.integers(0, 2**12))
    def test_a_swizzle_xors_bit_by_bit(self, swizzle: Swizzle, offset: int) -> None:
        expected = offset
        for bit in range(swizzle.base, swizzle.base + swizzle.bits):
            source, target = (bit + swizzle.shift, bit) if swizzle.shift >= 0 else (bit, bit - swizzle.shift)
            expected ^= (offset >> source & 1) << target
        assert swizzle(offset) == expected

    @laws
    @given(swizzles(), st.integers(0, 64), any_layouts())
    def test_a_composed_layout_swizzles_after_the_offset(self, swizzle: Swizzle, offset: int, inner: Layout) -> None:
        composed = ComposedLayout(swizzle, offset, inner)
        expected = [swizzle(offset + value) for value in unravelled(inner)]
        assert composed.indices().tolist() == expected
        assert composed(inner.size() - 1) == expected[-1]
        assert composed.cosize() == max(expected) + 1


class TestMaps:
    @laws
    @given(any_layouts())
    def test_coalesce_keeps_the_function_in_the_fewest_modes(self, layout: Layout) -> None:
        short = algebra.coalesce(layout)
        assert short.indices().tolist() == unravelled(layout)
        modes = short.flat_modes()
        assert modes == [(1, 0)] or all(extent > 1 for extent, _ in modes)
        assert all(second != extent * first for (extent, first), (_, second) in itertools.pairwise(modes))

    @laws
    @given(any_layouts())
    def test_regrouping_modes_keeps_the_function(self, layout: Layout) -> None:
        same = [algebra.flatten(layout), algebra.coalesce(layout, (1,)), algebra.group(layout, 0, layout.rank)]
        same.append(algebra.select(layout, range(layout.rank)))
        assert all(other.indices().tolist() == unravelled(layout) for other in same)

    @laws
    @given(any_layouts())
    def test_filter_keeps_the_set_of_offsets(self, layout: Layout) -> None:
        assert set(unravelled(algebra.filter(layout))) == set(unravelled(layout))
        assert 0 not in [step for extent, step in algebra.filter(layout).flat_modes() if extent > 1]

    @laws
    @given(any_layouts(), tiles() | any_layouts())
    def test_composition_is_the_composed_function(self, left: Layout, right: Layout) -> None:
        result = existing(algebra.composition, left, right)
        assert result.indices().tolist() == [left(index) for index in unravelled(right)]
        if isinstance(right.shape, tuple):  # an integer may split into a tuple
            assert [mode.size() for mode in result.modes()] == [mode.size() for mode in right.modes()]

    @laws
    @given(shapes(powers), ordered_layouts(powers, st.sampled_from([1, 2, 4])), st.randoms(use_true_random=False))
    def test_powers_of_two_always_compose(self, shape: algebra.IntTuple, right: Layout, random: object) -> None:
        strides = [random.randrange(100) for _ in algebra.leaves(shape)]  # type: ignore[attr-defined]
        left = with_strides(shape, strides)
        result = algebra.composition(left, right)
        assert result.indices().tolist() == [left(index) for index in unravelled(right)]

    @laws
    @given(layout_and_tiler)
    def test_a_tiler_composes_mode_by_mode(self, case: tuple[Layout, tuple[Layout | int, ...]]) -> None:
        layout, tiler = case
        result = existing(algebra.composition, layout, tiler)
        parts = [algebra.composition(mode, part) for mode, part in zip(layout.modes(), tiler)]
        assert result == algebra.concatenate(*parts)

    @laws
    @given(any_layouts(), st.integers(1, 200))
    def test_a_complement_is_ordered_and_disjoint(self, layout: Layout, cotarget: int) -> None:
        offsets = unravelled(existing(algebra.complement, layout, cotarget))
        assert offsets == sorted(set(offsets))
        assert set(offsets) & set(unravelled(layout)) == {0}

    @laws
    @given(ordered_layouts(nested=False), st.integers(1, 3))
    def test_a_layout_and_its_complement_fill_the_cotarget(self, layout: Layout, times: int) -> None:
        cotarget = layout.cosize() * times
        assume(cotarget <= 5000)
        both = algebra.concatenate(layout, algebra.complement(layout, cotarget))
        offsets = unravelled(both)
        assert len(set(offsets)) == len(offsets)
        assert set(range(cotarget)) <= set(offsets)

    @laws
    @given(any_layouts())
    def test_right_inverse(self, layout: Layout) -> None:
        inverse = algebra.right_inverse(layout)
        assert [layout(index) for index in unravelled(inverse)] == list(range(inverse.size()))

    @laws
    @given(ordered_layouts(gaps=st.just(1)))
    def test_the_inverses_of_a_bijection_are_whole(self, layout: Layout) -> None:
        assert algebra.right_inverse(layout).size() == layout.size()
        assert algebra.right_inverse(layout) == algebra.left_inverse(layout)

    @laws
    @given(ordered_layouts())
    def test_left_inverse(self, layout: Layout) -> None:
        inverse = algebra.left_inverse(layout)
        assert [inverse(offset) for offset in unravelled(layout)] == list(range(layout.size()))


class TestTiling:
    @laws
    @given(any_layouts(), tiles())
    def test_divide_is_composition_with_the_tile_and_its_complement(self, layout: Layout, tile: Layout) -> None:
        result = existing(algebra.logical_divide, layout, tile)
        order = algebra.concatenate(tile, algebra.complement(tile, layout.size()))
        inside = [index for index in range(order.size()) if order(index) < layout.size()]
        assert [result(index) for index in inside] == [layout(order(index)) for index in inside]
        assert result.mode(0).size() == tile.size()

    @laws
    @given(shapes(powers).map(Layout), ordered_layouts(powers, st.sampled_from([1, 2])))
    def test_tiles_of_powers_of_two_take_every_element_once(self, layout: Layout, tile: Layout) -> None:
        assume(tile.cosize() <= layout.size())
        assert sorted(unravelled(algebra.logical_divide(layout, tile))) == sorted(unravelled(layout))

    @laws
    @given(layout_and_tiler)
    def test_the_divides_by_a_tiler_are_regroupings(self, case: tuple[Layout, tuple[Layout | int, ...]]) -> None:
        layout, tiler = case
        logical = existing(algebra.logical_divide, layout, tiler)
        zipped = algebra.zipped_divide(layout, tiler)
        count = len(tiler)
        assert zipped.mode(0) == algebra.concatenate(*(mode.mode(0) for mode in logical.modes()[:count]))
        rests = [mode.mode(1) for mode in logical.modes()[:count]] + list(logical.modes()[count:])
        assert zipped.mode(1) == algebra.concatenate(*rests)
        assert algebra.tiled_divide(layout, tiler) == algebra.concatenate(zipped.mode(0), *rests)
        assert algebra.flat_divide(layout, tiler) == algebra.concatenate(*zipped.mode(0).modes(), *rests)
        assert sorted(unravelled(zipped)) == sorted(unravelled(layout))

    @laws
    @given(ordered_layouts(), tiles())
    def test_product_repeats_the_block_over_free_offsets(self, block: Layout, tiler: Layout) -> None:
        result = existing(algebra.logical_product, block, tiler)
        assume(result.size() <= 20_000)
        assert result.mode(0) == block
        assert len(set(unravelled(result))) == result.size()
        assert np.array_equal(np.argsort(result.mode(1).indices()), np.argsort(tiler.indices()))

    @laws
    @given(ordered_layouts(powers, nested=False), shapes(powers, nested=False).map(Layout))
    def test_blocked_and_raked_products_zip_the_modes(self, block: Layout, tiler: Layout) -> None:
        rank = max(block.rank, tiler.rank)
        blocked, raked = algebra.blocked_product(block, tiler), algebra.raked_product(block, tiler)
        assert blocked.rank == raked.rank == rank
        extents = [[mode.size() for mode in layout.modes()] + [1] * rank for layout in (block, tiler)]
        assert [mode.size() for mode in blocked.modes()] == [a * b for a, b in zip(*extents)][:rank]
        assert sorted(unravelled(blocked)) == sorted(unravelled(raked))
        assert [mode.mode(0) for mode in blocked.modes()][: block.rank] == list(block.modes())

    @pytest.mark.parametrize("name", [*DIVIDES, "composition"])
    def test_a_swizzled_layout_keeps_its_swizzle(self, name: str) -> None:
        inner = Layout((16, 64), (64, 1))
        composed = ComposedLayout(Swizzle(3, 3, 3), 8, inner)
        operation = getattr(algebra, name)
        assert operation(composed, (8, 16)) == ComposedLayout(composed.swizzle, 8, operation(inner, (8, 16)))

    def test_a_trace_sees_what_the_definition_says(self) -> None:
        seen: list[str] = []

        def trace(name: str, operands: tuple[algebra.Operand, ...], result: object) -> None:
            seen.append(f"{name} {' '.join(map(str, operands))} = {result}")

        algebra.tiled_divide(Layout((4, 2, 3), (2, 1, 8)), Layout(4, 2), trace)
        assert seen == [
            "complement 4:2 24 = (2,3):(1,8)",
            "concatenate 4:2 (2,3):(1,8) = (4,(2,3)):(2,(1,8))",
            "compose (4,2,3):(2,1,8) (4,(2,3)):(2,(1,8)) = ((2,2),(2,3)):((4,1),(2,8))",
            "regroup ((2,2),(2,3)):((4,1),(2,8)) = ((2,2),2,3):((4,1),2,8)",
        ]


@pytest.fixture(scope="module")
def dsl_context() -> Iterator[None]:
    with dsl.context("sm_90a"):
        yield


@pytest.mark.usefixtures("dsl_context")
class TestOracle:
    """The same shapes and strides as the DSL (strides of extents of 1 aside), where the result exists.

    The DSL aborts the process on some operands without a result, so ours says first whether there is one.
    """

    def agree(self, name: str, *operands: Tiler) -> None:
        ours = existing(getattr(algebra, name), *operands)
        theirs = dsl.plain(getattr(cute, name)(*map(oracle.to_dsl, operands)))
        assert str(oracle.without_idle_strides(ours)) == str(oracle.without_idle_strides(theirs))

    @pytest.mark.parametrize("name", ["coalesce", "right_inverse", "flatten", "filter"])
    @few
    @given(layout=any_layouts())
    def test_functions_of_any_layout(self, name: str, layout: Layout) -> None:
        self.agree(name, layout)

    @laws
    @given(ordered_layouts())
    def test_left_inverse(self, layout: Layout) -> None:
        self.agree("left_inverse", layout)

    @laws
    @given(any_layouts(), st.integers(1, 200))
    def test_complement(self, layout: Layout, cotarget: int) -> None:
        self.agree("complement", layout, cotarget)

    @laws
    @given(any_layouts(), tiles() | ordered_layouts())
    def test_composition(self, left: Layout, right: Layout) -> None:
        assume(right.cosize() <= left.size())  # beyond its size, CuTe drops extents of 1 at the end of `left`
        self.agree("composition", left, right)

    @pytest.mark.parametrize("name", DIVIDES)
    @few
    @given(layout=any_layouts(), tile=tiles())
    def test_divides_by_a_layout(self, name: str, layout: Layout, tile: Layout) -> None:
        assume(existing(algebra.logical_divide, layout, tile).size() == layout.size())  # no tile overhangs
        self.agree(name, layout, tile)

    @pytest.mark.parametrize("name", [*DIVIDES, "composition"])
    @few
    @given(case=layout_and_tiler)
    def test_divides_by_a_tiler(self, name: str, case: tuple[Layout, tuple[Layout | int, ...]]) -> None:
        self.agree(name, *case)

    @pytest.mark.parametrize("name", PRODUCTS)
    @few
    @given(block=ordered_layouts(), tiler=tiles())
    def test_products(self, name: str, block: Layout, tiler: Layout) -> None:
        self.agree(name, block, tiler)

    @pytest.mark.parametrize("name", ["blocked_product", "raked_product"])
    @few
    @given(block=ordered_layouts(powers), tiler=ordered_layouts(powers, st.just(1)))
    def test_zipped_products(self, name: str, block: Layout, tiler: Layout) -> None:
        assume(block.rank > 1 and tiler.rank > 1)  # the DSL cannot zip a tuple of one with an integer
        self.agree(name, block, tiler)

    @pytest.mark.parametrize("swizzle", [(3, 4, 3), (2, 3, 3), (1, 0, 4), (2, 1, -3)])
    def test_swizzled_layouts(self, swizzle: tuple[int, int, int]) -> None:
        inner = Layout((8, 16), (16, 1))
        theirs = cute.make_composed_layout(cute.make_swizzle(*swizzle), 16, oracle.to_dsl(inner))
        ours = ComposedLayout(Swizzle(*swizzle), 16, inner)
        assert dsl.layout_of(theirs) == ours
        assert ours.indices().tolist() == [int(theirs(index)) for index in range(inner.size())]


ERRORS = [
    (lambda: Layout(()), "a shape needs at least one mode"),
    (lambda: Layout("8"), "expected an integer or nested integers, given '8'"),
    (lambda: Layout((2, 0)), "every extent of a shape must be at least 1, given (2,0)"),
    (lambda: Layout((2, 2), (1, -2)), "every stride must be at least 0, given (1,-2)"),
    (lambda: Layout((2, 2), 1), "stride 1 is not nested like shape (2,2)"),
    (lambda: Layout((2, 2))((1, 1, 1)), "coordinate (1, 1, 1) does not fit shape (2,2)"),
    (lambda: Layout((2, 2))(-1), "a coordinate must not be negative, given -1"),
    (lambda: Layout(2**25).indices(), "33554432:1 has more than 16777216 elements"),
    (lambda: Layout((2, 2)).mode(2), "(2,2):(1,2) has no mode 2"),
    (lambda: algebra.group(Layout((2, 2)), 1, 1), "cannot group modes 1 to 1 of (2,2):(1,2)"),
    (lambda: algebra.coalesce(Layout(2), (1, 1)), "cannot coalesce 2:1 by a profile of 2 modes"),
    (
        lambda: Swizzle(3, 4, 2),
        "a swizzle needs bits >= 0, base >= 0, |shift| >= bits and base + bits + |shift| <= 31, given S<3,4,2>",
    ),
    (
        lambda: ComposedLayout(Swizzle(0, 0, 0), -1, Layout(2)),
        "the offset of a swizzled layout must be at least 0, given -1",
    ),
    (
        lambda: algebra.composition(Layout((4, 6), (1, 10)), Layout(6, 3)),
        "cannot compose (4,6):(1,10) with 6:3: stride 3 and extent 4 do not divide",
    ),
    (
        lambda: algebra.composition(Layout((4, 6), (1, 10)), Layout(6)),
        "cannot compose (4,6):(1,10) with 6:1: shape 6 is not a multiple of 4",
    ),
    (
        lambda: algebra.composition(Layout((2, 2), (1, 10)), Layout((2, 2), (1, 1))),
        "cannot compose (2,2):(1,10) with (2,2):(1,1): the modes of (2,2):(1,1) together overflow extent 2",
    ),
    (
        lambda: algebra.logical_divide(Layout(8), (4, 2)),
        "a tiler of 2 modes needs a layout of at least as many, given 8:1",
    ),
    (
        lambda: algebra.complement(Layout((2, 4), (1, 1)), 8),
        "the complement of (2,4):(1,1) does not exist: its modes overlap",
    ),
    (lambda: algebra.complement(Layout(2), 0), "the complement needs a size of at least 1, given 0"),
    (
        lambda: algebra.left_inverse(Layout((2, 2), (2, 5))),
        "(2,2):(2,5) has no left inverse: strides 2 and 5 do not nest",
    ),
    (lambda: algebra.left_inverse(Layout((3, 2), (1, 2))), "(3,2):(1,2) has no left inverse: its modes overlap"),
]


@pytest.mark.parametrize("call, words", ERRORS, ids=[words[:40] for _, words in ERRORS])
def test_errors_say_what_was_given_and_what_is_needed(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == words


def test_an_error_names_the_operand_at_fault() -> None:
    overlapping = Layout((2, 4), (1, 1))
    with pytest.raises(AlgebraError) as divided:
        algebra.logical_divide(Layout(8), overlapping)
    with pytest.raises(AlgebraError) as multiplied:
        algebra.logical_product(overlapping, Layout(8))
    assert (divided.value.argument, multiplied.value.argument) == (1, 0)
