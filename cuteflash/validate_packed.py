"""Input checks of packed sequences: what their tensors look like, and, apart because it reads them, what they say."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cuteflash.arguments import BwdOptions, FwdOptions
from cuteflash.validate import (
    PACKED_DIMS,
    check_operands,
    check_outputs,
    check_statistics,
    check_strided,
    holds,
    reads_values,
)


class PackedInputs(NamedTuple):
    """The tensors of an operator on packed sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1


class PackedBwdInputs(NamedTuple):
    """The tensors of a backward operator on packed sequences, in its order."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    dlse: Tensor | None = None

    @property
    def forward(self) -> PackedInputs:
        """The tensors of the forward."""
        return PackedInputs(
            self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k
        )


def check_packed(inputs: PackedInputs, options: FwdOptions | BwdOptions) -> None:
    """Raise if no kernel and no reference can take these arguments; reads no element.

    Raises:
        TypeError, ValueError, NotImplementedError: as `check_operands` does; the vectors are int32, contiguous, on q's
            device, and of sizes that belong together.
    """
    check_operands(inputs.q, inputs.k, inputs.v, options, PACKED_DIMS)
    check_vectors(inputs)


def check_vectors(inputs: PackedInputs) -> None:
    """What `check_packed` says of the vectors."""
    q = inputs.q
    cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    for name, vector in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        check_vector(name, vector, q.device)
        if holds(vector.shape[0] < 1):
            raise ValueError(f"{name}.shape is (0,); allowed: (batch + 1,)")
    if holds(cu_k.shape[0] != cu_q.shape[0]):
        shapes = tuple(cu_k.shape), tuple(cu_q.shape)
        raise ValueError(f"cu_seqlens_k.shape is {shapes[0]}; allowed: {shapes[1]}, that of cu_seqlens_q")
    for name, used in (("seqused_q", inputs.seqused_q), ("seqused_k", inputs.seqused_k)):
        if used is not None:
            check_vector(name, used, q.device)
            if holds(used.shape[0] != inputs.batch):
                raise ValueError(
                    f"{name}.shape is {tuple(used.shape)}; allowed: ({inputs.batch},), one less than cu_seqlens_q"
                )


def check_packed_bwd(inputs: PackedBwdInputs, options: BwdOptions) -> None:
    """Raise if no kernel and no reference can take these arguments of a backward, as `check_packed` and `check_bwd`."""
    check_packed(inputs.forward, options)
    q = inputs.q
    rows, heads, _ = q.shape
    check_outputs(q, {"out": inputs.out, "dout": inputs.dout}, (rows, heads, inputs.v.shape[2]), PACKED_DIMS)
    check_statistics(q, {"lse": inputs.lse, "dlse": inputs.dlse}, (heads, rows))


def check_vector(name: str, vector: Tensor, device: torch.device) -> None:
    """Raise if a tensor is not a contiguous vector of int32 on a device."""
    check_strided(name, vector)
    if vector.dtype != torch.int32:
        raise TypeError(f"{name}.dtype is {vector.dtype}; allowed: torch.int32")
    if vector.dim() != 1:
        raise ValueError(f"{name} has {vector.dim()} dimensions, shape {tuple(vector.shape)}; allowed: 1")
    if vector.device != device:
        raise ValueError(f"{name}.device is {vector.device}; allowed: {device}, that of q")
    if holds(vector.shape[0] > 1) and holds(vector.stride(0) != 1):
        raise ValueError(f"{name}.stride(0) is {vector.stride(0)}; allowed: 1 (contiguous)")


def check_values(inputs: PackedInputs, *, complete: bool) -> None:
    """Raise ValueError, naming the sequence, if the vectors do not describe sequences of these tensors. Reads them.

    Args:
        complete: the sequences have to reach the ends of their tensors; otherwise rows may follow the last one.
    """
    for side, tensor, used in (("q", inputs.q, inputs.seqused_q), ("k", inputs.k, inputs.seqused_k)):
        ends = (inputs.cu_seqlens_q if side == "q" else inputs.cu_seqlens_k).tolist()
        check_ends(f"cu_seqlens_{side}", ends, side, tensor.shape[0], complete=complete)
        for i, (count, length) in enumerate(
            zip([] if used is None else used.tolist(), differences(ends), strict=False)
        ):
            if not 0 <= count <= length:
                raise ValueError(f"seqused_{side}[{i}] is {count}; allowed: 0 to {length}, the length of sequence {i}")


def check_ends(name: str, ends: list[int], side: str, rows: int, *, complete: bool) -> None:
    """Raise ValueError, naming the sequence, if `ends` are not those of sequences in a tensor of so many rows."""
    if ends[0] != 0:
        raise ValueError(f"{name}[0] is {ends[0]}, where sequence 0 begins; allowed: 0")
    for i, length in enumerate(differences(ends)):
        if length < 0:
            raise ValueError(
                f"{name}[{i + 1}] is {ends[i + 1]}, the end of sequence {i}, which begins at {ends[i]}; "
                f"allowed: {ends[i]} or more"
            )
    if ends[-1] > rows or (complete and ends[-1] != rows):
        allowed = f"{rows}, that is {side}.shape[0]" if complete else f"up to {rows}, {side}.shape[0]"
        raise ValueError(f"{name}[-1] is {ends[-1]}, the end of sequence {len(ends) - 2}; allowed: {allowed}")


def check_limits(inputs: PackedInputs, limits: Mapping[str, int | Tensor | None]) -> None:
    """Raise ValueError if the vectors of checked tensors are wrong, or a limit of the lengths too small. Reads them."""
    check_values(inputs, complete=reads_values())
    check_longest(inputs, limits)


def check_longest(inputs: PackedInputs, limits: Mapping[str, int | Tensor | None]) -> None:
    """Raise ValueError if a sequence is longer than its side's limit, "q" or "k". Reads the vectors and the limits."""
    for side, given in limits.items():
        limit = int(given) if given is not None else None
        used, ends = getattr(inputs, f"seqused_{side}"), getattr(inputs, f"cu_seqlens_{side}")
        lengths = used.tolist() if used is not None else differences(ends.tolist())
        longest = max(lengths, default=0)
        if limit is not None and longest > limit:
            raise ValueError(
                f"max_seqlen_{side} is {limit}; allowed: {longest} or more, the length of sequence "
                f"{lengths.index(longest)}"
            )


def differences(ends: list[int]) -> list[int]:
    """The length of each sequence."""
    return [end - begin for begin, end in itertools.pairwise(ends)]
