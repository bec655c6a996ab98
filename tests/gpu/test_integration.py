"""The operators inside torch and transformers on a GPU, and the errors that come before any launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuteflash
from tests.gpu.checks import Case, assert_right

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


def test_a_language_model_agrees_with_eager(device: torch.device) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    from cuteflash.integrations import transformers as integration

    integration.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    exact = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").to(device).eval()
    tokens = torch.randint(0, 128, (2, 50), device=device)
    mask = torch.ones_like(tokens)
    mask[1, :17] = 0  # left padding
    logits = {}
    with torch.no_grad():
        logits["exact"] = exact(tokens, attention_mask=mask).logits
        for name in ("eager", "cuteflash"):
            model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=name, dtype=torch.bfloat16)
            model = model.to(device).eval()
            model.load_state_dict(exact.state_dict())
            logits[name] = model(tokens, attention_mask=mask).logits.float()
    errors = {name: (value - logits["exact"])[mask.bool()].abs().max().item() for name, value in logits.items()}
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
        "family": (ValueError, r"family", {"family": "sm70"}),
    }


@pytest.mark.parametrize("name", list(bad_calls(torch.device("cpu"))))
def test_bad_input_is_refused_before_any_launch(name: str, device: torch.device) -> None:
    error, words, changed = bad_calls(device)[name]
    good = dict(zip("qkv", CASE.inputs(device), strict=True))
    with pytest.raises(error, match=words):
        cuteflash.flash_attn_func(**(good | changed))


@pytest.mark.parametrize("name", ["dtype mix", "last dim", "pointer", "heads"])
def test_a_good_call_before_does_not_let_bad_input_through(name: str, device: torch.device) -> None:
    error, words, changed = bad_calls(device)[name]
    good = dict(zip("qkv", CASE.inputs(device), strict=True))
    cuteflash.flash_attn_func(**good)
    with pytest.raises(error, match=words):
        cuteflash.flash_attn_func(**(good | changed))


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
    assert torch.equal(torch.vmap(cuteflash.flash_attn_func)(*(x[None] for x in inputs))[0], expected)


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


def test_gradients_are_refused(device: torch.device) -> None:
    q, k, v = CASE.inputs(device)
    out = cuteflash.flash_attn_func(q.requires_grad_(), k, v)
    with pytest.raises(NotImplementedError, match="backward"):
        out.sum().backward()
