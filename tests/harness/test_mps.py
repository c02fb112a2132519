"""MPS of a bench, with a stand-in for NVIDIA's command: what is started is ended, whatever ends the bench."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.mps import FOLDERS, mps

STAND_IN = """#!/bin/sh
if [ "$1" = -d ]; then word=begin; else read word; fi
echo "$word $CUDA_MPS_PIPE_DIRECTORY" >> "$SAID"
"""
BENCH = """
import signal
from harness.mps import mps
with mps():
    print("ready", flush=True)
    signal.pause()
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    command = tmp_path / "nvidia-cuda-mps-control"
    command.write_text(STAND_IN)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    monkeypatch.delenv(FOLDERS[0], raising=False)
    return tmp_path / "said"


def test_it_is_begun_and_ended_in_a_folder_of_its_own(said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS[1], "theirs")
    with mps(False):
        assert not said.exists()
    handler = signal.getsignal(signal.SIGTERM)
    with mps():
        folder = os.environ[FOLDERS[0]]
    assert said.read_text().split("\n") == [f"begin {folder}", f"quit {folder}", ""]
    assert FOLDERS[0] not in os.environ
    assert os.environ[FOLDERS[1]] == "theirs"
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not Path(folder).exists()


def test_a_time_limit_ends_it_too(said: Path) -> None:
    """A daemon that was left refused the clients of the next bench."""
    bench = subprocess.Popen([sys.executable, "-c", BENCH], stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    assert bench.stdout.readline() == "ready\n"
    bench.terminate()
    assert bench.wait(timeout=30) == 1
    begun, ended = said.read_text().splitlines()
    assert ended == begun.replace("begin", "quit")
