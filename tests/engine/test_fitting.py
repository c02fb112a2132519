"""The memory model: what it says of stashes is what a stage holds, and a job that cannot fit is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipeline import CPU, stages

from everstep.cli import main
from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers import attention_library
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Model, partition
from everstep.engine.prepare import fitting
from everstep.engine.prepare.figures import layer_figures, settings_of, stage_figures
from everstep.engine.prepare.fitting import GIB, Memory, _changes, fit, fits, refuse_what_does_not_fit, room
from everstep.engine.state.optimizer import Updater
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec, OptimizerSpec
from everstep.schedule import footprint
from everstep.schedule.footprint import MOST_SHORT, Settings, StageFigures, per_parameter

DATA = Synthetic(vocab=64, sequence=16, rows=2, seed=3)
SMALL = {"vocab": 64, "width": 32, "heads": 4, "hidden": 48, "depth": 4}
ON_A_GPU = Settings(accumulate="strict32", checked_late=True)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_stashes_found_on_the_meta_device_are_those_of_a_stage(
    precision: str, recompute: int, count: int
) -> None:
    model = gpt(**SMALL)
    layers = layer_figures(model, DATA.batch(1, 0), precision)
    pipeline = stages(model, count, DATA, precision=precision, recompute=recompute)
    x = grad = None
    held = []
    for stage in pipeline:
        x = stage.forward(1, 0, x)
        held.append(stage.stash_bytes())
    for stage in reversed(pipeline):
        grad = stage.input_grad(1, 0, grad)
    for stage, forward in zip(pipeline, held, strict=True):
        figures = stage_figures(layers, stage.layers, recompute=recompute, makes=True)
        assert figures.held_forward == pytest.approx(forward, rel=0.05)
        assert figures.held_weight == pytest.approx(stage.stash_bytes(), rel=0.02)
        assert stage.held_bytes == (forward, stage.stash_bytes())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", ["strict", "strict32", "fp64", "fp32"])
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


def test_with_sums_of_four_bytes_a_parameter_takes_no_more_than_26() -> None:
    for eager in (False, True):
        settings = Settings(precision="bf16", accumulate="strict32", eager=eager)
        assert sum(per_parameter(settings).values()) == 22


def test_strict_sums_of_16_bits_take_five_bytes_on_a_gpu_and_the_means_of_one_worker_none() -> None:
    on_a_cpu = Settings(precision="bf16", accumulate="strict40")
    on_a_gpu = replace(on_a_cpu, checked_late=True)
    alone = replace(on_a_gpu, alone=True)
    of = [sum(per_parameter(one).values()) for one in (on_a_cpu, on_a_gpu, alone)]
    assert of == [26, 23, 19]
    assert sum(per_parameter(on_a_gpu, MOST_SHORT).values()) == 23
    assert sum(per_parameter(on_a_gpu, MOST_SHORT + 1).values()) == 26


@pytest.mark.parametrize(
    ("accumulate", "in_place", "expected"),
    [("strict40", False, 11), ("strict40", True, 2), ("strict", True, 0), ("strict32", False, 8)],
)
def test_what_peers_send_takes_so_many_bytes_per_parameter(
    accumulate: str, in_place: bool, expected: int
) -> None:
    """Read in place, of sums of 40 bits what 32 lack is copied twice."""
    settings = Settings(precision="bf16", accumulate=accumulate, replicas=4, in_place=in_place)
    stage = StageFigures(parameters=4, largest=4)
    assert footprint.received(stage, settings) == 3 * expected


@pytest.mark.parametrize(
    ("transport", "gpus", "replicas", "stages", "lanes"),
    [
        ("nccl", 1, 32, 1, 62),
        ("auto", 8, 8, 4, 18),
        ("auto", 8, 1, 2, 2),
        ("auto", 8, 4, 3, 22),  # after a death any of the adjacent stages may be a neighbour
        ("auto", 1, 8, 4, 0),  # memory that they share
        ("tcp", 8, 8, 4, 0),
    ],
)
def test_connections_by_nccl_take_memory_for_every_peer(
    monkeypatch: pytest.MonkeyPatch, transport: str, gpus: int, replicas: int, stages: int, lanes: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    settings = settings_of(job(device="cuda", transport=transport, replicas=replicas, stages=stages))
    found = footprint.items(StageFigures(parameters=4, largest=4), settings, stash=1, hosted=1)
    (item,) = [item for item in found if item.name == "connections"]
    assert (item.device, item.host) == (18.5e6 * lanes, 49e6 * lanes)


def job(**changes) -> Job:
    return replace(Job(model=ModelSpec(preset="gpt-tiny"), replicas=2, stages=2, microbatches=8), **changes)


def checked(job_: Job) -> tuple[Model, tuple]:
    return gpt(**SMALL), DATA.batch(1, 0)


def test_stash_and_peak_do_not_grow_with_microbatches_except_for_the_outbox() -> None:
    model, batch = checked(job())
    layers = layer_figures(model, batch, "fp32")
    found = [
        {item.name: item.device for item in fit(job(microbatches=m), model, layers, Memory())[0].items}
        for m in (8, 64)
    ]
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"outbox"}


@pytest.mark.parametrize(
    ("installed", "device", "accumulate", "expected"),
    [
        (True, "cuda", "strict", 2 * 2 * 4 * 256**2),
        (False, "cuda", "strict", 0),
        (True, "cuda", "fp32", 0),
        (True, "cpu", "strict", 0),
    ],
)
def test_the_workspace_of_exact_attention_is_counted_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, installed: bool, device: str, accumulate: str, expected: int
) -> None:
    monkeypatch.setattr(attention_library, "installed", lambda: installed)
    model = gpt(vocab=64, width=256, heads=4, hidden=48, depth=2)
    batch = Synthetic(vocab=64, sequence=256, rows=2).batch(1, 0)
    base = job(device=device, accumulate=accumulate, precision="bf16", stages=1)
    layers = layer_figures(model, batch, "bf16", device)
    (found,) = fit(base, model, layers, Memory())
    assert {item.name: item.device for item in found.items}["workspace of attention"] == expected


def test_attention_that_goes_another_way_has_no_workspace() -> None:
    bf16 = torch.bfloat16
    assert attention_library.workspace((8, 16, 2048, 128), bf16) == 1 << 30
    assert attention_library.workspace((8, 16, 4096, 128), bf16) == 0, "more than there is room for"
    assert attention_library.workspace((8, 16, 2000, 128), bf16) == 0
    assert attention_library.workspace((8, 16, 2048, 96), bf16) == 0
    assert attention_library.workspace((8, 16, 2048, 128), torch.float32) == 0


def limit_between(one: Job, other: Job, model: Model, layers: list) -> Memory:
    totals = [max(stage.total for stage in fit(j, model, layers, Memory(worker=1.0))) for j in (one, other)]
    assert totals[0] > totals[1]
    return Memory(worker=sum(totals) / 2)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (job(), {"accumulate": "strict32"}, 'set accumulate = "strict32"'),
        (
            job(accumulate="fp32"),
            {"optimizer": OptimizerSpec(stagger="never")},
            'set optimizer.stagger = "never"',
        ),
        (
            job(accumulate="fp32", optimizer=OptimizerSpec(stagger="never"), recompute=True),
            {"stages": 3},
            "set stages = 3",
        ),
    ],
)
def test_a_job_that_does_not_fit_is_refused_with_the_smallest_change_that_makes_it_fit(
    base: Job, change: dict, words: str
) -> None:
    base = replace(base, data=replace(base.data, rows=1))
    better = replace(base, **change)
    model, batch = checked(base)
    layers = layer_figures(model, batch, "fp32")
    memory = limit_between(base, better, model, layers)
    with pytest.raises(UserError, match=words) as refused:
        refuse_what_does_not_fit(base, model, batch, memory)
    assert "a worker of stage" in str(refused.value)
    assert fits(better, fit(better, model, layers, memory), memory)
    refuse_what_does_not_fit(better, model, batch, memory)


def test_half_of_the_layers_run_again_hold_less_than_none_and_more_than_all() -> None:
    model = gpt(**{**SMALL, "depth": 8})
    layers = layer_figures(model, DATA.batch(1, 0), "fp32")
    none, half, every = (
        stage_figures(layers, range(len(layers)), recompute=n).held_forward for n in (0, 2, 1)
    )
    assert none > half > every
    assert (none - half) / (none - every) == pytest.approx(0.5, abs=0.07)
    assert [words for words, *_ in _changes(job(accumulate="fp32"), model)][1:4] == [
        'recompute = true and recompute_part = "attention"',
        "recompute = true and recompute_every = 2",
        "recompute = true",
    ]


def test_shards_make_room_for_a_job_that_one_process_per_worker_cannot_hold() -> None:
    model, batch = checked(job())
    layers = layer_figures(model, batch, "fp32")
    many = job(shards=2)
    memory = limit_between(job(), many, model, layers)
    assert not fits(job(), fit(job(), model, layers, memory), memory)
    refuse_what_does_not_fit(many, model, batch, memory)
    for whole, part in zip(fit(job(), model, layers, memory), fit(many, model, layers, memory), strict=True):
        assert whole.figures.parameters / 2 < part.figures.parameters < 0.6 * whole.figures.parameters
    everything = Memory(machine=1.5 * sum(one.total for one in fit(many, model, layers, Memory())))
    assert not fits(many, fit(many, model, layers, everything), everything), "every shard takes its own"


def test_where_nothing_helps_the_sentence_says_so() -> None:
    model, batch = checked(job())
    with pytest.raises(UserError, match="use devices with more memory, or a smaller model"):
        refuse_what_does_not_fit(job(), model, batch, Memory(worker=1000.0))
    with pytest.raises(UserError, match=r"all workers .* this machine has"):
        refuse_what_does_not_fit(job(), model, batch, Memory(machine=1000.0))
    refuse_what_does_not_fit(job(), model, batch, Memory())


def test_tight_memory_lowers_the_stash_cap_before_a_job_is_refused() -> None:
    model, batch = checked(job())
    layers = layer_figures(model, batch, "fp32")
    plenty = fit(job(), model, layers, Memory())[0]
    assert plenty.stash == footprint.stash_cap(2)
    tight = fit(job(), model, layers, Memory(worker=plenty.total - plenty.figures.held))[0]
    assert tight.stash == plenty.stash - 1
    assert tight.total <= plenty.total - plenty.figures.held


def test_a_running_worker_knows_its_room() -> None:
    stage = stages(gpt(**SMALL), 1, DATA)[0]
    assert room(job(), stage) is None
    wide, narrow = (room(job(memory_gib=gib), stage) for gib in (1.0, 0.5))
    assert wide is not None
    assert narrow is not None
    assert wide - narrow == pytest.approx(0.5 * GIB)
    assert settings_of(job()).eager


def test_a_model_that_cannot_be_run_on_the_meta_device_is_judged_by_its_parameters() -> None:
    class Odd(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum().item())

    model = Model(layers=[lambda: Odd(4, 4), lambda: torch.nn.Linear(4, 2)])
    layers = layer_figures(model, (torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)), "fp32")
    assert [layer.parameters for layer in layers] == [20, 10]
    assert stage_figures(layers, partition(model, 1)[0], recompute=False).held == 0


def test_the_command_shows_what_fits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text('stages = 2\nmemory_gib = 1.0\n[model]\npreset = "gpt-tiny"\n')
    assert main.run(["plan", "--memory", str(file), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["fits"] is True
    assert [one["stage"] for one in found["stages"]] == [0, 1]
    assert found["worker_bytes"] == GIB
    items = found["stages"][0]["items"]
    assert (
        items["stashes"]["device"] == found["stages"][0]["stash_cap"] * found["stages"][0]["bytes_per_stash"]
    )
    assert found["stages"][0]["total"] < sum(item["device"] for item in items.values())
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


def gpt_1b(parameters: int, **gib: float) -> StageFigures:
    """A stage of it; its largest tensor is the embedding."""
    return StageFigures(parameters=parameters, largest=65_536_000, **{k: v * GIB for k, v in gib.items()})


def test_cuda_graphs_are_counted_and_no_job_is_refused_for_them() -> None:
    """Measured on an H200, gpt-1b of 3 layers, 4 microbatches of 8 x 2048 tokens, strict32: 10.72 GiB for
    each of three recordings, 38.35 GiB in all; strict without graphs 20.99 GiB.
    """
    figures = gpt_1b(285_227_008, held_forward=5.647, held_weight=4.149, inside=1.953)
    settings = replace(ON_A_GPU, recorded=True)
    items = footprint.items(figures, settings, stash=2, hosted=4)
    recorded = next(item for item in items if item.name == footprint.RECORDED)
    assert recorded.device / GIB == pytest.approx(3 * 10.72, rel=0.02)
    assert footprint.with_recordings(items) / GIB == pytest.approx(38.35, rel=0.05)
    never = footprint.items(figures, replace(settings, recorded=False), stash=2, hosted=4)
    assert footprint.with_recordings(never) == footprint.total(never) == footprint.total(items)
    strict = footprint.items(figures, replace(settings, accumulate="strict"), stash=2, hosted=4)
    assert footprint.total(strict) / GIB == pytest.approx(20.99, rel=0.02)


@pytest.mark.parametrize(("microbatches", "gib"), [(4, 4.76), (8, 5.93), (16, 6.24), (32, 6.37)])
def test_peak_memory_grows_with_stages_not_with_microbatches(microbatches: int, gib: float) -> None:
    """Measured on an H200, stage 0 of 4, gpt-1b of 8 layers, 4 x 512 tokens. From 8 microbatches on only the
    boundary tensors of a step are more.
    """
    figures = gpt_1b(168_304_640, held_forward=0.298, held_weight=0.262, inside=0.074, sent=0.008)
    stash = min(microbatches, footprint.stash_cap(4))
    items = footprint.items(figures, ON_A_GPU, stash=stash, hosted=microbatches)
    assert footprint.total(items) / GIB == pytest.approx(gib, rel=0.05)


def test_training_refuses_what_does_not_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text('memory_gib = 0.001\n[model]\npreset = "gpt-tiny"\n')
    assert main.run(["train", str(file)]) == 2
    assert "the job does not fit" in capfd.readouterr().err
    assert fitting.GIB == 2**30
    assert CPU.type == "cpu"


def test_a_gpu_keeps_less_of_a_norm_than_a_cpu() -> None:
    """One fused kernel: the input, which the layer before gives, and a number per row."""
    model = gpt(vocab=64, width=32, heads=4, hidden=48, depth=1)
    on = {device: layer_figures(model, DATA.batch(1, 0), "bf16", device)[1] for device in ("cpu", "cuda")}
    tokens, width, hidden = DATA.batch(1, 0)[0].numel(), 32, 48
    assert on["cuda"].held_weight == on["cpu"].held_weight
    assert on["cuda"].held_forward < on["cpu"].held_forward
    of_width = 8  # x, its norm, q, k, v, what attention gives, x again, its norm
    of_hidden = 4  # gate, up, silu(gate), their product
    numbers = 2 + 4  # per row, in fp32: of two norms, of four heads
    tables = 2 * 4 * 16 * 4  # of rotations
    expected = 2 * tokens * (of_width * width + of_hidden * hidden) + 4 * tokens * numbers + tables
    assert on["cuda"].held_forward == expected


def test_a_gpu_checks_the_gradients_of_one_microbatch_while_it_computes_the_next() -> None:
    stage = StageFigures(parameters=0, largest=0, held_forward=5.0, held_weight=3.0)
    for late, hosted, expected in ((False, 4, 10.0), (True, 4, 13.0), (True, 1, 5.0)):
        found = footprint.items(stage, footprint.Settings(checked_late=late), stash=2, hosted=hosted)
        assert footprint.total(found) == expected
    for hosted, recordings in ((2, 2), (4, 3)):  # a reduce lies between the last W and the next F
        found = footprint.items(
            stage, footprint.Settings(checked_late=True, recorded=True), stash=2, hosted=hosted
        )
        assert next(item for item in found if item.name == footprint.RECORDED).device == 5.0 * recordings
