"""Other ways to look at data: accumulators by row and column, or as A operands; tensors with other modes; pointers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

WORD_ALIGN = 8  # two-byte elements in 16 bytes


def rows_view(acc: cute.Tensor) -> cute.Tensor:
    """A C fragment seen as (rows of this thread, columns of this thread).

    Takes mma.sync fragments ((2, 2), M, N) and WGMMA fragments ((2, 2, V), M, N): the first mode of both
    is (two neighbouring columns, two rows eight apart[, column groups eight apart]).
    """
    atom, m, n = acc.layout.shape
    d_atom, d_m, d_n = acc.layout.stride
    groups = (n,) if len(atom) == 2 else (atom[2], n)
    d_groups = (d_n,) if len(atom) == 2 else (d_atom[2], d_n)
    layout = cute.make_layout(
        ((atom[1], m), (atom[0], *groups)),
        stride=((d_atom[1], d_m), (d_atom[0], *d_groups)),
    )
    return cute.make_tensor(acc.iterator, layout)


def acc_as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """A C fragment seen with the layout of the A operand of the following product (k extent 16).

    Two neighbouring 8-column groups of an accumulator hold, in the same threads, one 16-wide k-block of A:
    mma.sync ((2, 2), M, N) becomes ((2, 2, 2), M, N / 2), WGMMA ((2, 2, V), M, N) becomes ((2, 2, 2), M, (V / 2, N)).
    """
    if len(acc.layout.shape[0]) == 2:
        split = cute.logical_divide(acc.layout, (None, None, 2))  # ((2,2), M, (2, N/2))
        layout = cute.make_layout(
            ((*split.shape[0], split.shape[2][0]), split.shape[1], split.shape[2][1]),
            stride=((*split.stride[0], split.stride[2][0]), split.stride[1], split.stride[2][1]),
        )
    else:
        split = cute.logical_divide(acc.layout, ((None, None, 2), None, None))  # ((2,2,(2,V/2)), M, N)
        (a0, a1, (g, v)), m, n = split.shape
        (d0, d1, (dg, dv)), dm, dn = split.stride
        layout = cute.make_layout(((a0, a1, g), m, (v, n)), stride=((d0, d1, dg), dm, (dv, dn)))
    return cute.make_tensor(acc.iterator, layout)


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """The same data with its first two modes exchanged: (n, d, ...) becomes (d, n, ...)."""
    order = (1, 0, *range(2, cute.rank(tensor)))
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(order)))


def words_of(tensor: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """A tensor of bytes as one of two-byte elements: pairs of neighbours in the last mode, which is contiguous.

    All other strides are multiples of 16 bytes.
    """
    *shape, columns = tensor.shape
    strides = (cute.assume(stride // 2, divby=WORD_ALIGN) for stride in tensor.stride[:-1])
    layout = cute.make_layout((*shape, columns // 2), stride=(*strides, 1))
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=dtype), layout)


def with_batch(tensor: cute.Tensor) -> cute.Tensor:
    """A tensor without a batch mode, as a batch of one entry."""
    return cute.make_tensor(tensor.iterator, cute.make_layout((1, *tensor.shape), stride=(0, *tensor.stride)))


def rows_first(tensor: cute.Tensor) -> cute.Tensor:
    """A (batch, seqlen, heads, head_dim) tensor seen as (seqlen, head_dim, heads, batch)."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))


def columns_first(tensor: cute.Tensor) -> cute.Tensor:
    """A (batch, heads, head_dim, keys) tensor seen as (head_dim, keys, heads, batch)."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 3, 1, 0]))


def aligned(pointer: cute.Pointer, nbytes: int) -> cute.Pointer:
    """A pointer that is known to be a multiple of `nbytes`: nothing checks it.

    `Pointer.align` computes the next such address, which takes two instructions wherever one is used.
    """
    if nbytes <= pointer.alignment:
        return pointer
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=nbytes)
