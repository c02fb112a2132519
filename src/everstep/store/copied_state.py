"""A state in the memory of nodes, read tensor by tensor: from the next holder of a part where a read fails.

Who is asked next is decided in `core.worker.copy_holders`. What has been read and checked stays; only the
tensors that are missing are read from other holders.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from pathlib import Path

from torch import Tensor

from everstep.core.worker.copy_holders import CopyHolders
from everstep.errors import UserError
from everstep.log import warn
from everstep.protocol.messages import MemoryAddress
from everstep.store import memory
from everstep.store.reader import Checkpoint, UnusableCheckpointError

Read = Callable[[Checkpoint, Container[str]], Iterator[tuple[str, Tensor]]]


class CopiedState:
    def __init__(
        self,
        task: str,
        step: int,
        holders: CopyHolders,
        source: Callable[[MemoryAddress], Path | memory.Remote],
    ) -> None:
        """`source`: how a node's memory is read from here."""
        self._task, self._step, self._holders, self._source = task, step, holders, source
        self.bytes_here = self.bytes_elsewhere = 0

    def read(self, read: Read) -> dict[str, Tensor] | None:
        """What `read` gives of the whole state; None: a part of it has no holder left."""
        found: dict[str, Tensor] = {}
        while True:
            files: dict[str, int] = {}  # which part each file is of
            try:
                self._read_from(self._opened(files), read, found)
                return found
            except (UserError, OSError) as error:
                warn(f"the state of step {self._step} in memory: {error}")
                if not self._ask_another(error, files):
                    return None

    def _opened(self, files: dict[str, int]) -> Checkpoint:
        sources = []
        for number, (address, part) in enumerate(self._holders.chosen()):
            for label in part.get("shards", [part]):  # of a worker with shards: one each
                files[f"{label['name']}.safetensors"] = number
                sources.append((self._source(address), label))
        return memory.open_copies(self._task, self._step, sources)

    def _read_from(self, checkpoint: Checkpoint, read: Read, found: dict[str, Tensor]) -> None:
        try:
            for name, tensor in read(checkpoint, found):
                found[name] = tensor
        finally:
            here, elsewhere = memory.bytes_read(checkpoint)
            self.bytes_here += here
            self.bytes_elsewhere += elsewhere
            checkpoint.close()

    def _ask_another(self, error: UserError | OSError, files: dict[str, int]) -> bool:
        """False: it is not known whose part is to blame, or no other node has it."""
        if not isinstance(error, UnusableCheckpointError) or error.file not in files:
            return False
        reached = error.kind != "unreadable"
        return self._holders.read_failed(files[error.file], str(error), reached=reached)
