"""The benchmark of decoding, on the CPU with attention that is faked: caches, checks, what is timed, the report."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import decode
from benchmarks.decode import Settings
from benchmarks.decode_inputs import Caches, Shape, attention_in_fp32, complaint, copies_of, make_caches

CPU = torch.device("cpu")
EQUAL = Shape(32, 4, 2, (48, 48, 48), queries=2)
MIXED = Shape(32, 4, 2, (96, 5, 16))


def right(caches: Caches, family: str | None = None) -> Tensor:
    return attention_in_fp32(caches).to(caches.q.dtype)


@pytest.mark.parametrize("shape", [EQUAL, MIXED])
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_the_reference_is_attention_to_the_keys_of_each_sequence(
    shape: Shape, page_size: int, with_lengths: bool
) -> None:
    if shape.is_mixed and not page_size:
        pytest.skip("mixed lengths have pages")
    caches = make_caches(shape, CPU, page_size, with_lengths=with_lengths)
    found = attention_in_fp32(caches)
    for b, length in enumerate(shape.lengths):
        k, v = caches.k, caches.v
        rows = (k[b], v[b])
        if caches.page_table is not None:
            pages = caches.page_table[b].long()
            rows = (k[pages].flatten(0, 1), v[pages].flatten(0, 1))
        q, k, v = (x.float().transpose(0, 1) for x in (caches.q[b], rows[0][:length], rows[1][:length]))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(0, 1)
        torch.testing.assert_close(found[b], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [0, 16])
def test_e4m3_caches_hold_nearly_what_others_do_in_half_the_bytes(page_size: int) -> None:
    shape = EQUAL._replace(is_e4m3=True)
    caches, others = make_caches(shape, CPU, page_size), make_caches(EQUAL, CPU, page_size)
    assert caches.k.dtype == caches.v.dtype == torch.float8_e4m3fn and torch.equal(caches.q, others.q)
    assert 2 * shape.nbytes == EQUAL.nbytes and shape.label.endswith("e4m3")
    torch.testing.assert_close(attention_in_fp32(caches), attention_in_fp32(others), atol=0.1, rtol=0.1)
    assert complaint(decode.attend(caches), attention_in_fp32(caches)) is None


def test_pages_of_sequences_are_their_own() -> None:
    caches = make_caches(MIXED, CPU, 16)
    assert caches.page_table is not None and caches.k.shape[0] == 6 + 1 + 1
    rows = [row[:count].tolist() for row, count in zip(caches.page_table, (6, 1, 1), strict=True)]
    assert sorted(page for row in rows for page in row) == list(range(8))


def test_many_small_caches_and_few_large_ones_are_visited() -> None:
    assert copies_of(EQUAL, one_cache=True) == 1
    assert copies_of(Shape(128, 32, 8, (8192,)), one_cache=False) == 8
    assert copies_of(Shape(128, 32, 8, (131072,)), one_cache=False) == 1


def test_a_wrong_result_is_caught() -> None:
    caches = make_caches(EQUAL, CPU, 0)
    reference = attention_in_fp32(caches)
    assert complaint(reference.bfloat16(), reference) is None
    assert "rms error" in str(complaint(reference * 1.02, reference))
    spoiled = reference.clone()
    spoiled[0, 0, 0, 0] = torch.nan
    assert complaint(spoiled, reference)
    assert "shape" in str(complaint(reference[:1], reference))
    long = torch.ones(1 << 20)
    long[0] = 1.2
    assert "largest error" in str(complaint(long, torch.ones(1 << 20)))


def test_everything_is_checked_timed_and_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "attend", right)
    monkeypatch.setattr(decode, "missing_peer", lambda name: "not installed" if name == "fa4" else None)
    path, notes = tmp_path / "decode.json", tmp_path / "notes.md"
    settings = Settings(rounds=1, one_cache=True, peers=("fa4", "fa2"), pages=(16,))
    decode.run([EQUAL, MIXED], CPU, path, settings)
    equal, mixed = json.loads(path.read_text())["shapes"]
    rows, of_pages = "ours, lengths on the device", "ours, pages of 16, lengths on the device"
    assert list(equal["results"]) == ["ours", "ours sm80", "fa4", "fa2", "ours, pages of 16", rows, of_pages]
    assert list(mixed["results"]) == [of_pages]
    assert equal["results"]["fa4"] == {"left out": "NotImplementedError: not installed"}
    for cell in (equal, mixed):
        for entry in cell["results"].values():
            assert "left out" in entry or (entry["us"] > 0 and entry["gbps"] > 0 and entry["host_us"] > 0)
    notes.write_text("<!-- decode benchmark: begin -->\n<!-- decode benchmark: end -->\n")
    assert decode.main(["--from", str(path), "--into", str(notes)]) == 0
    assert "| D32, 4/2 heads, 1 × 0k beside 2 × 0k | – |" in notes.read_text()
    ratio = equal["results"]["ours sm80"]["gbps"] / equal["results"]["fa2"]["gbps"]
    assert f"- ours sm80/fa2: geometric mean {ratio:.3f}, worst {ratio:.3f} at {equal['label']}" in notes.read_text()
    for paged, in_rows in (("ours, pages of 16", "ours"), (of_pages, rows)):  # lengths in the same place
        ratio = equal["results"][paged]["gbps"] / equal["results"][in_rows]["gbps"]
        assert f"- {paged}/{in_rows}: geometric mean {ratio:.3f}, worst " in notes.read_text()
    assert "fa4: left out: NotImplementedError: not installed" in capsys.readouterr().out


@pytest.mark.parametrize(("place", "count"), [("host", 3), ("device", 2)])
def test_lengths_are_where_a_run_has_them(place: str, count: int) -> None:
    settings = Settings(one_cache=True, peers=(), pages=(16,), lengths=(place,))
    for shape in (EQUAL, MIXED):
        found = list(decode.contestants(shape, CPU, settings))
        assert len(found) == (1 if shape.is_mixed else count)
        for _, rotation in found:
            lengths = rotation.caches[0].lengths
            assert (lengths is not None) == (shape.is_mixed or place == "device")
            assert lengths is None or lengths.tolist() == list(shape.lengths)


def test_a_wrong_result_of_ours_fails_the_command(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "attend", lambda caches, **options: right(caches) + 1)
    path = tmp_path / "decode.json"
    decode.run([EQUAL], CPU, path, Settings(rounds=1, one_cache=True, peers=(), pages=()))
    assert decode.main(["--from", str(path)]) == 1


def test_calls_go_to_the_function_and_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Ops:
        @staticmethod
        def kvcache_fwd(*tensors: Tensor, **named: Any) -> Tensor:
            calls.append(("kvcache_fwd", named))
            return tensors[0]

    def function(*tensors: Tensor, **named: Any) -> Tensor:
        calls.append(("flash_attn_func", named))
        return tensors[0]

    monkeypatch.setattr(decode, "flash_attn_func", function)
    monkeypatch.setattr(torch.ops, "cuteflash", Ops)
    for page_size in (0, 16):
        decode.attend(make_caches(EQUAL, CPU, page_size))
    mixed = make_caches(MIXED, CPU, 16)
    decode.attend(mixed)
    decode.attend(make_caches(EQUAL, CPU, 0, with_lengths=True))
    assert [name for name, _ in calls] == ["flash_attn_func", *("kvcache_fwd",) * 3]
    assert all(named["num_splits"] == 0 for _, named in calls)
    assert calls[1][1]["seqused_k"] is None and calls[2][1]["seqused_k"] is mixed.lengths


def test_caches_are_visited_in_turn() -> None:
    seen: list[Any] = []
    rotation = decode.Rotation(lambda one: seen.append(one) or torch.zeros(1), ["a", "b", "c"])  # type: ignore
    rotation(2)
    rotation(3)
    assert seen == ["a", "b", "c", "a", "b"]


def test_the_grid() -> None:
    grid = decode.shapes([128], 1, quick=False)
    assert [shape.label for shape in grid] == [
        "D128, 32/8 heads, 1 × 8k",
        "D128, 32/8 heads, 1 × 128k",
        "D128, 32/8 heads, 16 × 8k",
        "D128, 64/8 heads, 64 × 4k",
        "D128, 32/32 heads, 32 × 4k",
        "D128, 32/1 heads, 8 × 32k",
        "D128, 32/8 heads, 1 × 128k beside 63 × 1k",
    ]
    assert len(decode.shapes([64, 256], 4, quick=True)) == 6
    assert grid[0].nbytes == 2 * 2 * 8192 * 8 * 128


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message for machines without a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_only_some_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode.main(["--only", "32/3 heads"])
    assert "'32/3 heads'" in capsys.readouterr().err
