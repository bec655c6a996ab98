"""cuDNN's attention on 8-bit operands, through the graph interface of the package nvidia-cudnn-frontend.

cuDNN takes one scale for each of Q, K, V, P and O. On Hopper its O has 8 bits; masks are full or causal, of as many
queries as keys. A graph is built for the shapes of a cell; `execute` gives it torch's tensors.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuteflash.tune.cells import Cell
from cuteflash.tune.timing import Runner

P_SCALE = 256.0  # of P, which is at most 1: e4m3 ends at 448
SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
LARGEST = ("amax_s", "amax_o")
ONE = (1, 1, 1, 1)


def missing() -> str | None:
    """None if the package is installed, else the reason in words."""
    return None if importlib.util.find_spec("cudnn") else "nvidia-cudnn-frontend is not installed"


def out_scale(descales: Sequence[Tensor]) -> Tensor:
    """What O is multiplied with before it is rounded: as V, since no element of O exceeds the largest one of V.

    `descales`: of Q, K and V, each the same for all heads.
    """
    return 1 / descales[2][0, 0]


def build_graph(cudnn: Any, cell: Cell, finds_largest: bool = False, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A cell's graph before any plan, and its tensors by name: q, k, v, o, `SCALES` and, if asked for, `LARGEST`.

    Args:
        cudnn: the package.
        cell: what is computed.
        finds_largest: the largest magnitudes of P and O are outputs, too.
        options: of cuDNN's graph, a handle for example.

    Raises:
        NotImplementedError: a mask or lengths that the benchmark has no graph for.
    """
    if cell.mask == "window" or cell.seqlen_q != cell.seqlen:
        raise NotImplementedError("cuDNN's FP8 attention on Hopper has no windows, and aligns masks to the first key")
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, **options)

    def tensor(name: str, columns: int) -> Any:
        return graph.tensor(name=name, **_layout(cell, columns), data_type=e4m3)

    tensors = {"q": tensor("q", cell.head_dim), "k": tensor("k", cell.head_dim), "v": tensor("v", cell.head_dim_v)}
    scales = {name: graph.tensor(name=name, dim=ONE, stride=ONE, data_type=fp32) for name in SCALES}
    o, _, *of_largest = graph.sdpa_fp8(
        **tensors,
        **scales,
        attn_scale=cell.head_dim**-0.5,
        generate_stats=False,
        use_causal_mask=cell.mask == "causal",
        name="sdpa",
    )
    layout = _layout(cell, cell.head_dim_v)
    o.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"]).set_data_type(e4m3)
    for one in of_largest:
        one.set_output(finds_largest).set_dim(ONE).set_stride(ONE).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    largest = dict(zip(LARGEST, of_largest, strict=True)) if finds_largest else {}
    return graph, {**tensors, **scales, "o": o, **largest}


def planned(cudnn: Any, cell: Cell, handle: Any) -> tuple[Any, dict[str, Any]]:
    """`build_graph` with a plan; largest magnitudes are outputs only if cuDNN has no plan without them.

    Raises:
        NotImplementedError: cuDNN has no plan at all; the text has its reason.
    """
    for finds_largest in (False, True):
        try:
            graph, tensors = build_graph(cudnn, cell, finds_largest, handle=handle)
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
            return graph, tensors
        except cudnn.cudnnGraphNotSupportedError as failure:
            reason = str(failure)
    raise NotImplementedError(f"cuDNN {cudnn.backend_version()} has no plan: {reason}")


def runner(cell: Cell, operands: Sequence[Tensor], descales: Sequence[Tensor]) -> Runner:
    """A runner over Q, K and V, (batch, seqlen, heads, columns) of e4m3; its O has 8 bits and `out_scale`."""
    cudnn = _cudnn()
    device = operands[0].device
    handle = _handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    graph, tensors = planned(cudnn, cell, handle)
    q, k, v = (x.transpose(1, 2) for x in operands)
    o = operands[0].new_empty((cell.batch, cell.seqlen, cell.heads, cell.head_dim_v)).transpose(1, 2)
    p_scale = torch.full((), P_SCALE, device=device)
    scales = (*(scale[0, 0] for scale in descales), 1 / p_scale, p_scale, out_scale(descales))
    values = dict(zip(SCALES, (x.reshape(ONE) for x in scales), strict=True)) | {"q": q, "k": k, "v": v, "o": o}
    values |= {name: torch.zeros(ONE, device=device) for name in LARGEST if name in tensors}
    pack = {tensors[name]: value for name, value in values.items()}
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)

    def run(calls: int) -> Tensor:
        for _ in range(calls):
            graph.execute(pack, workspace, handle=handle)
        return o.transpose(1, 2)

    return run


def _cudnn() -> Any:
    return importlib.import_module("cudnn")


@functools.cache
def _handle() -> Any:
    return _cudnn().create_handle()


def _layout(cell: Cell, columns: int) -> dict[str, tuple[int, ...]]:
    """Size and stride of a (batch, heads, seqlen, columns) view of (batch, seqlen, heads, columns) memory."""
    row = cell.heads * columns
    return {
        "dim": (cell.batch, cell.heads, cell.seqlen, columns),
        "stride": (cell.seqlen * row, columns, row, 1),
    }
