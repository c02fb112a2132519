"""Examples run by one command each, and heal."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.slow
def test_a_character_model_is_evaluated_the_same_with_a_kill() -> None:
    command = [sys.executable, "-m", "everstep.cli.main", "run", "--no-web"]
    script = [str(EXAMPLES / "char_gpt.py"), "--steps", "12"]
    losses = []
    for kills in ([], ["--kill", "stage=1,replica=0,step=7,op=F1"]):
        ran = subprocess.run(
            [*command, *kills, *script], capture_output=True, text=True, timeout=300, check=True
        )
        found = re.search(r"evaluation loss ([\d.]+), incidents (\d)", ran.stdout)
        assert found is not None
        losses.append(found[1])
        assert int(found[2]) == len(kills) // 2
    assert losses[0] == losses[1]


def ran(script: str, *arguments: str, kills: tuple[str, ...] = ()) -> str:
    command = [sys.executable, "-m", "everstep.cli.main", "run", "--no-web", "--every", "1000"]
    for kill in kills:
        command += ["--kill", kill]
    called = [*command, str(EXAMPLES / script), *arguments]
    return subprocess.run(called, capture_output=True, text=True, timeout=900, check=True).stdout


@pytest.mark.slow
def test_a_loop_with_everything_around_it_heals_stops_and_resumes(tmp_path: Path) -> None:
    """Killed, stopped early by a callback, resumed: it ends with the numbers of a run without all that."""
    whole = ran("own_loop.py", "--steps", "24", "--folder", str(tmp_path / "whole"))
    folder = ("--steps", "24", "--folder", str(tmp_path / "parts"))
    first = ran(
        "own_loop.py", *folder, "--fresh", "--stop-at", "0.01", kills=("stage=1,replica=0,step=3,op=F1",)
    )
    second = ran("own_loop.py", *folder)
    assert "in step 3, healed" in first
    assert "starts after step 0 of 24" in first
    resumed = re.search(r"starts after step (\d+) of 24", second)
    assert resumed is not None
    assert int(resumed[1]) > 0
    scores = [line for line in (first + second).splitlines() if re.match(r"step \d+: loss", line)]
    assert scores == [line for line in whole.splitlines() if re.match(r"step \d+: loss", line)]
    assert len(scores) == 6
    assert "24 losses" in second
    assert whole.splitlines()[-1] == second.splitlines()[-1]  # hours right: trained weights and their average
    rows = (tmp_path / "parts" / "log.csv").read_text().splitlines()
    steps = [row.split(",")[0] for row in rows[1:]]
    assert list(dict.fromkeys(steps)) == [str(step) for step in range(1, 25)]


@pytest.mark.slow
def test_dpo_with_its_reference_beside_it_is_trained_the_same_with_a_kill() -> None:
    clean = ran("dpo.py", "--steps", "8").splitlines()[-1]
    killed = ran("dpo.py", "--steps", "8", kills=("stage=1,replica=0,step=5,op=F1",)).splitlines()[-1]
    first, last = map(float, re.findall(r"0\.\d+", clean))
    assert first == pytest.approx(0.693147, abs=1e-6)  # log 2: the policy is the reference
    assert last < 0.6
    assert killed == clean.replace("0 incidents", "1 incidents")


@pytest.mark.slow
def test_a_lightning_module_is_trained_the_same_with_a_kill() -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    clean = ran("lightning_gpt.py", "--steps", "8").splitlines()
    killed = ran("lightning_gpt.py", "--steps", "8", kills=("stage=1,replica=0,step=5,op=F1",)).splitlines()
    assert "1 incidents healed" in killed[0]
    assert clean[1:] == killed[1:]
    assert clean[0].split(";")[0] == killed[0].split(";")[0]
