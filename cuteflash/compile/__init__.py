"""Compiling kernels, keeping them on disk, and saying what they cost. Importing this does not import the compiler."""

from cuteflash.compile.cache import CacheWarning, cache_dir
from cuteflash.compile.compiler import BuildReport, KernelWarning, build, compiled, lookup
from cuteflash.compile.resources import Resources

__all__ = [
    "BuildReport",
    "CacheWarning",
    "KernelWarning",
    "Resources",
    "build",
    "cache_dir",
    "compiled",
    "lookup",
]
