"""Exact attention for Ampere and Hopper GPUs, written in Python with the CuTe DSL.

Importing registers the operators `torch.ops.cuteflash.*`; it loads neither the compiler nor CUDA.
"""

from cuteflash.api import flash_attn_func
from cuteflash.version import VERSION as __version__

__all__ = ["__version__", "flash_attn_func"]
