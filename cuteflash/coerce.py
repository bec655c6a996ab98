"""What users may write for an argument of the public functions, as an operator takes it."""

from __future__ import annotations

import numbers
import sys
from typing import Any

import torch
from torch import Tensor

from cuteflash.arguments import Fp8Options, FwdOptions
from cuteflash.problem import FP8_OUT, UNBOUNDED
from cuteflash.traits.arch import FAMILIES, Family
from cuteflash.validate import SCALES, SOFTCAPS, shown

OUT_DTYPES: dict[Any, str] = {None: FP8_OUT, torch.bfloat16: "bf16", torch.float16: "fp16"}
Window = tuple[int, int]
UNBOUNDED_WINDOW: Window = (-1, -1)


def not_tensors(**tensors: object) -> TypeError:
    """The error that names the first of these arguments that is not a tensor."""
    name, value = next((n, x) for n, x in tensors.items() if not isinstance(x, Tensor))
    return TypeError(f"{name} is a {type(value).__name__}; allowed: a torch.Tensor")


def window_of(window_size: Window) -> Window:
    """Both sides of a window as an operator takes them."""
    if isinstance(window_size, (tuple, list)) and len(window_size) == 2:
        left, right = window_size
        if is_int(left) and is_int(right):
            if left < -1 or right < -1:
                raise ValueError(f"window_size is {shown(window_size)}; allowed: -1 (unbounded) or more on each side")
            return _side(left), _side(right)
    raise TypeError(
        f"window_size is {shown(window_size)}; allowed: None or a pair of ints (left, right), -1 is unbounded"
    )


def _side(keys: int) -> int:
    """A side of a window as an operator takes it; one beyond every length is none."""
    return int(keys) if keys < UNBOUNDED else -1


# NumPy's scalars are taken for what they stand for. They are known as numbers to `numbers`, but for its booleans.


def is_int(value: object) -> bool:
    """Whether a value is an integer, also one of NumPy's."""
    return isinstance(value, (int, numbers.Integral)) and not isinstance(value, bool)


def flag(name: str, value: object, also: str = "") -> bool:
    """`value` as a bool; `also` names what else the argument may be."""
    if isinstance(value, bool):
        return value
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.bool_):
        return bool(value)
    raise TypeError(f"{name} is {shown(value)}; allowed: {also}True, False")


def number(name: str, value: object, allowed: str) -> float:
    """`value` as an operator takes it. Not tensors: reading one would synchronise the host with the GPU."""
    if not isinstance(value, (int, numbers.Real)) or isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}, a {type(value).__name__}; allowed: {allowed}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is {shown(value)}; allowed: {allowed}") from None


def check_family(family: object) -> None:
    """Raise TypeError if a family is not a string; the operators check which one."""
    if family is not None and not isinstance(family, str):
        raise TypeError(f"family is {shown(family)}; allowed: None, {', '.join(map(repr, FAMILIES))}")


def descales_of(*, q_descale: object, k_descale: object, v_descale: object) -> tuple[Tensor, Tensor, Tensor]:
    """The scales of 8-bit operands, of which at least one is given: TypeError names the first that is missing."""
    tensors = []
    for name, value in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if not isinstance(value, Tensor):
            what = "None" if value is None else f"a {type(value).__name__}"
            raise TypeError(
                f"{name} is {what}; allowed with 8-bit q, k and v: a torch.Tensor, as for each of the others"
            )
        tensors.append(value)
    q, k, v = tensors
    return q, k, v


def formats_of(transposed_v: object, out_dtype: object) -> dict[str, Any]:
    """How V and O of 8-bit operands lie in memory, as an operator takes it."""
    if out_dtype not in OUT_DTYPES:
        names = ", ".join(map(str, OUT_DTYPES))
        raise TypeError(f"out_dtype is {shown(out_dtype)}; allowed: {names}")
    return {"transposed_v": flag("transposed_v", transposed_v), "out_dtype": OUT_DTYPES[out_dtype]}


def formats_without_scales(transposed_v: object, out_dtype: object, v_mean: object) -> ValueError:
    """The error if 16-bit operands come with what only 8-bit ones have."""
    mean = v_mean if v_mean is None else "given"
    return ValueError(
        f"transposed_v is {shown(transposed_v)}, out_dtype is {shown(out_dtype)}, v_mean is {mean}; allowed without "
        "q_descale, k_descale and v_descale: False, None and None"
    )


def fp8_options_of(options: FwdOptions, transposed_v: object, out_dtype: object) -> Fp8Options:
    """The options of a call with 8-bit operands; there is no backward to be deterministic."""
    shared = {name: value for name, value in options._asdict().items() if name in Fp8Options._fields}
    return Fp8Options(**shared, **formats_of(transposed_v, out_dtype))


def options_of(
    softmax_scale: float | None,
    causal: bool,
    window_size: Window | None,
    softcap: float,
    pack_gqa: bool | None,
    family: Family | None,
    deterministic: bool,
    lengths: str | None,
) -> FwdOptions:
    """The options of a call, as an operator takes them; `lengths` is one already."""
    if window_size is None or window_size is UNBOUNDED_WINDOW:
        left, right = UNBOUNDED_WINDOW
    else:
        left, right = window_of(window_size)
    if causal is not False and flag("causal", causal):
        right = 0
    if softmax_scale is not None and type(softmax_scale) is not float:  # NumPy's float64 is one of its subclasses
        softmax_scale = number("softmax_scale", softmax_scale, SCALES)
    if pack_gqa is not None:
        pack_gqa = flag("pack_gqa", pack_gqa, "None, ")
    if type(softcap) is not float:
        softcap = number("softcap", softcap, SOFTCAPS)
    check_family(family)
    if deterministic is not False:
        deterministic = flag("deterministic", deterministic)
    return FwdOptions(softmax_scale, left, right, softcap, pack_gqa, family, deterministic, lengths)
