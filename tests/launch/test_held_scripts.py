"""Ranks of a real script die at every moment of a step; all numbers are those of a run without failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "launch" / "held_script.py"
PLAIN = ("--no-hold", "--copy-every", "1000")
Numbers = dict[tuple[str, str], set[str]]


def run(
    folder: Path, ranks: int, *script: str, kill: str = "", options: tuple[str, ...] = ()
) -> tuple[Numbers, dict[str, Any]]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "HELD_KILL": kill,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "everstep.cli.main", "run", "--nproc", str(ranks), "--json", *options]
    done = subprocess.run(
        [*command, str(SCRIPT), "--out", str(folder / "its.pt"), *script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert document["exit_code"] == 0, done.stderr[-3000:]
    return numbers(done.stderr), document


def numbers(output: str) -> Numbers:
    """What each rank printed, by step; said twice it is to be the same."""
    found: Numbers = {}
    for line in output.splitlines():
        if match := re.match(r"\[(\d+)\] (step \d+ \w+|final)(.*)", line):
            found.setdefault((match[1], match[2]), set()).add(match[3])
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    found, _ = run(tmp_path_factory.mktemp("plain"), 3, options=PLAIN)
    assert len(found) > 40
    return found


@pytest.mark.parametrize(
    "kill",
    [
        "0,3,forward;1,5,bucket,1",  # the second replacement asks the first; it begins after an evaluation
        "1,6,opt",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in [
                "0,0,bucket;1,1,forward",
                "1,3,bucket,1;0,5,forward;1,7,in-bucket,0;0,9,after-bucket,1",
                "2,3,clip;0,5,after-opt;1,7,between;2,9,other",
                "1,4,eval;0,7,save;2,9,opt",
                "1,6,forward;2,8,opt",
                "1,6,forward,0,stop",
                "1,6,bucket,0,raise;2,8,clip,0,exit",
            ]
        ),
    ],
)
def test_a_death_at_any_moment_changes_no_number(plain: Numbers, kill: str, tmp_path: Path) -> None:
    found, document = run(tmp_path, 3, kill=kill)
    assert found == plain
    assert document["restarts"] == 0, document["incidents"]
    assert [incident["remedy"][:7] for incident in document["incidents"]] == ["replace"] * len(
        kill.split(";")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill",
    [
        "0,6,opt;1,6,opt",
        "0,6,forward;2,6,forward",
        "1,6,forward;1,6,clip",  # the replacement dies in the step that it began with
        "1,6,forward;1,-1,start",  # the replacement dies before it has its state
        "1,6,bucket,0;1,-1,load",  # and just after
        "1,6,opt;1,-1,load;0,-1,start;0,6,after-opt",
    ],
)
def test_deaths_within_a_heal_change_no_number(plain: Numbers, kill: str, tmp_path: Path) -> None:
    found, document = run(tmp_path, 3, kill=kill)
    assert found == plain
    assert document["restarts"] == 0, document["incidents"]


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["1,6,other", "1,6,between"])  # before the others' sum, and after it
def test_a_replacement_that_does_something_else_ends_the_heal_and_all_ranks_restart(
    kill: str, tmp_path: Path
) -> None:
    """Never a silent wrong number."""
    _, document = run(tmp_path, 3, "--mode", "differs", kill=kill, options=("--copy-every", "1"))
    assert document["restarts"] == 1
    (*_, last) = document["incidents"]  # all went on; what it issues is seen then
    assert "the script does not repeat itself" in "".join(last["evidence"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["unused", "static", "view"])
def test_ddp_with_its_options(mode: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    expected, _ = run(tmp_path / "plain", 2, "--mode", mode, options=PLAIN)
    found, document = run(tmp_path, 2, "--mode", mode, kill="1,6,bucket,0")
    assert (found, document["restarts"]) == (expected, 0)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [0, 2])
def test_exact_sums_are_held_as_plain_ones_are(shards: int, tmp_path: Path) -> None:
    """DDP's hook issues two collectives per bucket, and the second of one after the first of the next."""
    (tmp_path / "plain").mkdir()
    script = ("--hsdp", str(shards)) if shards else ()
    expected, _ = run(tmp_path / "plain", 4, *script, options=("--exact", *PLAIN))
    found, document = run(tmp_path, 4, *script, kill="1,4,bucket,1;0,7,opt", options=("--exact",))
    assert (found, document["restarts"]) == (expected, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["3,6,bucket,0", "0,6,opt"])
def test_a_shard_group_of_fsdp2_is_replaced_whole(kill: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    expected, _ = run(tmp_path / "plain", 4, "--hsdp", "2", options=PLAIN)
    found, document = run(tmp_path, 4, "--hsdp", "2", kill=kill)
    assert (found, document["restarts"]) == (expected, 0)


@pytest.mark.slow
def test_plain_fsdp_has_no_replica_and_all_ranks_restart(tmp_path: Path) -> None:
    _, document = run(tmp_path, 2, "--hsdp", "2", kill="1,6,forward", options=("--copy-every", "1"))
    assert document["restarts"] == 1
    assert "sharded over all ranks" in "".join(document["incidents"][0]["evidence"])
