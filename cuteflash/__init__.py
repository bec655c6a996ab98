"""Exact attention for Ampere and Hopper GPUs, written in Python with the CuTe DSL.

Importing registers the operators `torch.ops.cuteflash.*`; it loads neither the compiler nor CUDA.
"""

import contextlib
import sys

from cuteflash.startup import quiet_interrupts

# `python -m cuteflash` imports this package before it runs `__main__`; meanwhile sys.argv[0] is "-m".
with quiet_interrupts() if sys.argv[:1] == ["-m"] else contextlib.nullcontext():
    import cuteflash.sink_ops  # noqa: F401 - only backwards ask for its operators, by their names
    from cuteflash.api import flash_attn_func
    from cuteflash.append import append_kv, apply_rotary
    from cuteflash.coerce import Fp8
    from cuteflash.combine import flash_attn_combine, merge_attn_states
    from cuteflash.kvcache_api import flash_attn_with_kvcache
    from cuteflash.mla import append_latents, flash_mla_decode
    from cuteflash.mla_prefill import flash_mla_prefill
    from cuteflash.packed_api import flash_attn_varlen_func
    from cuteflash.packing import (
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        pad_input,
        unpad_input,
    )
    from cuteflash.quantize import quantize_qkv
    from cuteflash.scheduling import get_scheduler_metadata
    from cuteflash.version import VERSION as __version__

__all__ = [
    "Fp8",
    "__version__",
    "append_kv",
    "append_latents",
    "apply_rotary",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_mla_decode",
    "flash_mla_prefill",
    "get_scheduler_metadata",
    "merge_attn_states",
    "pad_input",
    "quantize_qkv",
    "unpad_input",
]
