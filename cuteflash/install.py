"""How to install the packages of an optional part of cuteflash, as this cuteflash was installed."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import shlex
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
EXTRA_OF_OURS = re.compile(r"cuteflash\[(.+)\]")


def how_to_install(extra: str) -> str:
    """A sentence with the command that installs the packages of the extra `extra`.

    In a checkout it installs the checkout with the extra. A wheel may be known to no package index that pip asks, so
    that the packages of the extra are named instead.
    """
    if (ROOT / "pyproject.toml").is_file():
        return f"install it with: pip install -e {shlex.quote(f'{ROOT}[{extra}]')}"
    packages = sorted(set(_packages(extra)))
    return f"install it with: pip install {shlex.join(packages)}"


def _packages(extra: str) -> Iterator[str]:
    """The requirements of an extra, those of the extras of ours that it includes among them."""
    for line in importlib.metadata.requires("cuteflash") or []:
        requirement, _, condition = (part.strip() for part in line.partition(";"))
        if re.search(rf"""extra == ["']{re.escape(extra)}["']""", condition):
            included = EXTRA_OF_OURS.fullmatch(requirement)
            if included:
                for name in included[1].split(","):
                    yield from _packages(name.strip())
            else:
                yield requirement
