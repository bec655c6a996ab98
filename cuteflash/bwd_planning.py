"""From a call of the backward on a GPU to its launch; what is planned, and when, says `cuteflash.planning`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, empty_like

from cuteflash.arguments import BwdOptions, BwdScalars, mask_of_window
from cuteflash.calls import Call, sizes_kind
from cuteflash.compile import compiled
from cuteflash.dispatch import Choice, choices, current_target
from cuteflash.planning import (
    DTYPE_NAMES,
    Kernel,
    Launch,
    Planner,
    Result,
    is_empty,
    scalars_of,
    sink_dtype,
    target_of,
)
from cuteflash.problem import BwdProblem, Operands, Scores
from cuteflash.strides import compacted, contiguous_strides, fp32_template
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import LengthClass, length_class_of
from cuteflash.validate import ALIGNMENT, check_bwd, check_sinks


class BwdPlanner(Planner):
    """The launches of the backward operator."""

    def kind_of(self, call: Call) -> Hashable:
        sizes = sizes_kind("bwd", *call[:3])
        if sizes is None:
            return None
        (batch, seqlen_q, heads, _), head_dim_v = call[0], call[2][3]
        out_shape, dout_shape, lse_shape, dlse_shape = call[6:10]
        if not (
            out_shape == dout_shape == (batch, seqlen_q, heads, head_dim_v)
            and lse_shape == (batch, heads, seqlen_q)
            and (dlse_shape is None or dlse_shape == lse_shape)
        ):
            return None
        return call[14:], sizes

    def check(
        self,
        call: Call,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *others: Tensor | None,
    ) -> Launch | None:
        options, dlse, sinks = BwdOptions(*call[-1]), others[0], others[1:]
        check_bwd(dout, q, k, v, out, lse, dlse, options)
        check_sinks(q, *(sinks or (None,)))
        if not is_empty(q, k):
            return None
        target_of(q.device, options.family)  # as `choose` does for the others
        return _zeros

    def plan(
        self,
        call: Call,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *others: Tensor | None,
    ) -> BwdPlan:
        dlse, *sinks = others
        return BwdPlan(q, k, v, BwdOptions(*call[-1]), dlse is not None, *sinks)


class BwdPlan:
    """The kernels and scalars of one kind of backward calls, made from the first of them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, options: BwdOptions, has_dlse: bool, sinks: Tensor | None = None
    ) -> None:
        seqlen_q, head_dim, head_dim_v = q.shape[1], q.shape[3], v.shape[3]
        mask, left, right = mask_of_window(options.window_left, options.window_right, seqlen_q, options.attention_chunk)
        operands = Operands.of(DTYPE_NAMES[q.dtype], head_dim, head_dim_v)
        scores = Scores(mask, options.softcap > 0, options.attention_chunk > 0, sink_dtype(sinks))
        self.problem = BwdProblem(operands, scores, has_dlse=has_dlse, is_deterministic=options.deterministic)
        self.target = current_target(q.device.index)
        lengths = cast(LengthClass, options.lengths or length_class_of(seqlen_q, k.shape[1], "bwd"))
        self.choices = choices(self.problem, self.target, cast(Family | None, options.family), lengths)
        self._kernels: dict[Choice, Kernel] = {}
        self.scalars = bwd_scalars(options, (left, right), head_dim, q.device)
        self.step: int = ALIGNMENT // q.element_size()  # elements
        self.device = q.device

    def can_address(self, call: Call) -> bool:
        """Whether its kernel can take the strides of a call's Q, K, V and O as they are."""
        (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3) = call[3:6]
        o0, o1, o2, o3 = call[10]
        ones, steps = q3 == k3 == v3 == o3 == 1, q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2 | o0 | o1 | o2
        return bool(ones and steps % self.step == 0)

    def strides(self, call: Call) -> Sequence[tuple[int, ...]]:
        """The strides of a call's tensors that its kernel addresses as they are."""
        return *call[3:6], call[10]

    def choice(self, call: Call) -> Choice:
        """The row for a call with so many heads and keys."""
        (batch, *_), (_, seqlen_k, kv_heads, _) = call[:2]
        *rows, last = self.choices
        size = batch * kv_heads, seqlen_k, self.scalars.num_sms
        return next((choice for choice in rows if choice.row.is_filled(*size)), last)

    def kernel(self, choice: Choice) -> Kernel:
        """The kernel of a row."""
        found = self._kernels.get(choice)
        if found is None:
            found = compiled(choice.kernel_cls, choice.traits, self.problem, self.target)
            self._kernels[choice] = found
        return found

    def launch(self, call: Call, restrides: Sequence[tuple[int, ...] | None] = ()) -> Launch:
        """A launch for a checked call of this kind.

        Args:
            call: whose gradients it returns.
            restrides: of q, k, v and out the strides that their kernel gets instead of their own; None keeps those.
        """
        (q_shape, k_shape, v_shape), (b, s_q, h, _) = call[:3], call[0]
        like = [strides == contiguous_strides(shape) for shape, strides in zip(call[:3], call[3:6], strict=True)]
        q_like, k_like, v_like = like
        dout_strides, lse_strides, dlse_strides = call[11:14]
        # A gradient that autograd expanded, out.sum()'s for example, has rows that a kernel cannot load.
        copies_dout = dout_strides[3] != 1 or any(stride % self.step for stride in dout_strides[:3])
        compact = contiguous_strides((b, h, s_q))
        copies_lse, copies_dlse = lse_strides != compact, dlse_strides is not None and dlse_strides != compact
        copies = copies_dout or copies_lse or copies_dlse
        restride = any(restrides)
        choice = self.choice(call)
        traits: Any = choice.traits
        places = traits.workspace(b, h, s_q)
        like_workspace = fp32_template((places.size,), self.device)
        kernel, scalars, parts_shape = self.kernel(choice), self.scalars, (h, places.sink_parts)

        def launch(
            dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Any, sinks: Any = None
        ) -> Result:
            dq = empty_like(q) if q_like else q.new_empty(q_shape)
            dk = empty_like(k) if k_like else k.new_empty(k_shape)
            dv = empty_like(v) if v_like else v.new_empty(v_shape)
            if restride:
                tensors = zip((q, k, v, out), restrides, strict=True)
                q, k, v, out = (x.as_strided(x.shape, s) if s else x for x, s in tensors)
            if copies:
                dout = compacted(dout) if copies_dout else dout
                lse = compacted(lse) if copies_lse else lse
                dlse = compacted(dlse) if copies_dlse else dlse
            workspace = empty_like(like_workspace)
            # In the order of `BwdArguments.flat`.
            if sinks is None:
                kernel(q, k, v, out, lse, dout, dlse, dq, dk, dv, workspace, *scalars)
                return dq, dk, dv
            parts = workspace.new_empty(parts_shape)
            kernel(q, k, v, out, lse, dout, dlse, dq, dk, dv, workspace, *scalars, sinks, parts)
            return dq, dk, dv, parts.sum(dim=1).to(sinks.dtype)

        return launch


def bwd_scalars(options: BwdOptions, window: tuple[int, int], head_dim: int, device: torch.device) -> BwdScalars:
    """The scalars of a launch; `window` has the sides as kernels take them, see `mask_of_window`."""
    return BwdScalars(**scalars_of(options, window, head_dim, device))


def _zeros(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Result:
    """The gradients if no query sees a key, possibly empty; sinks then have all the weight."""
    zeros = tuple(x.new_zeros(x.shape) for x in (q, k, v))
    dlse, sinks = (*others, None)[2:4]  # after out and lse
    if sinks is None:
        return zeros
    return *zeros, torch.zeros_like(sinks) if dlse is None else dlse.sum(dim=(0, 2)).to(sinks.dtype)
