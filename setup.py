"""The names that a wheel installs, and its long description; everything else about the package is in pyproject.toml.

`layouts/` and `benchmarks/` become `cuteflash_layouts` and `cuteflash_benchmarks`: other wheels may install packages of
the plain names. `cuteflash/companions.py` finds the two under either name.
"""

import pathlib
import re

from setuptools import find_packages, setup

COMPANIONS = ("benchmarks", "layouts")


def long_description() -> str:
    """The README without its pictures, and with files of the repository named instead of linked to."""
    text = pathlib.Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https://)[^)]*\)\n+", "", text)
    text = re.sub(r"\[([^\]]*)\]\((?!https://)\1\)", r"`\1`", text)
    return re.sub(r"\[([^\]]*)\]\((?!https://)([^)]*)\)", r"\1 (\2)", text)


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=[
        *find_packages(include=["cuteflash", "cuteflash.*"]),
        *(f"cuteflash_{name}" for top in COMPANIONS for name in find_packages(include=[top, f"{top}.*"])),
    ],
    py_modules=["cuteflash_command"],
    package_dir={f"cuteflash_{top}": top for top in COMPANIONS},
)
