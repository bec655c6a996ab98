"""Refuses at load, by name, the models whose attention does not go through transformers' attention interface.

transformers accepts any registered name for any model. A model with attention code of its own would still run that
code, under our name; some of them then lose their masks.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

NAME = "cuteflash"
FP8_NAME = "cuteflash_fp8"
PAGED_NAME = "cuteflash_paged"  # what continuous batching switches a model with `NAME` to
NAMES = (NAME, FP8_NAME, PAGED_NAME)  # of implementations of ours
_INSTEAD = (
    'use attn_implementation="sdpa" or "eager"; a model of several parts takes a dict, for example '
    'attn_implementation={"text_config": "cuteflash", "vision_config": "eager"}'
)


def refuse_class(cls: type) -> None:
    """Refuse a model class that cannot run on us, as far as that is known before it is built.

    Raises:
        NotImplementedError: the class cannot run on us.
    """
    kernels, module = getattr(cls, "_compatible_flash_implementations", None), sys.modules.get(cls.__module__, torch)
    if kernels is not None and NAME not in kernels and not _gives_sinks(module):
        raise NotImplementedError(
            f"{cls.__name__} does not run on cuteflash: of the flash implementations it allows only {kernels}, which "
            f"know its sparsity, and cuteflash does not; {_INSTEAD}"
        )
    choices = vars(module).items()
    own_choice = any(re.search("ATTENTION_CLASSES$", name) and NAME not in value for name, value in choices)
    if own_choice or not cls._can_set_attn_implementation():  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"{cls.__name__} does not run on cuteflash: its attention is code of its own that does not go through "
            f"transformers' attention interface; {_INSTEAD}"
        )


def refuse_own_attention(model: torch.nn.Module) -> None:
    """Refuse a built model that has a layer with attention code of its own beside layers that go through the interface.

    Raises:
        NotImplementedError: the model has such a layer.
    """
    for name, module in _own_modules(model, ""):
        layer: Any = type(module)
        if _computes_attention(layer):
            raise NotImplementedError(
                f"{type(model).__name__} does not run on cuteflash: {layer.__name__} ({name}) is attention code "
                f"of its own that does not go through transformers' attention interface; {_INSTEAD}"
            )


def guard() -> None:
    """Make transformers call our checks wherever a model's attention implementation is set. Idempotent."""
    from transformers import PreTrainedModel

    if getattr(PreTrainedModel.post_init, "knows_cuteflash", False):
        return
    for method, wrap in (
        ("_check_and_adjust_attn_implementation", _asks_for_class),
        ("get_correct_attn_implementation", _asks_for_class),
        ("post_init", _asks_for_layers),
        ("set_attn_implementation", _asks_and_restores),
    ):
        original = getattr(PreTrainedModel, method)
        ours = functools.wraps(original)(wrap(original))
        ours.knows_cuteflash = True  # type: ignore[attr-defined]
        setattr(PreTrainedModel, method, ours)


def _asks_for_class(original: Callable[..., Any]) -> Callable[..., Any]:
    def check(self: Any, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(implementation):
            refuse_class(type(self))
        return original(self, implementation, *args, **kwargs)

    return check


def _asks_for_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(self.config._attn_implementation):
            refuse_own_attention(self)
        return original(self, *args, **kwargs)

    return post_init


def _asks_and_restores(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers sets what it can and warns of the rest; a model that cannot run on us raises and is unchanged."""

    def set_attn_implementation(self: Any, implementation: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers import PreTrainedModel

        models = [module for module in self.modules() if isinstance(module, PreTrainedModel)]
        configs = [config for model in models for config in _configs(model.config)]
        before = [(config, config._attn_implementation_internal) for config in configs]
        try:
            result = original(self, implementation, *args, **kwargs)
            for model in models:
                if _is_ours(implementation) or _is_ours(model.config._attn_implementation):
                    refuse_class(type(model))
                    refuse_own_attention(model)
        except NotImplementedError:
            for config, value in before:
                config._attn_implementation_internal = value
            raise
        return result

    return set_attn_implementation


def _is_ours(implementation: Any) -> bool:
    return isinstance(implementation, str) and implementation.removeprefix("paged|") in NAMES


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for key in config.sub_configs:
        if getattr(config, key, None) is not None:
            yield from _configs(getattr(config, key))


def _own_modules(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules below one, without the models inside it, which are checked on their own."""
    from transformers import PreTrainedModel

    for name, child in module.named_children():
        if not isinstance(child, PreTrainedModel):
            yield f"{path}{name}", child
            yield from _own_modules(child, f"{path}{name}.")


@functools.cache
def _gives_sinks(module: Any) -> bool:
    """Whether a model's code gives attention sinks to the interface, which is why it allows only certain kernels."""
    try:
        return "s_aux=" in inspect.getsource(module)
    except (OSError, TypeError):
        return False


@functools.cache
def _computes_attention(cls: Any) -> bool:
    """Whether a layer computes attention between tokens in code of its own; judged by its name and its source.

    Pooling over a learned query, the maps that detection models return and blocks of convolutional autoencoders are
    not such layers; torch's own attention module is.
    """
    if not re.search("Attention", cls.__name__) or re.search("Pool|AttentionMap|Residual", cls.__name__):
        return False
    defining = next((base for base in cls.__mro__ if "forward" in vars(base)), cls)
    if defining.__module__.startswith("torch."):
        return False
    try:
        source = inspect.getsource(defining)
    except (OSError, TypeError):
        return False
    if "ALL_ATTENTION_FUNCTIONS" in source:
        return False
    scores = "softmax(" in source.lower() and re.search(r"matmul\(|einsum\(|bmm\(| @ ", source)
    return bool(scores) or "scaled_dot_product_attention(" in source
