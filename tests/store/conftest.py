"""These tests need no disk that keeps its word: flushing is what takes the time on a shared machine."""

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from everstep.cli import main


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    def document(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def everstep(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*arguments: Any) -> Ran:
        code = main.run([str(argument) for argument in arguments])
        told = capfd.readouterr()
        return Ran(code, told.out, told.err)

    return run
