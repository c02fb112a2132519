"""Listens to the kernel's log for lines that name a device's fault (an Xid, an ECC error, a dead disk)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from everstep.core.faults.severity import ErrorKind, judge

PATH = "/dev/kmsg"
_MAX_LINE = 8192


class KernelLog:
    """From now on; what was said before is not this run's business. Needs read permission on /dev/kmsg."""

    def __init__(self, *, path: str = PATH) -> None:
        self.fd: int | None = None
        with contextlib.suppress(OSError):
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self.fd, 0, os.SEEK_END)

    def read(self, found: Callable[[str], None]) -> None:
        """All lines there are; `found` gets those that name a fault."""
        assert self.fd is not None
        while True:
            try:
                data = os.read(self.fd, _MAX_LINE)
            except BrokenPipeError:  # lines were overwritten before we read them: continue with the next
                continue
            except OSError:
                return
            if not data:
                return
            text = data.decode(errors="replace").partition(";")[2].partition("\n")[0].strip()
            if text and judge("kernel", text).kind is not ErrorKind.OTHER:
                found(text)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
