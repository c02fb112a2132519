"""Random deaths at random moments: every microbatch reaches every sealed sum exactly once, and it always
ends. Here deaths only, by shape and rules; `tests/lab` has all the other faults.
"""

from dataclasses import replace

import pytest

from everstep.core.worker.rules import TaskRules
from everstep.protocol.shape import CHUNKS_PER_REPLICA
from everstep_lab.draw import Draw
from tests.storms.faults import FaultKind
from tests.storms.run import run_storm
from tests.storms.spec import Spec, Weather, draw_fault, run_time_us

CASES = {
    "one death": {"deaths": 1},
    "two deaths, three replicas": {"deaths": 2, "replicas": 3},
    "many deaths with returns": {"deaths": 6, "replicas": 3, "stages": 3, "steps": 6},
    "eager updates, some invalid": {"deaths": 1, "clip": 1.0, "stagger": "always", "steps": 6},
    "eager updates and many deaths": {
        "deaths": 5,
        "clip": 1.0,
        "stagger": "always",
        "steps": 6,
        "replicas": 3,
        "stages": 3,
    },
    "tied ends": {"deaths": 2, "tied": (0, 2), "stages": 3, "replicas": 3, "clip": 1.0},
    "checkpoints and lost stages": {"deaths": 6, "checkpoint_every": 2, "steps": 7},
    "one replica": {"deaths": 2, "replicas": 1, "stages": 2, "checkpoint_every": 1, "steps": 5},
    "one stage": {"deaths": 2, "replicas": 3, "stages": 1, "clip": 1.0},
    "late returns": {"deaths": 3, "replicas": 3, "stages": 2, "steps": 8, "rejoin_after_steps": 2},
    "workers that raise": {"deaths": 3, "replicas": 3, "what": FaultKind.RAISE},
}


def storm(
    seed: int,
    *,
    deaths: int,
    what: FaultKind = FaultKind.KILL,
    mode: str = "decoupled",
    rejoin_after_steps: int = 0,
    **rules,
) -> Spec:
    draw = Draw(seed, "case")
    spec = Spec(
        seed=seed,
        rules=TaskRules(**({"replicas": 2, "stages": 2, "microbatches": 2, "steps": 4} | rules)),
        mode=mode,
        rejoin_after_steps=rejoin_after_steps,
        weather=Weather(
            hop_us=draw.choice((30, 300, 3_000)),
            plan_us=draw.choice((100, 20_000)),
            start_us=draw.choice((500, 8_000)),
        ),
    )
    duration = run_time_us(spec)
    return replace(spec, faults=tuple(draw_fault(draw, what, duration) for _ in range(deaths)))


# Found by more seeds than the default suite draws: (case, seed, what went wrong).
FOUND = [
    ("eager updates and many deaths", 16, "a joiner that was let in for a step that was then undone"),
    ("one stage", 103, "a joiner that had the state of a step whose sum died with its holder"),
    (
        "eager updates and many deaths",
        88,
        "a worker that was to enter was taken for one that died eagerly",
    ),
    ("many deaths with returns", 53, "a parcel refused by a host that was ahead, and then went back"),
]


@pytest.mark.parametrize(("name", "seed", "what"), FOUND, ids=lambda value: str(value))
def test_a_storm_that_once_failed_passes(name: str, seed: int, what: str) -> None:
    assert run_storm(storm(seed, **CASES[name])).violation is None, what


@pytest.mark.parametrize("name", CASES)
def test_a_storm_of_deaths_loses_no_microbatch_and_ends(name: str, storms: int) -> None:
    struck = 0
    for seed in range(storms):
        spec = storm(seed, **CASES[name])
        report = run_storm(spec)
        assert report.violation is None, "\n".join([*spec.lines(), report.violation or ""])
        struck += report.deaths
    assert struck >= storms // 3, "the storms of this case hardly kill anybody"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "tied" not in case])
def test_with_sharded_states_a_storm_of_deaths_loses_no_microbatch_and_ends(name: str, storms: int) -> None:
    case = CASES[name]
    chunks = CHUNKS_PER_REPLICA * case.get("replicas", 2)
    for seed in range(storms // 2):
        spec = storm(seed, **case, chunks=chunks)
        violation = run_storm(spec).violation
        assert violation is None, "\n".join([*spec.lines(), violation or ""])
