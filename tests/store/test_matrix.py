"""A sample of `python -m tests.store.odd`: odd checkpoints of torch through pairs of formats."""

import sys
from pathlib import Path

import pytest
import torch

from tests.store.odd.frameworks import Frameworks, in_engine
from tests.store.odd.matrix import PAIRS, cases, parse, run
from tests.store.odd.model import OddModel, draw, optimizer_of, train, train_shards, truth_of

SAMPLE = ("300019:plain:universal:dcp", "300040:plain:universal:deepspeed-universal", "300001:plain:hf:dcp")
SHARDED = (
    "418:fsdp:universal:deepspeed-universal",
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


def test_deepspeeds_engine_holds_what_was_64_bits_wide_in_32() -> None:
    """Its file keeps F64 to the bit; the engine casts when it loads."""
    spec = draw(700007, "sharded")
    fine = torch.tensor([1 / 3], dtype=torch.float64)
    truth = {"model/a.b.c.bias": fine, "optimizer/a.b.c.bias/momentum_buffer": fine}
    truth["model/out.tie.weight"] = fine  # tied to it
    for held in in_engine(spec, "fp32", truth).values():
        assert held.dtype == torch.float32
    assert in_engine(spec, "bf16", truth)["model/a.b.c.bias"].dtype == torch.float32, "masters are not cast"


def test_deepspeeds_16_bit_engine_casts_frozen_weights_and_no_buffers() -> None:
    spec = {"tensors": [{"name": "w", "role": "frozen"}, {"name": "b", "role": "buffer"}]}
    held = in_engine(spec, "fp16", {"model/w": torch.ones(2), "buffer/b": torch.tensor([0.41632])})
    assert held["model/w"].dtype == torch.float16
    assert held["buffer/b"].dtype == torch.float32


# By default `test_formats.py` and `test_nothing_is_lost.py` go there and back through every format.
@pytest.mark.slow
def test_odd_checkpoints_survive_pairs_of_formats(tmp_path: Path) -> None:
    assert ran(SAMPLE, tmp_path) == []


@pytest.mark.slow
def test_odd_sharded_checkpoints_survive_pairs_of_formats(tmp_path: Path) -> None:
    assert ran(SHARDED, tmp_path) == []
