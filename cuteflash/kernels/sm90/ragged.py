"""TMA descriptors over packed sequences whose boxes end with a sequence, not with the tensor.

A box that reaches past the end of a sequence must bring zeros, as 0 times a neighbour's NaN would be NaN, and must not
store over the neighbour's rows. A descriptor clips rows at one fixed number, so the end of every sequence is made to
lie there: rows are counted such that a sequence of `length` rows is `[END - length, END)`, and two further modes move
that interval to where the sequence lies. With strides `rows`, and `TURN - rows`, and addresses that are taken modulo
2^64 bytes, row `END - length + i` with the coordinates (first + length, END) of these modes has the address

    (END - length + i) rows + (first + length) rows + END (TURN - rows) = (first + i) rows + END TURN

in elements, and END TURN is 2^64.

Of Vᵀ the keys are contiguous, while the strides of all other modes are multiples of 16 bytes. So both lie in steps of
16 keys there: with strides GRAIN and GRAIN (TURN - 1) and the coordinates (first + length) / GRAIN and END / GRAIN, if
`first` and `length` are multiples of GRAIN. What pads a sequence's keys to such a length is zero, and belongs to it.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from cuteflash.problem import CACHE_ROWS_MAX, LENGTH_MAX

END = 1 << 30
TURN = 1 << 34
EXTENT = CACHE_ROWS_MAX  # of the two further modes: never reached
GRAIN = 16  # keys of 8 bits
assert LENGTH_MAX <= END


def ragged(tensor: cute.Tensor, packed_heads: int) -> cute.Tensor:
    """A packed (1, rows, heads, head_dim) tensor as a descriptor is made from it: (END, head_dim, heads, ends, turn).

    With packed heads it is ((heads, END), head_dim, ends, turn).
    """
    _, _, heads, cols = tensor.shape
    _, d_row, d_head, d_col = tensor.stride
    ends, turn = (EXTENT, d_row), (EXTENT, Int64(TURN) - d_row)
    if packed_heads == 1:
        modes = (END, d_row), (cols, d_col), (heads, d_head), ends, turn
    else:
        modes = ((heads, END), (d_head, d_row)), (cols, d_col), ends, turn
    shape, stride = zip(*modes, strict=True)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def sequence_rows(tensor: cute.Tensor, packed_heads: int, head: Int32, first: Int32, length: Int32) -> cute.Tensor:
    """The rows of one sequence and head of `ragged`'s coordinates, (rows, head_dim); none lies beyond its end.

    With packed heads the rows are ((packed_heads, tokens), head_dim), of KV head `head`.
    """
    if packed_heads == 1:
        return cute.domain_offset((END - length, 0), tensor[None, None, head, first + length, END])
    rows = tensor[None, None, first + length, END]
    rows = cute.domain_offset(((head * packed_heads, END - length), 0), rows)
    shape = (packed_heads, END), rows.shape[1]
    return cute.make_tensor(rows.iterator, cute.make_layout(shape, stride=rows.stride))


def ragged_slabs(tensor: cute.Tensor, slab: int) -> cute.Tensor:
    """A packed tensor as `ragged`, for boxes of several slabs of columns: (END, slab, slabs, ends, turn).

    Slabs are counted through all heads, which lie whole slabs apart: a descriptor has five modes.
    """
    _, _, heads, cols = tensor.shape
    _, d_row, d_head, d_col = tensor.stride
    slabs = (heads - 1) * Int32(d_head // slab) + cols // slab
    modes = (END, d_row), (slab, d_col), (slabs, slab), (EXTENT, d_row), (EXTENT, Int64(TURN) - d_row)
    shape, stride = zip(*modes, strict=True)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def sequence_slabs(tensor: cute.Tensor, first_slab: Int32, first: Int32, length: Int32) -> cute.Tensor:
    """The rows of one sequence of `ragged_slabs`' coordinates, (rows, slab, slabs), from a head's first slab on."""
    return cute.domain_offset((END - length, 0, first_slab), tensor[None, None, None, first + length, END])


def ragged_columns(tensor: cute.Tensor) -> cute.Tensor:
    """A packed (1, heads, head_dim, keys) Vᵀ as a descriptor is made from it: (head_dim, END, heads, ends, turn)."""
    _, heads, rows, _ = tensor.shape
    _, d_head, d_row, d_key = tensor.stride
    turn = cute.assume(Int64(GRAIN * (TURN - 1)), divby=GRAIN)
    modes = (rows, d_row), (END, d_key), (heads, d_head), (EXTENT, GRAIN), (EXTENT, turn)
    shape, stride = zip(*modes, strict=True)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def sequence_columns(tensor: cute.Tensor, head: Int32, first: Int32, length: Int32) -> cute.Tensor:
    """The keys of one sequence and KV head of `ragged_columns`' coordinates, (head_dim, keys), in whole GRAINs.

    `first` is a multiple of GRAIN.
    """
    length = cute.round_up(length, GRAIN)
    return cute.domain_offset((0, END - length), tensor[None, None, head, (first + length) // GRAIN, END // GRAIN])
