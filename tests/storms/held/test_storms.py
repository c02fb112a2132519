"""Held ranks in storms: every result and update is that of a failure-free run, nothing hangs, planted bugs
are seen. `python -m tests.storms.held.test_storms 0:5000` runs more of them.
"""

import sys
import time

import pytest

from tests.storms.held.mutants import MUTANTS
from tests.storms.held.program import Program, reference
from tests.storms.held.world import Violation, World, storm, storms

SEEDS = 400
MUTANT_SEEDS = 600


def test_storms_give_what_a_failure_free_run_gives() -> None:
    outcomes = storms(range(SEEDS))
    assert outcomes["held"] > SEEDS / 2
    assert outcomes["heals"] > SEEDS


def test_a_storm_repeats_exactly() -> None:
    one, two = storm(7), storm(7)
    assert (one.now, one.heals, one.fallen) == (two.now, two.heals, two.fallen)


def test_a_storm_without_faults_is_the_reference() -> None:
    class Calm(World):
        def strike(self) -> None: ...

    assert not storm(3, Calm).heals


def test_programs_have_replicas() -> None:
    for seed in range(50):
        program = Program.drawn(seed)
        last = reference(program).last
        for rank, memory in last.items():
            assert memory.parameters == last[rank % program.unit].parameters


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    for seed in range(MUTANT_SEEDS):
        try:
            storm(seed)
        except (Violation, AssertionError, KeyError):
            return
    pytest.fail(f"{name} was not seen in {MUTANT_SEEDS} storms")


if __name__ == "__main__":
    first, last = map(int, sys.argv[1].split(":"))
    began = time.monotonic()
    found = storms(range(first, last))
    per_minute = (last - first) / (time.monotonic() - began) * 60
    print(f"{dict(found)}, {per_minute:.0f} storms per minute")
