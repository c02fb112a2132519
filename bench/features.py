"""What a model or a job may ask for, each in runs of real workers: is it right, and does it survive?

    python -m bench.features                          every feature, on the CPU, tiny
    python -m bench.features --only experts,recompute --results rows.jsonl    in pieces: what is there stays
    python -m bench.features --results rows.jsonl --table    what is there, as a table
    python -m bench.features --gpu                    step time and memory on a GPU, each with and without

    loss         largest relative difference of a loss to a plain loop of torch: one process, whole layers,
                 `backward()`, AdamW
    two kills    losses of all steps and every weight of the last checkpoint, against the clean run
    reshape      the running task goes from 2 x 2 to 1 x 2 workers of one process each: largest relative
                 difference of a loss to the clean run
    checkpoint   all workers are killed, and another shape (1 x 3) continues from the disk: the same

0 is every bit. Between numbers of shards losses differ by rounding; everything else must be 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # where nothing can be installed

import numpy as np
import torch
from torch import nn

import everstep
from everstep.engine.datasets.data import split
from everstep.engine.layers.model import drawn, every_parameter, in_precision
from everstep.engine.prepare.resolve import data_of, model_of, optimizer_of
from everstep.engine.stage.stage import DTYPES
from everstep.engine.telemetry.faults import parse_fault
from everstep.errors import UserError
from everstep.job.job import CheckpointSpec, Job
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.schedule.profile import PEAK
from harness.quick_weights import quick_job
from harness.sweep import deaths

STEPS, RESHAPED_AT = 6, 2
PRELOAD = ("everstep.engine.hf.model", "transformers.models.llama.modeling_llama")
KILLS = ("stage=1,replica=0,step=2,op=I1", "stage=0,replica=1,step=4,op=W0")
ROUNDING = 2e-6  # between numbers of shards, and against the plain loop, in fp32
IN_16_BITS = 5e-3
MODEL = {"preset": "gpt-tiny", "depth": 4, "context": 16}
SHARDS = {"shards": 2}
# name: what the job has besides; "model" and "data" are put in place of the usual ones
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tensor parallel": SHARDS,
    "tensor parallel of Hugging Face": SHARDS | {"model": "llama"},
    "experts": SHARDS | {"model": "mixtral"},
    "packed rows": {"data": "packed"},
    "recompute": {"recompute": True},
    "recompute attention": {"recompute": True, "recompute_part": "attention"},
    "sharded optimizer": {"optimizer": {"shard": True}},
    "bf16": {"precision": "bf16"},
}


def job_of(name: str, folder: Path) -> Job:
    given = dict(FEATURES[name])
    model, data = (
        given.pop("model", MODEL),
        given.pop("data", {"kind": "synthetic", "rows": 2, "sequence": 16}),
    )
    if isinstance(model, str):
        import transformers

        config = transformers.AutoConfig.for_model(
            model,
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
        config.save_pretrained(folder / model)
        model = {"hf": str(folder / model)}
    if data == "packed":
        draws = np.random.default_rng(7)
        draws.integers(0, 9, 20_000, dtype=np.uint8).tofile(folder / "tokens.bin")  # a document ends with 0
        data = {"kind": "tokens", "path": str(folder / "tokens.bin"), "document_end": 0}
        data |= {"rows": 2, "sequence": 16}
    return Job.from_dict(
        {
            "model": model,
            "data": data,
            "steps": STEPS,
            "replicas": 2,
            "stages": 2,
            "microbatches": 2,
            **given,
            "optimizer": {"decay": "constant", **given.get("optimizer", {})},
        }
    )


# ------------------------------------------------------------------ the CPU: is it right?


def row_of(name: str, server: ForkServer) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="everstep-features-") as root:
        folder = Path(root)
        job = job_of(name, folder)

        def saving(run: str, interval: int = STEPS) -> Job:
            return replace(job, checkpoint=CheckpointSpec(folder=str(folder / run), interval=interval))

        clean, _ = run(server, saving("clean"))
        killed, _ = run(server, saving("killed"), faults=KILLS)
        weights, healed = everstep.load(folder / "clean"), everstep.load(folder / "killed")
        moved, fewest = run(server, job, at=RESHAPED_AT, then=lambda task: task.reshape(1, 2, 1))
        begun = saving("resumed", 1)
        run(server, begun, at=STEPS // 2, then=_end_all)
        resumed, _ = run(server, begun.reshaped(1, 3))
        losses = clean.all_losses()
        row = {
            "feature": name,
            "loss": difference(plain_losses(job), losses),
            "killed": difference(losses, killed.all_losses()),
            "deaths": deaths(killed),
            "weights": all(torch.equal(weights[key], healed[key]) for key in weights),
            "reshape": difference(losses, moved.all_losses()),
            "moved_to": fewest,
            "checkpoint": difference(losses, resumed.all_losses()),
            "resumed_from": resumed.resumed_from,
            "seconds": round(time.monotonic() - began, 1),
        }
    between = 0.0 if job.shards == 1 else ROUNDING
    close = ROUNDING if job.precision == "fp32" else IN_16_BITS
    done = row["deaths"] >= len(KILLS) and row["moved_to"] == 2 and row["resumed_from"] >= 1
    equal = row["killed"] == 0 and row["weights"] and row["checkpoint"] <= between
    return row | {"ok": done and equal and row["loss"] <= close and row["reshape"] <= between}


def run(
    server: ForkServer,
    job: Job,
    *,
    faults: tuple[str, ...] = (),
    at: int | None = None,
    then: Callable[[LocalTask], None] = lambda task: None,
) -> tuple[Outcome, int]:
    """A run, with `then` once step `at` is done; and the fewest workers that it had from there on."""
    waiting, workers = [at] if at is not None else [], list[int]()

    def watch(kind: str, what: Any) -> None:
        if kind == "tick" and waiting and what.last_step >= waiting[0]:
            waiting.clear()
            then(what)
        elif kind == "step" and at is not None and what.step > at + 1:
            workers.append(len(task.processes))

    task = LocalTask(job, fork_server=server, faults=tuple(map(parse_fault, faults)), watch=watch)
    outcome = task.run()
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure)
    return outcome, min(workers, default=0)


def _end_all(task: LocalTask) -> None:
    for worker in task.processes:
        task.kill(worker)
    task.finish("all workers are killed")


def difference(expected: dict[int, float], found: dict[int, float]) -> float:
    """Of the steps that `found` has: a run that continues does not tell those before."""
    steps = [step for step in expected if step in found]
    if max(expected) not in steps:
        return float("inf")
    return max(abs(found[step] - expected[step]) / abs(expected[step]) for step in steps)


def plain_losses(job: Job) -> dict[int, float]:
    """What a person writes without us, for the same first values and batches."""
    model, data = model_of(job), data_of(job)
    layers = nn.ModuleList(drawn(model, index, job.seed) for index in range(len(model.names)))
    pairs = zip(model.names, layers, strict=True)
    named = [pair for layer, module in pairs for pair in every_parameter(layer, module).items()]
    masters = [(name, nn.Parameter(p.detach().clone())) for name, p in named]
    if job.precision == "bf16":
        for module in layers:
            in_precision(module, DTYPES[job.precision])
    through = model.assembly.join(range(len(layers)), list(layers), torch.device("cpu"))
    optimizer = optimizer_of(job)(masters)
    losses = {}
    for step in range(1, job.steps + 1):
        total, weight = 0.0, 0.0
        for microbatch in range(job.microbatches_in_step):
            inputs, targets = split(data.batch(step, microbatch))
            made = model.loss(
                through(inputs, lambda index, layer, *args, **more: layer(*args, **more)), targets
            )
            loss, counted = made if isinstance(made, tuple) else (made, torch.ones(()))
            loss.float().backward()
            total, weight = total + float(loss.detach()), weight + float(counted)
        for (_, master), (_, p) in zip(masters, named, strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float() / weight, None
        if job.optimizer.clip is not None:
            nn.utils.clip_grad_norm_([master for _, master in masters], job.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = job.optimizer.lr * job.rate(step - 1)
        optimizer.step()
        for (_, master), (_, p) in zip(masters, named, strict=True):
            p.data.copy_(master.data)
        losses[step] = total / weight
    return losses


# ------------------------------------------------------------------ a GPU: what does it cost?

# name: (the job's own keys, those of the run that it is compared with)
_DENSE = {"preset": "gpt-350m", "options": {"depth": 12}}
_UNTIED = {"preset": "gpt-350m", "options": {"depth": 12, "tied": False}, "replicas": 2}
ON_GPU: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recompute": (_DENSE | {"recompute": True}, _DENSE),
    "recompute attention": (_DENSE | {"recompute": True, "recompute_part": "attention"}, _DENSE),
    "compile": (_DENSE | {"compile": True}, _DENSE),
    "tensor parallel": (_DENSE | {"shards": 2}, _DENSE),
    "packed rows": (_DENSE | {"packed": True}, _DENSE),
    "sharded optimizer": (_UNTIED | {"optimizer": {"shard": True}}, _UNTIED),
    "bf16": (_DENSE, _DENSE | {"precision": "fp32"}),
}


def gpu_job(given: dict[str, Any], device: str, folder: Path, *, tiny: bool) -> Job:
    given = {"rows": 4, "sequence": 1024, **given}
    if tiny:
        given |= {"preset": "gpt-tiny", "rows": 2, "sequence": 32}
        given["options"] = {**given["options"], "depth": 4, "hidden": 64}
    rows, sequence = given.pop("rows"), given.pop("sequence")
    tables = quick_job(given.pop("preset"), given.pop("options"), rows, sequence)
    if given.pop("packed", False):  # documents of about 64 tokens
        draws = np.random.default_rng(7)
        draws.integers(0, 64, 2**22, dtype=np.uint8).tofile(folder / "tokens.bin")
        tables["data"] = {"kind": "tokens", "path": str(folder / "tokens.bin"), "document_end": 0}
        tables["data"] |= {"rows": rows, "sequence": sequence}
    keys = {"precision": "bf16", "microbatches": 4, "steps": 6, "device": device, "graphs": "never"}
    return Job.from_dict(
        tables | keys | given | {"optimizer": {"decay": "constant", **given.get("optimizer", {})}}
    )


def measured(server: ForkServer, job: Job) -> tuple[float, float]:
    """Median seconds of a step, and the most GiB that a worker had on the device."""
    peaks = [0.0]

    def watch(kind: str, what: Any) -> None:
        if kind == "times":
            peaks.append(what.times.get(PEAK, 0.0) / 2**30)

    outcome = LocalTask(job, fork_server=server, watch=watch).run()
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure)
    return statistics.median([row.seconds for row in outcome.rows][2:]), max(peaks)


def gpu_rows(only: list[str], device: str, limit_s: float, *, tiny: bool) -> list[dict[str, Any]]:
    server, began = ForkServer().start(), time.monotonic()
    known: dict[str, tuple[float, float]] = {}
    rows = []

    def once(given: dict[str, Any]) -> tuple[float, float]:
        key = json.dumps(given, sort_keys=True)
        if key not in known:
            with tempfile.TemporaryDirectory(prefix="everstep-features-") as folder:
                known[key] = measured(server, gpu_job(given, device, Path(folder), tiny=tiny))
        return known[key]

    try:
        for name, (given, without) in ON_GPU.items():
            if only and name not in only:
                continue
            if time.monotonic() - began > limit_s:
                print(f"{name:34} not begun: the limit is reached", flush=True)
                continue
            row: dict[str, Any] = {"feature": name}
            try:
                (row["without_s"], row["without_gib"]), (row["step_s"], row["gib"]) = (
                    once(without),
                    once(given),
                )
                said = f"step {row['step_s']:.3f} s ({row['without_s']:.3f} s without), "
                said += f"{row['gib']:.2f} GiB ({row['without_gib']:.2f} without)"
            except (UserError, RuntimeError) as error:
                row["failure"] = said = " ".join(str(error).split())[:300]
            print(f"{name:34} {said}", flush=True)
            rows.append(row)
    finally:
        server.close()
    return rows


# ------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| feature | loss | two kills | reshape | checkpoint |", "|---|---|---|---|---|"]
    for row in rows:
        killed = "same bits" if row["killed"] == 0 and row["weights"] else f"{row['killed']:.0e}"
        others = " | ".join(_shown(row[key]) for key in ("reshape", "checkpoint"))
        lines.append(f"| {row['feature']} | {row['loss']:.0e} | {killed} | {others} |")
    return "\n".join(lines)


def _shown(value: float) -> str:
    return "same bits" if value == 0 else f"{value:.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="features, by commas")
    parser.add_argument("--results", type=Path, help="a file of rows; a feature that passed in it is not run")
    parser.add_argument("--table", action="store_true", help="run nothing: the rows of --results as a table")
    parser.add_argument("--gpu", action="store_true", help="step time and memory, with and without")
    parser.add_argument("--device", default="cuda", help="with --gpu")
    parser.add_argument(
        "--tiny", action="store_true", help="with --gpu: a model that a CPU can train, to try it"
    )
    parser.add_argument(
        "--limit", type=float, default=1e9, help="with --gpu: seconds after which none begins"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    every = ON_GPU if given.gpu else FEATURES
    for name in only:
        if name not in every:
            parser.error(f"{name!r} is none of {', '.join(every)}")
    if given.gpu:
        found = gpu_rows(only, given.device, given.limit, tiny=given.tiny)
        if given.json:
            print(json.dumps(found))
        return int(any("failure" in row for row in found))
    told = given.results.read_text().splitlines() if given.results and given.results.exists() else []
    rows = {row["feature"]: row for row in map(json.loads, told) if row["ok"]}
    torch.set_num_threads(1)
    chosen = [] if given.table else [n for n in FEATURES if n not in rows and (not only or n in only)]
    theirs = any(FEATURES[name].get("model") is not None for name in chosen)
    server = ForkServer(preload=PRELOAD if theirs else ()).start() if chosen else None
    try:
        for name in chosen:
            assert server is not None
            rows[name] = row = row_of(name, server)
            if given.results is not None:
                with given.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if not given.json:
                print(f"{'ok  ' if row['ok'] else 'FAIL'} {row}", flush=True)
    finally:
        if server is not None:
            server.close()
    found = [rows[name] for name in FEATURES if name in rows]
    print(json.dumps(found) if given.json else table(found))
    return int(not all(row["ok"] for row in found))


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.exit(main())
