"""From a call on a GPU to its launch: target, row, kernel and scalars, each asked for once.

    call    sizes, strides, element types, devices and options: all that a launch depends on
    kind    what of a call decides code and scalars: lengths only by their class, strides not at all
    plan    of a kind: the row, the kernel with and without packed heads, and the scalars
    launch  of a call: a plan's kernel, with what the output looks like

Only the first call of a kind is checked in full and asks for rows and kernels. A later one with other sizes is compared
with what is usual; one that is not usual is checked in full as well, and passes or raises as a first one does.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, empty_like

from cuteflash.arguments import BwdOptions, Fp8Options, FwdOptions, FwdScalars, mask_of_window
from cuteflash.calls import Call, sizes_kind
from cuteflash.compile import compiled
from cuteflash.dispatch import check_family, choose, current_target
from cuteflash.problem import (
    LENGTH_MAX,
    PACK_GQA_MAX,
    FwdProblem,
    HalfDtype,
    Operands,
    Scores,
    SinkDtype,
)
from cuteflash.split_planning import ROWS, SplitKernels, SplitLaunch, Tiles, may_split
from cuteflash.strides import fp32_template, usable_strides
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import LengthClass, length_class_of
from cuteflash.validate import ALIGNMENT, check_fwd

Result = Any  # of a forward a Tensor without LSE, (Tensor, Tensor) with it; of a backward three Tensors
Kernel = Callable[..., object]
Launch = Callable[..., Result]  # takes the operator's tensors

DTYPE_NAMES: dict[torch.dtype, HalfDtype] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
SINK_DTYPES: dict[torch.dtype, SinkDtype] = {torch.float32: "fp32", **DTYPE_NAMES}
PLANS_MAX = 4096  # scales and windows are part of a kind, and may differ from call to call


def sink_dtype(sinks: Tensor | None) -> SinkDtype | None:
    """Their element type as problems name it."""
    return None if sinks is None else SINK_DTYPES[sinks.dtype]


class Planner(abc.ABC):
    """The launches of one operator."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, Any] = {}

    def launch(self, call: Call, *tensors: Tensor | None) -> Launch:
        """A checked launch for this call and all that are equal to it; what it keeps holds no argument.

        Raises:
            TypeError, ValueError, NotImplementedError: as the operator's check, `target_of` and `choose` do.
        """
        kind = self.kind_of(call)
        plan = self._plans.get(kind)
        if plan is not None and plan.can_address(call):
            return cast(Launch, plan.launch(call))
        without_kernel = self.check(call, *tensors)
        if without_kernel is not None:
            return without_kernel
        if plan is None:
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            plan = self._plans[kind] = self.plan(call, *tensors)
        return cast(Launch, plan.launch(call, [usable_strides(strides, plan.step) for strides in plan.strides(call)]))

    @abc.abstractmethod
    def kind_of(self, call: Call) -> Hashable:
        """What of a call decides its plan; None if only `check` can tell what it is."""

    @abc.abstractmethod
    def check(self, call: Call, *tensors: Any) -> Launch | None:
        """Check a call in full; a launch if it needs no kernel, since no query sees a key."""

    @abc.abstractmethod
    def plan(self, call: Call, *tensors: Any) -> Any:
        """The plan of a checked call's kind."""


class FwdPlanner(Planner):
    """The launches of one forward operator.

    Args:
        has_lse: whether it returns the log-sum-exp, too.
    """

    def __init__(self, has_lse: bool) -> None:
        super().__init__()
        self.has_lse = has_lse

    def kind_of(self, call: Call) -> Hashable:
        sizes = sizes_kind("fwd", *call[:3])
        return sizes and (call[6:], sizes)

    def check(self, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Launch | None:
        options = FwdOptions(*call[-1])
        check_fwd(q, k, v, options, sinks)
        if not is_empty(q, k):
            return None
        target_of(q.device, options.family)  # as `choose` does for the others
        return _without_kernel((*q.shape[:3], v.shape[3]), self.has_lse)

    def plan(self, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> FwdPlan:
        return FwdPlan(q, k, v, FwdOptions(*call[-1]), self.has_lse, sinks)


class FwdPlan:
    """The kernels and scalars of one kind of calls, made from the first of them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, options: FwdOptions, has_lse: bool, sinks: Tensor | None = None
    ) -> None:
        seqlen_q, head_dim, head_dim_v = q.shape[1], q.shape[3], v.shape[3]
        mask, left, right = mask_of_window(options.window_left, options.window_right, seqlen_q, options.attention_chunk)
        dtype = DTYPE_NAMES[q.dtype]
        scores = Scores(mask, options.softcap > 0, options.attention_chunk > 0, sink_dtype(sinks))
        self.problem = FwdProblem(Operands.of(dtype, head_dim, head_dim_v), scores, has_lse=has_lse)
        self.target = current_target(q.device.index)
        lengths = cast(LengthClass, options.lengths or length_class_of(seqlen_q, k.shape[1]))
        self.choice = choose(self.problem, self.target, cast(Family | None, options.family), lengths)
        self.pack_gqa = options.pack_gqa
        self.heads_per_kv = q.shape[2] // k.shape[2]
        self.scalars = fwd_scalars(options, (left, right), head_dim, q.device)
        self.step: int = ALIGNMENT // q.element_size()  # elements
        self.device = q.device
        self._kernels: dict[bool, Kernel] = {}
        family, num_sms = self.choice.family, self.scalars.num_sms
        self.split = SplitKernels(self.problem, self.target, family, lengths, options.num_splits, num_sms, self.device)

    def can_address(self, call: Call) -> bool:
        """Whether its kernels can take the strides of a call as they are."""
        (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3) = call[3:6]
        return bool(q3 == k3 == v3 == 1 and (q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2) % self.step == 0)

    def strides(self, call: Call) -> Sequence[tuple[int, ...]]:
        """The strides of a call's tensors that its kernels address as they are."""
        return call[3:6]

    def kernel(self, seqlen_q: int) -> Kernel:
        """The kernel for `seqlen_q` queries, with or without packed heads."""
        packs = self.pack_gqa
        if packs is None:
            packs = should_pack(seqlen_q, self.heads_per_kv, self.choice.traits.tile_m)
        found = self._kernels.get(packs)
        if found is None:
            problem = self.problem.packed(self.heads_per_kv) if packs else self.problem
            found = compiled(self.choice.kernel_cls, self.choice.traits, problem, self.target)
            self._kernels[packs] = found
        return found

    def split_kernel(self, call: Call) -> tuple[Kernel, SplitLaunch] | None:
        """The kernel that splits keys, with what it needs, if a call is to run it."""
        (batch, seqlen_q, _, _), (_, seqlen_k, kv_heads, _) = call[:2]
        if not may_split(self.split.num_splits, seqlen_k):
            return None
        packs = self.pack_gqa
        if packs is None:
            packs = should_pack(seqlen_q, self.heads_per_kv, ROWS)
        return self.split.of(Tiles(batch, kv_heads, self.heads_per_kv, seqlen_q, seqlen_k), packs)

    def launch(self, call: Call, restrides: Sequence[tuple[int, ...] | None] = ()) -> Launch:
        """A launch for a checked call of this kind.

        Args:
            call: whose results it returns.
            restrides: of q, k and v the strides that their kernel gets instead of their own; None keeps those.
        """
        (b, s_q, h, d), q_strides = call[0], call[3]
        d_v = self.problem.operands.head_dim_v
        split = self.split_kernel(call)
        kernel, scalars, o_shape = split[0] if split else self.kernel(s_q), self.scalars, (b, s_q, h, d_v)
        further = split[1].arguments if split else tuple
        like_lse = fp32_template((b, h, s_q), self.device) if self.problem.has_lse else None
        # empty_like is faster than new_empty, and the same thing if q is laid out as the output is.
        like_q = d == d_v and q_strides == (s_q * h * d, h * d, d, 1)
        restride = any(restrides)

        def launch(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Result:
            o = empty_like(q) if like_q else q.new_empty(o_shape)
            if restride:
                q, k, v = (x.as_strided(x.shape, s) if s else x for x, s in zip((q, k, v), restrides, strict=True))
            if like_lse is None:
                kernel(q, k, v, o, None, *further(), *scalars, *sinks)  # in the order of `FwdArguments.flat`
                return o
            lse = empty_like(like_lse)
            kernel(q, k, v, o, lse, *further(), *scalars, *sinks)
            return o, lse

        return launch


def should_pack(seqlen_q: int, heads_per_kv: int, tile_m: int) -> bool:
    """Whether folding a KV head's query heads into the rows of a tile pays (the `pack_gqa=None` heuristic).

    Each row block of a head reads all of K and V. Apart, the heads need ``heads_per_kv * ceil(seqlen_q / tile_m)``
    blocks, which for a short `seqlen_q` are mostly padding; packed, every 64 rows of a tile hold as many whole tokens
    as fit. Packed rows are gathered from several heads, so packing has to save a tenth of the blocks.
    """
    if heads_per_kv == 1 or heads_per_kv > PACK_GQA_MAX or seqlen_q * heads_per_kv > LENGTH_MAX:
        return False
    tokens = tile_m // PACK_GQA_MAX * (PACK_GQA_MAX // heads_per_kv)
    return 10 * -(-seqlen_q // tokens) <= 9 * heads_per_kv * -(-seqlen_q // tile_m)


def fwd_scalars(
    options: FwdOptions | Fp8Options, window: tuple[int, int], head_dim: int, device: torch.device
) -> FwdScalars:
    """The scalars of a launch; `window` has the sides as kernels take them, see `mask_of_window`."""
    return FwdScalars(**scalars_of(options, window, head_dim, device))


def scalars_of(
    options: FwdOptions | Fp8Options | BwdOptions, window: tuple[int, int], head_dim: int, device: torch.device
) -> dict[str, Any]:
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    sides = {"window_left": window[0], "window_right": window[1]}
    return {"attention_chunk": 0} | options.definition(head_dim) | sides | {"num_sms": num_sms}


def target_of(device: torch.device, family: str | None) -> str:
    """The compile target of a GPU of this machine. NotImplementedError: no kernel, or not the family, runs on it."""
    target = current_target(device.index)
    check_family(target, cast(Family | None, family))
    return target


def is_empty(q: Tensor, k: Tensor) -> bool:
    """Whether no query sees a key, whatever the mask."""
    return q.numel() == 0 or k.shape[1] == 0


def _without_kernel(o_shape: tuple[int, ...], has_lse: bool) -> Launch:
    """The results if no query sees a key: O = 0 and LSE = -inf, both possibly empty."""
    b, s_q, h, _ = o_shape

    def fill(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Result:
        o = q.new_zeros(o_shape)
        if not has_lse:
            return o
        lse = q.new_full((b, h, s_q), float("-inf"), dtype=torch.float32)
        return o, lse if sinks is None else lse.copy_(sinks[:, None])

    return fill
