"""States in memory: the files of a checkpoint in the memory stores of nodes, which are directories in RAM.

    <store>/<task>/step-00000010/stage-1-0.safetensors      the state of stage 1, from replica 0
                                 stage-1-0.json             what is in it, and the hashes of its chunks

A copy in memory is a part like any other; what makes parts a checkpoint is that the coordinator says so. Of
each it knows the name, the size and the hash of its description (`Label`), and no more: descriptions of large
models are long. A reader gets the labels and where each part lies, on its own node (a file) or on another
one (range requests), and reads of each what it needs.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import psutil

from everstep.errors import PeerError, UserError
from everstep.job.job import NetSpec
from everstep.layout.box import Box
from everstep.net.seal import CHUNK_BYTES, Sealer, Suite, Unsealer, accepted, derived_key, sealed_bytes
from everstep.store import index as indexes
from everstep.store import parts
from everstep.store.index import Part, Refused, digest
from everstep.store.owned_folders import new_folder
from everstep.store.parts import Label
from everstep.store.places import STEP, step_name
from everstep.store.ranges import Access, LocalFile, RangeFile
from everstep.store.reader import Checkpoint, read_small, unusable

if TYPE_CHECKING:
    from torch import Tensor

NONCE_BYTES = 16
MORE_THAN_FREE = "is more than half of the memory that is free"
HASHED_BYTES = 4 << 20  # hashed as one: parts in memory are read whole or nearly so
TIMEOUT_S = 10.0
_RAM = Path("/dev/shm")
_PREFIX = "everstep-memory-"


def new_directory() -> tuple[Path, int]:
    """An empty folder, in RAM where the system has such folders, and the lock that says it is in use.

    Stores whose owner was killed are removed on the way: their locks are free.
    """
    return new_folder(_PREFIX, _RAM if os.access(_RAM, os.W_OK) else Path(tempfile.gettempdir()))


def folder_of(store: Path, task: str, step: int) -> Path:
    return store / task / step_name(step)


def room_bytes(folder: Path, cgroups: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> int:
    """What can be written into a folder in RAM: less than the machine has free, where the cgroup of this
    process (a container, a Slurm step) or the file system itself is smaller. Pages written here count for
    the cgroup: above its limit the kernel ends processes of it. `own`: its path, as in /proc/self/cgroup.
    """
    found: list[int] = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError):
        there = os.statvfs(folder)
        found.append(there.f_bavail * there.f_frsize)
    if own is None:
        try:
            lines = Path("/proc/self/cgroup").read_text().splitlines()
        except OSError:
            lines = []
        own = next((line[3:] for line in lines if line.startswith("0::")), "")
    group = cgroups / own.strip("/")
    for each in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int((each / name).read_text()) for name in ("memory.max", "memory.current"))
            found.append(max(0, limit - used))
        if each == cgroups:
            break
    return min(found)


def held_bytes(store: Path) -> int:
    """Of all parts in a store that this user may see; some may be removed meanwhile."""
    found = 0
    for folder, _, names in os.walk(store):
        for name in names:
            with contextlib.suppress(OSError):
                found += os.stat(os.path.join(folder, name)).st_size
    return found


def too_much(folder: Path, num_bytes: int, at_once: int = 1) -> str:
    """Why a part of this size does not go into a store, or nothing. Half of what is free is left to others.
    `at_once`: so many workers may write as much at the same time.
    """
    free = room_bytes(folder)
    if num_bytes * at_once <= free // 2:
        return ""
    of_each = f" from each of {at_once} workers" if at_once > 1 else ""
    return f"{num_bytes / 1e9:.2f} GB{of_each} {MORE_THAN_FREE}, {free / 1e9:.2f} GB"


def put(
    store: Path,
    task: str,
    step: int,
    name: str,
    slices: Iterable[tuple[str, Sequence[int], Box, Tensor]],
    pace: Callable[[], None] = lambda: None,
) -> Label:
    """Write a part to this node's store; returns what a reader needs to know. Slices as for
    `folder.write_slices`. `pace` is called between pieces.
    """
    planned = [
        parts.PlannedSlice(key, tuple(shape), box, parts.stored_of(key, values))
        for key, shape, box, values in slices
    ]
    folder = folder_of(store, task, step)
    part = parts.write_part(
        folder, name, planned, chunk_bytes=HASHED_BYTES, progress=lambda num_bytes: pace()
    )
    text, label = parts.labelled(name, part)
    (folder / f"{name}.json").write_bytes(text)
    return label


def drop(store: Path, task: str, before: int) -> None:
    """Make room: what is older than this step goes."""
    for path in (store / task).glob("step-*"):
        match = STEP.fullmatch(path.name)
        if match and int(match[1]) < before:
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Remote:
    """Another node's memory store, as its agent serves it."""

    host: str
    port: int
    key: bytes  # `memory_key` of the task
    suite: Suite = Suite.PLAIN

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S, blocksize=1 << 20)


def memory_key(secret: str) -> bytes:
    """By which the workers of a task and the memory servers of their nodes know each other."""
    return derived_key(bytes.fromhex(secret), b"", b"everstep memory")


def suite_for(net: NetSpec, host: str) -> Suite:
    """How requests to a memory server are protected. A server may lack what `gmac` needs."""
    wanted = accepted(net, host)[0]
    return Suite.BLAKE2B if wanted is Suite.GMAC else wanted


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """One request to a memory server. Its proof covers all of it, and the key of its bytes is its own.

    The proof cannot be used again: a server takes a nonce once. What is read is sealed with a key to which
    the server adds a nonce, and what is written with one that only this request has.
    """

    method: str
    path: str
    span: str  # the Range of a GET, the length of a PUT
    suite: Suite
    nonce: bytes

    HEADER = "Everstep-Request"

    def proof(self, key: bytes, said: bytes = b"request") -> str:
        """Of the request, or of the server's answer to it."""
        words = "\n".join((self.method, self.path, self.span, self.suite.name)).encode()
        return hmac.digest(key, said + b"\n" + words + self.nonce, "sha256").hex()

    def headers(self, key: bytes) -> dict[str, str]:
        return {self.HEADER: f"{self.suite.name} {self.nonce.hex()} {self.proof(key)}"}

    def body_key(self, key: bytes, server_nonce: bytes = b"") -> bytes:
        return derived_key(key, self.nonce + server_nonce, f"{self.method} {self.path}".encode())

    @staticmethod
    def new(method: str, path: str, span: str, suite: Suite) -> CopyRequest:
        return CopyRequest(method, path, span, suite, secrets.token_bytes(NONCE_BYTES))

    @staticmethod
    def read(method: str, path: str, span: str, header: str) -> tuple[CopyRequest, str]:
        """With the proof that came with it. ValueError: it cannot be read."""
        suite, nonce, proof = header.split(" ")
        if len(bytes.fromhex(nonce)) != NONCE_BYTES or suite not in Suite.__members__:
            raise ValueError("a request whose proof cannot be read")
        return CopyRequest(method, path, span, Suite[suite], bytes.fromhex(nonce)), proof


def sealed(
    sealer: Sealer, file: BinaryIO, size: int, pace: Callable[[], None] = lambda: None
) -> Iterator[bytes | memoryview]:
    """The next `size` bytes of a file as they go over the wire. `pace` is called before each piece."""
    while size:
        pace()
        data = file.read(min(size, CHUNK_BYTES))
        if not data:
            raise OSError("a file in memory became shorter while it was sent")
        size -= len(data)
        yield from sealer.seal(memoryview(data))


def send(
    store: Path,
    label: Label,
    remote: Remote,
    task: str,
    step: int,
    pace: Callable[[], None] = lambda: None,
) -> None:
    """Copy a part from this node's store to another node's. `pace` is called between pieces."""
    connection = remote.connect()
    try:
        for name in (f"{label['name']}.safetensors", f"{label['name']}.json"):
            with (folder_of(store, task, step) / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                request = CopyRequest.new("PUT", f"/{task}/{step}/{name}", str(size), remote.suite)
                sealer = Sealer(request.suite, request.body_key(remote.key))
                wire = {"Content-Length": str(sealed_bytes(request.suite, size)), "Everstep-Size": str(size)}
                headers, body = request.headers(remote.key) | wire, sealed(sealer, file, size, pace)
                connection.request("PUT", request.path, body=body, headers=headers)
                answer = connection.getresponse()
                reason = answer.read(1000).decode(errors="replace")
            proof = answer.getheader(CopyRequest.HEADER, "")
            if answer.status != 201 or not hmac.compare_digest(proof, request.proof(remote.key, b"stored")):
                raise OSError(
                    f"the memory store at {remote.host}:{remote.port} answers {answer.status}: {reason}"
                )
    except http.client.HTTPException as error:
        raise OSError(
            f"the memory store at {remote.host}:{remote.port} answers nothing of use: {error!r}"
        ) from error
    finally:
        connection.close()


class PeerFile:
    """A part in another node's memory, over one connection per thread."""

    def __init__(self, remote: Remote, path: str, size: int) -> None:
        self.bytes_read = 0
        self._remote, self._name, self._size = remote, path, size
        self._mine = threading.local()

    def __str__(self) -> str:
        return f"{self._remote.host}:{self._remote.port}{self._name}"

    def size(self) -> int:
        return self._size

    def read(self, offset: int, out: memoryview) -> None:
        if not len(out):
            return
        connection, remote = self._connection(), self._remote
        request = CopyRequest.new("GET", self._name, f"bytes={offset}-{offset + len(out) - 1}", remote.suite)
        try:
            headers = request.headers(remote.key) | {"Range": request.span}
            connection.request("GET", self._name, headers=headers)
            answer = connection.getresponse()
            if answer.status != 206 or answer.length != sealed_bytes(remote.suite, len(out)):
                raise OSError(f"{self} answers {answer.status} with {answer.length} bytes")
            theirs = bytes.fromhex(answer.getheader("Everstep-Nonce", ""))
            unsealer = Unsealer(remote.suite, request.body_key(remote.key, theirs))
            left = out
            while left:
                count = answer.readinto(unsealer.room(left)[0])
                if not count:
                    raise OSError(f"{self} ends {len(left)} bytes too early")
                left = left[unsealer.took(left, count) :]
        except (OSError, ValueError, PeerError, http.client.HTTPException) as error:
            self._hang_up()
            raise OSError(f"{self}: {error}") from error
        self.bytes_read += len(out)

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._mine, "connection"):
            self._mine.connection = self._remote.connect()
        connection: http.client.HTTPConnection = self._mine.connection
        return connection

    def _hang_up(self) -> None:
        if hasattr(self._mine, "connection"):
            self._mine.connection.close()
            del self._mine.connection

    def close(self) -> None:
        self._hang_up()


@dataclass(slots=True)
class MemoryPlace:
    """Where the files of a checkpoint are that lies in the memory of several nodes. Only read from."""

    task: str
    step: int
    sources: Mapping[str, Path | Remote]  # by file: this node's store, or another's
    sizes: Mapping[str, int]
    opened: dict[str, RangeFile] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"in memory, task {self.task}"

    def file(self, folder: str, name: str, access: Access = "pread") -> RangeFile:
        source = self.sources[name]
        if isinstance(source, Path):
            return LocalFile(folder_of(source, self.task, self.step) / name, access)
        return PeerFile(source, f"/{self.task}/{self.step}/{name}", self.sizes[name])


def open_copies(task: str, step: int, copies: Sequence[tuple[Path | Remote, Label]]) -> Checkpoint:
    """A step's state in memory, to be read like a checkpoint; every byte read is checked against its hash."""
    parts = []
    for source, label in copies:
        try:
            parts.append(_described(task, step, source, label))
        except Refused as refused:
            raise unusable(f"of step {step} in memory", refused, f"{label['name']}.safetensors") from refused
    try:
        index = indexes.parse(indexes.text_of(step, parts, {}, (), None).encode())
    except Refused as refused:
        raise UserError(f"the state of step {step} in memory is not whole: {refused}.") from refused
    sources = {f"{label['name']}.safetensors": source for source, label in copies}
    place = MemoryPlace(task=task, step=step, sources=sources, sizes=index.files)
    return Checkpoint(place, step_name(step), index, "mmap")


def _described(task: str, step: int, source: Path | Remote, label: Label) -> Part:
    """The description of a part, if it is the one the label was made of."""
    name, size = f"{label['name']}.json", int(label["index_bytes"])
    if isinstance(source, Path):
        file: RangeFile = LocalFile(folder_of(source, task, step) / name)
    else:
        file = PeerFile(source, f"/{task}/{step}/{name}", size)
    try:
        text = read_small(file, name, indexes.MAX_INDEX_BYTES)
    finally:
        file.close()
    if digest(text) != label["xxh3"]:
        raise Refused(f"{name} is not what was written")
    part: Part = json.loads(text)
    return part


def bytes_read(checkpoint: Checkpoint) -> tuple[int, int]:
    """So far: from this node's store, and from others'."""
    files = checkpoint._files.values()
    elsewhere = sum(file.bytes_read for file in files if isinstance(file, PeerFile))
    return checkpoint.bytes_read - elsewhere, elsewhere
