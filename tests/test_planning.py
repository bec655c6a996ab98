"""Plans: calls of a known kind are not checked and planned in full again, and nothing passes because of that."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cuteflash import dispatch, planning
from cuteflash.arguments import FwdScalars, FwdTensors
from cuteflash.problem import LENGTH_MAX
from tests.test_ops import FWD, Gpu, qkv
from tests.test_validation import bad_tensors


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


CAUSAL = (None, -1, 0)


def test_a_new_shape_of_a_known_kind_asks_nothing_again(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*arguments: object) -> None:
        raise AssertionError("asked")

    gpu.fwd(*qkv(s_q=120, s_k=150), *CAUSAL)
    for name in ("check_fwd", "current_target", "check_family", "choose", "compiled"):
        monkeypatch.setattr(planning, name, asked)
    monkeypatch.setattr(planning.torch.cuda, "get_device_properties", asked)
    for shape in ({"s_q": 121, "s_k": 153}, {"batch": 3}, {"heads": 8, "kv_heads": 4}, {"s_q": 300, "s_k": 17}):
        q, k, v = qkv(**({"s_q": 120, "s_k": 150} | shape))
        o = gpu.fwd(q, k, v, *CAUSAL)
        tensors = FwdTensors(*gpu.launches[-1][1][:5])
        assert tensors.q is q and tensors.k is k and tensors.v is v and tensors.o is o
        assert o.shape == (*q.shape[:3], 24) and o.is_contiguous()
    gpu.fwd(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(s_q=125, s_k=150)), *CAUSAL)
    with pytest.raises(AssertionError, match="asked"):
        gpu.fwd(*qkv(s_q=1, s_k=150), *CAUSAL)  # which sees every key: another kernel
    with pytest.raises(AssertionError, match="asked"):
        gpu.fwd(*qkv(s_q=121, s_k=2000), *CAUSAL)  # a class of lengths with rows of its own


BAD = bad_tensors(empty)


@pytest.mark.parametrize("case", BAD)
def test_a_good_call_before_lets_no_bad_one_through(gpu: Gpu, case: str) -> None:
    tensors, error, message = BAD[case]
    gpu.fwd(*(empty(2, 6, 4, 16) for _ in range(3)))
    for _ in range(2):
        with pytest.raises(error, match=message):
            gpu.fwd(*tensors)
    assert len(gpu.launches) == 1


def test_a_good_call_before_lets_no_endless_one_through(gpu: Gpu) -> None:
    row = empty(1, 1, 4, 16)
    gpu.fwd(empty(1, 30, 4, 16), row, row, None, -1, -1, 0.0, True)
    for q, k in [(row.expand(1, LENGTH_MAX + 1, 4, 16), row), (row, row.expand(1, LENGTH_MAX + 1, 4, 16))]:
        with pytest.raises(ValueError, match=f"is {LENGTH_MAX + 1}; allowed: up to {LENGTH_MAX}"):
            gpu.fwd(q, k, k, None, -1, -1, 0.0, True)
    q, k = (empty(1, 1, heads, 16) for heads in (4, 1))
    gpu.fwd(q, k, k, None, -1, -1, 0.0, True)
    with pytest.raises(ValueError, match=f"packed heads is {LENGTH_MAX + 4}; allowed: up to {LENGTH_MAX}"):
        gpu.fwd(q.expand(1, LENGTH_MAX // 4 + 1, 4, 16), k, k, None, -1, -1, 0.0, True)


def some_call(choose: random.Random) -> tuple[list[Tensor], tuple[object, ...]]:
    """Tensors and options that are allowed, of few sizes, so that kinds repeat; some empty, some strided oddly."""
    batch, s_q, s_k = (choose.choice(sizes) for sizes in ((0, 1, 2), (0, 1, 5, 40, 1600), (0, 1, 7, 40, 1600)))
    heads, kv_heads = choose.choice([(1, 1), (4, 1), (8, 2), (8, 8), (0, 2)])
    d, d_v = choose.choice([(16, 16), (16, 24), (24, 16)])
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.as_strided(x.shape, (3, *x.stride()[1:])) if x.shape[0] == 1 else x,
        lambda x: x.as_strided(x.shape, (8, *x.stride()[1:])) if x.shape[0] == 1 else x,
        lambda x: x[:1].expand(batch, -1, -1, -1),
    ]
    shapes = (batch, s_q, heads, d), (batch, s_k, kv_heads, d), (batch, s_k, kv_heads, d_v)
    dtype = choose.choice([torch.float16, torch.bfloat16])
    options = choose.choice([(), CAUSAL, (0.5, 3, 1, 0.0, None), (None, -1, -1, 2.0, True), (None, -1, -1, 0.0, False)])
    return [choose.choice(views)(empty(*shape, dtype=dtype)) for shape in shapes], options


def test_earlier_calls_never_change_a_launch(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    choose, planned_afresh = random.Random(0), 0
    for _ in range(2000):
        tensors, options = some_call(choose)
        fresh = Gpu(monkeypatch)
        expected = fresh.fwd_lse(*tensors, *options)
        monkeypatch.setattr(planning, "compiled", gpu._compiled)
        gpu.launches.clear()
        results = gpu.fwd_lse(*tensors, *options)
        assert [(x.shape, x.stride()) for x in results] == [(x.shape, x.stride()) for x in expected]
        assert len(gpu.launches) == len(fresh.launches)
        for (problem, ours), (fresh_problem, theirs) in zip(gpu.launches, fresh.launches, strict=True):
            assert problem == fresh_problem and ours[5:] == theirs[5:]
            for x, y in zip(ours[:5], theirs[:5], strict=True):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        planned_afresh += fresh.planned
    assert gpu.planned < planned_afresh / 2


def test_plans_are_bounded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PLANS_MAX", 3)
    for s_k, window in enumerate([1, 2, 3, 4, 4, 1], start=1):
        gpu.fwd(*qkv(s_k=s_k), None, window)
    assert gpu.planned == 5  # 1 2 3, then room is made for 4, and 1 is planned again


def test_scalars_reach_the_kernel_in_the_order_of_their_declaration(gpu: Gpu) -> None:
    gpu.fwd(*qkv(), 0.5, 3, 1, 2.0)
    scalars = FwdScalars(*gpu.launches[0][1][len(FwdTensors._fields) :])
    assert scalars == FwdScalars(
        softmax_scale=0.5, softcap=2.0, window_left=3, window_right=1, attention_chunk=0, num_sms=132
    )


def test_packed_heads_are_another_kernel_of_the_same_plan(gpu: Gpu) -> None:
    for seqlen_q in (384, 6, 384, 6):
        gpu.fwd(*qkv(s_q=seqlen_q, heads=16, s_k=300), None, -1, -1, 0.0)
    assert [problem.operands.packed_heads for problem, _ in gpu.launches] == [1, 8, 1, 8]


def fake_cuda() -> Tensor:
    with FakeTensorMode():
        return torch.empty(2, 6, 4, 16, device="cuda", dtype=torch.float16)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Pretend that the machine has a GPU of a compute capability."""
    monkeypatch.setattr(planning, "current_target", dispatch.current_target.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return lambda capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_a_family_that_the_gpu_lacks(gpu: Gpu, pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend((8, 0))
    q = fake_cuda()
    FWD(q, q, q, family="sm80")
    message = "family is 'sm90', which sm_80 does not run; it runs: sm80"
    with pytest.raises(NotImplementedError, match=message):
        FWD(q, q, q, family="sm90")
    monkeypatch.setattr(planning, "current_target", lambda index: "sm_80")
    for shape in ({}, {"batch": 0}):
        with pytest.raises(NotImplementedError, match=message):
            gpu.fwd(*qkv(**shape), None, -1, -1, 0.0, None, "sm90")


@pytest.mark.parametrize("shape", [{}, {"batch": 0}], ids=["some", "empty"])
def test_a_planned_call_checks_its_family_once(
    gpu: Gpu, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    check = dispatch.check_family
    for module in (dispatch, planning):
        monkeypatch.setattr(module, "check_family", lambda *given: checked.append(given) or check(*given))
    dispatch.choose.cache_clear()
    gpu.fwd(*qkv(**shape), None, -1, -1, 0.0, None, "sm90")
    assert checked == [("sm_90a", "sm90")]


def test_a_gpu_that_no_kernel_runs_on(pretend) -> None:
    pretend((7, 5))
    q = fake_cuda()
    with pytest.raises(NotImplementedError, match=r"compute capability is 7\.5; supported: 8\.0"):
        FWD(q, q, q)


@pytest.mark.parametrize(
    ("seqlen_q", "heads_per_kv", "tile_m", "pays"),
    [
        (1, 8, 128, True),
        (1, 1, 128, False),  # nothing to fold
        (1, 65, 128, False),  # more heads than 64 rows
        (128, 8, 128, False),  # no padding to save
        (129, 8, 128, True),  # 9 blocks for 16
        (4097, 8, 128, False),  # 257 blocks for 264
        (64, 2, 128, True),
        (64, 33, 64, False),  # one token fits into 64 rows: 64 blocks for 33
        (1 << 28, 8, 128, False),  # rows past 32 bits
    ],
)
def test_packing_pays_where_it_saves_row_blocks(seqlen_q: int, heads_per_kv: int, tile_m: int, pays: bool) -> None:
    assert planning.should_pack(seqlen_q, heads_per_kv, tile_m) == pays
