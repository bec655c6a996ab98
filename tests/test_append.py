"""Appending and rotating on the CPU: the operators, torch.compile, and every error before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cuteflash import append_kv, apply_rotary
from cuteflash.append_ops import append_kv_op, apply_rotary_op
from cuteflash.append_problem import AppendOptions
from cuteflash.nn.rotary import RotaryEmbedding
from cuteflash.validate_append import AppendInputs
from cuteflash.validate_append_values import check_append_values
from tests.appended import FP8, Call, append_by_hand, begins_of, random_call, tables, turn


def flat(call: Call) -> tuple[Any, ...]:
    """The arguments as the operator takes them."""
    arguments = {name: x for name, x in call.arguments.items() if name in AppendInputs._fields}
    return *AppendInputs(**arguments), *AppendOptions(**call.options)


def small(**changes: Any) -> dict[str, Any]:
    """The arguments of a valid call, some of them changed."""
    arguments: dict[str, Any] = {
        "k_cache": torch.zeros(3, 16, 2, 32),
        "v_cache": torch.zeros(3, 16, 2, 32),
        "k": torch.ones(3, 4, 2, 32),
        "v": torch.ones(3, 4, 2, 32),
        "cache_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32),
    }
    return arguments | changes


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(200, 320))
def test_random_calls_in_fp32_are_the_definition(seed: int) -> None:
    call = random_call(seed, (torch.float32,))
    k_cache, v_cache, q = append_by_hand(call)
    arguments = call.arguments
    found = append_kv(**arguments)
    for cache, right in ((arguments["k_cache"], k_cache), (arguments["v_cache"], v_cache)):
        torch.testing.assert_close(cache.float(), right.float(), rtol=0.13 if cache.dtype == FP8 else 1e-5, atol=2e-3)
        assert (cache == right).float().mean() > 0.9  # rows that nothing is written to, above all
    assert (q is None) == (found is None)
    if q is not None:
        torch.testing.assert_close(found, q, equal_nan=True)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1, 2, 3])
def test_opcheck(seed: int) -> None:
    call = random_call(seed)
    for name in {"k", "v", "q"} & set(call.tensors):
        call.tensors[name] = call.tensors[name].nan_to_num()  # opcheck compares
    torch.library.opcheck(append_kv_op, flat(call))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck_of_the_rotation(needs_grad: bool) -> None:
    cos, sin = tables(16, 32).values()
    x = torch.randn(2, 5, 3, 48, requires_grad=needs_grad)
    torch.library.opcheck(apply_rotary_op, (x, cos, sin))
    packed = torch.randn(7, 3, 48, requires_grad=needs_grad)
    torch.library.opcheck(apply_rotary_op, (packed, cos, sin, ints(1, 4), ints(0, 3, 7), True, 0, True))


def test_the_schema_says_which_tensors_are_written() -> None:
    written = [x.name for x in append_kv_op._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    assert written == ["k_cache", "v_cache"]
    assert not any(x.alias_info for x in apply_rotary_op._schema.arguments)


def test_autograd_knows_of_the_write() -> None:
    arguments = small()
    weight = torch.ones(3, 16, 2, 32, requires_grad=True)
    loss = (weight * arguments["k_cache"]).sum()
    append_kv(**arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mapped", ["k_cache", "k", "cache_seqlens"])
def test_vmap_is_refused_by_name(mapped: str) -> None:
    arguments = small()
    twice = torch.stack([arguments[mapped]] * 2)
    with pytest.raises(NotImplementedError, match=f"^{mapped} is mapped by torch.vmap"):
        torch.vmap(lambda x: append_kv(**(arguments | {mapped: x})))(twice)
    assert not bool(arguments["k_cache"].any())


@pytest.mark.filterwarnings("error")
def test_vmap_of_a_rotation() -> None:
    x, cos, sin = torch.randn(2, 3, 4, 2, 32), torch.randn(16, 8), torch.randn(16, 8)
    found = torch.vmap(lambda x, cos: apply_rotary(x, cos, sin))(x, torch.stack([cos, -cos]))
    for i, table in enumerate((cos, -cos)):
        assert torch.equal(found[i], apply_rotary(x[i], table, sin))


def test_caches_of_inference_mode() -> None:
    with torch.inference_mode():
        arguments = small()
        append_kv(**arguments)
    assert bool((arguments["k_cache"][1, 5:9] == 1).all())


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(dynamic: bool) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, seqlens: Tensor) -> Tensor:
        cos, sin = table["rotary_cos"], table["rotary_sin"]
        rotated = append_kv(k_cache, v_cache, k, v, seqlens, q=q, rotary_cos=cos, rotary_sin=sin)
        return rotated + apply_rotary(q, cos, sin, seqlen_offsets=seqlens) + k_cache.sum()

    table = tables(16, 32)
    for batch in (2, 3):
        arguments = small(**{x: torch.randn(batch, 4, 2, 32) for x in "kv"}, cache_seqlens=ints(*range(batch)))
        q = torch.randn(batch, 4, 4, 32)
        other = {name: x.clone() for name, x in arguments.items()}
        found = step(q, *arguments.values())
        right = append_kv(**other, q=q, **table)
        torch.testing.assert_close(found, 2 * right + other["k_cache"].sum(), atol=1e-4, rtol=1e-4)
        assert torch.equal(arguments["k_cache"], other["k_cache"])
        assert torch.equal(arguments["v_cache"], other["v_cache"])


def test_fake_results_have_the_shapes_and_strides_of_real_ones() -> None:
    for seed in range(8):
        call = random_call(seed)
        arguments = flat(call)
        real = append_kv_op(*arguments)
        with FakeTensorMode() as mode:
            fakes = (mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments)
            fake = append_kv_op(*fakes)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_one_int_stands_for_all_lengths() -> None:
    arguments = small(cache_seqlens=7)
    append_kv(**arguments)
    assert bool((arguments["v_cache"][:, 7:11] == 1).all()) and arguments["v_cache"].sum() == 3 * 4 * 2 * 32
    packed = small(cache_seqlens=7, k=torch.ones(4, 2, 32), v=torch.ones(4, 2, 32), cu_seqlens_k_new=ints(0, 1, 4))
    append_kv(**packed)
    assert packed["k_cache"].sum() == 4 * 2 * 32


@pytest.mark.parametrize("size", [{"batch": 0}, {"tokens": 0}, {"heads": 0}])
def test_nothing_to_append(size: dict[str, int]) -> None:
    batch, tokens, heads = (size.get(x, y) for x, y in (("batch", 3), ("tokens", 4), ("heads", 2)))
    k = torch.ones(batch, tokens, heads, 32)
    cache = torch.zeros(3, 16, heads, 32)
    q = torch.ones(batch, tokens, 2 * heads, 32)
    found = append_kv(cache, cache.clone(), k, k, ints(*[0] * batch), q=q, **tables(16, 32))
    assert found.shape == q.shape and not cache.any()
    assert apply_rotary(k, *tables(16, 32).values()).shape == k.shape


def test_a_rotation_of_the_rotation_by_the_negative_angle_is_none() -> None:
    x = torch.randn(2, 9, 3, 64, dtype=torch.float64, requires_grad=True)
    cos, sin = (table.double() for table in tables(32, 48).values())
    turned = apply_rotary(x, cos, sin, seqlen_offsets=ints(3, 11), interleaved=True)
    torch.testing.assert_close(apply_rotary(turned, cos, -sin, seqlen_offsets=ints(3, 11), interleaved=True), x)
    few = torch.randn(1, 2, 1, 56, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, cos, sin, seqlen_offsets=1), few)


def test_rotation_is_that_of_the_module() -> None:
    rotary = RotaryEmbedding(32, interleaved=True)
    q, k = torch.randn(2, 7, 4, 48), torch.randn(2, 7, 2, 48)
    cos, sin = rotary.cos_sin(torch.arange(7))
    right = rotary(q, k)
    for x, expected in zip((q, k), right, strict=True):
        torch.testing.assert_close(apply_rotary(x, cos, sin, interleaved=True), expected)


def test_tokens_after_the_last_packed_sequence_stay_as_they_are() -> None:
    x = torch.randn(9, 2, 32)
    cos, sin = tables(16, 32).values()
    found = apply_rotary(x, cos, sin, cu_seqlens=ints(0, 2, 6), seqlen_offsets=ints(9, 3), max_seqlen=16)
    right = x.clone()
    for b, i, at in begins_of(x, ints(0, 2, 6)):
        right[at] = turn(x[at], cos[(9, 3)[b] + i], sin[(9, 3)[b] + i], False)
    torch.testing.assert_close(found, right)


PAGED = {"k_cache": torch.zeros(8, 4, 2, 32), "v_cache": torch.zeros(8, 4, 2, 32)}
PACKED = {"k": torch.ones(5, 2, 32), "v": torch.ones(5, 2, 32)}
QUANTISED = {"k_cache": torch.zeros(3, 16, 2, 32).to(FP8), "v_cache": torch.zeros(3, 16, 2, 32).to(FP8)}
SCALES = {"k_descale": torch.ones(3, 2), "v_descale": torch.ones(3, 2)}
ROTARY = tables(16, 32)
Q = {"q": torch.ones(3, 4, 4, 32)}
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k_cache": None}, TypeError, "k_cache is a NoneType"),
    ({"page_table": 3}, TypeError, "page_table is a int"),
    ({"cache_seqlens": 1.5}, TypeError, "cache_seqlens is a float"),
    ({"cache_seqlens": -1}, ValueError, "cache_seqlens is -1; allowed: 0 or more"),
    ({"rotary_interleaved": 2}, TypeError, "rotary_interleaved is 2"),
    ({"fixed_q": None}, TypeError, "fixed_q is None"),
    ({"k_cache": torch.zeros(3, 16, 2, 32, dtype=torch.int8)}, TypeError, "k_cache.dtype is torch.int8"),
    (
        {"v_cache": torch.zeros(3, 16, 2, 32).half()},
        TypeError,
        "v_cache.dtype is torch.float16; allowed: torch.float32",
    ),
    ({"v": torch.ones(3, 4, 2, 32).half()}, TypeError, "v.dtype is torch.float16"),
    ({"k": torch.ones(3, 4, 2, 32).half()}, TypeError, "k.dtype is torch.float16"),
    ({"k_cache": torch.zeros(16, 2, 32)}, ValueError, "k_cache has 3 dimensions"),
    ({"v_cache": torch.zeros(3, 15, 2, 32)}, ValueError, r"v_cache.shape\[1\] is 15; allowed: 16"),
    ({"k_cache": torch.zeros(1, 16, 2, 32).expand(3, -1, -1, -1)}, ValueError, r"k_cache.stride\(0\) is 0"),
    ({"k_cache": torch.zeros(3, 16, 2, 33)[..., :32]}, ValueError, r"k_cache.stride\(1\) is 66"),
    ({"k": torch.ones(3, 4, 1, 32)}, ValueError, r"k.shape\[2\] is 1; allowed: 2, that of k_cache"),
    ({"v": torch.ones(3, 5, 2, 32)}, ValueError, r"v.shape\[1\] is 5; allowed: 4, that of k"),
    ({"k": torch.ones(3, 4, 2, 40)}, ValueError, r"k.shape\[3\] is 40; allowed: 32"),
    ({"k": torch.ones(3, 17, 2, 32), "v": torch.ones(3, 17, 2, 32)}, ValueError, "k has 17 tokens; allowed: up to 16"),
    ({"cache_seqlens": ints(1, 2)}, ValueError, r"cache_seqlens.shape is \(2,\); allowed: \(3,\)"),
    ({"cache_seqlens": ints(1, 2, 3).long()}, TypeError, "cache_seqlens.dtype is torch.int64"),
    ({"cache_seqlens": ints(0, 5, 12).to("meta")}, ValueError, "cache_seqlens.device is meta"),
    ({"cache_seqlens": ints(0, 13, 1)}, ValueError, r"cache_seqlens\[1\] is 13; allowed: 0 to 12"),
    ({"cache_seqlens": ints(0, -1, 1)}, ValueError, r"cache_seqlens\[1\] is -1"),
    (
        {"k_cache": torch.zeros(2, 16, 2, 32), "v_cache": torch.zeros(2, 16, 2, 32)},
        ValueError,
        "is 2; allowed: 3 or more",
    ),
    ({"cache_batch_idx": ints(0, 1, 3)}, ValueError, r"cache_batch_idx\[2\] is 3; allowed: 0 to 2"),
    ({"cache_batch_idx": ints(0, 1, 0)}, ValueError, r"cache_batch_idx\[2\] is 0, that of sequence 0"),
    ({"cache_batch_idx": ints(0, 1)}, ValueError, "cache_batch_idx.shape is"),
    (PACKED | {"cu_seqlens_k_new": ints(0, 2, 1, 5)}, ValueError, r"cu_seqlens_k_new\[2\] is 1, the end of sequence 1"),
    (PACKED | {"cu_seqlens_k_new": ints(0, 2, 4, 6)}, ValueError, r"cu_seqlens_k_new\[3\] is 6"),
    (PACKED | {"cu_seqlens_k_new": ints(1, 2, 4, 5)}, ValueError, r"cu_seqlens_k_new\[0\] is 1"),
    ({"cu_seqlens_k_new": ints(0, 2, 4, 6)}, ValueError, "k has 4 dimensions"),
    (PAGED | {"page_table": ints([0, 1, 2, 3], [4, 5, 6, 9], [7, 7, 7, 8])}, ValueError, r"page_table\[2, 3\] is 8"),
    (PAGED | {"page_table": ints([0], [1], [2]).long()}, TypeError, "page_table.dtype is torch.int64"),
    (PAGED | {"page_table": ints([0], [1])}, ValueError, r"page_table.shape\[0\] is 2; allowed: 3 or more"),
    (PAGED | {"page_table": ints(0, 1, 2)}, ValueError, r"page_table.shape is \(3,\); allowed: \(batch,"),
    (
        PAGED | {"page_table": ints([0, 1, 2, 3], [4, 5, 6, 7]), "cache_batch_idx": ints(0, 1, 2)},
        ValueError,
        r"cache_batch_idx\[2\] is 2; allowed: 0 to 1, an entry of page_table",
    ),
    ({x: torch.zeros(8, 0, 2, 32) for x in PAGED} | {"page_table": ints([0], [1], [2])}, ValueError, "page_size"),
    (QUANTISED, ValueError, "k_descale is None; allowed with caches"),
    (SCALES, ValueError, "k_descale is given with caches of torch.float32"),
    (QUANTISED | SCALES | {"v_descale": torch.ones(2, 2)}, ValueError, r"v_descale.shape is \(2, 2\)"),
    (QUANTISED | SCALES | {"v_descale": torch.ones(3, 2).half()}, TypeError, "v_descale.dtype"),
    (QUANTISED | SCALES | {"v_descale": torch.zeros(3, 2)}, ValueError, r"v_descale\[0, 0\] is 0.0"),
    ({"rotary_cos": ROTARY["rotary_cos"]}, ValueError, "rotary_sin is None"),
    (ROTARY | {"rotary_sin": torch.ones(16, 8)}, ValueError, r"rotary_sin.shape is \(16, 8\)"),
    ({x: torch.ones(16, 20) for x in ROTARY}, ValueError, r"rotary_cos.shape is \(16, 20\)"),
    ({x: torch.ones(16, 4) for x in ROTARY}, ValueError, r"rotary_cos.shape is \(16, 4\)"),
    ({x: torch.ones(16, 16).half() for x in ROTARY}, TypeError, "rotary_cos.dtype is torch.float16"),
    ({x: torch.ones(3, 16) for x in ROTARY}, ValueError, r"rotary_cos.shape\[0\] is 3; allowed: 4 or more"),
    ({x: torch.ones(15, 16) for x in ROTARY}, ValueError, r"cache_seqlens\[2\] is 12; allowed: 0 to 11"),
    (ROTARY | {"rotary_seqlens": ints(1, 2, 13)}, ValueError, r"rotary_seqlens\[2\] is 13"),
    ({"rotary_seqlens": ints(1, 2, 3)}, ValueError, "rotary_seqlens is given without rotary_cos"),
    (Q, ValueError, "q is given without rotary_cos"),
    (ROTARY | {"cu_seqlens_q": ints(0, 1, 2, 3)}, ValueError, "cu_seqlens_q is given without q"),
    (ROTARY | {"q": torch.ones(2, 4, 4, 32)}, ValueError, "q has a batch of 2; allowed: 3"),
    (ROTARY | {"q": torch.ones(3, 4, 4, 40)}, ValueError, r"q.shape\[3\] is 40; allowed: 32"),
    (ROTARY | {"q": torch.ones(3, 4, 4, 32).half()}, TypeError, "q.dtype is torch.float16"),
    (ROTARY | {"q": torch.ones(3, 6, 4, 32)}, ValueError, r"cache_seqlens\[2\] is 12; allowed: 0 to 10"),
    (ROTARY | {"q": torch.ones(3, 17, 4, 32)}, ValueError, r"rotary_cos.shape\[0\] is 16; allowed: 17 or more"),
    ({"k_cache": torch.zeros(3, 16, 2, 32, requires_grad=True)}, ValueError, "k_cache requires grad"),
    ({"v": torch.ones(3, 4, 2, 32, requires_grad=True)}, ValueError, "v requires grad"),
    ({"k": torch.ones(3 * 4 * 2 * 32 + 1)[1:].view(3, 4, 2, 32)}, ValueError, r"k.data_ptr\(\) is"),
]


@pytest.mark.parametrize(("changes", "kind", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_errors_name_the_argument_and_leave_the_caches_alone(
    changes: dict[str, Any], kind: type[Exception], words: str
) -> None:
    arguments = small(**changes)
    before = {name: x.detach().clone() for name, x in arguments.items() if "cache" in name and torch.is_tensor(x)}
    with pytest.raises(kind, match=words):
        append_kv(**arguments)
    for name, x in before.items():
        if x.device.type == "cpu":
            assert torch.equal(x.float(), arguments[name].float())


def test_values_of_a_gpu_call_are_checked_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuteflash import append_ops

    monkeypatch.setattr(append_ops, "append_launch", lambda *_, counts: lambda _: None)
    monkeypatch.setattr(append_ops, "known_appends", append_ops.Known())
    inputs = AppendInputs(**small(cache_seqlens=ints(0, 13, 1)))
    append_ops.append_now(inputs, AppendOptions())
    monkeypatch.setenv("CUTEFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 13"):
        append_ops.append_now(inputs, AppendOptions())


def test_pages_that_are_not_written_may_have_any_number() -> None:
    table = ints([0, -7, 99, 99], [-1, 4, 5, 99], [-1, -1, -1, 7])
    inputs = AppendInputs(**small(**PAGED, page_table=table))
    check_append_values(inputs, AppendOptions())


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"x": None}, TypeError, "x is a NoneType"),
        ({"seqlen_offsets": 1.0}, TypeError, "seqlen_offsets is 1.0"),
        ({"seqlen_offsets": -1}, ValueError, "seqlen_offsets is -1"),
        ({"seqlen_offsets": 13}, ValueError, r"cos.shape\[0\] is 16; allowed: 17 or more"),
        ({"seqlen_offsets": ints(1, 13)}, ValueError, r"seqlen_offsets\[1\] is 13; allowed: 0 to 12"),
        ({"seqlen_offsets": ints(1)}, ValueError, "seqlen_offsets.shape is"),
        ({"x": torch.ones(2, 4, 3, 36)}, ValueError, r"x.shape\[3\] \(head_dim\) is 36"),
        ({"x": torch.ones(2, 4, 3, 24)}, ValueError, "cos.shape is"),
        ({"x": torch.ones(2, 4, 3, 32, dtype=torch.int32)}, TypeError, "x.dtype is torch.int32"),
        ({"cu_seqlens": ints(0, 2)}, ValueError, "x has 4 dimensions"),
        ({"x": torch.ones(4, 3, 32), "cu_seqlens": ints(0, 5)}, ValueError, r"cu_seqlens\[1\] is 5"),
        (
            {"x": torch.ones(4, 3, 32), "cu_seqlens": ints(0, 4), "max_seqlen": 17},
            ValueError,
            "positions of max_seqlen",
        ),
        ({"max_seqlen": 1.5}, TypeError, "max_seqlen is 1.5"),
        ({"fixed": 1}, TypeError, "fixed is 1"),
        ({"cos": torch.ones(16, 16, requires_grad=True)}, ValueError, "cos requires grad"),
    ],
)
def test_errors_of_a_rotation(changes: dict[str, Any], kind: type[Exception], words: str) -> None:
    cos, sin = tables(16, 32).values()
    with pytest.raises(kind, match=words):
        apply_rotary(**({"x": torch.ones(2, 4, 3, 32), "cos": cos, "sin": sin} | changes))


def test_all_tokens_may_have_the_position_of_the_first() -> None:
    cos, sin = tables(16, 32).values()
    x = torch.randn(2, 30, 3, 32)
    found = apply_rotary(x, cos, sin, seqlen_offsets=ints(15, 2), fixed=True)
    right = torch.stack([turn(row, cos[p], sin[p], False) for p, rows in zip((15, 2), x) for row in rows])
    torch.testing.assert_close(found, right.view_as(x))
