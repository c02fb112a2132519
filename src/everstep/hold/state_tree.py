"""A script's state on a wire: one JSON header that says what is where, then the bytes of its tensors.

    {"tree": …, "buffers": [["float32", [64, 64]], …]}   a dict is {"d": [[key, value], …]}
    bytes of buffer 0, bytes of buffer 1, …              a tensor {"b": number}, a DTensor has its "mesh", too

A buffer that has a handle besides (`same_gpu`) has no bytes.

Nothing of it is code, and nothing is executed to read it. A state is made of what `state_dict()` gives:
dicts, lists, tuples, numbers, texts, bytes, tensors, DTensors (of which the own shard travels) and arrays of
numpy.
"""

from __future__ import annotations

import base64
import gc
import io
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.errors import PeerError, UserError
from everstep.hold import same_gpu
from everstep.protocol.table import Json

MOST_HEADER = 256 << 20
MOST_BYTES = 1 << 40
LENGTH = struct.Struct("<Q")
_DTYPES = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)
}
Read = Callable[[int], bytes]
ReadInto = Callable[[memoryview], None]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor the own shard; without a gradient."""
    return shard(tensor).detach()


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """As above, without a new tensor: this is asked for every tensor in every step."""
    if type(tensor) in _PLAIN:
        return tensor
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_distributed(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "device_mesh")


# ------------------------------------------------------------------ out


@dataclass(slots=True)
class Packed:
    """A header, and the tensors whose bytes follow it."""

    tree: Json = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def parts(self, gpu: str = "") -> Iterator[memoryview]:
        """Everything, in order, for a process that uses this GPU."""
        buffers: list[list[Json]] = []
        for tensor in self.tensors:
            handle = same_gpu.shared(tensor, gpu)
            about: list[Json] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            buffers.append(about if handle is None else [*about, handle])
        head = json.dumps({"tree": self.tree, "buffers": buffers}, separators=(",", ":")).encode()
        yield memoryview(LENGTH.pack(len(head)) + head)
        for tensor, about in zip(self.tensors, buffers, strict=True):
            if tensor.numel() and len(about) == 2:
                yield _bytes_of(tensor)

    def buffer(self, tensor: torch.Tensor) -> int:
        """Tensors that share their memory are sent once."""
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
        if key not in self._numbers or not tensor.numel():
            self._numbers[key] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[key]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def pack(value: Any) -> Packed:
    """A UserError names what cannot be sent."""
    packed = Packed()
    packed.tree = _described(value, "", packed)
    return packed


def _described(value: Any, path: str, packed: Packed) -> Json:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value, packed)
    if isinstance(value, Mapping):
        return {
            "d": [
                [_described(k, path, packed), _described(v, f"{path}[{k!r}]", packed)]
                for k, v in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        items = [_described(each, f"{path}[{number}]", packed) for number, each in enumerate(value)]
        return items if isinstance(value, list) else {"t": items}
    if type(value).__module__ == "numpy":
        return _array(value, path, packed)
    match value:
        case int():
            return int.__int__(value)
        case float():
            return {"f": float.hex(value)}  # also what JSON does not know
        case complex():
            return {"c": [value.real.hex(), value.imag.hex()]}
        case str():
            return str.__str__(value)
        case bytes():
            return {"x": base64.b64encode(value).decode()}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
    raise UserError(
        f"state{path} is a {type(value).__name__}; a state is made of dicts, lists, tensors, numbers and "
        "texts. Give its state_dict(), or a tensor of it."
    )


def _tensor(value: torch.Tensor, packed: Packed) -> Json:
    found: dict[str, Json] = {"b": packed.buffer(local(value))}
    if value.device.type != "cpu":
        found["device"] = value.device.type
    if is_distributed(value):
        given: Any = value
        mesh = given.device_mesh
        found["mesh"] = {
            "names": list(mesh.mesh_dim_names or ()),
            "shape": list(mesh.shape),
            "placements": [_placement(each) for each in given.placements],
            "whole": list(value.shape),
            "stride": list(value.stride()),
        }
    return found


def _placement(placement: Any) -> Json:
    if placement.is_replicate():
        return "r"
    if type(placement).__name__ == "Shard":
        return placement.dim
    raise UserError(f"a DTensor is placed as {placement}; only Shard and Replicate can be sent.")


def _array(value: Any, path: str, packed: Packed) -> Json:
    import numpy as np

    if value.dtype.hasobject:
        raise UserError(f"state{path} is an array of objects; give numbers.")
    flat = np.frombuffer(np.ascontiguousarray(value).tobytes(), dtype=np.uint8).copy()
    number = len(packed.tensors)
    packed.tensors.append(torch.from_numpy(flat))
    return {
        "n": number,
        "dtype": value.dtype.str,
        "shape": list(value.shape),
        "scalar": not isinstance(value, np.ndarray),
    }


# ------------------------------------------------------------------ in


def unpack(read: Read, read_into: ReadInto) -> Any:
    """`read` gives exactly so many bytes; a PeerError for what is no state."""
    (length,) = LENGTH.unpack(read(LENGTH.size))
    if length > MOST_HEADER:
        raise PeerError(f"a state's header of {length} bytes is more than {MOST_HEADER}")
    try:
        header = json.loads(read(length))
        buffers = [_room(*about) for about in header["buffers"]]
        if sum(each.numel() * each.element_size() for each in buffers) > MOST_BYTES:
            raise PeerError("a state is larger than any")
        for each, about in zip(buffers, header["buffers"], strict=True):
            if each.numel() and len(about) == 2:
                read_into(each.reshape(-1).view(torch.uint8).numpy().data)
        return _value(header["tree"], buffers)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError, RecursionError) as error:
        raise PeerError(f"not a state: {error}") from error


def _room(kind: str, shape: list[int], handle: list[Json] | None = None) -> torch.Tensor:
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise PeerError(f"a tensor of shape {shape}")
    if handle is not None:
        return same_gpu.opened(handle, _DTYPES[kind], shape)
    return torch.empty(shape, dtype=_DTYPES[kind])


def _value(tree: Json, buffers: list[torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_value(each, buffers) for each in tree]
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"d": items}:
            return {_value(k, buffers): _value(v, buffers) for k, v in items}
        case {"t": items}:
            return tuple(_value(each, buffers) for each in items)
        case {"f": text}:
            return float.fromhex(text)
        case {"c": [real, imaginary]}:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case {"x": text}:
            return base64.b64decode(text)
        case {"b": number}:
            return _placed(tree, buffers[number])
        case {"n": number}:
            return _numpy(tree, buffers[number])
        case {"dtype": name}:
            return _DTYPES[name]
    raise PeerError(f"not a part of a state: {sorted(tree)}")


def _placed(tree: dict[str, Json], tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.to(tree["device"]) if "device" in tree else tensor
    if (about := tree.get("mesh")) is None:
        return found
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if each == "r" else Shard(int(each)) for each in about["placements"]]
    mesh = _mesh(tuple(about["names"]), tuple(about["shape"]))
    whole, stride = torch.Size(about["whole"]), tuple(about["stride"])
    return DTensor.from_local(found, mesh, placements, run_check=False, shape=whole, stride=stride)


def _mesh(names: tuple[str, ...], shape: tuple[int, ...]) -> Any:
    """The one of this process: it stands for the same dimensions, with this rank's place in them."""
    from torch.distributed.device_mesh import DeviceMesh

    for each in gc.get_objects():
        if (
            type(each) is DeviceMesh
            and tuple(each.mesh_dim_names or ()) == names
            and tuple(each.shape) == shape
        ):
            return each
    raise PeerError(f"no device mesh {names} of shape {shape} here; make it before everstep.restore")


def _numpy(tree: dict[str, Json], tensor: torch.Tensor) -> Any:
    import numpy as np

    kind = np.dtype(str(tree["dtype"]))
    if kind.hasobject:
        raise PeerError("an array of objects")
    array = np.frombuffer(tensor.numpy().tobytes(), dtype=kind).reshape(tree["shape"]).copy()
    return array[()] if tree["scalar"] else array


def to_bytes(value: Any) -> bytes:
    return b"".join(pack(value).parts())


def from_bytes(data: bytes) -> Any:
    stream = io.BytesIO(data)

    def read_into(view: memoryview) -> None:
        if stream.readinto(view) != len(view):
            raise PeerError("a state without its end")

    return unpack(stream.read, read_into)


# ------------------------------------------------------------------ walks


def mapped(value: Any, leaf: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same containers anew, with other tensors: later changes of the script's own do not reach it."""
    kind = type(value)
    if kind in _LEAVES:  # most common first: this walks a whole state in every step
        return value
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if kind is dict or isinstance(value, Mapping):
        return {k: mapped(v, leaf) for k, v in value.items()}
    if kind is list:
        return [mapped(each, leaf) for each in value]
    if kind is tuple:
        return tuple([mapped(each, leaf) for each in value])
    return value


_LEAVES = (int, float, bool, str, type(None))
