"""The benchmark of latent attention, on the CPU with attention that is faked: caches, checks, the table."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from torch import Tensor

from benchmarks import mla
from benchmarks.mla import Caches, Shape, attention_in_fp32, make_caches

CPU = torch.device("cpu")
EQUAL, MIXED = Shape(4, (192, 192)), Shape(4, (130, 5, 64), queries=2)


def right(caches: Caches) -> Tensor:
    return attention_in_fp32(caches, range(len(caches.q))).to(caches.q.dtype)


@pytest.mark.parametrize("shape", [EQUAL, MIXED])
def test_the_reference_is_attention_to_the_rows_of_each_sequence(shape: Shape) -> None:
    caches = make_caches(shape, CPU, 0)
    found = attention_in_fp32(caches, [len(shape.lengths) - 1])[0]
    length = shape.lengths[-1]
    pages = caches.page_table[len(shape.lengths) - 1, : -(-length // 64)].long()
    rows = caches.kv_cache[pages].flatten(0, 1)[:length, 0].float().expand(shape.heads, -1, -1)
    hidden = torch.ones(shape.queries, length).triu(length - shape.queries + 1).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        caches.q[-1].float().transpose(0, 1), rows, rows[..., :512], attn_mask=~hidden, scale=mla.SCALE
    )
    torch.testing.assert_close(found, expected.transpose(0, 1), atol=1e-4, rtol=1e-4)


def test_sequences_have_pages_of_their_own() -> None:
    table = make_caches(MIXED, CPU, 0).page_table
    assert sorted(table.flatten().tolist()) == [-1] * 4 + [0, 1, 2, 3, 4]


def test_work_is_counted_once_for_all_heads_that_read_it() -> None:
    assert EQUAL.nbytes(torch.bfloat16) == 2 * 192 * 576 * 2 and EQUAL.nbytes(mla.FP8) == 2 * 192 * 576
    assert EQUAL.flops == 2 * 2 * 192 * 4 * (576 + 512)
    assert MIXED.flops == 2 * 199 * 4 * 2 * (576 + 512)
    assert (EQUAL.label, Shape(16, (8192,) * 128).label) == ("2 × 192, 4 heads", "128 × 8k, 16 heads")
    assert MIXED.label == "3 mixed up to 130, 4 heads, 2 queries"


def test_everything_is_checked_timed_and_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mla, "L2_BYTES", 1)
    monkeypatch.setattr(mla, "attend", right)
    monkeypatch.setattr(mla, "attend_sm80", right)
    path = tmp_path / "mla.json"
    mla.run([EQUAL], CPU, path, 1)
    monkeypatch.setattr(mla, "attend_sm80", lambda caches: right(caches) * 1.1)  # the other family alone is wrong
    result = json.loads(path.read_text())
    result["shapes"] += mla.run([MIXED], CPU, None, 1)["shapes"]
    path.write_text(json.dumps(result))
    assert mla.main(["--from", str(path)]) == 1
    found = capsys.readouterr().out
    (line,) = (line for line in found.splitlines() if line.startswith("| 2 × 192, 4 heads | "))
    assert line.endswith(f" | {result['shapes'][0]['sm80']:.1f} |") and line.count("|") == 8
    assert "| 3 mixed up to 130, 4 heads, 2 queries | wrong: rms error" in found


def test_a_cache_of_e4m3_stands_beside_one_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "L2_BYTES", 1)
    seen = []

    def attend(caches: Caches) -> Tensor:
        seen.append((caches.kv_cache.dtype, caches.descale is None))
        return right(caches)

    monkeypatch.setattr(mla, "attend", attend)
    result = mla.run([EQUAL], CPU, None, 1, mla.FP8)
    assert set(seen) == {(mla.FP8, False), (torch.bfloat16, True)}
    (cell,) = result["shapes"]
    assert cell["bytes"] == EQUAL.nbytes(mla.FP8) and "sm80" not in cell
    found = "\n".join(mla.table(result))
    assert "cached rows of e4m3" in found and found.endswith(f" | {cell['bf16']:.1f} |") and "| bf16 µs |" in found


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mla.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
