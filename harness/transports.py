"""Stand-ins on the CPUs of one machine for what carries tensors between GPUs: the same protocols, no GPU.

    pipe     a lane, over a local socket, in the place of NCCL
    files    memory that both ends map, in the place of a GPU's

A worker takes the stand-in whose `Data` it is given: `carried_by` makes that of any job on synthetic data.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.engine.datasets.data import Synthetic
from everstep.errors import PeerError
from everstep.job.job import DataSpec, Job
from everstep.net import frames, plane
from everstep.net.arena import UnmappableError


class PipeWire:
    """A lane's wire by a local socket: one transfer after the other, as NCCL does it."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._name = b""
        self._sends = False
        self._parts: list[memoryview] = []
        self._began: float | None = None

    def name(self) -> bytes:
        return b"everstep-" + secrets.token_hex(16).encode()

    def begin_open(self, name: bytes, *, sends: bool) -> None:
        self._name, self._sends = b"\0" + name, sends
        if sends:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self._name)
            self._listener.listen(1)
            self._listener.setblocking(False)

    def is_open(self) -> bool:
        if self._socket is not None:
            return True
        try:
            if self._listener is not None:
                self._socket, _ = self._listener.accept()
            else:
                made = socket.socket(socket.AF_UNIX)
                made.connect(self._name)
                self._socket = made
        except (BlockingIOError, ConnectionRefusedError):
            return False
        self._socket.setblocking(False)
        return True

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def begin(self, tensors: tuple[Tensor, ...]) -> None:
        self._parts, self._began = [frames.raw(tensor) for tensor in tensors], time.monotonic()

    def is_done(self) -> bool:
        assert self._socket is not None
        try:
            while self._parts:
                part = self._parts[0]
                count = self._socket.send(part) if self._sends else self._socket.recv_into(part)
                if count == 0:
                    raise PeerError("the other end has closed it")
                self._parts[0] = part[count:]
                if not self._parts[0]:
                    self._parts.pop(0)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerError(str(error)) from None
        self._began = None
        return True

    def waits_since(self) -> float | None:
        return self._began

    def interrupt(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # it is closed, or the other end was first
                self._socket.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        for sock in (self._listener, self._socket):
            if sock is not None:
                sock.close()
        self._parts, self._began = [], None

    def close(self) -> None:
        """Nothing is left."""


class SharedFiles:
    """CPU memory in files without a name: they are gone with the last process that has them mapped."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def allocate(self, nbytes: int) -> tuple[int, str]:
        file = os.memfd_create("everstep-arena")  # stays open: others open it by its number
        os.posix_fallocate(file, 0, nbytes)
        return self._mapped(file, nbytes), f"{os.getpid()} {file}"

    def open(self, handle: str, nbytes: int) -> int:
        pid, _, number = handle.partition(" ")
        if not pid.isdecimal() or not number.isdecimal():
            raise PeerError("a peer named memory by something that is not a handle")
        try:
            with Path(f"/proc/{int(pid)}/fd/{int(number)}").open("r+b") as file:
                if os.fstat(file.fileno()).st_size != nbytes:
                    raise PeerError("a peer named a piece of memory in a wrong size")
                return self._mapped(file.fileno(), nbytes)
        except OSError as error:
            raise UnmappableError(f"a peer's memory cannot be mapped: {error}") from None

    def close(self, address: int, nbytes: int) -> None:
        del self._maps[address]  # unmapped with the last array over it

    def view(self, address: int, nbytes: int, owner: object) -> Tensor:
        base = max(a for a in self._maps if a <= address)
        array = np.frombuffer(self._maps[base], dtype=np.uint8, count=nbytes, offset=address - base)
        leased = array.view(_LeasedArray)
        leased.lease = owner
        return torch.from_numpy(leased)

    def _mapped(self, file: int, nbytes: int) -> int:
        made = mmap.mmap(file, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(made))
        self._maps[address] = made
        return address


class _LeasedArray(np.ndarray):
    lease: object = None


def use_pipe() -> None:
    """From now on workers of this process say that they can open such lanes."""
    plane.WIRES["pipe"] = lambda settings: PipeWire()
    _say("tcp", "", f"pipe {plane._namespace('pid')}")


def use_files() -> None:
    """From now on workers of this process share their memory."""
    plane.CudaMemory = lambda device: SharedFiles()  # type: ignore[assignment,misc]
    _say("ipc", plane._namespace("pid"), "")


def _say(*identity: str) -> None:
    plane._memory_and_lanes = lambda device, transport: identity  # type: ignore[assignment]


STAND_INS: dict[str, Callable[[], None]] = {"pipe": use_pipe, "files": use_files}


class Data:
    """Synthetic, in a worker that takes a stand-in."""

    in_a_thread = True

    def __init__(self, transport: str, **synthetic: Any) -> None:
        STAND_INS[transport]()
        self._data = Synthetic(**synthetic)

    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        return self._data.batch(step, microbatch)


def carried_by(job: Job, transport: str) -> Job:
    """By a stand-in, or by what a job itself may name."""
    if transport not in STAND_INS:
        return replace(job, transport=transport)  # type: ignore[arg-type]
    language = job.language()
    assert language is not None
    vocab, context = language
    synthetic = {"vocab": vocab, "sequence": job.data.sequence or context, "rows": job.data.rows}
    options = {"transport": transport, "seed": job.seed, **synthetic}
    return replace(job, data=DataSpec(build="harness.transports:Data", rows=job.data.rows, options=options))
