"""NCCL as the wire of a lane: a communicator of two ranks, the first sends, the second receives.

Called through ctypes, in the library that torch has brought along: torch's own process groups cannot be left
by one member while the others continue, and a collective of theirs waits for the dead. The communicator is
non-blocking: every call returns at once and is asked about later, so a lane's thread can always leave.

Two ranks and one direction, because operations of one communicator run one after the other: with both
directions on it, two workers that send at the same time would wait for each other's receive.

A transfer waits on the device until the other end's comes there too, and NVIDIA promises neither that streams
run at the same time nor that a call to CUDA (a kernel's first launch, memory, another communicator) does not
wait for all of them. So each transfer has a stream alone, and one that waits for long is interrupted
(`net/lanes.py`).

The ways out of a communicator whose other rank is dead, and what each takes, are in `docs/data-plane.md`. The
fastest is `ncclCommShrink` with NCCL_SHRINK_ABORT: it tells the kernels on the device to stop. What it leaves
is aborted afterwards, when no one waits.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from everstep.errors import DeviceError, PeerError
from everstep.log import say
from everstep.net.arena import cuda_runtime

SUCCESS, IN_PROGRESS = 0, 7
BYTES = 1  # ncclUint8
SHRINK_ABORT = 1
NAME_BYTES = 128
MAX_CTAS = 4  # a transfer needs few of the device's multiprocessors
MOST_AT_ONCE = 8  # transfers each way: others wait for their turn
QUEUES = 8
_ENOUGH_QUEUES = {str(number) for number in range(QUEUES, 33)}  # 32: the most that CUDA has
LOOK_AT_ERRORS_EVERY_S = 0.02
LEAVE_WITHIN_S = 5.0
_DEFAULT = -(2**31)  # NCCL's word for "not given"
_AS_OF = 21800  # the version whose fields `_Config` has; a later library knows how to read it


class _Name(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * NAME_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


def _config() -> _Config:
    return _Config(
        ctypes.sizeof(_Config), 0xCAFEBEEF, _AS_OF, 0, _DEFAULT, _DEFAULT, MAX_CTAS, None, _DEFAULT
    )


@functools.cache
def library() -> Any:
    """None: torch has no NCCL here."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libnccl.so" in line:
            return _declared(ctypes.CDLL(line.split()[-1]))
    try:
        import nvidia.nccl
    except ImportError:
        return None
    found = [path for folder in nvidia.nccl.__path__ for path in Path(folder, "lib").glob("libnccl.so*")]
    return _declared(ctypes.CDLL(str(found[0]))) if found else None


def _declared(nccl: ctypes.CDLL) -> ctypes.CDLL:
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    return nccl


@functools.cache
def version() -> int:
    """22809 is 2.28.9; 0: there is no NCCL here."""
    nccl, found = library(), ctypes.c_int()
    if nccl is None or nccl.ncclGetVersion(ctypes.byref(found)):
        return 0
    return found.value


def prepare(host: str, *, alone: bool) -> None:
    """Settings of this process, before CUDA and NCCL are first used. What the user has set stays, too few
    queues apart: some other programs want a single one.

    `alone`: as if on a node of its own. NCCL refuses two ranks on one GPU, or on two MIG instances of one,
    unless it takes them for different machines.
    """
    # Queues to the device: under MPS a process has 2 by default, and lanes would wait behind the computation.
    # With 32 each, the fourth process that shares a GPU under MPS finds no memory for its context (measured).
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if given not in _ENOUGH_QUEUES:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(QUEUES)
    if given not in ("", os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]):
        say(
            f"CUDA_DEVICE_MAX_CONNECTIONS={given} is taken for {QUEUES}: CUDA has at most 32, and with fewer "
            f"than {QUEUES} workers could wait for each other"
        )
    if alone:
        os.environ.setdefault("NCCL_HOSTID", f"everstep-{os.getpid()}-{time.monotonic_ns()}")
    interface = next(
        (name for name, at in psutil.net_if_addrs().items() if any(a.address == host for a in at)), None
    )
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


@functools.cache
def _idle(device: torch.device, sends: bool) -> queue.SimpleQueue[torch.cuda.Stream]:
    """Streams of a GPU that no transfer is on. What is received has its own: torch keeps memory for each."""
    return queue.SimpleQueue()


class NcclWire:
    """One end of a lane between two GPUs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nccl = library()
        self._comm, self._shrunk = ctypes.c_void_p(), ctypes.c_void_p()
        self._sends = self._opened = False
        self._on: torch.cuda.Stream | None = None  # while something moves
        self._event: torch.cuda.Event | None = None
        self._launching = False
        self._since: float | None = None  # the launch was over: the device is in it
        self._looked_at = 0.0
        self._launch = threading.Lock()  # held while something is begun, and while what is there is stopped
        self._is_stopped = False

    def name(self) -> bytes:
        torch.cuda.set_device(self._device)
        found = _Name()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(found)))
        return ctypes.string_at(ctypes.byref(found), NAME_BYTES)

    def begin_open(self, name: bytes, *, sends: bool) -> None:
        if len(name) != NAME_BYTES:
            raise PeerError("a peer named a communicator by something that is not a name of NCCL's")
        torch.cuda.set_device(self._device)
        self._sends = sends
        given, config = _Name(), _config()
        ctypes.memmove(ctypes.byref(given), name, NAME_BYTES)
        self._check(
            self._nccl.ncclCommInitRankConfig(
                ctypes.byref(self._comm), 2, given, 0 if sends else 1, ctypes.byref(config)
            )
        )

    def is_open(self) -> bool:
        self._opened = self._state() == SUCCESS
        return self._opened

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self._stream()):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        tensor.record_stream(torch.cuda.default_stream(self._device))  # where it is read
        return tensor

    def begin(self, tensors: tuple[Tensor, ...]) -> None:
        """The sender's tensors are whole: the device has made them. So no stream waits for another here."""
        torch.cuda.set_device(self._device)  # of this thread, which is not the one that opened it
        call = self._nccl.ncclSend if self._sends else self._nccl.ncclRecv
        other = 1 if self._sends else 0
        with self._launch:
            if self._is_stopped:
                raise PeerError("a transfer was interrupted")
            stream = ctypes.c_void_p(self._stream().cuda_stream)
            self._check(self._nccl.ncclGroupStart())
            codes = [
                call(
                    ctypes.c_void_p(t.data_ptr()), ctypes.c_size_t(t.nbytes), BYTES, other, self._comm, stream
                )
                for t in tensors
            ]
            codes.append(self._nccl.ncclGroupEnd())
        for code in codes:
            self._check(code)
        self._launching, self._event = True, None

    def _stream(self) -> torch.cuda.Stream:
        if self._on is None:
            try:
                self._on = _idle(self._device, self._sends).get_nowait()
            except queue.Empty:
                self._on = _own_stream(self._device)
        return self._on

    def is_done(self) -> bool:
        if self._launching:
            if self._state() == IN_PROGRESS:
                return False
            self._launching, self._since = False, time.monotonic()
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(self._stream())
        assert self._event is not None
        if self._event.query():  # type: ignore[no-untyped-call]
            self._event = self._since = None
            self._give_back()
            return True
        if time.monotonic() - self._looked_at > LOOK_AT_ERRORS_EVERY_S:
            self._looked_at = time.monotonic()
            self._state()
        return False

    def waits_since(self) -> float | None:
        return self._since

    def interrupt(self) -> None:
        """Without a call to CUDA before its kernel is told to stop: another thread's may wait for that."""
        if self._launch.acquire(blocking=False):  # else something is being begun: nothing is on the device
            try:
                self._stop()
            finally:
                self._launch.release()

    def leave(self) -> None:
        """A library that cannot stop a kernel, or a communicator that never was open, is left by an abort.
        Raises if that does not help: memory that a transfer is in must not be used for something else, and
        only the end of this process ends the transfer.
        """
        if not self._comm:
            return
        torch.cuda.set_device(self._device)
        with self._launch:
            self._stop()
        if not (self._is_stopped and self._ends()):
            self.close()
        if not self._ends():
            raise DeviceError(
                f"a transfer over NCCL is still on the device {LEAVE_WITHIN_S:g} s after its communicator "
                "was aborted; the worker ends, because the device would go on to use its memory"
            )
        self._give_back()

    def _stop(self) -> None:
        """By shrinking, where a transfer is on the device: the quickest way to stop its kernel."""
        if self._is_stopped or self._since is None or not hasattr(self._nccl, "ncclCommShrink"):
            return
        self._is_stopped = True
        other = (ctypes.c_int * 1)(1 if self._sends else 0)
        self._nccl.ncclCommShrink(self._comm, other, 1, ctypes.byref(self._shrunk), None, SHRINK_ABORT)

    def close(self) -> None:
        for comm in (self._shrunk, self._comm):
            if comm:
                self._nccl.ncclCommAbort(comm)
        self._shrunk, self._comm = ctypes.c_void_p(), ctypes.c_void_p()
        self._ends()

    def _ends(self) -> bool:
        """False: the device is still in a transfer after a time."""
        if self._on is None or not (self._launching or self._since is not None):
            return True
        over = self._on if self._event is None else self._event
        until = time.monotonic() + LEAVE_WITHIN_S
        while not over.query():
            if time.monotonic() > until:
                return False
            time.sleep(5e-4)
        return True

    def _give_back(self) -> None:
        if self._on is not None:
            _idle(self._device, self._sends).put(self._on)
        self._on = None

    def _state(self) -> int:
        state = ctypes.c_int(IN_PROGRESS)
        self._check(self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
        self._check(state.value)
        return state.value

    def _check(self, code: int) -> None:
        if code not in (SUCCESS, IN_PROGRESS):
            words = self._nccl.ncclGetErrorString(code).decode(errors="replace")
            last = (self._nccl.ncclGetLastError(None) or b"").decode(errors="replace").strip()
            raise PeerError(f"NCCL: {words}{f' ({last[:300]})' if last else ''}")


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """Not from torch's pool, which gives one and the same to several."""
    stream = ctypes.c_void_p()
    with torch.cuda.device(device):
        non_blocking, high = ctypes.c_uint(1), ctypes.c_int(-1)
        code = cuda_runtime().cudaStreamCreateWithPriority(ctypes.byref(stream), non_blocking, high)
    if code or stream.value is None:
        raise PeerError(f"no stream for a lane (CUDA error {code})")
    return torch.cuda.ExternalStream(stream.value, device=device)  # type: ignore[no-untyped-call]
