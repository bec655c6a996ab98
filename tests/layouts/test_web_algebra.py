"""The page's layout algebra and parser, run in node, against their Python twins: values, steps, errors, positions.

All texts go through one node process. The Python side is tested by itself against the DSL and the algebra's laws.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from layouts.algebra import ComposedLayout, Layout, Swizzle, text_of
from layouts.messages import MAX_TEXT
from layouts.syntax import FUNCTIONS, Kind
from layouts.text import LayoutSyntaxError, LayoutTextError, ThreadValue, evaluate
from tests.layouts.strategies import any_layouts, shapes, swizzles, tilers, tiles
from tests.layouts.test_text import MEANING_ERRORS, MEANINGS, STEPS, SYNTAX_ERRORS, texts
from tests.layouts.web import run_js

Example = TypeVar("Example")

MORE_TEXTS = [
    "compose((8,4), 16:3)",
    "compose((6,4), 4:2)",
    "compose((4,6), (2,3):(2,2))",
    "compose((4,1):(1,100), 8)",
    "compose((4,1), 8)",
    "compose(S<2,1,3> o 5 o (8,8):(8,1), ((2,2),4))",
    "compose((8,8), (4,(2)))",
    "compose((8,8), ((2,2):(1,4), _4:_2))",
    "left_inverse((2,2):(2,7))",
    "left_inverse((2,4):(2,4))",
    "right_inverse((2,4):(2,4))",
    "complement((2,2):(2,5), 24)",
    "complement((2,4):(1,0), 25)",
    "complement(1:0)",
    "filter(4:0)",
    "zipped_product((8,8), (2))",
    "flat_product((8,8), (2,3:2))",
    "blocked_product(2, (3,4))",
    "raked_product((3,4), 2:5)",
    "tiled_divide(S<3,3,3> o 64 o (8,64):(64,1), (8,8))",
    "divide((8,8), ((2,2), 3))",
    "divide((8,(2,4)), (4,(2:1,2)))",
    "divide((8,8), (0,2))",
    "product((4,4), (2,3,4))",
    "TV ((4,8),(2,2)):((32,1),(16,8)) on ((2,8),8)",
    "S<0,0,0> o 8",
    "S<5,0,4> o 8",
    "S<8,16,8> o 8",
    "S<1,1,1> o 2147483648 o 8",
    "compose(2147483647, (2,2):(1,2147483646))",
    "product(1048576, 4096)",
    "coalesce((2,2147483648):(1,2))",
    "007:_02",
    "8:_",
    "constructor(8)",
    "toString",
    "(8,64):(64,1) \u00a0",
    "8:\U0001d7d8",
    "S<3,4,3> o 0 o coalesce(8)",
    "8\f",
    "(" + "8," * MAX_TEXT,
    "8" * (MAX_TEXT - 1) + "\U0001d7d8\U0001d7d8",
]


def drawn(strategy: st.SearchStrategy[Example], count: int) -> list[Example]:
    """`count` examples, the same in every run."""
    found: list[Example] = []

    @settings(max_examples=count, derandomize=True, database=None, phases=[Phase.generate])
    @given(strategy)
    def collect(example: Example) -> None:
        found.append(example)

    collect()
    return found


@st.composite
def calls(draw: st.DrawFn) -> str:
    """A call of any function with layouts that fit often; some of them do not, which is a test of the error."""
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    kinds = FUNCTIONS[name].kinds
    layout = draw(any_layouts())
    swizzled = kinds[0] is Kind.LAYOUT and draw(st.booleans())
    arguments = [f"{draw(swizzles())} o {draw(st.integers(0, 99))} o {layout}" if swizzled else str(layout)]
    for kind in kinds[1:]:
        if kind is Kind.INTEGER:
            arguments.append(str(draw(st.integers(1, 2000))))
        elif kind is Kind.TILER and draw(st.booleans()):
            arguments.append(f"({','.join(map(str, draw(tilers(layout))))})")
        elif kind is Kind.TILER:
            arguments.append(str(draw(tiles() | st.integers(1, 9) | shapes().map(text_of) | any_layouts())))
        else:
            arguments.append(str(draw(tiles())))
    return f"{name}({', '.join(arguments)})"


def all_texts() -> list[str]:
    tables: list[list[tuple[Any, ...]]] = [MEANINGS, STEPS, SYNTAX_ERRORS, MEANING_ERRORS]
    written = [row[0] for table in tables for row in table] + MORE_TEXTS
    return written + drawn(any_layouts().map(str), 100) + drawn(calls(), 400) + drawn(texts, 300)


def as_text(operand: object) -> str:
    """An operand of a step as CuTe text; `text_of` knows no tuples of layouts."""
    return f"({','.join(map(as_text, operand))})" if isinstance(operand, tuple) else str(operand)


def python_outcome(text: str) -> dict[str, Any]:
    try:
        result = evaluate(text)
    except LayoutTextError as error:
        kind = {"expected": error.expected} if isinstance(error, LayoutSyntaxError) else {}
        return {"position": error.position, "length": error.length, "message": error.message, **kind}
    value = result.value.layout if isinstance(result.value, ThreadValue) else result.value
    steps = [
        [step.start, step.end, step.operation, [as_text(operand) for operand in step.operands], str(step.result)]
        for step in result.steps
    ]
    return {
        "value": str(result.value),
        "indices": value.indices().tolist() if value.size() <= 4096 else value.size(),
        "steps": steps,
    }


JS_OUTCOMES = """data.map((text) => {
  const { toText, evaluate, size } = CF.algebra;
  try {
    const { value, steps } = CF.text.evaluate(text);
    const plain = value.tv ?? value;
    return {
      value: toText(value),
      indices: size(plain) <= 4096 ? [...evaluate(plain)] : size(plain),
      steps: steps.map((s) => [s.start, s.end, s.operation, s.operands.map(toText), toText(s.result)]),
    };
  } catch (error) {
    if (!(error instanceof CF.text.LayoutTextError)) return { crash: String(error.stack) };
    const { position, length, message, expected } = error;
    return { position, length, message, expected };
  }
})"""


@pytest.mark.slow
def test_texts_mean_the_same_in_the_page_and_in_python() -> None:
    given_texts = all_texts()
    outcomes = run_js(["algebra.js", "text.js"], JS_OUTCOMES, given_texts)
    for text, outcome in zip(given_texts, outcomes, strict=True):
        assert outcome == python_outcome(text), text
    errors = sum("message" in outcome for outcome in outcomes)
    assert 0.2 < errors / len(outcomes) < 0.8, "the generated texts are hardly ever right, or hardly ever wrong"


def test_indices_of_single_coordinates_are_pythons() -> None:
    layouts: list[Layout | ComposedLayout] = [
        *drawn(any_layouts(), 100),
        ComposedLayout(Swizzle(3, 4, 3), 7, Layout(512)),
    ]
    data: list[tuple[str, list[int], list[int], int]] = []
    for layout in layouts:
        inner = layout.layout if isinstance(layout, ComposedLayout) else layout
        positions = [0, layout.size() // 2, layout.size() - 1, layout.size() + 3]
        data.append((str(layout), positions, [int(layout(position)) for position in positions], inner.size()))
    script = """data.map(([text, positions, , size]) => {
      const { value } = CF.text.evaluate(text);
      const { index, coordinate, plain } = CF.algebra;
      const nested = positions.filter((p) => p < size).map((p) => index(value, coordinate(p, plain(value).shape)));
      return [positions.map((p) => index(value, p)), nested];
    })"""
    for (text, _, expected, _), (integers, nested) in zip(data, run_js(["algebra.js", "text.js"], script, data)):
        assert integers == expected, text
        assert nested == expected[:3], text


def test_a_swizzled_tile_has_pythons_offsets() -> None:
    script = 'Array.from(CF.algebra.evaluate(CF.text.evaluate("S<3,3,3> o 0 o (128,256):(256,1)").value))'
    tile = ComposedLayout(Swizzle(3, 3, 3), 0, Layout((128, 256), (256, 1)))
    assert run_js(["algebra.js", "text.js"], script) == tile.indices().tolist()


@pytest.mark.parametrize("shape, stride", [([4, 2], [1]), ([4, 0], [1, 1]), ([4], [-1]), (4, [1])])
def test_a_layout_that_is_none_is_refused_with_pythons_words(shape: Any, stride: Any) -> None:
    script = """(() => {
      try { return CF.algebra.layout(...data); } catch (error) { return error.message; }
    })()"""
    with pytest.raises(ValueError) as caught:
        Layout(shape, stride)
    assert run_js(["algebra.js"], script, [shape, stride]) == str(caught.value)
