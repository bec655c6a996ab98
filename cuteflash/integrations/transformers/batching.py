"""Who decides in transformers what an implementation with "flash" in its name can do.

transformers takes every such name for one of the flash-attn packages: it loads functions of the package, and vision
towers pack images into one row without a mask; for any other name they give the interface one image at a time. So our
names are told apart. Continuous batching is the exception: it has kinds of steps that only flash-attn takes, and ours
for it (`PAGED_NAME`) takes them as well.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from cuteflash.integrations.transformers.load import FP8_NAME, NAME, NAMES, PAGED_NAME

BATCHING = "transformers.generation.continuous_batching"


def tell_apart_from_flash_attn() -> None:
    """Answer for our names when transformers asks whether flash-attn is meant. Calling it again changes nothing.

    Its modules import the function that decides this by name.
    """
    from transformers.utils import generic

    _import_batching()
    ask = generic.is_flash_attention_requested
    if getattr(ask, "knows_cuteflash", False):
        return

    @functools.wraps(ask)
    def ask_of_others(
        config: Any = None, requested_attention_implementation: str | None = None, *args: Any, **kwargs: Any
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name not in NAMES and ask(config, requested_attention_implementation, *args, **kwargs)

    @functools.wraps(ask)
    def ask_in_batches(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        if name == PAGED_NAME:
            return version is None  # of a certain version it is none
        return ask_of_others(config, requested_attention_implementation, version=version)

    for answer in (ask_of_others, ask_in_batches):
        answer.knows_cuteflash = True  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if getattr(module, "__dict__", {}).get("is_flash_attention_requested") is ask:
            module.is_flash_attention_requested = ask_in_batches if name.startswith(BATCHING) else ask_of_others  # type: ignore[attr-defined]


def join_batches() -> None:
    """Let continuous batching run models with our implementations. Calling it again changes nothing.

    Without the class or a function that it changes, as in transformers before 5.17, transformers refuses our names.
    """
    modules = _import_batching()
    if modules is None:
        return
    api, initialization = modules
    manager = api.ContinuousBatchingManager
    switch = getattr(manager, "switch_to_cb_friendly_attn", None)
    decide = getattr(initialization, "ensure_decode_fast_path_is_available", None)
    if switch is None or decide is None or getattr(switch, "knows_cuteflash", False):
        return
    manager.switch_to_cb_friendly_attn = _switches(switch)
    api.ContinuousBatchingIOs.reset = _waits(api.ContinuousBatchingIOs.reset)
    initialization.ensure_decode_fast_path_is_available = _decides(decide)


def _import_batching() -> tuple[Any, Any] | None:
    """The modules of continuous batching, of a transformers that has them."""
    try:
        from transformers.generation.continuous_batching import continuous_api, initialization
    except ImportError:
        return None
    return continuous_api, initialization


def _switches(original: Any) -> Any:
    @functools.wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """A model with `NAME` gets `PAGED_NAME`, until the manager stops; never flash-attn instead."""
        name = model.config._attn_implementation
        if name == FP8_NAME:
            raise NotImplementedError(
                f"attn_implementation is {FP8_NAME}, which does not support continuous batching; set {NAME} for it"
            )
        if name == NAME:
            model.set_attn_implementation(PAGED_NAME)
            self._original_attn_impl = name
        elif name != PAGED_NAME:
            original(self, model, *args, **kwargs)

    switch_to_cb_friendly_attn.knows_cuteflash = True  # type: ignore[attr-defined]
    return switch_to_cb_friendly_attn


def _waits(original: Any) -> Any:
    @functools.wraps(original)
    def reset(self: Any) -> None:
        """Clear the inputs of steps, and wait for it.

        transformers clears them on the current stream and copies the next step's on another one, which does not wait: a
        GPU that is busy clears them after that, and the step's tokens are wrong (transformers 5.17 and 5.23).
        """
        original(self)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    return reset


def _decides(original: Any) -> Any:
    @functools.wraps(original)
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
        """Whether steps of one token a request read pages in place: ours do, but not those of sliding layers."""
        if config._attn_implementation != PAGED_NAME:
            original(config, cb_config, *args, **kwargs)
        elif not _is_full(config):
            cb_config.max_blocks_per_request = 0

    return ensure_decode_fast_path_is_available


def _is_full(config: Any) -> bool:
    """Whether all layers are full attention, of which the cache keeps all keys in their order."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "sliding_window", None) is None
    return set(kinds) == {"full_attention"}
