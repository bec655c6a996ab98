"""A machine without a GPU plays one, so that the host's work of a call can be timed there.

Inside `no_kernels()` CPU tensors take the way of CUDA ones, and a launch hands its arguments to a function that does
nothing, through the same TVM-FFI call as a kernel's. What a call costs then is all that the host does for it, but for
the driver's part of a launch, torch's allocator of GPU memory, and the thread that runs the backwards of a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, is_autocast_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

import cuteflash
from cuteflash import torch_internals
from cuteflash.torch_internals import is_seen

TARGET = "sm_90a"
PROPERTIES = types.SimpleNamespace(multi_processor_count=132)
STREAM = types.SimpleNamespace(device_index=0, cuda_stream=0)


@contextlib.contextmanager
def no_kernels(compiled: Callable[..., Callable[..., object]] | None = None) -> Iterator[None]:
    """Inside, CPU tensors are taken for those of a Hopper GPU, and nothing is computed: results hold anything.

    Args:
        compiled: in place of `cuteflash.compile.compiled`; None gives the function that does nothing for any kernel.
    """
    if compiled is None:
        nothing = no_operation()

        def compiled(*kernel: Any) -> Callable[..., object]:
            return nothing

    replaced: dict[str, Any] = {
        "compiled": compiled,
        "current_target": lambda index: TARGET,
        "is_plain_cuda_call": is_plain_cpu_call,
        "can_read": lambda vector: False,  # as of a GPU's
        "_reads": lambda tensor: False,
    }
    with contextlib.ExitStack() as stack:
        for module in modules():
            for name, value in replaced.items():
                if name in vars(module) and module is not torch_internals:
                    stack.enter_context(mock.patch.object(module, name, value))
        for name, value in {
            "get_device_properties": lambda device: PROPERTIES,
            "current_stream": lambda device: STREAM,
            "is_current_stream_capturing": lambda: False,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        yield


def modules() -> list[types.ModuleType]:
    """Those of cuteflash that are called between a public function and a launch."""
    return [importlib.import_module(f"cuteflash.{found.name}") for found in pkgutil.iter_modules(cuteflash.__path__)
            if not found.ispkg and found.name != "__main__"]  # fmt: skip


def no_operation() -> Callable[..., object]:
    """A function of TVM-FFI that takes any arguments and returns None.

    RuntimeError: apache-tvm-ffi, which comes with nvidia-cutlass-dsl, is not installed.
    """
    try:
        import tvm_ffi
    except ImportError as error:
        raise RuntimeError("host times without a GPU need apache-tvm-ffi, which is not installed") from error
    function: Callable[..., object] = tvm_ffi.get_global_func("testing.nop")
    return function


def is_plain_cpu_call(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """`cuteflash.torch_internals.is_plain_cuda_call` of CPU tensors, at the same cost."""
    return (
        not is_dynamo_compiling()
        and type(q) is type(k) is type(v) is Tensor
        and q.is_cpu
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and forward_ad._current_level < 0
        and not is_autocast_enabled()
        and not torch._C._is_torch_function_mode_enabled()
        and not is_seen()
    )
