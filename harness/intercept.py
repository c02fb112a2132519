"""Source ports for connections that a library opens by itself (gloo): the least invasive way we found.

The kernel can stop a thread at `connect()` and ask a supervisor what to do (seccomp user notification).
Ours looks at the target address, binds the very same socket to the source port that the plan wants, and
lets the call continue. The library is not changed, not preloaded, not recompiled; no root, no compiler; it
sees a connect() that took a few milliseconds longer. Ways that were weighed and left:

    ip_local_port_range per namespace   confines, does not choose; needs root
    LD_PRELOAD of a connect() shim      a binary for every platform, set before the process starts
    cgroup/connect4 BPF                 needs CAP_BPF
    forming groups until ports suit     one in (paths to the power of pairs) tries suits

Limits. Linux ≥ 5.5 on x86-64 and aarch64. It holds for the thread that installs it and for those this
thread starts afterwards, and it cannot be taken back: install it in a process that is yours. It sets
no_new_privs, so the process can start no setuid program any more. The supervisor is a thread of the same
process: a C extension that connects while it holds Python's global lock would wait for ever; torch's gloo
and TCPStore let it go. Only the direction from who connects to who accepts is chosen; the way back is the
fabric's hash of the same ports, which is the same path where all switches hash alike and symmetrically (as
ours do), and by chance elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable

from everstep.errors import UserError

# target host, target port -> source host and port, or None to leave it alone
Choose = Callable[[str, int], tuple[str, int] | None]

_SYSCALLS = {  # machine: seccomp, connect, audit architecture
    "aarch64": (277, 203, 0xC00000B7),
    "x86_64": (317, 42, 0xC000003E),
}
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_RECV, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")


class Interceptor:
    """From `install()` on, connects of the calling thread and its descendants ask `choose` for a source
    port."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._listener = -1
        self._installed = threading.Event()
        self.steered: list[tuple[str, int, int]] = []  # target host, target port, source port
        self._thread = threading.Thread(target=self._serve, name="connects", daemon=True)

    def install(self) -> None:
        """Start the supervisor, then filter this thread; the other way round it would stop itself."""
        numbers = _SYSCALLS.get(platform.machine())
        if numbers is None or not sys.platform.startswith("linux"):
            raise UserError(f"gloo's ports cannot be steered on {platform.machine()}; use x86-64, aarch64.")
        self._thread.start()
        self._listener = _listen_to_connects(*numbers)
        self._installed.set()

    def _serve(self) -> None:
        self._installed.wait()
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while True:
            poll.poll()
            buffer = bytearray(_NOTIFICATION.size)
            try:
                fcntl.ioctl(self._listener, _RECV, buffer)
            except OSError:  # the caller is gone: killed, or interrupted by a signal
                continue
            call, _, _, _, _, _, fd, address, length, *_ = _NOTIFICATION.unpack(buffer)
            try:
                self._steer(fd, ctypes.string_at(address, min(length, 128)))
            except Exception as error:  # whatever happens here, the library's connect must continue
                print(f"connect not steered: {error}", file=sys.stderr)
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._listener, _SEND, _ANSWER.pack(call, 0, 0, _CONTINUE))

    def _steer(self, fd: int, address: bytes) -> None:
        if len(address) < 8 or int.from_bytes(address[:2], sys.byteorder) != socket.AF_INET:
            return
        host, port = socket.inet_ntoa(address[4:8]), int.from_bytes(address[2:4], "big")
        with socket.socket(fileno=os.dup(fd)) as sock:
            if sock.type & socket.SOCK_STREAM == 0 or sock.getsockname()[1] != 0:
                return
            chosen = self._choose(host, port)
            if chosen is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(chosen)
                self.steered.append((host, port, chosen[1]))


def _listen_to_connects(seccomp: int, connect: int, architecture: int) -> int:
    program = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_JUMP_IF_EQUAL, 0, 3, architecture),
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
        (_JUMP_IF_EQUAL, 0, 1, connect),
        (_RETURN, 0, 0, _NOTIFY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    text = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("@HP", len(program), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise UserError(f"gloo's ports cannot be steered: {os.strerror(ctypes.get_errno())} (no_new_privs).")
    listener = libc.syscall(seccomp, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.c_char_p(head))
    if listener < 0:
        raise UserError(f"gloo's ports cannot be steered: {os.strerror(ctypes.get_errno())} (seccomp).")
    os.set_inheritable(listener, False)
    return int(listener)
