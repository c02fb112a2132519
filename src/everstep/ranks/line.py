"""A rank's end of the socket to the process that keeps it. A child that the script forks says nothing on it.

`current` is the line of this process, if it is a rank of ours: what a script tells with `everstep.progress`
goes there, and nowhere if the script runs without Everstep.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

MAX_MESSAGE_BYTES = 1 << 16


class KeeperLine:
    def __init__(self, fd: int | None) -> None:
        self._pid = os.getpid()
        self._socket = None if fd is None else socket.socket(fileno=fd)
        self.snapshots: Path | None = (
            None  # the folder for states that are handed over; None: they are not kept
        )
        self.restore_step: int | None = None
        self.copy_every = 1  # snapshots from one copy to the next
        if fd is not None:
            os.set_inheritable(fd, False)

    def say(self, **message: Any) -> None:
        if self._socket is None or os.getpid() != self._pid:
            return
        try:
            self._socket.send(json.dumps(message, ensure_ascii=False).encode(errors="replace"))
        except OSError:
            self._socket = None  # the keeper has gone; what the script does is not changed by that

    def question(self) -> dict[str, Any] | None:
        """The next one; None: there will be none."""
        if self._socket is None:
            return None
        try:
            found = json.loads(self._socket.recv(MAX_MESSAGE_BYTES) or b"null")
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


current: KeeperLine | None = None


def progress(step: int, *, tokens: int | None = None, saved: bool = False) -> None:
    """Tell Everstep that this rank has done this step. For goodput, for hangs that use a CPU, for the page.

    `tokens`: seen since the training began, by all ranks. `saved`: the script can continue from this step
    (it has just written its checkpoint); nodes that wait to take part are let in then.

    Does nothing, and costs nothing, where the script is not run by Everstep.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        from everstep.errors import UserError

        raise UserError(f"step is {step!r}; give a whole number, at least 0.")
    if current is not None:
        current.say(kind="progress", step=step, tokens=tokens, saved=bool(saved))
