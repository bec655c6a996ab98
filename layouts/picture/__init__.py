"""Static pictures of a scene's panels: SVG, PNG and text.

`make_table` gives text and colour of a panel's cells, `lay_out` places them, and `svg`, `png` and `ascii` write files.
"""

from .coloring import COLORS, colors
from .model import Picture, Table, lay_out
from .panel import make_table
from .parts import panels, part_of

__all__ = ["COLORS", "Picture", "Table", "colors", "lay_out", "make_table", "panels", "part_of"]
