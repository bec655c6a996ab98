"""One architecture: what ours makes of each probe that eager attention can do."""

from __future__ import annotations

import copy
import importlib
import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cuteflash
from cuteflash.integrations import transformers as integration

from . import configs
from .inputs import candidates, packed, padded

RIGHT, NO_ATTENTION, REFUSED = "right", "no attention", "refused"
WRONG, FAILS, NO_REFERENCE = "wrong", "fails", "no reference"
TOLERANCE = 1e-3  # of the largest value; what a wrong mask changes is a hundred times that
MAX_PARAMETERS = 110_000_000
PACKAGE = pathlib.Path(cuteflash.__file__).parent


class Finding(NamedTuple):
    """What became of a probe: its name, an outcome, and why."""

    probe: str
    outcome: str
    reason: str = ""


class Pair(NamedTuple):
    """The same random weights with eager attention and with ours."""

    eager: Any
    ours: Any


class Calls:
    """Counts the calls of our attention function."""

    def __init__(self) -> None:
        self.number = 0

    def install(self) -> None:
        from transformers import AttentionInterface

        integration.register()

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return integration.attention(*args, **kwargs)

        AttentionInterface.register(integration.NAME, counted)


CALLS = Calls()


def model_classes(model_type: str) -> list[type]:
    """The classes to look at: the bare model, and the causal language model that the same configuration builds."""
    from transformers import PreTrainedModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    config_class = CONFIG_MAPPING[model_type]
    module = config_class.__module__.replace("configuration_", "modeling_")
    found = []
    for item in vars(importlib.import_module(module)).values():
        own = inspect.isclass(item) and issubclass(item, PreTrainedModel) and item.__module__ == module
        if own and item.config_class is config_class and not item.__name__.endswith("PreTrainedModel"):
            found.append(item)
    bare = [cls for cls in found if cls.__name__ in _names(MODEL_MAPPING_NAMES, model_type)]
    bare = bare or [cls for cls in found if re.search("(?<!LMHead)(Model|Encoder|Decoder|Backbone)$", cls.__name__)]
    causal = [cls for cls in found if re.search("ForCausalLM$|LMHeadModel$|ForConditionalGeneration$", cls.__name__)]
    return list(dict.fromkeys(bare[:1] + causal[:1])) or found[:1]


def _names(mapping: dict[str, Any], model_type: str) -> tuple[str, ...]:
    names = mapping.get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


def look_at(model_type: str) -> list[Finding]:
    """Every probe of an architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CALLS.install()
    findings = []
    try:
        classes = model_classes(model_type)
        base = configs.tiny(CONFIG_MAPPING[model_type])
        settings = configs.variants(base)
    except Exception as error:
        return [Finding("", NO_REFERENCE, f"configuration: {_brief(error)}")]
    if not classes:
        return [Finding("", NO_REFERENCE, "no model class")]
    for cls in classes:
        for variant, config in settings.items():
            findings += _look(cls, config, f"{cls.__name__} {variant}".strip())
    return findings


def build(cls: type, config: Any, implementation: str) -> Any:
    """A model with weights that make attention matter; the same for every implementation."""
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = cls(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                scale = 1.2 / max(parameter[0].numel(), 1) ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def _look(cls: type, config: Any, name: str) -> list[Finding]:
    try:
        with torch.device("meta"):
            probe = copy.deepcopy(config)
            probe._attn_implementation = "eager"
            size = sum(parameter.numel() for parameter in cls(probe).parameters())
        if size > MAX_PARAMETERS:
            return [Finding(name, NO_REFERENCE, f"{size / 1e6:.0f} million parameters")]
    except Exception:
        pass  # not every model can be built without storage
    refusal: Finding | None = None
    try:
        ours = build(cls, config, integration.NAME)
    except Exception as error:
        refusal = Finding(f"{name} load", *_outcome_of(error))
        if refusal.outcome == REFUSED:  # whether or not it runs here with eager attention
            return [refusal]
    try:
        eager = build(cls, config, "eager")
        inputs = _first_that_runs(eager)
    except Exception as error:
        return [Finding(name, NO_REFERENCE, _brief(error))]
    if refusal is not None:
        return [refusal]
    found = _probes(Pair(eager, ours), inputs, cls, config)
    return [Finding(f"{name} {probe}".strip(), outcome, why) for probe, outcome, why in found]


def _first_that_runs(model: Any) -> dict[str, Any]:
    first: Exception | None = None
    for inputs in candidates(model):
        try:
            found = _tensors(_run(model, inputs))
            if found and all(bool(torch.isfinite(tensor).all()) for tensor in found.values()):
                return inputs
            first = first or ValueError("eager attention gives no finite output")
        except Exception as error:
            first = first or error
    raise first or ValueError(f"no inputs known for {list(inspect.signature(model.forward).parameters)[:6]}")


@torch.no_grad()
def _run(model: Any, inputs: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)
    return model(**inputs, **more)


def _probes(pair: Pair, inputs: dict[str, Any], cls: type, config: Any) -> list[Finding]:
    before = CALLS.number
    found = [_compare("", pair, lambda model: _tensors(_run(model, inputs)))]
    if found[0].outcome == RIGHT and CALLS.number == before:
        attention = _attention_classes(pair.ours)
        return [Finding("", WRONG, f"{attention} never call us") if attention else Finding("", NO_ATTENTION)]
    if "input_ids" in inputs:
        for side in ("right", "left"):
            for batch in (2, 1):
                found.append(_padding(pair, inputs, side, batch))
        if "position_ids" in inspect.signature(pair.ours.forward).parameters:
            found.append(_compare("packed", pair, lambda model: _tensors(_run(model, packed(model, inputs)))))
        if re.search("CausalLM|LMHead", cls.__name__):
            found.append(_leak(pair, inputs))
            found += [_generate(pair, inputs, cache) for cache in ("dynamic", "static")]
    found.append(_weights(pair, inputs))
    found.append(_dropout(cls, config, inputs))
    return [finding for finding in found if finding.outcome != NO_REFERENCE or finding.probe == ""]


def _compare(name: str, pair: Pair, run: Callable[[Any], dict[str, Tensor]]) -> Finding:
    try:
        expected = run(pair.eager)
    except Exception as error:
        return Finding(name, NO_REFERENCE, _brief(error))
    try:
        got = run(pair.ours)
    except Exception as error:
        return Finding(name, *_outcome_of(error))
    if expected.keys() != got.keys():
        return Finding(name, WRONG, f"outputs {sorted(expected.keys() ^ got.keys())} differ")
    for key, tensor in expected.items():
        if tensor.shape != got[key].shape:
            return Finding(name, WRONG, f"{key}: shape {tuple(got[key].shape)}, eager {tuple(tensor.shape)}")
        error, size = (got[key] - tensor).abs().max().item(), tensor.abs().max().item()
        if not error <= TOLERANCE * max(size, 1e-3):
            return Finding(name, WRONG, f"{key} differs by {error:.2g} of {size:.2g}")
    return Finding(name, RIGHT)


def _padding(pair: Pair, inputs: dict[str, Any], side: str, batch: int) -> Finding:
    given, real = padded(inputs, side, batch)
    counts = None if "decoder_input_ids" in inputs else real  # a decoder beside the padded encoder has no padding
    return _compare(f"{side} padding, batch {batch}", pair, lambda model: _tensors(_run(model, given), counts))


def _leak(pair: Pair, inputs: dict[str, Any]) -> Finding:
    """Whether the last token changes what stands before it, in ours and not in eager."""

    def earlier(model: Any) -> dict[str, Tensor]:
        other = inputs["input_ids"].clone()
        other[:, -1] = (other[:, -1] + 7) % 100 + 10
        difference = _run(model, inputs)[0] - _run(model, {**inputs, "input_ids": other})[0]
        return {"leak": (difference[:, :-1].abs().amax() > 1e-3).float()[None]}

    return _compare("future token changed", pair, earlier)


def _generate(pair: Pair, inputs: dict[str, Any], cache: str) -> Finding:
    given, _ = padded(inputs, "left", 2)

    def run(model: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        out = model.generate(
            **given,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            cache_implementation=cache,
            output_scores=True,
            return_dict_in_generate=True,
        )
        scores = torch.stack(out.scores).float()
        return {"tokens": out.sequences.float(), "scores": scores.clamp(min=-1e4)}

    return _compare(f"generate, {cache} cache", pair, run)


def _weights(pair: Pair, inputs: dict[str, Any]) -> Finding:
    """Attention weights as an output: as many as from eager, or a refusal."""

    def counts(model: Any) -> dict[str, Tensor]:
        out = _run(model, inputs, output_attentions=True)
        found = {name: value for name, value in out.items() if name.endswith("attentions") and value is not None}
        number = sum(part is not None for value in found.values() for part in value)
        return {"attentions": torch.tensor([float(number)])}

    return _compare("attention weights", pair, counts)


def _dropout(cls: type, config: Any, inputs: dict[str, Any]) -> Finding:
    """Dropout in training: refused, unless eager attention drops nothing either."""
    name = "dropout in training"
    dropping, has_setting = configs.with_dropout(config)
    if not has_setting:
        return Finding(name, NO_REFERENCE)
    try:
        eager = build(cls, dropping, "eager")
        changes = _changes_in_training(eager, inputs)
    except Exception as error:
        return Finding(name, NO_REFERENCE, _brief(error))
    try:
        ours = _changes_in_training(build(cls, dropping, integration.NAME), inputs)
    except Exception as error:
        return Finding(name, *_outcome_of(error))
    return Finding(name, RIGHT) if ours == changes else Finding(name, WRONG, "dropout is left out in training")


def _changes_in_training(model: Any, inputs: dict[str, Any]) -> bool:
    still = _tensors(_run(model, inputs))
    moving = _tensors(_run(model.train(), inputs))
    return any(bool(((moving[key] - still[key]).abs() > TOLERANCE * still[key].abs().max()).any()) for key in still)


def _tensors(out: Any, real: Tensor | None = None) -> dict[str, Tensor]:
    """The floating outputs, those a token at its real tokens only; without caches."""
    found: dict[str, Tensor] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.numel():
                if real is None:
                    found[name] = value
                elif value.shape[:2] == real.shape:
                    found[name] = value[real]
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(f"{name}.{key}", item)
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                walk(f"{name}[{index}]", item)

    items = out.items() if hasattr(out, "items") else [("output", out)]
    for name, value in items:
        if "past_key_values" not in name and "cache" not in name and name != "encoder_last_hidden_state":
            walk(name, value)
    return found


def _attention_classes(model: Any) -> list[str]:
    """Classes of attention in a model; a gate with that name weighs features and has no queries and keys."""
    names = {type(module).__name__ for module in model.modules()}
    return sorted(name for name in names if re.search("Attention|Attn", name) and "GatedAttention" not in name)


def _outcome_of(error: Exception) -> tuple[str, str]:
    """A refusal is raised by our code and names us; any other error is not what a user can work with."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and pathlib.Path(trace.tb_frame.f_code.co_filename).is_relative_to(PACKAGE)
    return (REFUSED if ours else FAILS), _brief(error)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
