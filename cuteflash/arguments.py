"""What an operation is called with, declared once: the options of its operators, the arguments of its kernels.

    FwdOptions    the schema of the operators, with its defaults
    FwdTensors    the tensors of a kernel   } the order of its `__call__`, of the fakes that it is compiled with
    PackedTensors those of packed sequences } (`cuteflash.core.signature`), and of every launch
    ScaleTensors  those of 8-bit operands   }
    SplitTensors  those of split keys       }
    FwdScalars    its run-time scalars      }
    sinks         of a problem with sinks, after the scalars: one vector; of a backward `SinkTensors`
    tree          of a problem with a tree, after those: one vector
    shared_k      of a problem whose heads share columns of K, after these

An option with the name of a scalar is passed on as that scalar. A backward has the same, named `Bwd`.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, Self

from cuteflash.problem import FP8_OUT, UNBOUNDED, MaskKind

EXECUTION = ("pack_gqa", "family", "deterministic", "lengths", "num_splits")  # options that say how to compute
FORMATS = ("transposed_v", "out_dtype")  # options that say how tensors are given; all others say what to compute


class FwdOptions(NamedTuple):
    """The arguments of the forward operators after q, k and v.

    Attributes:
        softmax_scale: factor of the scores, positive and finite; None is ``1 / sqrt(head_dim)``.
        window_left: keys visible before the query's own position (bottom-right aligned); -1 is all.
        window_right: keys visible after it; -1 is all, 0 is causal.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none.
        pack_gqa: fold the query heads of one KV head into the rows of a tile; None leaves it to a heuristic.
        family: kernel family, ``"sm80"`` or ``"sm90"``; None is the best of the GPU. CPU tensors ignore it.
        deterministic: of the backward, which autograd calls with the same options; the forward always is.
        lengths: class of the sequences' lengths (`cuteflash.traits.length_class`), which decides between kernels that
            give the same result; None takes it from the sizes.
        attention_chunk: a query sees only keys of its own chunk: positions are cut into chunks of so many; 0 is none.
        num_splits: into how many parts the keys of a query tile are split at most, each read by another block; 1 is
            none, 0 leaves it to a heuristic.
    """

    softmax_scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    pack_gqa: bool | None = None
    family: str | None = None
    deterministic: bool = False
    lengths: str | None = None
    attention_chunk: int = 0
    num_splits: int = 1

    def definition(self, head_dim: int) -> dict[str, Any]:
        """See `_definition`."""
        return _definition(self, head_dim)


class Fp8Options(NamedTuple):
    """The arguments of the forward operators of 8-bit operands after their tensors.

    Attributes:
        softmax_scale, window_left, window_right, softcap, pack_gqa, family, lengths: see `FwdOptions`.
        transposed_v: v is Vᵀ, see `cuteflash.flash_attn_func`.
        out_dtype: element type of O, ``"bf16"`` or ``"fp16"``.
    """

    softmax_scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    pack_gqa: bool | None = None
    family: str | None = None
    transposed_v: bool = False
    out_dtype: str = FP8_OUT
    lengths: str | None = None

    def definition(self, head_dim: int) -> dict[str, Any]:
        """See `_definition`."""
        return _definition(self, head_dim)


class Fp8InferenceOptions(NamedTuple):
    """The arguments of the operators that quantise 16-bit tensors and attend, after their tensors.

    Attributes:
        softmax_scale, window_left, window_right, softcap, pack_gqa, family, lengths: see `FwdOptions`.
        out_dtype: element type of O, ``"bf16"`` or ``"fp16"``; None is that of q.
        hadamard: columns of a block that a Hadamard rotation of Q and K mixes before they are quantised; 0 is none.
    """

    softmax_scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    pack_gqa: bool | None = None
    family: str | None = None
    out_dtype: str | None = None
    hadamard: int = 0
    lengths: str | None = None


class BwdOptions(NamedTuple):
    """The arguments of the backward operators after their tensors: those of the forward that a backward has, too.

    Attributes:
        softmax_scale, window_left, window_right, softcap, family, lengths, attention_chunk: as of the forward.
        deterministic: equal inputs give bitwise equal gradients; ``torch.use_deterministic_algorithms(True)`` asks for
            it as well, unless it only warns.
    """

    softmax_scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    family: str | None = None
    deterministic: bool = False
    lengths: str | None = None
    attention_chunk: int = 0

    def definition(self, head_dim: int) -> dict[str, Any]:
        """See `_definition`."""
        return _definition(self, head_dim)


def with_sinks(options: FwdOptions, sinks: Any) -> tuple[Any, ...]:
    """The arguments after the tensors of a forward operator, sinks being the last."""
    return *options, sinks


def without_sinks(options: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """The options among these arguments, and the sinks; None if there are none."""
    count = len(FwdOptions._fields)
    return (options[:count], options[count]) if len(options) > count else (options, None)


def bwd_options(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for a backward of those for its forward, in both of which trailing defaults may be left out."""
    return options[:_PACK_GQA] + options[_PACK_GQA + 1 : _NUM_SPLITS]


_PACK_GQA, _NUM_SPLITS = (FwdOptions._fields.index(name) for name in ("pack_gqa", "num_splits"))


def _definition(options: FwdOptions | Fp8Options | BwdOptions, head_dim: int) -> dict[str, Any]:
    """What defines the result, by name: the default scale filled in, no length of a mask beyond `UNBOUNDED`."""
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    resolved = options._asdict() | {"softmax_scale": scale}
    for name in ("window_left", "window_right", "attention_chunk"):
        if name in resolved:
            resolved[name] = min(resolved[name], UNBOUNDED)
    return {name: value for name, value in resolved.items() if name not in (*EXECUTION, *FORMATS)}


def mask_of_window(
    window_left: int, window_right: int, seqlen_q: int, attention_chunk: int = 0
) -> tuple[MaskKind, int, int]:
    """The mask kind of a window, with both sides as a kernel takes them.

    Args:
        window_left: keys a query sees before its own, bottom-right aligned; -1 is all.
        window_right: keys a query sees after its own; -1 is all, 0 with `window_left` -1 is causal.
        seqlen_q: queries of one sequence. A single query is the last row of the score matrix, which no right edge
            cuts, so decoding takes the kernel without a mask.
        attention_chunk: a chunk's length, which has both edges; 0 is none.

    Returns:
        (mask kind, left, right) with ``UNBOUNDED`` for a side of -1.
    """
    left = UNBOUNDED if window_left < 0 else min(window_left, UNBOUNDED)
    right = UNBOUNDED if window_right < 0 else min(window_right, UNBOUNDED)
    if attention_chunk:
        return "window", left, right
    if window_left < 0 and (window_right < 0 or seqlen_q == 1):
        return "full", left, right
    if window_left < 0 and window_right == 0:
        return "causal", left, right
    return "window", left, right


class FwdTensors(NamedTuple):
    """The tensors of a forward kernel; inside the kernel CuTe tensors, outside torch's.

    Packed sequences have no batch mode, and `seqlen` is that of all of them together.
    """

    q: Any  # (batch, seqlen_q, heads_q, head_dim)
    k: Any  # (batch, seqlen_k, heads_k, head_dim); of a cache (pages, page_size, heads_k, head_dim)
    v: Any  # (batch, seqlen_k, heads_k, head_dim_v); likewise
    o: Any  # (batch, seqlen_q, heads_q, head_dim_v)
    lse: Any  # (batch, heads_q, seqlen_q), fp32; None for a problem without LSE


class PackedTensors(NamedTuple):
    """What a kernel gets of packed sequences and of caches, int32; a kernel of dense batches has none of these."""

    cu_seqlens_q: Any = None  # (batch + 1,), the first row of each sequence, then the end of the last one
    cu_seqlens_k: Any = None
    seqused_q: Any = None  # (batch,), how many of a sequence's rows count, the first ones; None is all
    seqused_k: Any = None
    tile_counter: Any = None  # (1,), 0 before a launch and after it; launches that overlap have one each
    page_table: Any = None  # (cache entries, pages of each), the page's number; entries after the last row are not read
    cache_batch_idx: Any = None  # (batch,), the cache entry of each sequence
    cache_leftpad: Any = None  # (batch,), how many rows of a sequence's cache entry lie before its first key


class ScaleTensors(NamedTuple):
    """The scales of 8-bit operands, fp32 (batch, heads_k) or (batch, heads_k, blocks of 128 tokens).

    A kernel of 16-bit operands does not have these arguments; one of 16-bit Q and an 8-bit cache has no `q_descale`.

    What a row of an operand stands for is the row times its head's scale, and of V plus its head's mean.
    """

    q_descale: Any = None  # of the query heads that read a KV head
    k_descale: Any = None
    v_descale: Any = None
    v_mean: Any = None  # (batch, heads_k, head_dim_v), fp32; None for a problem without it


class SplitTensors(NamedTuple):
    """What a kernel gets that splits keys; others do not have these arguments."""

    partials: Any = None  # (n,) fp32, see `cuteflash.core.split`
    arrivals: Any = None  # (blocks,) int32, 0 before a launch and after it; launches that overlap have one each. If the
    # launch is scheduled, all of its metadata, see `cuteflash.core.split_slots`
    most_parts: Any = None  # int, of a tile, at least 2
    lanes: Any = None  # int, lines of tiles; it divides heads, as the tiles see them, and blocks


class FwdScalars(NamedTuple):
    """The run-time scalars of a forward kernel; it gets a float in fp32 and an int in 32 bits."""

    softmax_scale: float
    softcap: float
    window_left: int  # `UNBOUNDED` is all
    window_right: int
    attention_chunk: int  # positive if the problem is chunked; no other kernel reads it
    num_sms: int


class FwdArguments(NamedTuple):
    """All arguments of a forward kernel. It takes them flat: a nested tuple costs each launch 0.5 us of host time.

    Attributes:
        sinks: (heads_q,), the logit of each query head that has no key; only a kernel with sinks has this argument.
        tree: (2 rows of q,) int32, see `cuteflash.core.tree`; likewise, only a kernel with a tree.
        shared_k: (batch, seqlen_k, 1, columns), the last columns of every head's K; likewise.
    """

    tensors: FwdTensors
    packed: PackedTensors
    scales: ScaleTensors
    scalars: FwdScalars
    sinks: Any
    stream: Any
    split: SplitTensors = SplitTensors()
    tree: Any = None
    shared_k: Any = None

    @classmethod
    def of(
        cls,
        flat: tuple[Any, ...],
        is_split: bool = False,
        has_sinks: bool = False,
        shares_k: bool = False,
        has_tree: bool = False,
    ) -> Self:
        """From the flat arguments that `__call__` gets; `is_split` and the others as the problem."""
        last = len(flat) - 1 - has_sinks - has_tree - shares_k
        end, scalars = len(FwdTensors._fields), last - len(FwdScalars._fields)
        split = scalars - (len(SplitTensors._fields) if is_split else 0)
        tensors, between = FwdTensors(*flat[:end]), flat[end:split]
        is_packed = len(between) >= len(PackedTensors._fields)  # those that are missing are missing altogether
        packed = len(PackedTensors._fields) if is_packed else 0
        return cls(
            tensors,
            PackedTensors(*between[:packed]),
            ScaleTensors(*between[packed:]),
            FwdScalars(*flat[scalars:last]),
            flat[last] if has_sinks else None,
            flat[-1],
            SplitTensors(*flat[split:scalars]),
            flat[last + has_sinks] if has_tree else None,
            flat[-2] if shares_k else None,
        )

    def flat(self) -> tuple[Any, ...]:
        """As `__call__` takes them: those of split keys come last before the scalars."""
        groups = (group for group in (self.packed, self.scales, self.split) if any(x is not None for x in group))
        last = (x for x in (self.sinks, self.tree, self.shared_k) if x is not None)
        return (*self.tensors, *itertools.chain(*groups), *self.scalars, *last, self.stream)


class BwdTensors(NamedTuple):
    """The tensors of a backward kernel; inside the kernel CuTe tensors, outside torch's.

    Gradients have the shape of what they belong to.
    """

    q: Any  # (batch, seqlen_q, heads_q, head_dim)
    k: Any  # (batch, seqlen_k, heads_k, head_dim)
    v: Any  # (batch, seqlen_k, heads_k, head_dim_v)
    o: Any  # (batch, seqlen_q, heads_q, head_dim_v)
    lse: Any  # (batch, heads_q, seqlen_q), fp32
    do: Any
    dlse: Any  # None for a problem without it
    dq: Any
    dk: Any
    dv: Any
    workspace: Any  # (n,) fp32, see `cuteflash.core.workspace`


class BwdScalars(NamedTuple):
    """The run-time scalars of a backward kernel; it gets a float in fp32 and an int in 32 bits."""

    softmax_scale: float
    softcap: float
    window_left: int  # `UNBOUNDED` is all
    window_right: int
    attention_chunk: int  # positive if the problem is chunked; no other kernel reads it
    num_sms: int


class SinkTensors(NamedTuple):
    """The sinks of a backward and their gradient; a kernel without sinks does not have these arguments."""

    sinks: Any = None  # (heads_q,), as of the forward
    dsinks: Any = None  # (heads_q, n) fp32, whose rows add up to the gradient, see `cuteflash.core.workspace`


class BwdArguments(NamedTuple):
    """All arguments of a backward kernel, which takes them flat."""

    tensors: BwdTensors
    packed: PackedTensors
    scalars: BwdScalars
    sinks: SinkTensors
    stream: Any

    @classmethod
    def of(cls, flat: tuple[Any, ...], has_sinks: bool = False) -> Self:
        """From the flat arguments that `__call__` gets."""
        last = len(flat) - 1 - has_sinks * len(SinkTensors._fields)
        end, scalars = len(BwdTensors._fields), last - len(BwdScalars._fields)
        return cls(
            BwdTensors(*flat[:end]),
            PackedTensors(*flat[end:scalars]),
            BwdScalars(*flat[scalars:last]),
            SinkTensors(*flat[last:-1]),
            flat[-1],
        )

    def flat(self) -> tuple[Any, ...]:
        """As `__call__` takes them."""
        groups = (group for group in (self.packed, self.scalars, self.sinks) if any(x is not None for x in group))
        return (*self.tensors, *itertools.chain(*groups), self.stream)
