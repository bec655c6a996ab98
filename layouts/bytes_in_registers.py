"""Operands of fp16 that are made in registers of pairs of bytes, as ldmatrix brings them: the order of their columns.

And what becomes of a Q that is not of fp16.

Lane 4 g + t of a warp has what PTX calls groupID g and threadID_in_group t.
"""

from __future__ import annotations

from typing import Final

from .algebra import Layout

CONVERSION: Final = "cvt.rn.f16x2.e4m3x2"
# Of 16 columns of K a lane has 4 t to 4 t + 3, which a product counts as 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
IN_FOURS: Final = Layout((2, 4, 2), (1, 4, 2))
# Of 16 columns of V lanes have 2 g of one fragment and 2 g + 1 of the next, which a product counts as g and g + 8.
IN_PAIRS: Final = Layout((8, 2), (2, 1))
NEIGHBOURS: Final = "Not transposed: a pair of bytes are neighbours in K's columns, of which Q's have the same order."
TURNED: Final = "Transposed: a register has two columns of two keys, of which the middle bytes change places."
ADDRESSED: Final = "Lane i gives the address of 16 bytes of a row; a phase is the 8 rows of one matrix."
FIT: Final = "and.b32, shfl.sync.bfly.b32, mul.f32, cvt.rn.f16x2.f32"
FITTED: Final = "Each row times a power of two that brings its largest element below 2^15; its scores are scaled back."
