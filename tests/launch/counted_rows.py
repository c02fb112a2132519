"""Data that writes down who was given what, for real workers: every row of 37, and a stream that counts."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import everstep

ROWS = 37


def note(folder: str, **facts: Any) -> None:
    """One line per call; a line this short is written whole, whoever else writes."""
    file = os.open(Path(folder) / "seen.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (json.dumps(facts | {"pid": os.getpid()}) + "\n").encode())
    os.close(file)


def row(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(4, generator=draw)
    return x, torch.sin(x).sum(0, keepdim=True)


class Numbered:
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return (*row(index), index)


class Data:
    """`everstep.rows`, with a note of every batch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.rows: Any = everstep.rows(Numbered(), rows=3, collate=self.collate)

    def collate(self, rows: list[Any]) -> Any:
        self.now = [index for _, _, index in rows]
        return torch.stack([x for x, _, _ in rows]), torch.stack([y for _, y, _ in rows])

    def for_job(self, job: Any) -> "Data":
        self.rows = self.rows.for_job(job)
        return self

    def batch(self, step: int, microbatch: int) -> Any:
        made = self.rows.batch(step, microbatch)
        note(self.folder, step=step, microbatch=microbatch, rows=self.now)
        return made


def elements() -> Iterator[Any]:
    for number in range(10_000):
        x, y = row(number)
        yield x.expand(3, 4) + number / 100, y.expand(3, 1)


class StreamData:
    """`everstep.stream`, with a note of every batch: its first value says which element it is."""

    def __init__(self, folder: str, where: str = "") -> None:
        self.folder = folder
        self.stream: Any = everstep.stream(elements, folder=where or None)

    def for_job(self, job: Any) -> "StreamData":
        self.stream = self.stream.for_job(job)
        return self

    def prepare(self, *, fresh: bool) -> None:
        self.stream.prepare(fresh=fresh)

    def batch(self, step: int, microbatch: int) -> Any:
        made = self.stream.batch(step, microbatch)
        note(self.folder, step=step, microbatch=microbatch, rows=[made[0][0].tolist()])
        return made


def layers() -> Any:
    return [
        lambda: torch.nn.Linear(4, 16),
        lambda: torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(16, 1)),
    ]


def model() -> Any:
    return everstep.Model(layers=layers(), loss=torch.nn.functional.mse_loss)
