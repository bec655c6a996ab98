"""The operators inside torch and transformers on a GPU, and the errors that come before any launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import cuteflash
from tests.gpu.checks import SMALL_LLAMA, Case, assert_right

pytestmark = pytest.mark.gpu

CASE = Case(96, 160, heads=4, kv_heads=2, causal=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic: bool, device: torch.device) -> None:
    def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return cuteflash.flash_attn_func(q, k, v * 2, causal=True) * 0.5

    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(scaled, fullgraph=True, dynamic=dynamic, backend=backend)
    for seed, case in enumerate((CASE, Case(80, 144, heads=4, kv_heads=2, causal=True))):
        inputs = case.inputs(device, seed)
        with torch.no_grad():
            assert_right(inputs, case, compiled(*inputs))


@pytest.mark.parametrize("name", ["fwd", "fwd_lse"])
@pytest.mark.parametrize("options", [(), (0.2, 20, 0), (None, -1, -1, 15.0, True)], ids=str)
def test_operators_pass_opcheck(name: str, options: tuple[Any, ...], family: str, device: torch.device) -> None:
    defaults = (None, -1, -1, 0.0, None, None)
    arguments = (*options, *defaults[len(options) : 5], family)
    operator = getattr(torch.ops.cuteflash, name).default
    torch.library.opcheck(operator, (*CASE.inputs(device), *arguments))


@pytest.mark.parametrize("batch", ["left padding", "right padding", "cached", "packed"])
def test_a_language_model_agrees_with_eager(batch: str, device: torch.device) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    from cuteflash.integrations import transformers as integration

    integration.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL_LLAMA)
    exact = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").to(device).eval()
    tokens = torch.randint(0, 128, (2, 50), device=device)
    mask = torch.ones_like(tokens)
    positions = torch.arange(50, device=device).expand(2, -1)
    if batch == "packed":
        positions = torch.stack([positions[0] % 20, positions[1] % 33])
    elif batch == "right padding":
        mask[1, 33:] = 0
    else:
        mask[1, :17] = 0

    def logits(model: Any) -> torch.Tensor:
        if batch == "packed":
            return model(tokens, position_ids=positions, use_cache=False).logits
        if batch != "cached":
            return model(tokens, attention_mask=mask).logits
        first = model(tokens[:, :40], attention_mask=mask[:, :40], use_cache=True)
        rest = model(tokens[:, 40:], attention_mask=mask, past_key_values=first.past_key_values)
        return torch.cat([first.logits, rest.logits], dim=1)

    results = {}
    with torch.no_grad():
        results["exact"] = logits(exact)
        for name in ("eager", "cuteflash"):
            model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=name, dtype=torch.bfloat16)
            model = model.to(device).eval()
            model.load_state_dict(exact.state_dict())
            results[name] = logits(model).float()
    errors = {name: (value - results["exact"])[mask.bool()].abs().max().item() for name, value in results.items()}
    assert errors["cuteflash"] <= 2 * errors["eager"] + 1e-3


def test_scaled_dot_product_attention_runs_ours(cuda: torch.device) -> None:
    from cuteflash.integrations import sdpa

    case = Case(130, heads=4, causal=True)
    inputs = case.inputs(cuda)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("cuteflash")
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert_right(inputs, case, out)
    with torch.no_grad():
        assert torch.equal(out, cuteflash.flash_attn_func(*inputs, causal=True))


def nested(length: int, like: torch.Tensor) -> torch.Tensor:
    sequences = [like.new_zeros(seqlen, *like.shape[2:]) for seqlen in (length, length // 2)]
    return torch.nested.nested_tensor(sequences, layout=torch.strided)


def bad_calls(device: torch.device) -> dict[str, tuple[type[Exception], str, dict[str, Any]]]:
    """Name → (error, words of its message, arguments that replace good ones)."""
    q, k, v = CASE.inputs(device)
    flat = torch.zeros(q.numel() + 8, dtype=q.dtype, device=device)
    return {
        "rank": (ValueError, r"q has 3 dimensions", {"q": q[0]}),
        "dtype mix": (TypeError, r"k\.dtype", {"k": k.half()}),
        "integer dtype": (TypeError, r"q\.dtype", {"q": q.int(), "k": k.int(), "v": v.int()}),
        "heads": (ValueError, r"heads", {"q": q[:, :, :3]}),
        "wide head dim": (ValueError, r"264", {"q": q.new_zeros(2, 8, 4, 264), "k": k.new_zeros(2, 160, 2, 264)}),
        "odd head dim": (ValueError, r"multiples of 8", {"q": q[..., :60], "k": k[..., :60]}),
        "sparse": (
            NotImplementedError,
            r"q\.layout",
            {"q": torch.zeros(q.shape, dtype=q.dtype, device=device).to_sparse()},
        ),
        "last dim": (ValueError, r"q\.stride\(3\)", {"q": q.transpose(2, 3).contiguous().transpose(2, 3)}),
        "pointer": (ValueError, r"q\.data_ptr", {"q": flat[1 : 1 + q.numel()].view(q.shape)}),
        "batch": (ValueError, r"k\.shape\[0\]", {"k": k[:1]}),
        "key length": (ValueError, r"v\.shape\[1\]", {"v": v[:, :5]}),
        "scale": (ValueError, r"softmax_scale", {"softmax_scale": float("nan")}),
        "softcap": (ValueError, r"softcap", {"softcap": -1.0}),
        "window": (ValueError, r"window", {"window_size": (-2, 0)}),
        "endless scale": (ValueError, r"softmax_scale is 10+\.\.\.0+; allowed", {"softmax_scale": 10**400}),
        "lse": (TypeError, r"return_lse is 'x'; allowed: True, False", {"return_lse": "x"}),
        "nested": (NotImplementedError, r"q is a nested tensor", {"q": nested(CASE.seqlen_q, q)}),
        "nested keys": (NotImplementedError, r"k is a nested tensor", {"k": nested(CASE.seqlen_q, k)}),
        "family": (ValueError, r"family", {"family": "sm70"}),
    }


@pytest.mark.parametrize("name", list(bad_calls(torch.device("cpu"))))
def test_bad_input_is_refused_before_any_launch(name: str, device: torch.device) -> None:
    error, words, changed = bad_calls(device)[name]
    good = dict(zip("qkv", CASE.inputs(device), strict=True))
    with pytest.raises(error, match=words):
        cuteflash.flash_attn_func(**(good | changed))


@pytest.mark.parametrize("name", ["dtype mix", "last dim", "pointer", "heads", "nested", "nested keys"])
def test_a_good_call_before_does_not_let_bad_input_through(name: str, device: torch.device) -> None:
    error, words, changed = bad_calls(device)[name]
    good = dict(zip("qkv", CASE.inputs(device), strict=True))
    cuteflash.flash_attn_func(**good)
    with pytest.raises(error, match=words):
        cuteflash.flash_attn_func(**(good | changed))


def test_calls_that_differ_in_sizes_alone_are_right_one_after_the_other(family: str, device: torch.device) -> None:
    for seqlen_q, seqlen_k, heads, batch in [(33, 70, 4, 2), (34, 70, 4, 2), (90, 41, 8, 1), (300, 299, 4, 3)]:
        case = Case(seqlen_q, seqlen_k, heads=heads, kv_heads=heads // 2, batch=batch, causal=True)
        inputs = case.inputs(device)
        assert_right(inputs, case, cuteflash.flash_attn_func(*inputs, causal=True, family=family))
        strided = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)
        assert_right(strided, case, cuteflash.flash_attn_func(*strided, causal=True, family=family))


def test_modes_see_the_operator(cuda: torch.device) -> None:
    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    inputs = CASE.inputs(cuda)
    expected = cuteflash.flash_attn_func(*inputs)
    with Recorder():
        out = cuteflash.flash_attn_func(*inputs)
    assert "cuteflash.fwd.default" in seen
    assert torch.equal(out, expected)


@pytest.mark.parametrize("way", ["jvp", "dual tensor"])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_forward_mode_is_refused(mode: Any, position: int, way: str, device: torch.device) -> None:
    inputs = list(CASE.inputs(device))
    cuteflash.flash_attn_func(*inputs)  # planned, compiled

    def function(x: torch.Tensor) -> torch.Tensor:
        return cuteflash.flash_attn_func(*inputs[:position], x, *inputs[position + 1 :])

    x = inputs[position]
    with mode(), pytest.raises(NotImplementedError, match=f"{'qkv'[position]} has a tangent .*no forward-mode"):
        if way == "jvp":
            torch.func.jvp(function, (x,), (x,))
        else:
            with forward_ad.dual_level():
                function(forward_ad.make_dual(x, x))


def test_tensors_without_a_tangent_pass_through_forward_mode(device: torch.device) -> None:
    inputs = CASE.inputs(device)
    expected = cuteflash.flash_attn_func(*inputs, causal=True)
    with forward_ad.dual_level():
        out = cuteflash.flash_attn_func(*inputs, causal=True)
    assert torch.equal(out, expected)
    assert_right(inputs, CASE, out)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (3, 1, 0)], ids=str)
def test_vmap_maps(in_dims: tuple[int | None, ...], family: str, device: torch.device) -> None:
    examples = [CASE.inputs(device, seed) for seed in range(3)]
    examples = [tuple(x if dim is not None else y for x, y, dim in zip(e, examples[0], in_dims)) for e in examples]
    stacked = [
        torch.stack(xs).movedim(0, dim) if dim is not None else xs[0] for xs, dim in zip(zip(*examples), in_dims)
    ]

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return cuteflash.flash_attn_func(q, k, v, causal=True, family=family, return_lse=True)

    out, lse = torch.vmap(function, in_dims=in_dims)(*stacked)
    for inputs, one, one_lse in zip(examples, out, lse):
        assert_right(inputs, CASE, one, one_lse)


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("float16",) * 3, ("bfloat16", "float32", "float16")], ids=str)
def test_autocast_runs_in_its_dtype(
    dtypes: tuple[str, ...], to: torch.dtype, family: str, device: torch.device
) -> None:
    inputs = [x.to(getattr(torch, dtype)) for x, dtype in zip(CASE.inputs(device), dtypes)]
    cast = tuple(x.to(to) for x in inputs)
    expected, expected_lse = cuteflash.flash_attn_func(*cast, causal=True, family=family, return_lse=True)
    assert_right(cast, CASE, expected, expected_lse)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), torch.autocast(device.type, to):
            out, lse = cuteflash.flash_attn_func(*inputs, causal=True, family=family, return_lse=True)
            assert torch.equal(cuteflash.flash_attn_func(*inputs, causal=True, family=family), expected)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


def test_autocast_does_as_torchs_own_attention(device: torch.device) -> None:
    inputs = [x.float() for x in CASE.inputs(device)]
    for enabled in (True, False) if device.type == "cpu" else (True,):
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled), torch.no_grad():
            torchs = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in inputs), enable_gqa=True
            )
            assert cuteflash.flash_attn_func(*inputs).dtype == torchs.dtype


def test_autocast_is_compiled(device: torch.device) -> None:
    inputs = tuple(x.float() for x in CASE.inputs(device))

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return cuteflash.flash_attn_func(q, k, v, causal=True)

    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*inputs), model(*inputs))


def test_flops_are_counted(device: torch.device) -> None:
    inputs = CASE.inputs(device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        cuteflash.flash_attn_func(*inputs, causal=True)
    scores = CASE.batch * CASE.heads * CASE.seqlen_q * 160
    assert counter.get_total_flops() == 2 * scores * 2 * CASE.head_dim


def test_scalars_of_numpy(family: str, device: torch.device) -> None:
    numpy = pytest.importorskip("numpy")
    inputs = CASE.inputs(device)
    given = {
        "softmax_scale": numpy.float32(0.25),
        "softcap": numpy.float64(20),
        "window_size": (numpy.int64(30), 2**63),
        "causal": numpy.True_,
        "return_lse": numpy.True_,
        "pack_gqa": numpy.False_,
    }
    out, lse = cuteflash.flash_attn_func(*inputs, family=family, **given)
    case = dataclasses.replace(CASE, scale=0.25, softcap=20.0, window=(30, -1))
    assert_right(inputs, case, out, lse)


@pytest.mark.parametrize("negated", range(3))
def test_a_lazily_negated_tensor_is_read_negated(negated: int, family: str, device: torch.device) -> None:
    inputs = CASE.inputs(device)
    lazy = [torch._neg_view(-x) if i == negated else x for i, x in enumerate(inputs)]
    assert lazy[negated].is_neg()
    with torch.no_grad():
        out = cuteflash.flash_attn_func(*lazy, family=family, **CASE.options())
    assert_right(inputs, CASE, out)


def test_devices_do_not_mix(cuda: torch.device) -> None:
    q, k, v = CASE.inputs(cuda)
    with pytest.raises(ValueError, match=r"k\.device"):
        cuteflash.flash_attn_func(q, k.cpu(), v)


def test_full_precision_is_refused_on_a_gpu(cuda: torch.device) -> None:
    with pytest.raises(TypeError, match=r"q\.dtype is torch\.float32"):
        cuteflash.flash_attn_func(*(x.float() for x in CASE.inputs(cuda)))


def test_a_family_the_gpu_lacks_is_refused(cuda: torch.device) -> None:
    if torch.cuda.get_device_capability(cuda)[0] == 9:
        pytest.skip("Hopper runs every family")
    with pytest.raises(NotImplementedError, match="sm90"):
        cuteflash.flash_attn_func(*CASE.inputs(cuda), family="sm90")
