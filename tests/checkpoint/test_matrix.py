"""A sample of `python -m bench.checkpoint matrix`: odd checkpoints of torch through pairs of formats."""

import sys
from pathlib import Path

import pytest

from harness.odd.frameworks import Frameworks
from harness.odd.matrix import PAIRS, cases, parse, run
from harness.odd.model import OddModel, draw, optimizer_of, train, train_shards, truth_of

SAMPLE = ("300019:plain:universal:dcp", "300040:plain:universal:ds-universal", "300001:plain:zero-3:megatron")
SHARDED = (
    "418:fsdp:universal:zero-2",
    "422:dtensor:dcp:dcp",
    "424:fsdp:dcp:dcp",
)  # empty chunks, strided shards


def ran(names: tuple[str, ...], folder: Path) -> list[str]:
    frameworks = Frameworks(folder, sys.executable)
    try:
        results = [run(parse(name), frameworks, folder) for name in names]
    finally:
        frameworks.close()
    return [f"{one.case}: {one.because}" for one in results if one.outcome == "failed"]


def test_a_seed_gives_the_same_cases_and_every_pair_once() -> None:
    drawn = cases(len(PAIRS), 9, deepspeed=False)
    assert drawn == cases(len(PAIRS), 9, deepspeed=False)
    assert {(case.a, case.b) for case in drawn} == set(PAIRS)


@pytest.mark.parametrize("optimizer", ["adamw", "amsgrad", "momentum", "sgd", "tensor-lr"])
def test_shards_are_given_the_states_that_torchs_own_step_makes(optimizer: str) -> None:
    """Else a sharded model asks for states that the checkpoint of a plain one rightly has not."""
    spec = draw(900208, "torch") | {"optimizer": optimizer}
    named = []
    for way in (train, train_shards):
        model = OddModel(spec)
        made = optimizer_of(spec, model)
        way(spec, model, made)
        named.append(set(truth_of(spec, model, made)[0]))
    assert named[0] == named[1]


def test_odd_checkpoints_survive_pairs_of_formats(tmp_path: Path) -> None:
    assert ran(SAMPLE, tmp_path) == []


@pytest.mark.slow
def test_odd_sharded_checkpoints_survive_pairs_of_formats(tmp_path: Path) -> None:
    assert ran(SHARDED, tmp_path) == []
