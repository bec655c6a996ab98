"""Chunked attention: a query sees only keys of its own chunk of positions, forward and backward, in both families."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu import gradients, packed_gradients
from tests.gpu.checks import Case, check
from tests.gpu.packed import Packed

pytestmark = pytest.mark.gpu

CHUNKS = (1, 7, 64, 100, 128, 1000)
LENGTHS = ((1, 300), (113, 203), (203, 113), (517, 517), (1025, 1025))
SIDES = {
    "chunk": Case(),
    "causal": Case(causal=True),
    "window": Case(window=(70, 30)),
}


@pytest.mark.parametrize("mask", SIDES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_forward(chunk: int, lengths: tuple[int, int], mask: str, family: str, device: torch.device) -> None:
    sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "attention_chunk": chunk}
    check(dataclasses.replace(SIDES[mask], **sizes, lse=True), family, device)


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_forward_of_other_head_dims(head_dim: int, family: str, device: torch.device) -> None:
    case = Case(333, 700, head_dim=head_dim, causal=True, attention_chunk=300, softcap=20.0, lse=True)
    check(case, family, device)
    check(dataclasses.replace(case, attention_chunk=40), family, device)


@pytest.mark.parametrize("lengths", [(1, 300), (9, 700), (333, 333)], ids=str)
def test_forward_with_packed_heads(lengths: tuple[int, int], family: str, device: torch.device) -> None:
    case = Case(*lengths, heads=8, kv_heads=2, causal=True, attention_chunk=150, pack_gqa=True, lse=True)
    check(case, family, device)


def test_a_chunk_without_keys_gives_zero(family: str, device: torch.device) -> None:
    check(Case(200, 70, attention_chunk=64, lse=True), family, device)  # positions before the first key


@pytest.mark.parametrize("mask", SIDES)
@pytest.mark.parametrize("lengths", [(113, 203), (203, 113), (517, 517)], ids=str)
@pytest.mark.parametrize("chunk", [7, 100, 256])
def test_backward(chunk: int, lengths: tuple[int, int], mask: str, family: str, device: torch.device) -> None:
    sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "attention_chunk": chunk}
    gradients.check(gradients.small(device, dataclasses.replace(SIDES[mask], **sizes, lse=True)), family, device)


@pytest.mark.parametrize("head_dim", [128])
def test_backward_of_other_head_dims(head_dim: int, family: str, device: torch.device) -> None:
    case = Case(300, 400, head_dim=head_dim, dtype="fp16", causal=True, attention_chunk=120, softcap=20.0)
    gradients.check(gradients.small(device, case), family, device, deterministic=True)


@pytest.mark.parametrize("mask", SIDES)
def test_packed_sequences(mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(SIDES[mask], attention_chunk=50, lse=True)
    lengths_q, lengths_k = (5, 0, 130, 300, 64, 1), (90, 20, 130, 411, 0, 1)
    used_k = (41, 20, 129, 300, 0, 1)
    Packed(lengths_q, lengths_k, case).check(family, device)
    Packed(lengths_q, lengths_k, case, used_k=used_k, rest_q=3, rest_k=2).check(family, device)
    packed_gradients.check(Packed(lengths_q, lengths_k, case, used_k=used_k), family, device)


def test_one_kernel_serves_other_chunks(family: str, device: torch.device) -> None:
    for chunk in (3, 64, 90, 1 << 40):
        check(Case(90, 130, attention_chunk=chunk), family, device)
