"""Layout text: what it means, the steps it takes, and where its errors point."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts.algebra import ComposedLayout, Layout, Swizzle
from layouts.messages import MAX_DEPTH, MAX_TEXT, MESSAGES
from layouts.syntax import ALIASES, FUNCTIONS, Kind
from layouts.text import LayoutSyntaxError, LayoutTextError, ThreadValue, evaluate, parse
from tests.layouts.strategies import any_layouts, swizzles

generated = settings(derandomize=True, max_examples=200)

MEANINGS = [
    ("8", "8:1"),
    ("(8)", "(8):(1)"),
    ("(8,64)", "(8,64):(1,8)"),
    ("(8,1)", "(8,1):(1,0)"),
    (" ( ( 2,4 ),8 )\n:\t((1,16),2)", "((2,4),8):((1,16),2)"),
    ("S<3,4,3> o 0 o (8,64):(64,1)", "S<3,4,3> o 0 o (8,64):(64,1)"),
    ("Sw<3,4,3> o _16 o (_8,_64):(_64,_1)", "S<3,4,3> o 16 o (8,64):(64,1)"),
    ("S<2,0,-3>o 8", "S<2,0,-3> o 0 o 8:1"),
    ("S<2,0,3> o 8:2", "S<2,0,3> o 0 o 8:2"),
    ("TV ((4,8),(2,2)):((32,1),(16,8)) on (16,8)", "TV ((4,8),(2,2)):((32,1),(16,8)) on (16,8)"),
    ("compose((6,2):(8,2), (4,3):(3,1))", "((2,2),3):((24,2),8)"),
    ("composition(20:2, (5,4):(4,1))", "(5,4):(8,2)"),
    ("complement((2,2):(1,6), 24)", "(3,2):(2,12)"),
    ("complement(4:2)", "2:1"),
    ("divide((4,2,3):(2,1,8), 4:2)", "((2,2),(2,3)):((4,1),(2,8))"),
    ("logical_divide((8,8), (4,2))", "((4,2),(2,4)):((1,4),(8,16))"),
    ("zipped_divide((9,(4,8)):(59,(13,1)), (3:3, (2,4):(1,8)))", "((3,(2,4)),(3,(2,2))):((177,(13,2)),(59,(26,1)))"),
    ("tiled_divide((9,8,4), (3,4))", "((3,4),3,2,4):((1,9),3,36,72)"),
    ("flat_divide((9,8,4), (3,4))", "(3,4,3,2,4):(1,9,3,36,72)"),
    ("divide((8,64), (8,64):(1,8))", "((8,64),1):((1,8),0)"),
    ("zipped_divide(S<3,3,3> o (8,64):(64,1), (8,8))", "S<3,3,3> o 0 o ((8,8),(1,8)):((64,1),(0,8))"),
    ("product((2,2):(4,1), 6)", "((2,2),(2,3)):((4,1),(2,8))"),
    ("product((2,5):(5,1), (3:5, 4:6))", "((2,3),(5,4)):((5,10),(1,30))"),
    ("tiled_product((2,2):(4,1), (4,2):(2,1))", "((2,2),4,2):((4,1),8,2)"),
    ("blocked_product((2,5):(5,1), (3,4))", "((2,3),(5,4)):((5,10),(1,30))"),
    ("raked_product((2,5):(5,1), (3,4))", "((3,2),(4,5)):((10,5),(30,1))"),
    ("right_inverse((4,8):(8,1))", "(8,4):(4,1)"),
    ("left_inverse((4,8):(1,8))", "(8,8):(1,4)"),
    ("coalesce((2,(1,6)):(1,(6,2)))", "12:1"),
    ("flatten((2,(4,8)))", "(2,4,8):(1,2,8)"),
    ("filter((2,4,1):(0,2,7))", "4:2"),
    ("coalesce(compose((8,8), right_inverse((8,8):(8,1))))", "(8,8):(8,1)"),
]


@pytest.mark.parametrize("text, value", MEANINGS)
def test_a_text_means_a_layout(text: str, value: str) -> None:
    assert str(evaluate(text).value) == value


def test_every_function_is_among_the_meanings() -> None:
    written = {word for text, _ in MEANINGS for word in re.findall(r"\w+(?=\()", text)}
    assert written >= {*FUNCTIONS, *ALIASES} - {"zipped_product", "flat_product", "logical_product"}
    assert str(evaluate("zipped_product(8, 2)").value) == "(8,2):(1,8)"
    assert str(evaluate("flat_product((4,2), logical_product(2, 2))").value) == "(4,2,2,2):(1,4,8,16)"


def test_values_are_the_algebras() -> None:
    assert evaluate("(8,64):(64,1)").value == Layout((8, 64), (64, 1))
    assert evaluate("S<3,4,3> o 2 o 8").value == ComposedLayout(Swizzle(3, 4, 3), 2, Layout(8))
    assert evaluate("TV (4,2) on (4,2)").value == ThreadValue(Layout((4, 2)), (4, 2))


@generated
@given(any_layouts())
def test_a_layouts_text_reads_back(layout: Layout) -> None:
    assert evaluate(str(layout)).value == layout
    assert evaluate(f"coalesce( {layout} )").value == evaluate(f"coalesce({layout})").value


@generated
@given(swizzles(), st.integers(0, 99), any_layouts())
def test_a_swizzled_layouts_text_reads_back(swizzle: Swizzle, offset: int, layout: Layout) -> None:
    composed = ComposedLayout(swizzle, offset, layout)
    assert evaluate(str(composed)).value == composed


def steps_of(text: str) -> list[str]:
    """`text of the span: operation operands -> result` of every step."""
    return [
        f"{text[step.start : step.end]}: {' '.join([step.operation, *map(str, step.operands)])} -> {step.result}"
        for step in evaluate(text).steps
    ]


STEPS = [
    ("S<1,1,2> o 8:2", ["8:2: layout -> 8:2", "S<1,1,2> o 8:2: swizzle S<1,1,2> 0 8:2 -> S<1,1,2> o 0 o 8:2"]),
    ("TV (2,4) on (2,4)", ["(2,4): layout -> (2,4):(1,2)", "ALL: tv (2,4):(1,2) (2, 4) -> TV (2,4):(1,2) on (2,4)"]),
    ("complement(4:2)", ["4:2: layout -> 4:2", "ALL: complement 4:2 7 -> 2:1"]),
    ("coalesce((2,4))", ["(2,4): layout -> (2,4):(1,2)", "ALL: coalesce (2,4):(1,2) -> 8:1"]),
    (
        "divide(24:3, 4:2)",
        [
            "24:3: layout -> 24:3",
            "4:2: layout -> 4:2",
            "ALL: complement 4:2 24 -> (2,3):(1,8)",
            "ALL: concatenate 4:2 (2,3):(1,8) -> (4,(2,3)):(2,(1,8))",
            "ALL: compose 24:3 (4,(2,3)):(2,(1,8)) -> (4,(2,3)):(6,(3,24))",
        ],
    ),
    (
        "zipped_divide((4,6), (2))",
        [
            "(4,6): layout -> (4,6):(1,4)",
            "ALL: complement 2:1 4 -> 2:2",
            "ALL: concatenate 2:1 2:2 -> (2,2):(1,2)",
            "ALL: compose 4:1 (2,2):(1,2) -> (2,2):(1,2)",
            "ALL: concatenate (2,2):(1,2) 6:4 -> ((2,2),6):((1,2),4)",
            "ALL: regroup ((2,2),6):((1,2),4) -> ((2),(2,6)):((1),(2,4))",
        ],
    ),
    (
        "raked_product(4, 2:1)",
        [
            "4: layout -> 4:1",
            "2:1: layout -> 2:1",
            "ALL: complement (4):(1) 8 -> 2:4",
            "ALL: compose 2:4 (2):(1) -> (2):(4)",
            "ALL: concatenate (4):(1) (2):(4) -> ((4),(2)):((1),(4))",
            "ALL: regroup (2):(4) (4):(1) -> ((2,4)):((4,1))",
        ],
    ),
    (
        "tiled_divide(S<0,0,0> o 4, 2)",
        [
            "4: layout -> 4:1",
            "S<0,0,0> o 4: swizzle S<0,0,0> 0 4:1 -> S<0,0,0> o 0 o 4:1",
            "ALL: complement 2:1 4 -> 2:2",
            "ALL: concatenate 2:1 2:2 -> (2,2):(1,2)",
            "ALL: compose 4:1 (2,2):(1,2) -> (2,2):(1,2)",
            "ALL: swizzle S<0,0,0> 0 (2,2):(1,2) -> S<0,0,0> o 0 o (2,2):(1,2)",
        ],
    ),
]


@pytest.mark.parametrize("text, steps", STEPS)
def test_steps_show_the_definition(text: str, steps: list[str]) -> None:
    assert steps_of(text) == [step.replace("ALL", text) for step in steps]


@pytest.mark.parametrize("text, value", MEANINGS)
def test_the_last_step_is_the_value(text: str, value: str) -> None:
    assert str(evaluate(text).steps[-1].result) == value


END = "the end of the text"
OPERAND = "an integer or '('"
# the text, with the carets of the error below it, what was expected and what was found
SYNTAX_ERRORS = [
    ("", "^", "a layout or a function", END),
    ("  ", "  ^", "a layout or a function", END),
    ("(8", "  ^", "',' or ')'", END),
    ("(8,", "   ^", OPERAND, END),
    ("()", " ^", OPERAND, "')'"),
    ("(8,$)", "   ^", OPERAND, "'$'"),
    ("8 8", "  ^", "':' or the end of the text", "'8'"),
    ("8:1:2", "   ^", END, "':'"),
    ("8:-1", "  ^", OPERAND, "'-'"),
    ("(8,64):(64", "          ^", "',' or ')'", END),
    ("(0,2)", " ^", "a positive integer", "'0'"),
    ("((2,4):1,2):3", "           ^", END, "':'"),
    ("S", " ^", "'<'", END),
    ("S<3,4 o", "      ^", "','", "'o'"),
    ("S<3,4,3> (8,8)", "         ^", "'o'", "'('"),
    ("S<3,4,3> o", "          ^", OPERAND, END),
    ("S<-3,4,3> o 8", "  ^", "an integer", "'-'"),
    ("TV (4,8) (4,4)", "         ^", "'on'", "'('"),
    ("TV (4,8) on", "           ^", OPERAND, END),
    ("divide", "      ^", "'('", END),
    ("divide()", "       ^", "a layout or a function", "')'"),
    ("divide(8)", "        ^", "','", "')'"),
    ("divide(8,2,3)", "          ^", "')'", "','"),
    ("complement(8:1 4)", "               ^", "',' or ')'", "'4'"),
    ("layout", "^^^^^^", "a function", None),
    ("coalesce(foo(8))", "         ^^^", "a function", None),
    ("99999999999", "^^^^^^^^^^^", "an integer up to 2147483648", None),
    ("(" * 33, " " * 32 + "^", "at most 32 levels", None),
]


@pytest.mark.parametrize("text, carets, expected, found", SYNTAX_ERRORS)
def test_a_syntax_error_points_at_the_character(text: str, carets: str, expected: str, found: str | None) -> None:
    with pytest.raises(LayoutSyntaxError) as caught:
        parse(text)
    error = caught.value
    assert (error.position, error.expected) == (carets.index("^"), expected)
    assert str(error) == f"{error.message}\n  {text}\n  {carets}"
    if found is not None:
        assert error.message == f"expected {expected}, found {found}"


def test_the_carets_stand_below_the_line_of_the_error() -> None:
    with pytest.raises(LayoutSyntaxError) as caught:
        parse("(8,\n\t64):(64,x)")
    assert caught.value.position == 13
    assert str(caught.value).splitlines()[1:] == ["   64):(64,x)", "           ^"]
    with pytest.raises(LayoutSyntaxError, match=f"longer than {MAX_TEXT} characters") as caught:
        parse("(" + "8," * MAX_TEXT)
    assert max(map(len, str(caught.value).splitlines())) < 200


MEANING_ERRORS = [
    ("(2,3):(1,2,3)", "      ^^^^^^^", "stride (1,2,3) is not nested like shape (2,3)"),
    ("((2,3),4):(1,(2,3))", "           ^", "stride 1 is not nested like shape (2,3)"),
    ("(2:1,3)", "^^^^^^^", MESSAGES["tiler_alone"]),
    ("S<3,1,2> o 8", "^^^^^^^^", MESSAGES["swizzle"].format(swizzle="S<3,1,2>")),
    ("coalesce((2:1,3))", "         ^^^^^^^", "coalesce needs a layout here, given '(2:1,3)'"),
    ("complement(8,2:1)", "             ^^^", "complement needs an integer here, given '2:1'"),
    (
        "right_inverse(S<3,4,3> o 8)",
        "              ^^^^^^^^^^^^",
        "right_inverse needs a layout without a swizzle here, given 'S<3,4,3> o 8'",
    ),
    (
        "coalesce(compose((4,6):(1,10), 6:3))",
        "                               ^^^",
        "cannot compose (4,6):(1,10) with 6:3: stride 3 and extent 4 do not divide",
    ),
    ("divide(8, (2,4):(1,1))", "          ^^^^^^^^^^^", MESSAGES["overlap"].format(layout="(2,4):(1,1)")),
    ("product((2,4):(1,1), 2)", "        ^^^^^^^^^^^", MESSAGES["overlap"].format(layout="(2,4):(1,1)")),
    ("divide(8, (2,4))", "          ^^^^^", "a tiler of 2 modes needs a layout of at least as many, given 8:1"),
    ("left_inverse((3,2):(1,2))", "             ^^^^^^^^^^^", MESSAGES["repeats"].format(layout="(3,2):(1,2)")),
    ("TV (4,8,2) on (8,8)", "   ^^^^^^^", MESSAGES["tv_rank"].format(layout="(4,8,2):(1,4,32)")),
    ("TV (4,8) on 32", "            ^^", "a TV layout needs a shape of two extents, given 32"),
    ("TV (4,8) on (4,4)", "   ^^^^^", "(4,8):(1,4) reaches element 31, but shape (4,4) has 16"),
    ("(4096,4096)", "^^^^^^^^^^^", "(4096,4096):(1,4096) has more than 1048576 elements"),
    ("8:2147483648", "^^^^^^^^^^^^", "8:2147483648 reaches beyond offset 2147483648"),
    ("complement(8, 2147483648)", "^" * 25, "268435456:8 has more than 1048576 elements"),
    ("TV (4,8) on (4096,4096)", "            ^^^^^^^^^^^", "(4096,4096) has more than 1048576 elements"),
]


@pytest.mark.parametrize("text, carets, words", MEANING_ERRORS)
def test_an_error_of_meaning_points_at_the_argument(text: str, carets: str, words: str) -> None:
    with pytest.raises(LayoutTextError) as caught:
        evaluate(text)
    assert not isinstance(caught.value, LayoutSyntaxError)
    assert str(caught.value) == f"{words}\n  {text}\n  {carets}"


def test_nesting_is_bounded_for_calls_too() -> None:
    text = "coalesce(" * MAX_DEPTH + "8" + ")" * MAX_DEPTH
    assert str(evaluate(text).value) == "8:1"
    with pytest.raises(LayoutSyntaxError, match="nested deeper than 32"):
        evaluate(f"coalesce({text})")


words = st.sampled_from(
    [*FUNCTIONS, "S<2,1,3>", "o", "TV", "on", "(", "(", ")", ")", ",", ",", ":", "8", "2", "4", "?"]
)
texts = st.lists(words, max_size=14).map(" ".join) | st.text("()<>,:-So0123 TVon", max_size=30)


@settings(generated, max_examples=1000)
@given(texts)
def test_whatever_is_typed_an_error_stands_at_the_first_wrong_character(text: str) -> None:
    try:
        evaluate(text)
    except LayoutSyntaxError as error:
        assert 0 <= error.position <= len(text)
        try:
            parse(text[: error.position])
        except LayoutSyntaxError as cut:  # what comes before can be the beginning of a text
            assert cut.message.endswith("found the end of the text")
    except LayoutTextError as error:
        assert 0 <= error.position < error.position + error.length <= len(text)


def test_the_messages_are_plain_templates() -> None:
    assert all(re.fullmatch(r"(?:[^{}]|\{[a-z]+\})+", template) for template in MESSAGES.values())
    assert {kind for signature in FUNCTIONS.values() for kind in signature.kinds} == set(Kind)
