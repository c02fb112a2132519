"""What is counted before the start is what a worker keeps, and a job that has no room for it is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipeline import stages
from torch import nn

from everstep.cli import main
from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Model
from everstep.engine.prepare.fitting import (
    GIB,
    LOGITS,
    Memory,
    fit,
    fits,
    refuse_what_does_not_fit,
    room,
    settings_of,
)
from everstep.engine.state.optimizer import Updater
from everstep.engine.sums.grids import MOST_SHORT
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec
from everstep.schedule.footprint import Settings, per_parameter

DATA = Synthetic(vocab=64, sequence=16, rows=2, seed=3)
SMALL = {"vocab": 64, "width": 32, "heads": 4, "hidden": 48, "depth": 4}
BATCH = DATA.batch(1, 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", ["strict", "fp32"])
def test_bytes_per_parameter_are_those_of_the_tensors_that_stay(precision: str, accumulate: str) -> None:
    stage = stages(gpt(**SMALL), 1, DATA, precision=precision, accumulate=accumulate)[0]
    updater = Updater(stage)
    mean = torch.randn(stage.size)
    updater.preview(0, mean)
    updater.commit(0, mean)
    optimizer = sum(t.nbytes for n, t in updater.state().items() if n.startswith("optimizer/") and t.ndim)
    kept = [stage.masters, stage.working, stage.sums.flat, mean]
    told = per_parameter(Settings(precision=precision, accumulate=accumulate, eager=True))
    assert sum(t.nbytes for t in kept) / stage.size == sum(told.values()) - told["optimizer state"]
    assert optimizer / sum(slot.size for slot in stage.slots.values()) == told["optimizer state"]


def job(**changes) -> Job:
    return replace(Job(model=ModelSpec(preset="gpt-tiny"), replicas=2, stages=2, microbatches=8), **changes)


def test_strict_sums_of_16_bits_take_five_bytes_on_a_gpu_and_the_means_of_one_worker_none() -> None:
    on_a_cpu = job(precision="bf16", stages=1)
    on_a_gpu = replace(on_a_cpu, device="cuda")
    alone = replace(on_a_gpu, replicas=1)
    few, many = (replace(alone, microbatches=count) for count in (MOST_SHORT, MOST_SHORT + 1))
    of = [sum(per_parameter(settings_of(one)).values()) for one in (on_a_cpu, on_a_gpu, alone, few, many)]
    assert of == [26, 23, 19, 19, 26]


def test_what_is_trained_what_is_frozen_and_the_logits_are_counted() -> None:
    def frozen() -> nn.Module:
        return nn.Linear(64, 32, bias=False).requires_grad_(False)

    layers = {"a": lambda: nn.Linear(8, 64, bias=False), "b": frozen, "c": lambda: nn.Linear(32, 10)}
    batch = torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64)
    found = fit(job(precision="bf16"), Model(layers=layers), batch)
    assert [one.parameters for one in found] == [8 * 64, 32 * 10 + 10]
    assert [one.items["frozen weights"] for one in found] == [0, 2 * 64 * 32]
    assert [one.items["logits"] for one in found] == [0, LOGITS * 2 * 6 * 10]
    assert [one.items["master weights"] for one in found] == [4 * 8 * 64, 4 * 330]


def test_shards_and_sharded_states_need_less() -> None:
    model = gpt(**SMALL)
    whole, parts = fit(job(), model, BATCH), fit(job(shards=2), model, BATCH)
    for one, part in zip(whole, parts, strict=True):
        assert one.parameters / 2 < part.parameters < 0.6 * one.parameters
    sharded = fit(job(replicas=4, optimizer=replace(job().optimizer, shard=True)), model, BATCH)
    assert all(one.total < other.total for one, other in zip(sharded, whole, strict=True))
    everything = Memory(machine=3 * sum(one.total for one in parts))
    assert not fits(job(shards=2), parts, everything), "every shard takes its own"


def test_a_job_that_does_not_fit_is_told_how_much_it_lacks() -> None:
    model = gpt(**SMALL)
    most = max(one.total for one in fit(job(), model, BATCH))
    refuse_what_does_not_fit(job(), model, BATCH, Memory(worker=most))
    with pytest.raises(UserError, match=r"a worker of stage [01] needs .* and has .*use more stages"):
        refuse_what_does_not_fit(job(), model, BATCH, Memory(worker=most - 1))
    with pytest.raises(UserError, match=r"all workers .* this machine has"):
        refuse_what_does_not_fit(job(), model, BATCH, Memory(machine=1000.0))
    refuse_what_does_not_fit(job(), model, BATCH, Memory())


def test_a_running_worker_knows_its_room() -> None:
    stage = stages(gpt(**SMALL), 1, DATA)[0]
    assert room(job(), stage) is None
    wide, narrow = (room(job(memory_gib=gib), stage) for gib in (1.0, 0.5))
    assert wide is not None
    assert narrow is not None
    assert wide - narrow == pytest.approx(0.5 * GIB)
    assert settings_of(job()).eager


def test_the_command_shows_what_fits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text('stages = 2\nmemory_gib = 1.0\n[model]\npreset = "gpt-tiny"\n')
    assert main.run(["plan", "--memory", str(file), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["fits"] is True
    assert [one["stage"] for one in found["stages"]] == [0, 1]
    assert found["worker_bytes"] == GIB
    first, last = found["stages"]
    assert first["total"] == sum(first["items"].values())
    assert last["items"]["logits"] > first["items"]["logits"] == 0
    assert main.run(["plan", "--memory", str(file)]) == 0
    shown = capfd.readouterr().out
    assert "master weights" in shown
    assert "the job fits" in shown
    assert "memory of two nodes every 10 steps" in shown
    assert 'compile = "auto" is false: on CPUs' in shown
    for interval, told in ((0, False), (3, True)):
        file.write_text(f'memory_interval = {interval}\n[model]\npreset = "gpt-tiny"\n')
        assert main.run(["plan", "--memory", str(file)]) == 0
        assert ("of two nodes every 3 steps, because the job says so" in capfd.readouterr().out) is told


def test_training_refuses_what_does_not_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text('memory_gib = 0.001\n[model]\npreset = "gpt-tiny"\n')
    assert main.run(["train", str(file)]) == 2
    assert "the job does not fit" in capfd.readouterr().err
