"""A capture of all traffic of a run: with encryption neither a token, nor the task's secret, nor a tensor is
in it; without, all three are, so the search would find them. Needs root, for a network namespace of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _absent() -> str:
    if os.geteuid() != 0:
        return "listening to an interface needs root"
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "unshare or ip is not installed"
    made = subprocess.run(["unshare", "-n", "true"], capture_output=True)
    return "" if made.returncode == 0 else "this kernel, or container, allows no namespaces"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_absent()), reason=_absent() or "a namespace can be made here"),
]


def captured(folder: Path, *options: str) -> dict[str, Any]:
    command = ["unshare", "-n", sys.executable, "-m", "tests.server.wiretap", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=600)
    assert done.returncode == 0, "\n".join(p.read_text()[-2000:] for p in folder.glob("*.log"))
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["frames_missed"] == 0
    assert found["pieces_looked_for"] > 20
    return found


def test_an_encrypted_run_says_nothing_in_clear(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")
    found = captured(tmp_path, "--encrypt")
    assert found["bytes"] > 1_000_000
    assert (found["token"], found["secret"], found["tensors"]) == (False, False, 0)


def test_without_encryption_the_same_search_finds_all_of_it(tmp_path: Path) -> None:
    found = captured(tmp_path)
    assert found["token"]
    assert found["secret"]
    assert found["tensors"] > found["pieces_looked_for"] / 2
