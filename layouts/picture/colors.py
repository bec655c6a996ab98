"""The colours of static pictures, those of the page (web/core.js): eight for categories, a ramp for quantities.

The categories are Okabe and Ito's, the ramp goes from dark blue over green to yellow: both hold for colour-blind
readers and in grey.
"""

from __future__ import annotations

CATEGORIES = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999")
STOPS = ("#440154", "#472f7d", "#39568c", "#28788e", "#1f988b", "#35b779", "#7ad151", "#bddf26", "#fde725")
PAPER = "#ffffff"
INK = "#1a1a1a"
MUTED = "#5c5c5c"
LINE = "#ffffff"
PLAIN = "#dbe4ee"
ABSENT = "#f4f4f4"  # cells that hold nothing: rows and columns beyond a tensor's end


def category(index: int) -> str:
    """The colour of category `index`; they repeat after eight."""
    return CATEGORIES[index % len(CATEGORIES)]


def ramp(part: float) -> str:
    """The colour at `part` of the ramp, 0 to 1."""
    at = min(max(part, 0.0), 1.0) * (len(STOPS) - 1)
    low = min(int(at), len(STOPS) - 2)
    return mix(STOPS[low], STOPS[low + 1], at - low)


def mix(start: str, end: str, part: float) -> str:
    """The colour at `part` of the way from `start` to `end`."""
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(_rgb(start), _rgb(end), strict=True))


def ink(fill: str) -> str:
    """Black or white, whichever reads better on `fill`: relative luminance, threshold of equal contrast."""
    red, green, blue = ((channel / 255) ** 2.2 for channel in _rgb(fill))
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#ffffff"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
