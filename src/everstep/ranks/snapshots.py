"""A script's state in the memory of nodes: handed over by ranks, kept by keepers, given back after a failure.

    rank ──snapshot──► a file in shared memory of its node ──► its keeper ──► a copy on the next node
    rank ◄──restore─── the files of all ranks, verified, of the newest state that is whole

A rank's file has what only this rank has: its shards of DTensors (FSDP2), and from rank 0 all the rest, which
is the same on every rank (DDP). So a state can be restored by any number of ranks: whole tensors are put
together from the boxes that shards say they are.

Handing over copies the tensors to host memory before it returns; writing and hashing follow in a thread. A
state that was not written by all ranks does not count.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from everstep.errors import EverstepError, UserError
from everstep.protocol.messages import KeptFile, SnapshotFile
from everstep.ranks import line as rank_line
from everstep.store.owned_folders import new_folder

KEPT_STEPS = 3  # per node: two that are whole, and one that is being written
_CHUNK = 1 << 22
_TIMEOUT_S = 60.0
_LENGTH = struct.Struct("<q")
_SHARDS, _REST = "shards", "rest"


def file_name(rank: int, world: int) -> str:
    return f"rank-{rank}-of-{world}.pt"


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step}"


# ------------------------------------------------------------------ in a rank


class Restored(NamedTuple):
    """The state that was handed over last, and its step. Tensors are whole, and in host memory."""

    state: Any
    step: int


_writing: threading.Thread | None = None


def snapshot(state: Any, step: int) -> None:
    """Keep this state in the memory of two nodes, to continue from after a failure. All ranks call it.

    `state`: dicts and lists of tensors, numbers and texts, as `state_dict()` gives them; tensors may be
    DTensors. What is no DTensor is taken from rank 0. Returns when the tensors are copied; the rest happens
    meanwhile. Does nothing where the script is not run as a script task of Everstep.
    """
    global _writing
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UserError(f"step is {step!r}; give a whole number, at least 0.")
    line = rank_line.current
    if line is None or line.snapshots is None:
        return
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    shards: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {}
    rest = _staged(state, "", shards, is_first=rank == 0)
    if _writing is not None:
        _writing.join()
    content = {_SHARDS: shards} | ({_REST: rest} if rank == 0 else {})
    folder, name = step_folder(line.snapshots, step), file_name(rank, world)
    if not shards and rank:
        line.say(kind="snapshot", step=step, name="")
        return
    _writing = threading.Thread(
        target=_write, args=(content, folder, name, step, line), name="everstep-snapshot", daemon=False
    )
    _writing.start()


def restore() -> Restored | None:
    """The state to continue from, if there is one: what all ranks have handed over last."""
    line = rank_line.current
    if line is None or line.snapshots is None or line.restore_step is None:
        return None
    import torch

    folder = step_folder(line.snapshots, line.restore_step)
    rest: Any = None
    shards: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Any]]] = {}
    for path in sorted(folder.glob("rank-*.pt")):
        content = torch.load(path, map_location="cpu", weights_only=True)
        rest = content.get(_REST, rest)
        for key, shard in content[_SHARDS].items():
            shards.setdefault(key, []).append(shard)
    if rest is None:
        raise EverstepError(f"the state of step {line.restore_step} has no part of rank 0.")
    return Restored(_rebuilt(rest, "", shards), line.restore_step)


def _staged(value: Any, key: str, shards: dict[str, Any], *, is_first: bool) -> Any:
    """A copy of the state; DTensors leave their shard in `shards` and None in their place."""
    import torch

    if isinstance(value, Mapping):
        return {k: _staged(v, f"{key}/{k}", shards, is_first=is_first) for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_staged(v, f"{key}/{i}", shards, is_first=is_first) for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, torch.Tensor):
        if isinstance(value, str | bytes | int | float | complex | bool | type(None)):
            return value
        raise UserError(
            f"state{key.replace('/', '.')} is a {type(value).__name__}; a state is made of dicts, lists, "
            "tensors, numbers and texts. Give its state_dict()."
        )
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        local = value.to_local()
        shards[key] = (tuple(value.shape), tuple(offset), _on_host(local))
        return None
    return _on_host(value) if is_first else None


def _on_host(tensor: Any) -> Any:
    """A copy that no later step changes."""
    found = tensor.detach()
    return found.clone() if found.device.type == "cpu" else found.cpu()


def _rebuilt(value: Any, key: str, shards: Mapping[str, list[Any]]) -> Any:
    if isinstance(value, dict):
        return {k: _rebuilt(v, f"{key}/{k}", shards) for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_rebuilt(v, f"{key}/{i}", shards) for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return _joined(shards[key]) if value is None and key in shards else value


def _joined(parts: list[tuple[tuple[int, ...], tuple[int, ...], Any]]) -> Any:
    import torch

    shape, _, first = parts[0]
    whole = torch.empty(shape, dtype=first.dtype)
    for _, offset, part in parts:
        whole[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = part
    return whole


def _write(content: Any, folder: Path, name: str, step: int, line: rank_line.KeeperLine) -> None:
    """Whole or not at all: it is told once it is written."""
    import torch

    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / f"{name}.part")
        (folder / f"{name}.part").replace(folder / name)
        found = described(folder / name)
        line.say(kind="snapshot", step=step, name=name, size=found.size, hash=found.hash)
    except Exception as error:  # a full memory: training continues, and the state before is kept
        with contextlib.suppress(OSError):
            (folder / f"{name}.part").unlink()
        line.say(kind="snapshot_failed", step=step, because=f"{type(error).__name__}: {error}"[:300])


def described(path: Path) -> SnapshotFile:
    import xxhash

    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            hasher.update(data)
            size += len(data)
    return SnapshotFile(size=size, hash=hasher.hexdigest())


# ------------------------------------------------------------------ in a keeper


class NodeMemory:
    """The files of this node's ranks and of another node's, in shared memory; other nodes read them here."""

    def __init__(self, host: str, secret: str) -> None:
        base = Path("/dev/shm")
        root = base if base.is_dir() and os.access(base, os.W_OK) else Path(tempfile.gettempdir())
        self.folder, self._lock = new_folder("everstep-snapshots-", root)
        self._secret = secret
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        threading.Thread(target=self._serve, name="everstep-snapshots", daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def trim(self) -> None:
        """Only the newest steps stay."""
        steps = sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))
        for step in steps[:-KEPT_STEPS]:
            shutil.rmtree(step_folder(self.folder, step), ignore_errors=True)

    def fetch(self, step: int, files: Iterable[KeptFile]) -> str:
        """Read what is not here. Why it failed; empty: all are here, with the right hash."""
        folder = step_folder(self.folder, step)
        folder.mkdir(parents=True, exist_ok=True)
        for wanted in files:
            path = folder / wanted.name
            if path.is_file() and described(path) == wanted.file:
                continue
            troubles = [self._read(holder, step, wanted, path) for holder in wanted.holders]
            if not wanted.holders or all(troubles):
                return f"{wanted.name}: {'; '.join(filter(None, troubles)) or 'no node has it'}"
        return ""

    def _read(self, holder: tuple[str, int], step: int, wanted: KeptFile, path: Path) -> str:
        """Why it failed."""
        if path.is_file() and described(path) == wanted.file:
            return ""
        part = path.with_name(f"{path.name}.part")
        try:
            with socket.create_connection(holder, timeout=_TIMEOUT_S) as sock, part.open("wb") as file:
                asked = {"secret": self._secret, "step": step, "name": wanted.name}
                sock.sendall(json.dumps(asked).encode() + b"\n")
                stream = sock.makefile("rb")
                (size,) = _LENGTH.unpack(stream.read(_LENGTH.size))
                if size != wanted.file.size:
                    return f"{holder[0]}:{holder[1]} does not have it"
                left = size
                while left:
                    data = stream.read(min(left, _CHUNK))
                    if not data:
                        raise OSError("the connection closed")
                    file.write(data)
                    left -= len(data)
            if described(part) != wanted.file:
                return f"what {holder[0]}:{holder[1]} sent fails its checksum"
            part.replace(path)
        except (OSError, struct.error) as error:
            return f"{holder[0]}:{holder[1]}: {error}"
        finally:
            part.unlink(missing_ok=True)
        return ""

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        sock.settimeout(_TIMEOUT_S)
        with sock, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            asked = json.loads(sock.makefile("rb").readline(1 << 16))
            if not hmac.compare_digest(str(asked["secret"]).encode(), self._secret.encode()):
                return
            path = step_folder(self.folder, int(asked["step"])) / Path(str(asked["name"])).name
            if not path.is_file():
                sock.sendall(_LENGTH.pack(-1))
                return
            with path.open("rb") as file:
                sock.sendall(_LENGTH.pack(os.fstat(file.fileno()).st_size))
                sock.sendfile(file)
