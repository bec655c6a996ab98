"""The names that a wheel installs; everything else about the package is in pyproject.toml.

`layouts/` and `benchmarks/` become `cuteflash_layouts` and `cuteflash_benchmarks`: other wheels may install packages of
the plain names. `cuteflash/companions.py` finds the two under either name.
"""

from setuptools import find_packages, setup

COMPANIONS = ("benchmarks", "layouts")

setup(
    packages=[
        *find_packages(include=["cuteflash", "cuteflash.*"]),
        *(f"cuteflash_{name}" for top in COMPANIONS for name in find_packages(include=[top, f"{top}.*"])),
    ],
    py_modules=["cuteflash_command"],
    package_dir={f"cuteflash_{top}": top for top in COMPANIONS},
)
