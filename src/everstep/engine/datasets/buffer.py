"""The batches of a stream in a folder: each a file of its own, complete once it has its name.

00000017.batch    tensors, the tree they are put together by, and the source's state after this batch
wanted            the highest number that any worker has asked for, and so how far to read ahead
lock              held by the one process that reads the source
stopped           why there will be no further batch, and from which number on
stream.json       how many microbatches a step has: what the numbers mean
"""

from __future__ import annotations

import fcntl
import io
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from everstep.engine.layers.boundary import Value, put_together, take_apart
from everstep.errors import UserError

_STATE = "state"


class BatchBuffer:
    def __init__(self, folder: Path, *, keep: int, most_bytes: int) -> None:
        """`keep`: batches below the highest wanted that stay; at least half of them, however large."""
        self.folder, self.keep, self.most_bytes = folder, keep, most_bytes
        self._wanted = -1
        self._sizes: dict[int, int] = {}  # as the reader knows them, in order
        self._total = 0

    # -------------------------------------------------------------- for every worker

    def get(self, number: int) -> tuple[Value, Any] | None:
        """A batch, and the source's state after it (None: it has none)."""
        path = self._path(number)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}
                facts = json.loads(file.metadata()["facts"])
        except FileNotFoundError:
            return None
        state = tensors.pop(_STATE, None)
        value = put_together(facts["tree"], [tensors[str(i)] for i in range(len(tensors))])
        return value, {"epoch": facts["epoch"], "state": None if state is None else _loaded(state)}

    def want(self, number: int) -> None:
        if number <= self._wanted and self.wanted() >= self._wanted:
            return
        self._wanted = max(self._wanted, number)
        if self.wanted() < self._wanted:  # two writers at once: the lower one is corrected by who still waits
            self._replace("wanted", str(self._wanted))

    def wanted(self) -> int:
        try:
            return int((self.folder / "wanted").read_text() or -1)
        except FileNotFoundError:
            return -1

    def first(self) -> int:
        """The lowest number that is stored, 0 if there is none."""
        return min(self.numbers(), default=0)

    def numbers(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.batch") if path.stem.isdecimal()]

    def why_stopped(self, number: int) -> str | None:
        """Why this batch will never come."""
        try:
            facts = json.loads((self.folder / "stopped").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return str(facts["why"]) if number >= facts["from"] else None

    def facts(self) -> dict[str, Any] | None:
        """What the batches were read with; None: nothing was read yet."""
        try:
            return dict(json.loads((self.folder / "stream.json").read_text()))
        except FileNotFoundError:
            return None

    def set_facts(self, facts: dict[str, Any]) -> None:
        self._replace("stream.json", json.dumps(facts))

    def lock(self) -> BinaryIO | None:
        """None: another process, or another thread of this one, reads the source."""
        file = (self.folder / "lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def forget_all(self) -> None:
        for name in ("*.batch", "*.part", "wanted", "stopped", "stream.json"):
            for path in self.folder.glob(name):
                path.unlink(missing_ok=True)

    # -------------------------------------------------------------- for the reader

    def may_go_on(self) -> None:
        """Why it stopped is not true any more, or worth another try."""
        (self.folder / "stopped").unlink(missing_ok=True)

    def begin(self) -> int:
        """The number of the next batch to store."""
        for path in self.folder.glob("*.batch.part"):
            path.unlink(missing_ok=True)
        self._sizes = {number: self._path(number).stat().st_size for number in sorted(self.numbers())}
        self._total = sum(self._sizes.values())
        return max(self._sizes, default=-1) + 1

    def put(self, number: int, value: Value, *, epoch: int, state: Any) -> None:
        tensors, tree = take_apart(value)
        stored = {str(i): tensor.detach().cpu().contiguous().clone() for i, tensor in enumerate(tensors)}
        if state is not None:
            stored[_STATE] = _saved(state)
        path = self._path(number)
        part = path.with_suffix(".batch.part")
        save_file(stored, part, metadata={"facts": json.dumps({"tree": tree, "epoch": epoch})})
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.rename(path)
        self._sizes[number] = path.stat().st_size
        self._total += self._sizes[number]
        self._forget_old()

    def is_full(self) -> bool:
        return self._total > self.most_bytes

    def stop(self, number: int, why: str) -> None:
        self._replace("stopped", json.dumps({"from": number, "why": why}))

    def _forget_old(self) -> None:
        """What no restore can ask for, and what is too much; never the newest, which has the state."""
        wanted = self.wanted()
        while self._sizes:
            number = next(iter(self._sizes))
            too_much = self.is_full() and number < wanted - self.keep // 2
            if not (number < wanted - self.keep or too_much):
                return
            self._total -= self._sizes.pop(number)
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:010d}.batch"

    def _replace(self, name: str, text: str) -> None:
        part = self.folder / f"{name}.{os.getpid()}.part"
        part.write_text(text)
        part.rename(self.folder / name)


def _saved(state: Any) -> Tensor:
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        made = torch.from_numpy(np.frombuffer(buffer.getvalue(), dtype=np.uint8).copy())
        _loaded(made)
    except Exception as error:  # of pickle, or of torch's restricted unpickler
        raise UserError(
            "the state_dict of the stream holds objects that are not plain values or tensors, and a stored "
            f"state is read without running code: {str(error).splitlines()[0]}"
        ) from None
    return made


def _loaded(state: Tensor) -> Any:
    return torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True)
