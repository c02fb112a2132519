"""A script's state in the memory of nodes: handed over by ranks, kept by keepers, given back after a failure.

    rank ──snapshot──► a file in shared memory of its node ──► its keeper ──► a copy on the next node
    rank ◄──restore─── the files of all ranks, verified, of the newest state that is whole

A rank's file has what only this rank has: its shards of DTensors (FSDP2), and from rank 0 all the rest, which
is the same on every rank (DDP). So a state can be restored by any number of ranks: whole tensors are put
together from the boxes that shards say they are. That the rest is the same is looked at once, at the first
state: an optimizer of which each rank has another part (ZeRO) would lose all parts but one. With `per_rank`
each rank keeps all of its own, for as many ranks as there are now.

Handing over copies the tensors to host memory before it returns; writing and hashing follow in a thread. A
state that was not written by all ranks does not count.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from everstep.errors import EverstepError, PeerError, UserError
from everstep.hold import door
from everstep.layout.box import Box, uncovered
from everstep.log import warn
from everstep.net.handshake import Acceptor, Opener
from everstep.net.sockets import listening, read_exactly
from everstep.protocol.messages import KeptFile, SnapshotFile
from everstep.ranks import line as rank_line
from everstep.store.owned_folders import MEMORY, new_folder, remove_left

KEPT_STEPS = 3  # per node: two that are whole, and one that is being written
COPIED_STEPS = 3  # that went from node to node last: two that are whole, and one on its way
# Small states that come one after the other in no time: the order to copy one takes longer than that.
YOUNG_S, YOUNG_BYTES = 2.0, 64 << 20
_CHUNK = 1 << 22
_TIMEOUT_S, _STRANGER_S = 60.0, 5.0
_LENGTH = struct.Struct("<q")
_SHARDS, _REST, _PER_RANK = "shards", "rest", "per_rank"
MOST_STRANGERS = 64  # connections at once to a node's memory; the tasks of a node have a few each


def file_name(rank: int, world: int) -> str:
    return f"rank-{rank}-of-{world}.pt"


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step}"


# ------------------------------------------------------------------ in a rank


class Restored(NamedTuple):
    """The step to begin with, and the state that `state_fn` gave at its beginning. After a restart of all
    ranks its tensors are whole, and in host memory.
    """

    step: int
    state: Any


_writing: threading.Thread | None = None
_snapshots = 0  # so far
_last: tuple[int, bool] | None = None  # the step that was copied last; whether a second one was told of


def snapshot(step: int, state_fn: Callable[[], Any], *, per_rank: bool = False) -> None:
    """The first line of a training loop's body: step `step` begins, with the state that `state_fn` gives. All
    ranks call it once per optimizer step.

    When a rank dies, the others are held in their collectives, and its replacement begins with this step.
    For that, references are kept, and nothing is copied. Every 10th state (`--copy-every`) is also copied
    into the memory of two nodes: from the newest of these all ranks begin again if they cannot be held.

    `state_fn` gives dicts and lists of tensors, numbers and texts, as `state_dict()` does; tensors may be
    DTensors. What is no DTensor is taken from rank 0, and is refused if it is not the same on all ranks.
    `per_rank`: each rank keeps its own in the copies, and ranks are not held. Does nothing where the script
    is not run as a script task of Everstep.
    """
    global _snapshots
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UserError(f"step is {step!r}; give a whole number, at least 0.")
    if not callable(state_fn):
        raise UserError(
            f"state_fn is a {type(state_fn).__name__}; give a function that returns the state: "
            "everstep.snapshot(step, lambda: {...})."
        )
    line = rank_line.current
    if line is None or line.snapshots is None:
        return
    if door.current is not None:
        if per_rank:
            door.current.refuse("it calls everstep.snapshot with per_rank: each rank has a state of its own")
        door.current.snapshot(step, state_fn)
        _snapshots = door.current.book.interval
    if (_snapshots + 1) % line.copy_every == 0:
        is_first = _snapshots + 1 == line.copy_every
        _copy(state_fn(), step, line.snapshots, line, per_rank=per_rank, is_first=is_first)
    _snapshots += 1


def _copy(
    state: Any, step: int, root: Path, line: rank_line.KeeperLine, *, per_rank: bool, is_first: bool
) -> None:
    """Returns when the tensors are copied; the rest happens meanwhile. The first of a run is compared between
    the ranks: by collectives, so a replacement that begins with this very step does it again.
    """
    global _writing, _last
    if _last is not None and _last[0] == step:
        if not _last[1]:
            warn(f"a state of step {step} was handed over already, and another one is not kept; count up")
        _last = (step, True)
        return
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    shards: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {}
    keeps_rest = rank == 0 or per_rank
    rest = _staged(state, "", None if per_rank else shards, keeps_rest=keeps_rest)
    if not per_rank and is_first:
        _require_alike(state, world, None if door.current is None else door.current.managed)
    _last = (step, False)
    if _writing is not None:
        _writing.join()
    content = {_SHARDS: shards, _PER_RANK: per_rank} | ({_REST: rest} if keeps_rest else {})
    folder, name = step_folder(root, step), file_name(rank, world)
    if not shards and not keeps_rest:
        line.say(kind="snapshot", step=step, name="")
        return
    _writing = threading.Thread(
        target=_write, args=(content, folder, name, step, line), name="everstep-snapshot", daemon=False
    )
    _writing.start()


def restore() -> Restored | None:
    """Before the loop, when all process groups are made. None: the run begins. Else the step to begin with,
    and its state: in the replacement of a rank that died from a peer, after a restart from the newest copy.
    """
    line = rank_line.current
    if door.current is not None and (found := door.current.restore()) is not None:
        return Restored(found.step, found.state)
    if line is None or line.snapshots is None or line.restore_step is None:
        return None
    import torch

    folder = step_folder(line.snapshots, line.restore_step)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rest: Any = None
    shards: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Any]]] = {}
    for path in sorted(folder.glob("rank-*.pt")):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if content[_PER_RANK]:
            return _own(folder, rank, world, line.restore_step)
        rest = content.get(_REST, rest)
        for key, shard in content[_SHARDS].items():
            shards.setdefault(key, []).append(shard)
    if rest is None:
        raise EverstepError(f"the state of step {line.restore_step} has no part of rank 0.")
    return Restored(line.restore_step, _rebuilt(rest, "", shards))


def _own(folder: Path, rank: int, world: int, step: int) -> Restored | None:
    import torch

    path = folder / file_name(rank, world)
    if not path.is_file():
        kept = len(list(folder.glob("rank-*.pt")))
        warn(
            f"the state of step {step} was kept by each of {kept} ranks for itself, and there are {world} "
            "now: it cannot be used"
        )
        return None
    return Restored(step, torch.load(path, map_location="cpu", weights_only=True)[_REST])


def _require_alike(state: Any, world: int, managed: Callable[[], Collection[int]] | None = None) -> None:
    """That all ranks have the same, but for DTensors. All ranks ask at once, and all get the same answer.
    `managed`: addresses of the tensors that optimizers change, where that is known; then others (running
    means of batch norm: DDP takes rank 0's) may differ.
    """
    import torch
    from torch import distributed

    if world == 1 or not (distributed.is_available() and distributed.is_initialized()):
        return
    found: dict[str, int] = {}
    _digests(state, "", found, None if managed is None else managed())
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"

    def differ(numbers: list[int]) -> list[bool]:
        least = torch.tensor(numbers, dtype=torch.int64, device=device)
        most = least.clone()
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        return (least != most).tolist()

    if any(differ([len(found), _number("\0".join(found).encode())])):
        where = "ranks have other keys"
    else:
        different = differ(list(found.values())) if found else []
        keys = [key for key, is_other in zip(found, different, strict=True) if is_other]
        if not keys:
            return
        where = f"{_named(keys[0])} is not the same on all ranks"
    raise UserError(
        f"{where}, and only what rank 0 has would be kept: give what ranks share, DTensors, or per_rank=True."
    )


def _digests(value: Any, key: str, found: dict[str, int], managed: Collection[int] | None = None) -> None:
    """Of every value that is no DTensor."""
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(value, Mapping):
        for k, v in value.items():
            _digests(v, _under(key, _plain(k, f"a key of {_named(key)}")), found, managed)
    elif isinstance(value, list | tuple):
        for i, v in enumerate(value):
            _digests(v, _under(key, i), found, managed)
    elif isinstance(value, torch.Tensor):
        if not isinstance(value, DTensor) and (managed is None or value.data_ptr() in managed):
            held = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            form = f"{held.dtype}{tuple(held.shape)}".encode()
            found[key] = _number(form + held.view(-1).view(torch.uint8).numpy().tobytes())
    else:
        found[key] = _number(repr(value).encode())


def _number(data: bytes) -> int:
    import xxhash

    return int(xxhash.xxh3_64_intdigest(data)) >> 1  # it fits into an int64


def _staged(value: Any, key: str, shards: dict[str, Any] | None, *, keeps_rest: bool) -> Any:
    """A copy of the state; DTensors leave their shard in `shards` and None in their place."""
    import torch

    if isinstance(value, Mapping):
        return {
            plain: _staged(v, _under(key, plain), shards, keeps_rest=keeps_rest)
            for k, v in value.items()
            for plain in (_plain(k, f"a key of {_named(key)}"),)
        }
    if isinstance(value, list | tuple):
        items = [_staged(v, _under(key, i), shards, keeps_rest=keeps_rest) for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, torch.Tensor):
        return _plain(value, _named(key))
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        if shards is None:
            raise UserError(
                f"{_named(key)} is a DTensor, which is kept without per_rank; give its to_local(), or leave "
                "per_rank out."
            )
        if any(placement.is_partial() for placement in value.placements):
            raise UserError(
                f"{_named(key)} is a DTensor of partial sums; give it reduced: "
                "redistribute(placements=[Replicate()])."
            )
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        shards[key] = (tuple(value.shape), tuple(offset), _on_host(value.to_local(), key))
        return None
    return _on_host(value, key) if keeps_rest else None


# What they are without what a class has added to them: str() of an enum is another text.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}


def _plain(value: Any, where: str) -> Any:
    """Of Python's own types: what another class has made of one (a number of numpy, an enum) is written as a
    class, and a class is not read back.
    """
    if isinstance(value, tuple):  # a key
        return tuple(_plain(each, where) for each in value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 1):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind):
            return plain(value)
    raise UserError(
        f"{where} is a {type(value).__name__}; a state is made of dicts, lists, tensors, numbers and "
        "texts. Give its state_dict(), or a tensor of it."
    )


def _under(key: str, part: Any) -> str:
    """The path to a value, another one for each: "a/b" is not b in a, and 1 is not "1"."""
    return f"{key}[{part!r}]"


def _named(key: str) -> str:
    return f"state{key}"


def _on_host(tensor: Any, key: str) -> Any:
    """A copy that no later step changes."""
    import torch

    found = tensor.detach()
    if type(found) is not torch.Tensor:
        raise UserError(
            f"{_named(key)} is a {type(found).__name__}, a kind of tensor that is not read back; give a "
            "plain tensor."
        )
    return found.clone() if found.device.type == "cpu" else found.cpu()


def _rebuilt(value: Any, key: str, shards: Mapping[str, list[Any]]) -> Any:
    if isinstance(value, dict):
        return {k: _rebuilt(v, _under(key, k), shards) for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_rebuilt(v, _under(key, i), shards) for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return _joined(shards[key]) if value is None and key in shards else value


def _joined(parts: list[tuple[tuple[int, ...], tuple[int, ...], Any]]) -> Any:
    import torch

    shape, _, first = parts[0]
    boxes = [Box(tuple(offset), tuple(part.shape)) for _, offset, part in parts]
    if uncovered(tuple(shape), [box for box in boxes if box.volume]) is not None:
        raise EverstepError("a state that was kept is not whole: the shard of a rank is missing.")
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


def _trim(folder: Path, but: Collection[int] = (), young_s: float = 0.0) -> None:
    """Only the steps that were written last stay, and these; and of younger ones those that take no room."""
    found = []
    for path in folder.glob("step-*"):
        number = path.name.removeprefix("step-")
        with contextlib.suppress(OSError):
            if number.isdecimal():
                found.append((path.stat().st_mtime, int(number), path))
    room, now = YOUNG_BYTES, time.time()
    for written_at, step, path in sorted(found)[:-KEPT_STEPS][::-1]:
        if step in but:
            continue
        if 0 <= now - written_at < young_s:
            with contextlib.suppress(OSError):
                room -= sum(file.stat().st_size for file in path.iterdir())
                if room >= 0:
                    continue
        shutil.rmtree(path, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_PREFIX = "everstep-snapshots-"


def _root() -> Path:
    return MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def remove_left_files() -> None:
    """Of keepers that were killed: they are memory, which nobody else gives back."""
    remove_left(_PREFIX, _root())


class NodeMemory:
    """The files of this node's ranks and of another node's, in shared memory; other nodes read them here."""

    def __init__(self, host: str, secret: str, disk: Path | None = None) -> None:
        """`disk`: the folder of the task, that all nodes see, to which states are drained."""
        self.disk = disk
        self.folder, self._lock = new_folder(_PREFIX, _root())
        self._key = hmac.digest(secret.encode(), b"everstep snapshots", "sha256")
        self._room = threading.BoundedSemaphore(MOST_STRANGERS)
        self._numbers = itertools.count()
        self._fetching: list[int] = []  # steps whose files are on their way here
        self._copied: deque[int] = deque(maxlen=COPIED_STEPS)
        self._copied_lock = threading.Lock()
        self._listener = listening(host)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        threading.Thread(target=self._serve, name="everstep-snapshots", daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def trim(self) -> None:
        with self._copied_lock:
            copied = tuple(self._copied)
        _trim(self.folder, (*self._fetching, *copied), YOUNG_S)

    def leave_only(self, step: int, files: Iterable[KeptFile]) -> None:
        """Ranks begin with this state: no file of another number of ranks is part of it."""
        names = {each.name for each in files}
        for path in step_folder(self.folder, step).iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)

    def _is_copied(self, step: int) -> None:
        """From node to node. What is whole is among these, however many states ranks hand over meanwhile."""
        with self._copied_lock:
            if step in self._copied:
                self._copied.remove(step)
            self._copied.append(step)

    def fetch(self, step: int, files: Iterable[KeptFile]) -> str:
        """Read what is not here. Why it failed; empty: all are here, with the right hash."""
        self._fetching.append(step)
        try:
            if failed := self._fetch(step, files):
                return failed
            self._is_copied(step)
            return ""
        finally:
            self._fetching.remove(step)

    def _part(self, path: Path) -> Path:
        """A name of its own: a state may be restored while a thread still copies it here."""
        return path.with_name(f"{path.name}.{next(self._numbers)}.part")

    def _fetch(self, step: int, files: Iterable[KeptFile]) -> str:
        folder = step_folder(self.folder, step)
        folder.mkdir(parents=True, exist_ok=True)
        for wanted in files:
            path = folder / wanted.name
            if path.is_file() and described(path) == wanted.file:
                continue
            troubles = [self._read(holder, step, wanted, path) for holder in wanted.holders]
            if wanted.holders and not all(troubles):
                continue
            if self.disk is not None:
                troubles.append(self._read_disk(self.disk, step, wanted, path))
            if not troubles or all(troubles):
                return f"{wanted.name}: {'; '.join(filter(None, troubles)) or 'no node has it'}"
        return ""

    def _read_disk(self, disk: Path, step: int, wanted: KeptFile, path: Path) -> str:
        """Why it failed."""
        part, found = self._part(path), step_folder(disk, step) / wanted.name
        try:
            shutil.copyfile(found, part)
            if described(part) != wanted.file:
                return f"{found} fails its checksum"
            part.replace(path)
        except OSError as error:
            return f"{found}: {error.strerror}"
        finally:
            part.unlink(missing_ok=True)
        return ""

    def hold(self, step: int, names: Iterable[str]) -> Path:
        """Other names of these files, which stay when the step is no longer kept."""
        held = Path(tempfile.mkdtemp(prefix=f"draining-{step}-", dir=self.folder))
        for name in names:
            os.link(step_folder(self.folder, step) / name, held / name)
        return held

    def drain(self, step: int, held: Path) -> str:
        """Write them to disk, each whole or not at all. Why it failed."""
        assert self.disk is not None, "no folder was given"
        folder = step_folder(self.disk, step)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for source in sorted(held.iterdir()):
                part = folder / f"{source.name}.part"
                with source.open("rb") as data, part.open("wb") as file:
                    shutil.copyfileobj(data, file, _CHUNK)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(folder / source.name)
            _sync_folder(folder)
        except OSError as error:
            return f"{error.strerror or error}: {error.filename or folder}"
        finally:
            shutil.rmtree(held, ignore_errors=True)
        _trim(self.disk)
        return ""

    def _read(self, holder: tuple[str, int], step: int, wanted: KeptFile, path: Path) -> str:
        """Why it failed."""
        if path.is_file() and described(path) == wanted.file:
            return ""
        part = self._part(path)
        try:
            with socket.create_connection(holder, timeout=_TIMEOUT_S) as sock, part.open("wb") as file:
                _prove(sock, Opener(self._key))
                stream = sock.makefile("rb")
                sock.sendall(json.dumps({"step": step, "name": wanted.name}).encode() + b"\n")
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
        except (OSError, struct.error, PeerError) as error:
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
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        try:
            self._give(sock)
        finally:
            self._room.release()

    def _give(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, ValueError, KeyError, TypeError, PeerError):
            _prove(sock, Acceptor(self._key))
            asked = json.loads(sock.makefile("rb").readline(1 << 16))
            path = step_folder(self.folder, int(asked["step"])) / Path(str(asked["name"])).name
            if not path.is_file():
                sock.sendall(_LENGTH.pack(-1))
                return
            self._is_copied(int(asked["step"]))
            with path.open("rb") as file:
                sock.sendall(_LENGTH.pack(os.fstat(file.fileno()).st_size))
                sock.sendfile(file)


def _prove(sock: socket.socket, side: Opener | Acceptor) -> None:
    """To each other that both know the task's secret, in `_STRANGER_S` altogether; a PeerError if not."""
    ends = time.monotonic() + _STRANGER_S
    if isinstance(side, Opener):
        sock.sendall(side.hello())
    while (wants := side.wants) > 0:
        data = read_exactly(sock, wants, within_s=ends - time.monotonic())
        if answer := side.feed(data):
            sock.sendall(answer)
    sock.settimeout(_TIMEOUT_S)
