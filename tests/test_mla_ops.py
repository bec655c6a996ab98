"""Decoding of latent attention: what the operator and the functions compute on a CPU, and which input is refused."""

from __future__ import annotations

import contextlib
import math
import pathlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cuteflash import append_latents, flash_attn_func, flash_mla_decode, mla_ops

MLA = torch.ops.cuteflash.mla_decode.default
PAGE, CAPACITY = 64, 192
LENGTHS = (65, 0, 1, 192, 64)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def built(
    is_paged: bool = True, lengths: tuple[int, ...] = LENGTHS, seqlen_q: int = 3, heads: int = 5, **kind: Any
) -> dict[str, Any]:
    """The operator's tensors by name: what no query may see is NaN, and table entries for it are no pages."""
    generator = torch.Generator().manual_seed(0)
    batch, slots = len(lengths), CAPACITY // PAGE
    q = torch.randn(batch, seqlen_q, heads, 576, generator=generator)
    rows = torch.randn(batch, CAPACITY, 1, 576, generator=generator)
    for i, length in enumerate(lengths):
        rows[i, length:] = torch.nan
    used = int32(*lengths)
    if not is_paged:
        return {"q": q.to(**kind), "kv_cache": rows.to(**kind), "cache_seqlens": used, "page_table": None}
    places = torch.randperm(batch * slots + 3, generator=generator)[: batch * slots].view(batch, slots).int()
    pages = torch.full((batch * slots + 3, PAGE, 1, 576), torch.nan)
    pages[places.flatten().long()] = rows.view(-1, PAGE, 1, 576)
    for i, length in enumerate(lengths):
        places[i, -(-length // PAGE) :] = -123456
    return {"q": q.to(**kind), "kv_cache": pages.to(**kind), "cache_seqlens": used, "page_table": places}


def definition(q: Tensor, rows: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """O (seqlen_q, heads, 512) and LSE (heads, seqlen_q) of one sequence, rows (length, 576), in fp64."""
    q, rows = q.double(), rows.double()
    scores = torch.einsum("shd,td->hst", q, rows) * scale
    if causal:
        query, key = torch.arange(len(q))[:, None], torch.arange(len(rows))
        scores = scores.masked_fill(key > query + len(rows) - len(q), -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0)
    return torch.einsum("hst,td->shd", weights, rows[:, :512]), lse


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.07])
def test_each_sequence_is_the_definition(is_paged: bool, causal: bool, scale: float | None) -> None:
    tensors, dense = built(is_paged), built(False)
    out, lse = MLA(*tensors.values(), softmax_scale=scale, causal=causal)
    for i, length in enumerate(LENGTHS):
        rows = dense["kv_cache"][i, :length, 0]
        expected = definition(tensors["q"][i], rows, 576**-0.5 if scale is None else scale, causal)
        torch.testing.assert_close((out[i].double(), lse[i].double()), expected, atol=1e-5, rtol=1e-5)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    assert not causal or (lse[2, :, :2] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_element_types(dtype: torch.dtype) -> None:
    tensors, exact = built(dtype=dtype), built()
    out, lse = MLA(*tensors.values())
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.float(), MLA(*exact.values())[0], atol=0.03, rtol=0.03)


def test_pages_of_several_times_64_rows() -> None:
    q, cache, lengths, table = built().values()
    places = torch.arange(10, dtype=torch.int32).view(5, 2)  # two pages of 128 rows each
    wide = torch.full((10, 2 * PAGE, 1, 576), math.nan)
    for i, length in enumerate(LENGTHS):
        for slot in range(-(-length // PAGE)):
            page, half = divmod(slot, 2)
            wide[2 * i + page, half * PAGE : (half + 1) * PAGE] = cache[table[i, slot]]
    for found, expected in zip(MLA(q, wide, lengths, places), MLA(q, cache, lengths, table), strict=True):
        assert torch.equal(found, expected)


def test_the_function_is_the_operator() -> None:
    tensors = built()
    q, cache, lengths, table = tensors.values()
    expected = MLA(q, cache, lengths, table, 512, 0.3, True, 4)
    named = {"page_table": table, "softmax_scale": 0.3, "causal": True, "num_splits": 4}
    out, lse = flash_mla_decode(q, cache, lengths, **named, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(flash_mla_decode(q, cache, cache_seqlens=lengths, **named), expected[0])


def test_lengths_may_be_one_number_or_the_whole_cache() -> None:
    q, cache, _, _ = built(False, lengths=(192, 192)).values()
    assert torch.equal(flash_mla_decode(q, cache, 70), flash_mla_decode(q, cache, int32(70, 70)))
    assert torch.equal(flash_mla_decode(q, cache), flash_mla_decode(q, cache, int32(192, 192)))


def test_strides() -> None:
    q, cache, lengths, table = built().values()
    expected = MLA(q, cache, lengths, table)
    wide = torch.zeros(*cache.shape[:2], 1, 640)
    wide[..., :576] = cache
    many = torch.cat((q, q), dim=2).transpose(1, 2).contiguous().transpose(1, 2)[:, :, :5]
    for given in ((many, wide[..., :576]), (q.flip(1).flip(1), cache.unsqueeze(3)[:, :, :, 0])):
        torch.testing.assert_close(MLA(*given, lengths, table), expected)


@pytest.mark.parametrize("change", [{"q": (0, 3, 5, 576)}, {"q": (5, 0, 5, 576)}, {"q": (5, 3, 0, 576)}], ids=str)
def test_nothing_to_compute(change: dict[str, Any]) -> None:
    _, cache, lengths, table = built().values()
    q = torch.empty(change["q"])
    out, lse = MLA(q, cache, lengths[: len(q)], table[: len(q)])
    assert out.shape == (*q.shape[:3], 512) and lse.shape == (q.shape[0], q.shape[2], q.shape[1])


def test_a_table_without_pages() -> None:
    q, cache, lengths, table = built().values()
    out, lse = MLA(q, cache, lengths * 0, table[:, :0])
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("is_paged", [False, True])
def test_opcheck(is_paged: bool) -> None:
    torch.library.opcheck(MLA, tuple(built(is_paged).values()))


def test_the_schema() -> None:
    assert str(MLA._schema) == (
        "cuteflash::mla_decode(Tensor q, Tensor kv_cache, Tensor cache_seqlens, Tensor? page_table=None, "
        "int head_dim_v=512, float? softmax_scale=None, bool causal=False, int num_splits=0, "
        "str? family=None, Tensor? descale=None) -> (Tensor, Tensor)"
    )


@pytest.mark.slow
def test_compiling_makes_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()

    def step(q: Tensor, cache: Tensor, lengths: Tensor, table: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        append_latents(cache, row, lengths, page_table=table)
        return flash_mla_decode(q, cache, lengths + 1, page_table=table, causal=True, return_lse=True)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((3, 64, 190, 0), (100, 63), (5,) * 7):
            tensors = built(lengths=tuple(length + 1 for length in lengths), seqlen_q=1)
            tensors["cache_seqlens"] = int32(*lengths)
            row = torch.randn(len(lengths), 1, 576)
            mine = {**tensors, "kv_cache": tensors["kv_cache"].clone()}
            for got, expected in zip(compiled(*mine.values(), row), step(*tensors.values(), row), strict=True):
                torch.testing.assert_close(got, expected)
            torch.testing.assert_close(mine["kv_cache"], tensors["kv_cache"], equal_nan=True)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_results_look_like_real_ones(device: str, is_paged: bool) -> None:
    tensors = built(is_paged, dtype=torch.bfloat16)
    real = MLA(*tensors.values())
    with FakeTensorMode() if device != "meta" else contextlib.nullcontext():
        made = [x if x is None else torch.empty(x.shape, dtype=x.dtype, device=device) for x in tensors.values()]
        fake = MLA(*made)
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]
    assert fake[0].device.type == device


def test_gradients_and_tangents_are_refused_by_name() -> None:
    tensors = built()
    leaf = tensors["q"].clone().requires_grad_()
    others = list(tensors.values())[1:]
    for call in (lambda: MLA(leaf, *others), lambda: flash_mla_decode(leaf, *others[:2], page_table=others[2])):
        with pytest.raises(
            NotImplementedError, match=r"q.requires_grad is True; cuteflash has no gradient of torch.ops"
        ):
            call()
        with torch.no_grad():
            call()
    with pytest.raises(NotImplementedError, match="q has a tangent"):
        torch.func.jvp(lambda x: MLA(x, *others)[0], (tensors["q"],), (tensors["q"],))


def test_transforms() -> None:
    tensors = built()
    others = list(tensors.values())[1:]
    both = torch.stack([tensors["q"], -tensors["q"]])
    out, lse = torch.vmap(MLA, in_dims=(0, None, None, None))(both, *others)
    for i in range(2):
        expected = MLA(both[i], *others)
        assert torch.equal(out[i], expected[0]) and torch.equal(lse[i], expected[1])
    with torch.autocast("cpu", torch.bfloat16):
        assert MLA(*tensors.values())[0].dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        MLA(*tensors.values())
    assert counter.get_total_flops() == 2 * 5 * 3 * 5 * CAPACITY * (576 + 512)


# What is refused, with the same words for CPU, fake and CUDA tensors.


def change_of(tensors: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return tensors | {name: make(tensors[name]) if callable(make) else make for name, make in change.items()}


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q rank": ({"q": lambda q: q[0]}, ValueError, r"q has 3 dimensions, .*allowed: 4, \(batch, seqlen, heads, head_d"),
    "cache rank": ({"kv_cache": lambda x: x[0]}, ValueError, r"kv_cache has 3 dimensions.*\(num_pages, page_size, kv"),
    "q width": (
        {"q": lambda q: q[..., :512]},
        ValueError,
        r"q.shape\[3\] \(head_dim\) is 512; allowed: 576, 512 columns of the latent and 64 with rotary positions",
    ),
    "cache width": ({"kv_cache": lambda x: x[..., :568]}, ValueError, r"kv_cache.shape\[3\] .* is 568; allowed: 576"),
    "kv heads": ({"kv_cache": lambda x: x.expand(-1, -1, 2, -1)}, ValueError, r"kv_cache.shape\[2\] .* is 2; allowed"),
    "heads": ({"q": lambda q: q[:, :, :1].expand(-1, -1, 129, -1)}, ValueError, r"q.shape\[2\] .* is 129; allowed: u"),
    "page size": (
        {"kv_cache": lambda x: x[:, :16]},
        ValueError,
        r"kv_cache.shape\[1\] \(page_size\) is 16; allowed: multiples of 64",
    ),
    "q dtype": ({"q": lambda q: q.int()}, TypeError, "q.dtype is torch.int32; allowed on cpu: "),
    "fp8": ({"kv_cache": lambda x: x.to(torch.float8_e4m3fn)}, ValueError, "descale is None; allowed with a kv_cache"),
    "dtype": ({"kv_cache": lambda x: x.half()}, TypeError, "kv_cache.dtype is torch.float16; allowed: torch.float32,"),
    "device": ({"kv_cache": lambda x: x.to("meta")}, ValueError, "kv_cache.device is meta; allowed: cpu, that of q"),
    "row stride": ({"q": lambda q: q.mT.contiguous().mT}, ValueError, r"q.stride\(3\) is 5; allowed: 1"),
    "lengths dtype": ({"cache_seqlens": lambda x: x.long()}, TypeError, "cache_seqlens.dtype is torch.int64; allowed"),
    "lengths": ({"cache_seqlens": lambda x: x[1:]}, ValueError, r"cache_seqlens.shape is \(4,\); allowed: \(5,\), th"),
    "table dtype": ({"page_table": lambda x: x.long()}, TypeError, "page_table.dtype is torch.int64; allowed: torch."),
    "table rank": ({"page_table": lambda x: x[0]}, ValueError, "page_table has 1 dimensions, .* allowed: 2, .batch, "),
    "table batch": ({"page_table": lambda x: x[1:]}, ValueError, r"page_table.shape\[0\] is 4; allowed: 5, the batch"),
    "table stride": ({"page_table": lambda x: x.T.contiguous().T}, ValueError, r"page_table.stride\(1\) is 5; allowe"),
    "batch": ({"page_table": None, "kv_cache": lambda x: x[:3]}, ValueError, r"kv_cache.shape\[0\] is 3; allowed: 5,"),
    "too long": ({"cache_seqlens": int32(1, 193, 0, 0, 0)}, ValueError, r"cache_seqlens\[1\] is 193; allowed: 0 to 1"),
    "negative": ({"cache_seqlens": int32(-1, 0, 0, 0, 0)}, ValueError, r"cache_seqlens\[0\] is -1; allowed: 0 to 192"),
    "page": (
        {"cache_seqlens": int32(65, 1, 1, 0, 0)},
        ValueError,
        r"page_table\[1, 0\] is -123456, a page of sequence 1; allowed: 0 to 17",
    ),
    "address": (
        {"q": lambda q: torch.zeros(q.numel() + 1)[1:].view(q.shape)},
        ValueError,
        r"q.data_ptr\(\) is .*; allowed: multiples of 16 bytes",
    ),
}  # fmt: skip
BAD_OPTIONS: dict[str, tuple[Any, str]] = {
    "head_dim_v": (256, "head_dim_v is 256; allowed: 512"),
    "softmax_scale": (0.0, "softmax_scale is 0.0; allowed: None or a positive number"),
    "num_splits": (-1, r"num_splits is -1; allowed: 0 \(a heuristic\)"),
    "family": ("sm70", "family is 'sm70'; allowed: None, 'sm80', 'sm90'"),
}


@pytest.mark.parametrize("case", BAD)
def test_tensors_that_are_refused(case: str) -> None:
    change, error, message = BAD[case]
    with pytest.raises(error, match=message):
        MLA(*change_of(built(), change).values())


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_are_refused(name: str) -> None:
    value, message = BAD_OPTIONS[name]
    q, cache, lengths, table = built().values()
    for call in (lambda: MLA(q, cache, lengths, table, **{name: value}),
                 lambda: flash_mla_decode(q, cache, lengths, page_table=table, **{name: value})):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [1]}, TypeError, "q is a list; allowed: a torch.Tensor"),
        ({"kv_cache": None}, TypeError, "kv_cache is a NoneType; allowed: a torch.Tensor"),
        ({"page_table": [[0]]}, TypeError, "page_table is a list; allowed: a torch.Tensor"),
        ({"cache_seqlens": 2.5}, TypeError, "cache_seqlens is 2.5; allowed: None, an int, a torch.Tensor"),
        ({"cache_seqlens": 193}, ValueError, "cache_seqlens is 193; allowed: 0 to 192, the rows of a sequence's cache"),
        ({"head_dim_v": 512.0}, TypeError, "head_dim_v is 512.0; allowed: 512"),
        ({"causal": 1}, TypeError, "causal is 1; allowed: True, False"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale is '1', a str; allowed: None or a positive"),
        ({"num_splits": None}, TypeError, "num_splits is None; allowed: 0"),
        ({"family": 80}, TypeError, "family is 80; allowed: None, 'sm80', 'sm90'"),
        ({"return_lse": 0}, TypeError, "return_lse is 0; allowed: True, False"),
    ],
    ids=str,
)
def test_what_the_function_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_mla_decode(**(built() | change))


# Appending.


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_appended_in_place(is_paged: bool, dtype: torch.dtype) -> None:
    tensors = built(is_paged, lengths=(63, 0, 1), dtype=dtype)
    cache, table = tensors["kv_cache"], tensors["page_table"]
    if is_paged:
        table = tensors["page_table"] = torch.arange(9, dtype=torch.int32).flip(0).view(3, 3)
    before, begins = cache.clone(), int32(63, 0, 1)
    rows = torch.randn(3, 4, 576).to(dtype)
    append_latents(cache, rows, begins, page_table=table)
    for i, begin in enumerate((63, 0, 1)):
        for j in range(4):
            at = divmod(begin + j, PAGE)
            entry = (i, begin + j) if table is None else (int(table[i, at[0]]), at[1])
            assert torch.equal(cache[entry][0], rows[i, j])
            before[entry] = cache[entry]
    torch.testing.assert_close(cache, before, equal_nan=True, rtol=0, atol=0)
    again = cache.clone()
    append_latents(again, rows[:, :, None], begins, page_table=table)
    torch.testing.assert_close(cache, again, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": None}, TypeError, "rows is a NoneType; allowed: a torch.Tensor"),
        ({"rows": torch.zeros(5, 1, 512)}, ValueError, r"rows.shape is \(5, 1, 1, 512\); allowed: \(.., .., 1, 576\)"),
        (
            {"kv_cache": torch.zeros(5, 9, 576)},
            ValueError,
            r"kv_cache.shape is \(5, 9, 576\); allowed: \(.., .., 1, 576",
        ),
        (
            {"rows": torch.zeros(5, 1, 576).half()},
            TypeError,
            "rows.dtype is torch.float16; allowed: torch.float32, that",
        ),
        (
            {"rows": torch.zeros(5, 1, 576, requires_grad=True)},
            ValueError,
            "rows requires grad; allowed: tensors that do",
        ),
        ({"rows": torch.zeros(4, 1, 576)}, ValueError, "allowed"),
        ({"cache_seqlens": int32(1, 2, 3, 192, 4)}, ValueError, "allowed"),
    ],
    ids=str,
)
def test_what_appending_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = built(False)
    given.pop("q")
    before = given["kv_cache"].clone()
    with pytest.raises(error, match=message):
        append_latents(**(given | {"rows": torch.zeros(5, 1, 576)} | change))
    torch.testing.assert_close(given["kv_cache"], before, equal_nan=True, rtol=0, atol=0)


class Recorder:
    """Stands in for `CudaMlaDecode`: the arguments of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.calls.append((tensors, options))
        return tensors[0], tensors[1]


def cuda() -> tuple[mla_ops.CudaDecode, Recorder]:
    """The implementation for a GPU, to be driven on CPU tensors."""
    made, recorder = mla_ops.CudaDecode(), Recorder()
    made.decode = recorder  # type: ignore[assignment]
    return made, recorder


PLAIN = {"causal": False, "num_splits": 0, "descale": None}


def test_a_launch_gets_tensors_and_resolved_options() -> None:
    run, recorder = cuda()
    q, cache, lengths, table = built(dtype=torch.bfloat16).values()
    run(q, cache, lengths, table)
    run(q, cache, lengths, None if table is None else table, 512, 0.3, True, 4, "sm80")
    (first, defaults), (second, options) = recorder.calls
    assert all(x is y for found in (first, second) for x, y in zip(found, (q, cache, table, lengths), strict=True))
    assert defaults == {"head_dim_v": 512, "softmax_scale": 576**-0.5, **PLAIN, "family": None}
    assert options == {
        "head_dim_v": 512,
        "softmax_scale": 0.3,
        **PLAIN,
        "causal": True,
        "num_splits": 4,
        "family": "sm80",
    }


def test_nothing_is_launched_without_rows_or_queries() -> None:
    run, recorder = cuda()
    q, cache, lengths, table = built(dtype=torch.bfloat16).values()
    for given in ((q[:, :0], cache, lengths, table), (q, cache, lengths, table[:, :0]), (q, cache[:0], lengths, table)):
        o, lse = run(*given)
        assert (o == 0).all() and (lse == -math.inf).all()
    assert not recorder.calls


@pytest.mark.parametrize("case", ["q width", "page size", "lengths dtype", "table batch", "address"])
def test_a_launch_is_checked_first(case: str) -> None:
    run, recorder = cuda()
    change, error, message = BAD[case]
    tensors = change_of(built(), change)
    with pytest.raises(error, match=message):
        run(*tensors.values())
    assert not recorder.calls


def test_values_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    run, recorder = cuda()
    tensors = built(dtype=torch.bfloat16) | {"cache_seqlens": int32(1, 193, 0, 0, 0)}
    run(*tensors.values())
    monkeypatch.setenv("CUTEFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 193"):
        run(*tensors.values())
    assert len(recorder.calls) == 1


def test_the_snippets_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = (pathlib.Path(__file__).resolve().parent.parent / "docs" / "mla.md").read_text()
    names: dict[str, Any] = {}
    for snippet in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        exec(compile(snippet, "mla.md", "exec"), names)
    assert names["out"].shape == (2, 1, 16, 512) and names["lse"].shape == (2, 16, 1)
    torch.testing.assert_close(names["decoded"], names["whole"], atol=1e-4, rtol=1e-4)
    expected = flash_attn_func(names["queries"], names["k"], names["v"], causal=True, return_lse=True)
    torch.testing.assert_close(names["in_parts"], expected[0])
    assert torch.allclose(names["merged"], expected[0][:, 64:], atol=1e-5)
    assert torch.allclose(names["merged_lse"], expected[1][:, :, 64:], atol=1e-5)
