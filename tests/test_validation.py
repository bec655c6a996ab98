"""Bad input: the error names the argument, its value and what is allowed, the same on real, fake and meta tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cuteflash import flash_attn_func
from cuteflash.arguments import FwdOptions
from cuteflash.validate import check_fwd

WHERE = ["cpu", "fake cpu", "fake cuda", "meta"]
S, H, D = 6, 4, 16


@pytest.fixture(params=WHERE)
def empty(request: pytest.FixtureRequest):
    """A maker of bf16 tensors, real or fake."""
    kind, _, device = request.param.rpartition(" ")
    with FakeTensorMode() if kind else contextlib.nullcontext():
        yield lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device=device)


Make = Callable[..., Tensor]


def bad_tensors(empty: Make) -> dict[str, tuple[tuple[Tensor, Tensor, Tensor], type[Exception], str]]:
    good, half = empty(2, S, H, D), empty(2, S, H, D, dtype=torch.float16)
    int32, fp8 = (empty(2, S, H, D, dtype=dtype) for dtype in (torch.int32, torch.float8_e4m3fn))
    none, narrow, wide = (empty(2, S, H, head_dim) for head_dim in (0, 12, 264))
    one_kv_head_less, no_kv_head = empty(2, S, H - 1, D), empty(2, S, 0, D)
    gaps = good.as_strided(good.shape, (8, 8, 4, 1))
    columns = good.as_strided(good.shape, (384, 64, 1, 4))
    return {
        "q rank": ((empty(S, H, D), good, good), ValueError, r"q has 3 dimensions, shape \(6, 4, 16\).*batch, seqlen"),
        "k rank": ((good, empty(1, 2, S, H, D), good), ValueError, "k has 5 dimensions"),
        "q dtype": ((int32, good, good), TypeError, "q.dtype is torch.int32; allowed .*torch.bfloat16"),
        "q fp8": ((fp8, good, good), TypeError, "q.dtype is torch.float8"),
        "dtype mix": ((good, half, good), TypeError, "k.dtype is torch.float16; allowed: torch.bfloat16, that of q"),
        "v dtype": ((good, good, half), TypeError, "v.dtype is torch.float16; allowed: torch.bfloat16, that of q"),
        "batch": ((good, empty(1, S, H, D), good), ValueError, r"k.shape\[0\] \(batch\) is 1; allowed: 2, that of q"),
        "v batch": ((good, good, empty(1, S, H, D)), ValueError, r"v.shape\[0\] \(batch\) is 1; .*: 2, that of k"),
        "v seqlen": ((good, good, empty(2, 5, H, D)), ValueError, r"v.shape\[1\] \(seqlen\) is 5; .*: 6, that of k"),
        "v heads": ((good, good, empty(2, S, 2, D)), ValueError, r"v.shape\[2\] \(heads\) is 2; .*: 4, that of k"),
        "heads": ((good, one_kv_head_less, one_kv_head_less), ValueError, r"q.shape\[2\] \(heads\) is 4; .*which is 3"),
        "no kv heads": ((good, no_kv_head, no_kv_head), ValueError, r"q.shape\[2\] \(heads\) is 4; .*which is 0"),
        "k head_dim": ((good, empty(2, S, H, 24), good), ValueError, r"k.shape\[3\] \(head_dim\) is 24; allowed: 16"),
        "head_dim of 12": ((narrow, narrow, good), ValueError, r"q.shape\[3\] \(head_dim\) is 12; .*of 8 up to 256"),
        "head_dim of 264": ((wide, wide, good), ValueError, r"q.shape\[3\] \(head_dim\) is 264; .*of 8 up to 256"),
        "head_dim of 0": ((none, none, good), ValueError, r"q.shape\[3\] \(head_dim\) is 0"),
        "head_dim_v": ((good, good, wide), ValueError, r"v.shape\[3\] \(head_dim\) is 264; .*of 8 up to 256"),
        "last dim": ((good, good, columns), ValueError, r"v.stride\(3\) is 4; allowed: 1"),
        "row stride": ((good, gaps, good), ValueError, r"k.stride\(2\) is 4; allowed: multiples of 8 elements"),
    }


CASES = tuple(bad_tensors(lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype)))


@pytest.mark.parametrize("case", CASES)
def test_bad_tensors(empty: Make, case: str) -> None:
    tensors, error, message = bad_tensors(empty)[case]
    with pytest.raises(error, match=message):
        flash_attn_func(*tensors)
    for op in (torch.ops.cuteflash.fwd, torch.ops.cuteflash.fwd_lse):
        with pytest.raises(error, match=message):
            op(*tensors)


OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "infinite scale": ({"softmax_scale": math.inf}, ValueError, "softmax_scale is inf; allowed: None or a positive"),
    "nan scale": ({"softmax_scale": math.nan}, ValueError, "softmax_scale is nan"),
    "zero scale": ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0; allowed: None or a positive number"),
    "negative scale": ({"softmax_scale": -0.125}, ValueError, "softmax_scale is -0.125; allowed: None or a positive"),
    "scale that is 0 in fp32": ({"softmax_scale": 1e-40}, ValueError, "softmax_scale is 1e-40; .*fp32 holds .1.2e-38"),
    "scale that is inf in fp32": ({"softmax_scale": 1e39}, ValueError, r"softmax_scale is 1e\+39; .* to 3.4e\+38"),
    "softcap that is 0 in fp32": ({"softcap": 1e-40}, ValueError, "softcap is 1e-40; allowed: 0 .none. or a positive"),
    "negative softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0; allowed: 0"),
    "infinite softcap": ({"softcap": math.inf}, ValueError, "softcap is inf"),
    "nan softcap": ({"softcap": math.nan}, ValueError, "softcap is nan"),
    "family": ({"family": "sm70"}, ValueError, "family is 'sm70'; allowed: None, 'sm80', 'sm90'"),
}
ENDLESS = 10**400  # no float holds it
UNPRINTABLE = 10**5000  # more digits than Python prints
OPERATOR_OPTIONS = OPTIONS | {
    "left": ({"window_left": -2}, ValueError, r"window_left is -2; allowed: -1 \(unbounded\) or more"),
    "right": ({"window_right": -3}, ValueError, "window_right is -3"),
    "lengths": (
        {"lengths": "middling"},
        ValueError,
        "lengths is 'middling'; allowed: None, 'decode', 'tiny', 'small', 'brief'",
    ),
}
FUNCTION_OPTIONS = OPTIONS | {
    "left": ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\); allowed: -1 \(unbounded\) or more"),
    "right, causal": ({"window_size": (0, -2), "causal": True}, ValueError, r"window_size is \(0, -2\)"),
    "window int": ({"window_size": 5}, TypeError, "window_size is 5; allowed: None or a pair of ints"),
    "window triple": ({"window_size": (1, 2, 3)}, TypeError, r"window_size is \(1, 2, 3\)"),
    "window float": ({"window_size": (1.0, 2)}, TypeError, r"window_size is \(1.0, 2\)"),
    "window bool": ({"window_size": (True, 2)}, TypeError, r"window_size is \(True, 2\)"),
    "causal": ({"causal": 1}, TypeError, "causal is 1; allowed: True, False"),
    "deterministic": ({"deterministic": 1}, TypeError, "deterministic is 1; allowed: True, False"),
    "pack_gqa": ({"pack_gqa": "yes"}, TypeError, "pack_gqa is 'yes'; allowed: None, True, False"),
    "scale": ({"softmax_scale": "1"}, TypeError, "softmax_scale is '1', a str; allowed: None or a positive number"),
    "scale tensor": ({"softmax_scale": torch.ones(())}, TypeError, "softmax_scale is .*, a Tensor"),
    "scale array": ({"softmax_scale": np.ones(())}, TypeError, "softmax_scale is array.*, a ndarray"),
    "scale bool": (
        {"softmax_scale": np.True_},
        TypeError,
        "softmax_scale is .*True.*, a bool; allowed: None or a posi",
    ),
    "endless scale": ({"softmax_scale": ENDLESS}, ValueError, r"softmax_scale is 10+\.\.\.0+; allowed: None or a posi"),
    "endless softcap": ({"softcap": -ENDLESS}, ValueError, r"softcap is -10+\.\.\.0+; allowed: 0 .none. or a positive"),
    "endless fraction": (
        {"softcap": Fraction(ENDLESS)},
        ValueError,
        r"softcap is Fraction\(10+.*; allowed: 0 .none. or",
    ),
    "unprintable scale": (
        {"softmax_scale": UNPRINTABLE},
        ValueError,
        "softmax_scale is a int with an integer too long",
    ),
    "unprintable window": (
        {"window_size": (-UNPRINTABLE, 0)},
        ValueError,
        "window_size is a tuple with an integer too",
    ),
    "scale of infinity": (
        {"softmax_scale": np.float32(np.inf)},
        ValueError,
        "softmax_scale is inf; allowed: None or a",
    ),
    "window array": (
        {"window_size": np.array([1, 2])},
        TypeError,
        r"window_size is array\(\[1, 2\]\); allowed: None or",
    ),
    "window numpy float": (
        {"window_size": (np.float32(1), 2)},
        TypeError,
        "window_size is .*allowed: None or a pair of",
    ),
    "window numpy bool": (
        {"window_size": (np.True_, 2)},
        TypeError,
        "window_size is .*allowed: None or a pair of ints",
    ),
    "softcap": ({"softcap": None}, TypeError, "softcap is None, a NoneType; allowed: 0 .none. or a positive number"),
    "return_lse": ({"return_lse": "x"}, TypeError, "return_lse is 'x'; allowed: True, False"),
    "return_lse None": ({"return_lse": None}, TypeError, "return_lse is None; allowed: True, False"),
    "return_lse tensor": ({"return_lse": torch.ones(())}, TypeError, "return_lse is tensor.*; allowed: True, False"),
    "long text": ({"causal": "x" * 10**6}, TypeError, r"causal is 'x+\.\.\.x+'; allowed: True, False"),
    "family type": ({"family": 90}, TypeError, "family is 90; allowed: None, 'sm80', 'sm90'"),
}


@pytest.mark.parametrize("case", OPERATOR_OPTIONS)
def test_bad_options_of_the_operators(empty: Make, case: str) -> None:
    options, error, message = OPERATOR_OPTIONS[case]
    q = empty(2, S, H, D)
    for op in (torch.ops.cuteflash.fwd, torch.ops.cuteflash.fwd_lse):
        with pytest.raises(error, match=message):
            op(q, q, q, **options)


@pytest.mark.parametrize("case", FUNCTION_OPTIONS)
def test_bad_options_of_the_function(empty: Make, case: str) -> None:
    options, error, message = FUNCTION_OPTIONS[case]
    q = empty(2, S, H, D)
    with pytest.raises(error, match=message):
        flash_attn_func(q, q, q, **options)


NUMPY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale": ({"softmax_scale": np.float32(0.5)}, {"softmax_scale": 0.5}),
    "double scale": ({"softmax_scale": np.float64(0.5)}, {"softmax_scale": 0.5}),
    "integer scale": ({"softmax_scale": np.int64(2)}, {"softmax_scale": 2}),
    "fraction": ({"softmax_scale": Fraction(1, 2)}, {"softmax_scale": 0.5}),
    "softcap": ({"softcap": np.float16(2)}, {"softcap": 2}),
    "window": ({"window_size": (np.int64(1), np.uint8(2))}, {"window_size": (1, 2)}),
    "causal": ({"causal": np.True_}, {"causal": True}),
    "not causal": ({"causal": np.False_}, {"causal": False}),
    "lse": ({"return_lse": np.True_}, {"return_lse": True}),
    "no lse": ({"return_lse": np.False_}, {"return_lse": False}),
    "pack_gqa": ({"pack_gqa": np.True_}, {"pack_gqa": True}),
    "family": ({"family": np.str_("sm90")}, {"family": "sm90"}),
    "endless window": ({"window_size": (2**63, 0)}, {"window_size": (-1, 0)}),
    "unprintable window": ({"window_size": (0, UNPRINTABLE)}, {"window_size": (0, -1)}),
}


@pytest.mark.parametrize("case", NUMPY)
def test_scalars_of_other_types_are_taken_for_what_they_stand_for(case: str) -> None:
    given, meant = NUMPY[case]
    q, k, v = torch.randn(3, 2, S, H, D, generator=torch.Generator().manual_seed(0)).unbind()
    torch.testing.assert_close(flash_attn_func(q, k, v, **given), flash_attn_func(q, k, v, **meant), rtol=0, atol=0)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("value", [None, [[1.0]], 3])
def test_arguments_that_are_no_tensors(position: int, value: object) -> None:
    arguments: list[Any] = [torch.empty(2, S, H, D)] * 3
    arguments[position] = value
    with pytest.raises(TypeError, match=f"{'qkv'[position]} is a {type(value).__name__}; allowed: a torch.Tensor"):
        flash_attn_func(*arguments)


def test_at_most_64_query_heads_can_be_packed(empty: Make) -> None:
    q, k = empty(1, S, 130, D), empty(1, S, 2, D)
    with pytest.raises(ValueError, match="pack_gqa is True with 65 query heads for each KV head; allowed: up to 64"):
        flash_attn_func(q, k, k, pack_gqa=True)


def test_lengths_stay_below_32_bit_indices(empty: Make) -> None:
    row, long = empty(1, 1, 1, D), 1 << 30
    endless = row.expand(1, long, 1, D)
    with pytest.raises(ValueError, match=rf"q.shape\[1\].* is {long}; allowed: up to {long - 1024}"):
        flash_attn_func(endless, row, row)
    with pytest.raises(ValueError, match=rf"k.shape\[1\] is {long}; allowed: up to {long - 1024}"):
        flash_attn_func(row, endless, endless)
    packed = row.expand(1, long // 4, 4, D)
    with pytest.raises(ValueError, match=rf"packed heads is {long}; allowed: up to {long - 1024}"):
        flash_attn_func(packed, row, row, pack_gqa=True)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_misaligned_pointers(position: int) -> None:
    tensors = [torch.zeros(2, S, H, D, dtype=torch.bfloat16) for _ in range(3)]
    shifted = torch.zeros(2 * S * H * D + 4, dtype=torch.bfloat16)[4:].view(2, S, H, D)
    tensors[position] = shifted
    message = (
        rf"{'qkv'[position]}.data_ptr\(\) is 0x[0-9a-f]+8; allowed: multiples of 16 bytes \(its storage offset is 4"
    )
    with pytest.raises(ValueError, match=message):
        flash_attn_func(*tensors)


def test_devices_do_not_mix() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        cpu, cuda = (torch.empty(2, S, H, D, device=device, dtype=torch.float16) for device in ("cpu", "cuda"))
    with pytest.raises(ValueError, match=r"v.device is cpu; allowed: cuda:0, that of q"):
        check_fwd(cuda, cuda, cpu, FwdOptions())
    meta = torch.empty(2, S, H, D, device="meta")
    with pytest.raises(ValueError, match=r"k.device is meta; allowed: cpu, that of q"):
        flash_attn_func(torch.empty(2, S, H, D), meta, meta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gpus_take_half_precision_only(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        q = torch.empty(2, S, H, D, device="cuda", dtype=dtype)
        with pytest.raises(TypeError, match=r"allowed on cuda: torch.float16, torch.bfloat16$"):
            flash_attn_func(q, q, q)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_devices_are_not_supported(device: str) -> None:
    with FakeTensorMode():
        q = torch.empty(2, S, H, D, device=device, dtype=torch.float16)
        with pytest.raises(NotImplementedError, match=f"q.device is {device}:0; supported: cuda, cpu"):
            flash_attn_func(q, q, q)


def test_sparse_tensors_are_not_supported() -> None:
    q = torch.zeros(2, S, H, D).to_sparse()
    with pytest.raises(NotImplementedError, match=r"q.layout is torch.sparse_coo; supported: torch.strided"):
        flash_attn_func(q, q, q)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_nested_tensors_are_not_supported(layout: torch.layout, mode: Any, position: int) -> None:
    tensors = [torch.randn(2, S, H, D) for _ in range(3)]
    with mode():
        tensors[position] = torch.nested.nested_tensor([torch.randn(n, H, D) for n in (3, S)], layout=layout)
        message = f"^{'qkv'[position]} is a nested tensor, layout {layout}; supported: tensors whose sequences have one"
        for function in (flash_attn_func, torch.ops.cuteflash.fwd, torch.ops.cuteflash.fwd_lse):
            with pytest.raises(NotImplementedError, match=message):
                function(*tensors)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiling_raises_the_same_error(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    q, k = torch.empty(2, S, H, D), torch.empty(2, S, 3, D)
    with pytest.raises(Exception, match="heads"):
        compiled(q, k, k)
    with pytest.raises(Exception, match="causal is 'x'; allowed: True, False"):
        compiled(q, q, q, causal="x")
