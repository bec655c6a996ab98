"""What users may write for an argument of the public functions, as an operator takes it."""

from __future__ import annotations

import dataclasses
import numbers
import sys
from typing import Any

import torch
from torch import Tensor

from cuteflash.arguments import Fp8InferenceOptions, Fp8Options, FwdOptions
from cuteflash.problem import FP8_OUT, UNBOUNDED
from cuteflash.quantize_problem import HADAMARD_BLOCKS
from cuteflash.traits.arch import FAMILIES, Family
from cuteflash.validate import SCALES, SOFTCAPS, SPLITS, shown

OUT_DTYPES: dict[Any, str | None] = {None: None, torch.bfloat16: "bf16", torch.float16: "fp16"}
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


def chunk_of(attention_chunk: object) -> int:
    """The length of a mask's chunks as an operator takes it; 0 is none."""
    if not is_int(attention_chunk):
        raise TypeError(f"attention_chunk is {shown(attention_chunk)}; allowed: an int, 0 (none) or more")
    if attention_chunk < 0:  # type: ignore[operator]
        raise ValueError(f"attention_chunk is {shown(attention_chunk)}; allowed: 0 (none) or more")
    chunk: int = int(attention_chunk)  # type: ignore[call-overload]
    return min(chunk, UNBOUNDED)


def check_no_chunk(attention_chunk: object) -> None:
    """Raise NotImplementedError if chunks are asked for, which no kernel of 8-bit operands has."""
    if attention_chunk != 0:
        raise NotImplementedError(f"attention_chunk is {shown(attention_chunk)}; supported with 8-bit operands: 0")


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


def scales_of(
    fp8: object, v_mean: object, *, q_descale: object, k_descale: object, v_descale: object
) -> list[Tensor | None]:
    """The scales of 8-bit operands, of which at least one is given, and V's mean: errors name what is wrong."""
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    check_not_inferred(fp8, **descales)
    if v_mean is not None and not isinstance(v_mean, Tensor):
        raise not_tensors(v_mean=v_mean)
    return [*descales_of(**descales), v_mean]


def check_not_inferred(fp8: object, **descales: object) -> None:
    """Raise ValueError if operands with scales, of which at least one is given, are to be quantised."""
    if fp8 is not False and fp8_of(fp8) is not None:
        given = next(name for name, value in descales.items() if value is not None)
        raise ValueError(f"fp8 is {shown(fp8)}; allowed with {given}: False, as q, k and v have 8 bits already")


def out_dtype_of(out_dtype: object) -> str | None:
    """The element type of O as an operator takes it, None if none is named."""
    if not (out_dtype is None or isinstance(out_dtype, torch.dtype)) or out_dtype not in OUT_DTYPES:
        names = ", ".join(map(str, OUT_DTYPES))
        raise TypeError(f"out_dtype is {shown(out_dtype)}; allowed: {names}")
    return OUT_DTYPES[out_dtype]


def formats_of(transposed_v: object, out_dtype: object) -> dict[str, Any]:
    """How V and O of 8-bit operands lie in memory, as an operator takes it."""
    return {"transposed_v": flag("transposed_v", transposed_v), "out_dtype": out_dtype_of(out_dtype) or FP8_OUT}


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8:
    """How 16-bit tensors become 8-bit operands of attention, for ``flash_attn_func(..., fp8=Fp8(...))``.

    Attributes:
        hadamard: rotate each block of so many columns of Q and K, 32, 64, 128 or 256, by an orthonormal Hadamard
            matrix before they are rounded: the scores stay what they are, and channels with outliers are spread over
            their block. `head_dim` is a multiple of it. None is no rotation.

    Raises:
        TypeError: `hadamard` is not an int.
        ValueError: it is not one of these.
    """

    hadamard: int | None = None

    def __post_init__(self) -> None:
        if self.hadamard is None:
            return
        allowed = f"None, {', '.join(map(str, HADAMARD_BLOCKS))}"
        if not is_int(self.hadamard):
            raise TypeError(f"hadamard is {shown(self.hadamard)}; allowed: {allowed}")
        if self.hadamard not in HADAMARD_BLOCKS:
            raise ValueError(f"hadamard is {shown(self.hadamard)}; allowed: {allowed}")


def fp8_of(fp8: object) -> Fp8 | None:
    """How to quantise; None if not at all."""
    if isinstance(fp8, Fp8):
        return fp8
    return Fp8() if flag("fp8", fp8, "a cuteflash.Fp8, ") else None


def check_not_quantised(transposed_v: object, v_mean: object) -> None:
    """Raise ValueError if 16-bit tensors that are to be quantised come with what only 8-bit ones have."""
    if transposed_v is not False or v_mean is not None:
        mean = v_mean if v_mean is None else "given"
        raise ValueError(
            f"transposed_v is {shown(transposed_v)}, v_mean is {mean}; allowed with fp8: False and None, as q, k and v "
            "have 16 bits and are quantised in the call"
        )


def check_sinks_alone(
    sinks: object,
    q_descale: object,
    k_descale: object,
    v_descale: object,
    v_mean: object,
    transposed_v: object,
    out_dtype: object,
    fp8: object = False,
) -> None:
    """Raise if sinks are not a tensor, or come with one of the others, which belong to attention in 8 bits."""
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks is a {type(sinks).__name__}; allowed: None, a torch.Tensor")
    others = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "v_mean": v_mean}
    for name, value in (others | {"transposed_v": transposed_v, "out_dtype": out_dtype, "fp8": fp8}).items():
        if isinstance(value, Tensor) or value:
            raise NotImplementedError(f"{name} is given with sinks; supported with sinks: q, k and v of 16 bits")


def formats_without_scales(transposed_v: object, out_dtype: object, v_mean: object) -> ValueError:
    """The error if 16-bit operands come with what only 8-bit ones have."""
    mean = v_mean if v_mean is None else "given"
    return ValueError(
        f"transposed_v is {shown(transposed_v)}, out_dtype is {shown(out_dtype)}, v_mean is {mean}; allowed without "
        "q_descale, k_descale and v_descale: False, None and None, and with fp8 an out_dtype"
    )


def fp8_options_of(options: FwdOptions, transposed_v: object, out_dtype: object) -> Fp8Options:
    """The options of a call with 8-bit operands; there is no backward to be deterministic."""
    check_no_chunk(options.attention_chunk)
    check_unsplit(options.num_splits)
    shared = {name: value for name, value in options._asdict().items() if name in Fp8Options._fields}
    return Fp8Options(**shared, **formats_of(transposed_v, out_dtype))


def inference_options_of(options: FwdOptions, how: Fp8, out_dtype: object) -> Fp8InferenceOptions:
    """The options of a call that quantises 16-bit tensors; there is no backward to be deterministic."""
    check_no_chunk(options.attention_chunk)
    check_unsplit(options.num_splits)
    shared = {name: value for name, value in options._asdict().items() if name in Fp8InferenceOptions._fields}
    return Fp8InferenceOptions(**shared, out_dtype=out_dtype_of(out_dtype), hadamard=int(how.hadamard or 0))


def options_of(
    softmax_scale: float | None,
    causal: bool,
    window_size: Window | None,
    softcap: float,
    pack_gqa: bool | None,
    family: Family | None,
    deterministic: bool,
    lengths: str | None,
    *,
    attention_chunk: int = 0,
    num_splits: int = 1,
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
    chunk = 0 if type(attention_chunk) is int and attention_chunk == 0 else chunk_of(attention_chunk)
    splits = num_splits if type(num_splits) is int and 0 <= num_splits < UNBOUNDED else splits_of(num_splits)
    return FwdOptions(softmax_scale, left, right, softcap, pack_gqa, family, deterministic, lengths, chunk, splits)


def splits_of(num_splits: int) -> int:
    """`num_splits` as an operator takes it. TypeError: it is not an int; ValueError: it is negative."""
    if not is_int(num_splits):
        raise TypeError(f"num_splits is {shown(num_splits)}; allowed: {SPLITS}")
    if num_splits < 0:
        raise ValueError(f"num_splits is {shown(num_splits)}; allowed: {SPLITS}")
    return min(int(num_splits), UNBOUNDED)


def check_unsplit(num_splits: int) -> None:
    """Raise ValueError if operands of 8 bits are to be split."""
    if num_splits > 1:
        raise ValueError(f"num_splits is {num_splits}; allowed with scales or fp8: 0, 1 (keys are not split)")
