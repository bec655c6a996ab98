"""The parts of `examples/train_gpt.py`, on a small corpus; training with our attention is in test_train_gpt_both.py."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import signal
from typing import Any

import pytest
import torch
import train_gpt
from gpt import corpus as corpora
from gpt import curves, fp8
from gpt.corpus import SEPARATOR, Batches, Corpus
from gpt.model import GPT, TorchMHA, nudge, sample
from gpt.settings import PRESETS, Settings
from gpt.training import History, Trainer, Watch, learning_rate
from torch import Tensor

from cuteflash.nn import MHA
from tests.gpt_runs import SETTINGS, SMALL, small_library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return small_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def corpus(library: pathlib.Path) -> Corpus:
    return corpora.read(library)


def train(corpus: Corpus, settings: Settings = SETTINGS, **options: Any) -> Trainer:
    trainer = Trainer(settings, corpus, TorchMHA, **options)
    assert trainer.run(Watch())
    return trainer


def assert_equal(one: Trainer, other: Trainer) -> None:
    """Bit for bit: histories but for their times, weights, the optimiser's state."""
    ours, theirs = one.history, other.history
    assert ours.losses == theirs.losses and ours.validation == theirs.validation
    for state, same in zip(states(one), states(other), strict=True):
        assert torch.equal(state, same)


def states(trainer: Trainer) -> list[Tensor]:
    moments = trainer._optimiser.state_dict()["state"].values()
    return [*trainer.model.state_dict().values(), *(x for moment in moments for x in moment.values())]


# The corpus


def test_the_corpus_is_the_same_in_every_run(library: pathlib.Path, corpus: Corpus) -> None:
    again = corpora.read(library)
    assert torch.equal(again.training, corpus.training) and torch.equal(again.validation, corpus.validation)
    assert again.digest == corpus.digest and corpus.documents == 59  # one is empty


def test_no_document_is_both_trained_on_and_held_out(library: pathlib.Path, corpus: Corpus) -> None:
    split = [bytes(x.tolist()).split(bytes([SEPARATOR])) for x in (corpus.training, corpus.validation)]
    assert [parts.pop() for parts in split] == [b"", b""]
    expected = [content for _, content in corpora.documents(library)]
    assert sorted(split[0] + split[1]) == sorted(expected) and len(split[1]) >= 1


def test_what_machines_do_not_share_is_left_out(tmp_path: pathlib.Path) -> None:
    for name in ("b.py", "a.py", "c.txt", "test/d.py", "x/tests/e.py", "site-packages/f.py", "x/g.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "zero.py").write_bytes(b"a\0b")
    assert [name for name, _ in corpora.documents(tmp_path)] == ["a.py", "b.py", "x/g.py"]
    with pytest.raises(ValueError, match="Python sources; allowed: enough to hold some out"):
        corpora.read(tmp_path / "x")


def test_the_digest_knows_every_byte(tmp_path: pathlib.Path) -> None:
    names = [f"{i}.py" for i in range(60)]
    for name in names:
        (tmp_path / name).write_text("x")
    before = corpora.read(tmp_path).digest
    (tmp_path / names[3]).write_text("y")
    assert corpora.read(tmp_path).digest != before


# Batches


@pytest.mark.parametrize("packed", [False, True])
def test_targets_follow_their_inputs(corpus: Corpus, packed: bool) -> None:
    stream = bytes(corpus.training.tolist())
    batch = Batches(corpus.training, 16, 4, 0, packed).at(2)
    ends = batch.cu_seqlens.tolist() if packed else None
    inputs = [batch.inputs[a:b] for a, b in itertools.pairwise(ends)] if packed else batch.inputs
    targets = [batch.targets[a:b] for a, b in itertools.pairwise(ends)] if packed else batch.targets
    for x, y in zip(inputs, targets, strict=True):
        assert torch.equal(x[1:], y[:-1]) and bytes([*x.tolist(), int(y[-1])]) in stream


@pytest.mark.parametrize("packed", [False, True])
def test_an_epoch_has_every_piece_once(corpus: Corpus, packed: bool) -> None:
    batches = Batches(corpus.training, 16, 1, 0, packed)
    count = len(batches._starts)
    epochs = [[bytes(batches.at(step).inputs.flatten().tolist()) for step in range(count)] for _ in (0, 1)]
    assert epochs[0] == epochs[1]
    pieces = [batches._stream[a : a + n].tolist() for a, n in zip(batches._starts, batches._lengths, strict=True)]
    assert sorted(epochs[0]) == sorted(map(bytes, pieces))
    following = [bytes(batches.at(count + step).inputs.flatten().tolist()) for step in range(count)]
    assert sorted(following) == sorted(epochs[0]) and following != epochs[0]


def test_packed_pieces_are_of_one_document(corpus: Corpus) -> None:
    batches = Batches(corpus.training, 16, 4, 0, packed=True)
    seen = [batches.at(step) for step in range(10)]
    assert not any((batch.inputs == SEPARATOR).any() for batch in seen)
    lengths = torch.cat([batch.cu_seqlens.diff() for batch in seen])
    assert lengths.min() >= 1 and lengths.max() == 16 and lengths.unique().numel() > 2
    assert seen[0].cu_seqlens.dtype == torch.int32 and all(len(batch.cu_seqlens) == 5 for batch in seen)
    total = sum(len(content) for content in bytes(corpus.training.tolist()).split(bytes([SEPARATOR])))
    assert int(batches._lengths.sum()) == total


def test_batches_follow_from_seed_and_step_alone(corpus: Corpus) -> None:
    ahead, back = (Batches(corpus.training, 16, 4, 3) for _ in (0, 1))
    forward = [ahead.at(step).inputs for step in range(80)]
    backward = [back.at(step).inputs for step in reversed(range(80))]
    assert all(torch.equal(x, y) for x, y in zip(forward, reversed(backward), strict=True))
    assert not torch.equal(forward[0], Batches(corpus.training, 16, 4, 4).at(0).inputs)


def test_a_context_longer_than_the_stream(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=r"context is 100000; allowed: less than the \d+ bytes"):
        Batches(corpus.training, 100_000, 1, 0)


# The model


def test_both_attentions_start_from_the_same_weights() -> None:
    torch.manual_seed(0)
    ours = GPT(SETTINGS, MHA).state_dict()
    torch.manual_seed(1)
    theirs = GPT(SETTINGS, TorchMHA).state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    other = GPT(dataclasses.replace(SETTINGS, seed=1)).state_dict()
    assert not torch.equal(other["head.weight"], ours["head.weight"])


def test_both_attentions_compute_the_same(corpus: Corpus) -> None:
    inputs = Batches(corpus.training, 16, 4, 0).at(0).inputs
    with torch.no_grad():
        ours, theirs = (GPT(SETTINGS, attention)(inputs) for attention in (MHA, TorchMHA))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_packed_documents_do_not_see_each_other(corpus: Corpus) -> None:
    model, batch = GPT(SETTINGS, TorchMHA), Batches(corpus.training, 16, 4, 0, packed=True).at(0)
    with torch.no_grad():
        packed = model(batch.inputs, batch.cu_seqlens)
        alone = [model(x[None])[0] for x in batch.inputs.split(batch.cu_seqlens.diff().tolist())]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nudge_is_at_most_a_rounding(dtype: torch.dtype) -> None:
    one, other = GPT(SETTINGS).state_dict(), GPT(SETTINGS)
    nudge(other, dtype, 1)
    changes = [(x / one[name] - 1).abs() for name, x in other.state_dict().items()]
    largest = max(float(x.max()) for x in changes)
    assert torch.finfo(dtype).eps / 4 < largest <= torch.finfo(dtype).eps


def test_sampling_is_by_its_seed() -> None:
    model = GPT(SETTINGS)
    one, two, other = (sample(model, b"ab", 20, seed) for seed in (0, 0, 1))
    assert one == two != other and len(one) == 22 and one.startswith(b"ab")


def test_presets_can_be() -> None:
    for settings in PRESETS.values():
        settings.check()
        MHA(settings.dim, settings.heads, settings.kv_heads, device="meta")


# Training


def test_the_loss_falls_and_is_watched(corpus: Corpus) -> None:
    told: list[int] = []
    trainer = Trainer(dataclasses.replace(SETTINGS, steps=40), corpus, TorchMHA)
    assert trainer.run(Watch(progress=lambda history: told.append(len(history.losses))))
    history = trainer.history
    assert sum(history.losses[-5:]) / 5 < history.losses[0] - 1 and told[-1] == 40
    assert [step for step, _ in history.validation] == list(range(4, 44, 4))
    assert history.validation[-1][1] < history.validation[0][1]


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"dtype": "bf16"}, {"dtype": "fp16"}], ids=str)
def test_equal_runs_have_equal_curves(corpus: Corpus, options: dict[str, Any]) -> None:
    settings = dataclasses.replace(SETTINGS, **options)
    assert_equal(train(corpus, settings), train(corpus, settings))


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"dtype": "fp16"}], ids=str)
@pytest.mark.parametrize("stop", [3, 5])
def test_a_run_that_resumes_is_bit_for_bit_one_that_was_not_interrupted(
    corpus: Corpus, tmp_path: pathlib.Path, options: dict[str, Any], stop: int
) -> None:
    settings = dataclasses.replace(SETTINGS, **options)
    asked = iter(range(1000))
    file = tmp_path / "new" / "run.pt"
    interrupted = Trainer(settings, corpus, TorchMHA, checkpoint=file, every=4)
    assert not interrupted.run(Watch(stopped=lambda: next(asked) >= stop))
    assert 0 < interrupted.steps_done < SETTINGS.steps
    resumed = Trainer(settings, corpus, TorchMHA, checkpoint=file, every=4)
    resumed.resume()
    assert resumed.steps_done == interrupted.steps_done and resumed.run(Watch())
    assert_equal(resumed, train(corpus, settings))


def test_a_checkpoint_is_replaced_whole_or_not_at_all(
    corpus: Corpus, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = train(corpus, checkpoint=tmp_path / "run.pt")
    before = (tmp_path / "run.pt").read_bytes()

    def full(*paths: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        trainer.save()
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    assert (tmp_path / "run.pt").read_bytes() == before


def test_a_checkpoint_of_another_run_is_refused(corpus: Corpus, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.pt"
    train(corpus, checkpoint=file)
    other = Trainer(dataclasses.replace(SETTINGS, seed=5), corpus, TorchMHA, checkpoint=file)
    with pytest.raises(ValueError, match=r"run\.pt is of another run: seed is 5, and was 0"):
        other.resume()
    other = Trainer(SETTINGS, corpus._replace(digest="abc"), TorchMHA, checkpoint=file)
    with pytest.raises(ValueError, match="the corpus is abc, and was"):
        other.resume()


def test_a_loss_that_is_not_finite_ends_the_run(corpus: Corpus) -> None:
    trainer = Trainer(SETTINGS, corpus, TorchMHA)
    trainer.model.head.weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="loss of step 0 or one of the next"):
        trainer.run(Watch())


def test_the_learning_rate_rises_then_falls() -> None:
    settings = dataclasses.replace(SETTINGS, steps=100, lr=1.0)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[:5] == [0.2, 0.4, 0.6, 0.8, 1.0] and rates[5:] == sorted(rates[5:], reverse=True)
    assert 0.1 < rates[-1] < 0.11


# The judgement


def history(*losses: float) -> History:
    return History(losses=list(losses), validation=[(len(losses), losses[-1])])


def test_curves_within_the_noise_agree() -> None:
    torchs = [history(3.0, 2.0), history(3.0, 2.001), history(3.0, 1.999)]
    close, far = curves.judge(history(3.0, 2.002), torchs), curves.judge(history(3.0, 2.1), torchs)
    assert close.noise == pytest.approx(0.002 / 2**0.5) and close.gap == pytest.approx(0.002 / 2**0.5)
    assert close.agree and "agree within noise" in str(close) and "DO NOT" not in str(close)
    assert not far.agree and "DO NOT agree" in str(far)


def test_curves_that_are_the_same_agree_and_nan_does_not() -> None:
    torchs = [history(3.0, 2.0), history(3.0, 2.0)]
    assert curves.judge(history(3.0, 2.0), torchs).agree
    assert not curves.judge(history(3.0, float("nan")), torchs).agree


def test_a_validation_loss_beyond_the_noise_does_not_agree() -> None:
    torchs = [history(3.0, 2.0), history(3.0, 2.001)]
    ours = dataclasses.replace(history(3.0, 2.0), validation=[(2, 2.5)])
    assert not curves.judge(ours, torchs).agree


def test_a_wrong_attention_is_found(corpus: Corpus) -> None:
    class Scaled(TorchMHA):
        """Its scores are too large by a tenth."""

        def attend(self, q: Tensor, *rest: Any) -> Tensor:
            return super().attend(1.1 * q, *rest)

    settings = dataclasses.replace(SETTINGS, steps=20)
    torchs = [train(corpus, settings, nudged=nudged).history for nudged in (0, 1, 2)]
    wrong = Trainer(settings, corpus, Scaled)
    assert wrong.run(Watch())
    assert not curves.judge(wrong.history, torchs).agree
    assert curves.judge(train(corpus, settings, nudged=3).history, torchs).agree


# The command


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> list[str]:
    """Options of a run of a second, on the small corpus."""
    monkeypatch.setattr(corpora, "read", lambda: corpus)
    monkeypatch.setattr(train_gpt, "SAMPLED", 4)
    return [*SMALL, "--attention=sdpa"]


def test_a_run_with_all_its_files(small: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "x" / "run.json"), "--plot", str(tmp_path / "run.png")]
    assert train_gpt.main([*small, *files, "--checkpoint", str(tmp_path / "c")]) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "c" / "sdpa.pt").is_file()
    result = json.loads((tmp_path / "x" / "run.json").read_text())
    assert list(result["runs"]) == ["sdpa"] and len(result["runs"]["sdpa"]["losses"]) == 7
    assert result["judgement"] is None and result["settings"]["kv_heads"] == 2
    assert "validation loss" in capsys.readouterr().out


def test_a_trained_model_is_validated_with_attention_in_fp8(
    small: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    assert train_gpt.main([*small, "--dim=32", "--attention=cuteflash", "--fp8", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    trained, in_fp8 = result["runs"]["cuteflash"]["validation"][-1][1], result["fp8_validation"]
    assert in_fp8 != trained and in_fp8 == pytest.approx(trained, abs=1e-3)
    assert f"attention in FP8: validation loss {in_fp8:.4f}" in capsys.readouterr().out


def test_attention_in_fp8_ends_with_its_context(corpus: Corpus) -> None:
    trainer = Trainer(dataclasses.replace(SETTINGS, dim=32), corpus, MHA)
    before = trainer.validate()
    with fp8.inference(trainer.model):
        assert trainer.validate() != before
    assert trainer.validate() == before


def test_ctrl_c_saves_what_resume_continues(
    small: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer._step
    before = signal.getsignal(signal.SIGINT)  # not the default one in a job that a shell started in the background

    def step_with_ctrl_c(self: Trainer, number: int, batch: Any) -> Tensor:
        if number == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, number, batch)

    monkeypatch.setattr(Trainer, "_step", step_with_ctrl_c)
    saved = [*small, "--checkpoint", str(tmp_path / "c")]
    assert train_gpt.main(saved) == 130
    assert "interrupted after 4 steps of sdpa" in capsys.readouterr().err
    monkeypatch.setattr(Trainer, "_step", step)
    assert train_gpt.main([*saved, "--resume", "--json", str(tmp_path / "resumed.json")]) == 0
    assert train_gpt.main([*small, "--json", str(tmp_path / "whole.json")]) == 0
    resumed, whole = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("resumed", "whole"))
    assert resumed["runs"]["sdpa"]["losses"] == whole["runs"]["sdpa"]["losses"]
    assert resumed["sample"] == whole["sample"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--steps=0"], "steps is 0; allowed: positive"),
        (["--dim=20"], "dim is 20; allowed: multiples of 8 columns for each of 2 heads"),
        (["--kv-heads=3"], "kv_heads is 3; allowed: divisors of heads, which is 2"),
        (["--seed=-1"], "seed is -1; allowed: 0 or more"),
        (["--context=100000"], "context is 100000; allowed: less than"),
        (["--resume"], "resume is given without checkpoint"),
        (["--nudged=0"], "nudged is 0; allowed: positive"),
        (["--checkpoint=c", "--checkpoint-every=0"], "checkpoint-every is 0; allowed: positive"),
        (["--json=/"], "output / is a directory"),
        (["--fp8"], "dim is 16; allowed with fp8: multiples of 16 columns for each of 2 heads"),
        (["--fp8", "--dim=32", "--packed"], "packed is given with fp8"),
    ],
)
def test_wrong_options(
    small: list[str], options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        train_gpt.main([*small, *options])
    assert ended.value.code == 2 and complaint in capsys.readouterr().err


def test_a_plot_that_nothing_can_draw(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        train_gpt.main([*small, "--plot=x.png"])
    assert "matplotlib, which draws it, is missing; install it with: pip install" in capsys.readouterr().err


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = train_gpt.make_parser().parse_args(["--device=cuda"])
    with pytest.raises(ValueError, match="device is cuda, but torch finds no GPU"):
        train_gpt.make_settings(options)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    settings = train_gpt.make_settings(argparse.Namespace(**{**vars(options), "preset": "small"}))
    assert (settings.device, settings.dtype) == ("cuda", "bf16")
    with pytest.raises(ValueError, match="dtype is fp32 on cuda; allowed there: bf16, fp16"):
        train_gpt.make_settings(argparse.Namespace(**{**vars(options), "dtype": "fp32"}))
