"""The backward pass of causal attention by cuDNN, in one order: through its own front end, where that is
installed (`pip install nvidia-cudnn-frontend`).

torch calls cuDNN's backward pass without asking for one order. Asked for it, cuDNN keeps the gradient of all
scores of a layer, which takes room: 2 bytes x rows x heads x length x length. One workspace serves all layers
and all recorded ops of a process, for the ops of a device run one after the other; the memory model counts it
(`schedule.footprint`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from everstep.log import warn

ROOM = 2 << 30  # bytes, at most; beyond it there is another way

Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


_spaces: dict[torch.device, Tensor] = {}
_recorded: list[Tensor] = []  # workspaces whose addresses are in a CUDA graph


def workspace(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes, about; 0: attention of this shape (rows x heads x length x size) does not go this way."""
    rows, heads, length, size = shape
    needed = 2 * rows * heads * length * length
    fits = dtype in (torch.bfloat16, torch.float16) and size in (64, 128) and not length % 128
    return needed if fits and needed <= ROOM else 0


def installed() -> bool:
    """Without loading it."""
    return importlib.util.find_spec("cudnn") is not None


def version() -> str:
    """Of the front end and of cuDNN; empty: it cannot be used here."""
    front_end = _front_end()
    return "" if front_end is None else f"{front_end.__version__} with cuDNN {front_end.backend_version()}"


@cache
def _front_end() -> Any | None:
    if not installed():
        return None
    try:
        import cudnn  # type: ignore[import-not-found,unused-ignore]
    except Exception as error:  # not for this Python or driver
        warn(f"exact attention without cuDNN's front end: {error}")
        return None
    return cudnn


@cache
def _handle(device: torch.device) -> Any:
    front_end = _front_end()
    assert front_end is not None
    with torch.cuda.device(device):
        return front_end.create_handle()


def has_layout(tensor: Tensor) -> bool:
    """Rows x heads x length x size, in memory rows x length x heads x size."""
    return tensor.transpose(1, 2).is_contiguous()


def in_layout(tensor: Tensor) -> Tensor:
    return tensor if has_layout(tensor) else tensor.transpose(1, 2).contiguous().transpose(1, 2)


@cache
def backward(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Backward | None:
    """(q, k, v, output, its gradient, log-sum-exp) -> the gradients of q, k and v; None: not here."""
    front_end = _front_end()
    if front_end is None or not workspace(shape, dtype):
        return None
    try:
        return _built(front_end, shape, dtype, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no such kernel in this version
        warn(f"exact attention without cuDNN's front end: {error}")
        return None


def _space(device: torch.device, nbytes: int) -> Tensor:
    found = _spaces.get(device)
    if found is None or found.numel() < nbytes:
        found = _spaces[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    is_recorded = any(found is one for one in _recorded)
    if device.type == "cuda" and not is_recorded and torch.cuda.is_current_stream_capturing():
        _recorded.append(found)
    return found


def _built(front_end: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Backward:
    rows, heads, length, size = shape
    handle, kinds = _handle(device), front_end.data_type
    kind = kinds.BFLOAT16 if dtype == torch.bfloat16 else kinds.HALF
    strides = [length * heads * size, size, heads * size, 1]
    graph = front_end.pygraph(
        io_data_type=kind,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
        handle=handle,
    )
    given = [
        graph.tensor(name=name, dim=list(shape), stride=strides, data_type=kind)
        for name in ("q", "k", "v", "o", "do")
    ]
    sums = graph.tensor(
        name="stats",
        dim=[rows, heads, length, 1],
        stride=[heads * length, length, 1, 1],
        data_type=kinds.FLOAT,
    )
    found = graph.sdpa_backward(
        **dict(zip(("q", "k", "v", "o", "dO"), given, strict=True)),
        stats=sums,
        attn_scale=size**-0.5,
        use_causal_mask=True,
        use_deterministic_algorithm=True,
    )
    for one in found:
        one.set_output(True).set_dim(list(shape)).set_stride(strides)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([front_end.heur_mode.A, front_end.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    room = graph.get_workspace_size()

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        *five, logsumexp = tensors
        made = tuple(in_layout(torch.empty_like(five[0])) for _ in found)
        pack = dict(zip((*given, sums, *found), (*map(in_layout, five), logsumexp, *made), strict=True))
        space = _space(device, room)
        front_end.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(pack, space, handle=handle)
        return made

    return run
