"""Kinds of inputs: plain normal ones, and some like those of language models, on which speed and accuracy may differ.

    plain        Q, K and V normal: scores are normal, too, with a spread of about one nat
    sink:N       one key, the first one by default, scores N nats above the others for every query: attention sinks
    sink:N:middle  the same of the key in the middle, which no tile begins with: fixed maxima have to be repaired there
    ramp:N       scores rise evenly over the keys, by N nats from the last to the first (N < 0: to the last), so that
                 maxima never come to rest
    peaked       scores spread three times as wide; peaked:half: those of every other head
    outliers     a few channels of Q and K stand far from 0 at every token, as in language models, and a few of V are
                 ten times and more larger; scores spread about twice as wide around what is the same for all keys

Kinds are made from plain inputs of any shape, type and device, always in the same way.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

PLAIN = "plain"
FORMS = (PLAIN, "sink:NATS", "sink:NATS:middle", "ramp:NATS", "peaked", "peaked:half", "outliers")
OPTIONS = {"sink": "middle", "peaked": "half"}  # what may stand behind the last colon
MAX_NATS = 1000.0
PEAK = 3.0  # what the queries of peaked heads are multiplied with
OUTLIERS = (10.0, 20.0)  # sizes of outlier channels; the others' is 1
CHANNELS_AN_OUTLIER = 64
SEED = 1  # of directions and channels, which no other random number shares

Qkv = tuple[Tensor, Tensor, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of inputs."""

    name: str  # what comes before the colon
    nats: float = 0.0  # of a sink and a ramp
    option: str = ""  # "middle" of a sink, "half" of peaked heads

    def __str__(self) -> str:
        """As `parse_kind` takes it; equal kinds have equal texts."""
        return ":".join(
            [self.name, *([f"{self.nats:g}"] if self.nats else []), *([self.option] if self.option else [])]
        )


def parse_kind(text: str) -> Kind:
    """The kind called e.g. `"plain"`, `"sink:12"` or `"peaked:half"`. ValueError says what is allowed."""
    name, *more = text.strip().split(":")
    allowed: list[list[str | None]] = [[], [OPTIONS.get(name)]]
    if name in ("sink", "ramp") and more:
        try:
            nats = float(more.pop(0))
        except ValueError:
            nats = math.nan
        if 0 < abs(nats) <= MAX_NATS and (nats > 0 or name == "ramp") and more in allowed:
            return Kind(name, nats, *more)
    elif name in ("peaked", PLAIN, "outliers") and more in allowed:
        return Kind(name, option="".join(more))
    raise ValueError(f"inputs is {text!r}; allowed: {', '.join(FORMS)}, up to {MAX_NATS:g} nats")


def of_kind(kind: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, place: int = 0) -> Qkv:
    """Inputs of a kind from plain ones; plain ones are returned as they are.

    Args:
        kind: as `parse_kind` takes it.
        q, k, v: (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, kv_heads, head_dim), (.., head_dim_v), normal.
        scale: what products of q and k are multiplied with; None is head_dim^-0.5.
        place: index of the key of a sink that is not of the kind in the middle.
    """
    parsed = parse_kind(kind)
    if parsed.name == PLAIN:
        return q, k, v
    exact = q.float(), k.float(), v.float()
    generator = torch.Generator().manual_seed(SEED)
    if parsed.name == "peaked":
        made = _peaked(*exact, every=2 if parsed.option else 1)
    elif parsed.name == "outliers":
        made = _outliers(*exact, generator)
    else:
        keys = k.shape[1]
        nats = _favours(parsed, keys, keys // 2 if parsed.option else place).to(q.device)
        made = _favoured(*exact, nats, q.shape[3] ** -0.5 if scale is None else scale, generator)
    return made[0].to(q.dtype), made[1].to(k.dtype), made[2].to(v.dtype)


def _favours(kind: Kind, keys: int, place: int) -> Tensor:
    """(keys,): by how many nats each key scores above what it would."""
    if kind.name == "ramp":
        return torch.linspace(max(kind.nats, 0.0), max(-kind.nats, 0.0), keys)
    if not -keys <= place < keys:
        raise ValueError(f"place is {place}; allowed: an index of one of the {keys} keys")
    favours = torch.zeros(keys)
    favours[place] = kind.nats
    return favours


def _favoured(q: Tensor, k: Tensor, v: Tensor, nats: Tensor, scale: float, generator: torch.Generator) -> Qkv:
    """Adds `nats[j]` to the scores of key j, for all queries.

    Each KV head has a direction that all its queries share, in which keys reach as far as they are favoured. The rest
    of Q and K lies across it, so that the other scores stay what they were: normal.
    """
    head_dim, kv_heads = q.shape[3], k.shape[2]
    signs = torch.randint(0, 2, (kv_heads, head_dim), generator=generator) * 2.0 - 1
    direction = (signs * head_dim**-0.5).to(q.device)  # of length 1, and no channel of it is larger than another
    reach = math.sqrt(nats.abs().max().item() / scale)  # the favour is shared by Q and K
    across = (head_dim / (head_dim - 1)) ** 0.25  # the scores' spread without one direction of head_dim
    for_queries = direction.repeat_interleave(q.shape[2] // kv_heads, dim=0)

    def along(tensor: Tensor, directions: Tensor, amount: Tensor | float) -> Tensor:
        rest = tensor - (tensor * directions).sum(-1, keepdim=True) * directions
        made: Tensor = rest * across + amount * directions
        return made

    return along(q, for_queries, reach), along(k, direction, (nats / (scale * reach))[:, None, None]), v


def _peaked(q: Tensor, k: Tensor, v: Tensor, every: int) -> Qkv:
    q = q.clone()
    q[:, :, ::every] *= PEAK
    return q, k, v


def _outliers(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> Qkv:
    """Outlier channels of K are the same at all keys but for what is normal, so that a softmax does not see their size;
    those of Q multiply the difference."""
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]

    def channels(columns: int) -> Tensor:
        order = torch.rand(kv_heads, columns, generator=generator).argsort(-1)
        return order[:, : max(1, columns // CHANNELS_AN_OUTLIER)]

    def sizes(columns: int, places: Tensor, elseplaces: float) -> Tensor:
        """(kv_heads, columns) of random sizes and signs at `places`."""
        size = torch.empty(places.shape).uniform_(*OUTLIERS, generator=generator)
        size *= torch.randint(0, 2, places.shape, generator=generator) * 2 - 1
        return torch.full((kv_heads, columns), elseplaces).scatter_(1, places, size).to(q.device)

    shared = channels(q.shape[3])
    q = q + sizes(q.shape[3], shared, 0.0).repeat_interleave(group, dim=0)
    k = k + sizes(k.shape[3], shared, 0.0)
    return q, k, v * sizes(v.shape[3], channels(v.shape[3]), 1.0)
