"""Architectures of Hugging Face transformers, trained by real workers through a SIGKILL.

    python bench/models.py                    a table
    python bench/models.py --only llama --json
    python bench/models.py --only mixtral --shards 2    workers of two processes, experts spread over them
    python bench/models.py --scan             which of all causal LMs of transformers can be cut, and why not
    python bench/models.py --scan --shards 2  and which of them can be split over shards

Each model starts from a folder with weights, and is trained three times on the same batches (rows of
different lengths, masked): by a plain loop of transformers in one process, by 2 x 2 workers, and by 2 x 2
workers one of which is killed. Then the checkpoint of the killed run is exported and loaded by transformers.

    loss        largest relative difference between the losses of our run and those of the plain loop
    bits        losses of every step and every weight of the last checkpoint: killed run = clean run
    export      logits of the exported folder = logits of the checkpoint's weights in a transformers model
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

import torch
from torch import Tensor

import everstep
from everstep.engine.hf.model import NUMBERS_OF_EXPERTS, Family, expert_patterns
from everstep.engine.layers.model import Model, parameter_count, partition, skeleton, slots
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.layers.taken_over import share_in_two
from everstep.engine.prepare.shard_trial import refuse_mixed, with_summed
from everstep.engine.shards.layers import refuse_unsplittable
from everstep.engine.telemetry.faults import parse_fault
from everstep.errors import UserError
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.job.presets import refuse_shards
from everstep.launch.local.api import run_job
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.report import incident_line
from everstep.node.fork_server import ForkServer
from harness.masked_tokens import MaskedTokens
from harness.tiny_models import MORE, TINY

TOLERANCE = 1e-5  # of losses against transformers: fp32, other orders of summing
STEPS, MICROBATCHES = 6, 2
KILLS = ("stage=1,replica=0,step=3,op=I1", "stage=0,replica=1,step=3,op=F1", "stage=1,replica=1,step=4,op=W0")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="parts of architectures' names, by commas")
    parser.add_argument("--shards", type=int, default=1, help="processes per worker")
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    result = (
        scan(given.only, given.shards) if given.scan else table(given.only, given.shards, quiet=given.json)
    )
    if given.json:
        print(json.dumps(result))
    elif given.scan:
        print(
            f"{result['cut']} of {result['total']} causal LMs of transformers {result['version']} can be cut"
        )
        experts = result["experts"]
        print(f"{sum(experts.values())} of {len(experts)} of them with experts can spread these over shards")
        if given.shards > 1:
            print(
                f"{sum(not why for why in result['shards'].values())} can be split over {given.shards} shards"
            )
        for kind, why in result["shards"].items():
            if why:
                print(f"  {kind}: {why}")
        for kind in (kind for kind, found in experts.items() if not found):
            print(f"  {kind}: experts of a form that is not known")
        for kind, why in result["not"].items():
            print(f"  {kind}: {why}")
    return 0 if result.get("passed", 0) == result.get("total") or given.scan else 1


# ------------------------------------------------------------------ the table


def table(only: str, shards: int, *, quiet: bool) -> dict[str, Any]:
    import transformers

    rows = []
    models = TINY | MORE
    names = [name for name in models if any(part in name for part in only.split(","))]
    preload = ("everstep.engine.hf.model", *(f"transformers.models.{_module(n)}" for n in names))
    server = ForkServer(preload=preload).start()
    try:
        for number, name in enumerate(names):
            with tempfile.TemporaryDirectory(prefix="everstep-models-") as folder:
                try:
                    kill = KILLS[number % len(KILLS)]
                    row = tried(name, models[name][0], kill, Path(folder), server, shards)
                except Exception as error:  # a row that fails is a row
                    row = {"ok": False, "failure": f"{type(error).__name__}: {error}"}
            rows.append({"architecture": name, "special": models[name][1], **row})
            if not quiet:
                print(_line(rows[-1]), flush=True)
            for line in rows[-1].get("unplanned", ()):  # not planted: it must be explained
                print(f"     {name}: {line}", file=sys.stderr, flush=True)
    finally:
        server.close()
    passed = sum(row["ok"] for row in rows)
    if not quiet:
        print(f"{passed} of {len(rows)}; tolerance of losses {TOLERANCE:g}, everything else to the bit")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {"total": len(rows), "passed": passed, "tolerance": TOLERANCE, "rows": rows, "versions": versions}


def _module(kind: str) -> str:
    package = kind.removesuffix("_text")
    return f"{package}.modeling_{package}"


def _line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"FAIL {row['architecture']:12} {row['failure']}"
    if "parts" in row:
        clean, killed = ("equal" if row[key] else "DIFFERENT" for key in ("clean_equal", "killed_equal"))
        return (
            f"{'ok  ' if row['ok'] else 'FAIL'} {row['architecture']:12} {row['class']:22} "
            f"parts {row['parts']:8} clean {clean}  killed {killed}  {row['seconds']:4.0f} s  "
            f"{row['special']}"
        )
    bits, export = ("equal" if row[key] else "DIFFERENT" for key in ("bits_equal", "export_equal"))
    return (
        f"{'ok  ' if row['ok'] else 'FAIL'} {row['architecture']:12} {row['class']:22} cut {row['cut']:6} "
        f"two-op {row['in_two']:4.0%}  loss {row['loss_difference']:.1e}  "
        f"bits {bits}  export {export}  {row['seconds']:4.0f} s  {row['special']}"
    )


def tried(
    name: str, values: dict[str, Any], kill: str, folder: Path, server: ForkServer, shards: int
) -> dict[str, Any]:
    """One architecture: three trainings and an export."""
    import transformers

    began = time.monotonic()
    config = transformers.AutoConfig.for_model(name, **values)
    torch.manual_seed(7)
    start = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # as after some training: at tiny widths fresh weights do next to nothing
        for parameter in start.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    start.save_pretrained(folder / "base")
    job = replace(_job(folder, "clean"), shards=shards)
    model = everstep.hf(folder / "base")
    clean = run_job(job, fork_server=server)
    killed_job = replace(_job(folder, "killed"), shards=shards)
    killed = run_job(killed_job, faults=(parse_fault(kill),), fork_server=server)
    for outcome in (clean, killed):
        if outcome.failure:
            raise RuntimeError(outcome.failure)
    theirs = plain_loop(start, job)
    ours, healed = _losses(clean), _losses(killed)
    weights = everstep.load(folder / "clean")
    same = everstep.load(folder / "killed")
    everstep.export(folder / "killed", folder / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
    check = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")  # with what is frozen
    check.load_state_dict(same, strict=False)
    check.tie_weights()
    row = {
        "class": type(start).__name__,
        "parameters": parameter_count(model),
        "cut": "+".join(str(len(part)) for part in partition(model, 2)),
        "in_two": share_in_two([skeleton(model, layer) for layer in model.layers]),
        "kill": kill,
        "incidents": len(killed.incidents),
        "unplanned": [incident_line(one) for one in [*clean.incidents, *killed.incidents[1:]]],
        "loss_first": ours[0],
        "loss_last": ours[-1],
        "loss_difference": max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)),
        "bits_equal": ours == healed and all(torch.equal(weights[key], same[key]) for key in weights),
        "export_equal": torch.equal(_logits(loaded), _logits(check)),
        "seconds": time.monotonic() - began,
    }
    fine = row["loss_difference"] <= TOLERANCE and row["bits_equal"] and row["export_equal"]
    return {"ok": bool(fine and row["incidents"] >= 1 and ours[-1] != ours[0]), **row}


def _job(folder: Path, run: str) -> Job:
    return Job(
        model=ModelSpec(hf=str(folder / "base")),
        data=DataSpec(build="masked_tokens:MaskedTokens"),
        optimizer=OptimizerSpec(lr=1e-2, warmup=2, clip=1.0),
        checkpoint=CheckpointSpec(folder=str(folder / run), interval=STEPS),
        steps=STEPS,
        replicas=2,
        stages=2,
        microbatches=MICROBATCHES,
        base=str(Path(__file__).resolve().parents[1] / "harness"),
    )


def _losses(outcome: Outcome) -> list[float]:
    rows = outcome.by_step()
    return [rows[step].loss for step in sorted(rows)]


def plain_loop(model: Any, job: Job) -> list[float]:
    """What a person writes without us: all microbatches of a step, weighted by their tokens, one update."""
    model.train()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    spec, data = job.optimizer, MaskedTokens()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim > 1]},
            {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
    )
    losses = []
    for step in range(1, job.steps + 1):
        batches = [data.batch(step, m) for m in range(job.microbatches_in_step)]
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        total = 0.0
        for batch, count in zip(batches, counts, strict=True):
            loss = model(**batch, use_cache=False).loss * count / sum(counts)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip)
        for group in optimizer.param_groups:
            group["lr"] = spec.lr * job.rate(step - 1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _logits(model: Any) -> Tensor:
    batch = MaskedTokens().batch(99, 0)
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=batch["input_ids"], use_cache=False).logits
    return logits


# ------------------------------------------------------------------ all of transformers


def scan(only: str, shards: int) -> dict[str, Any]:
    """Every causal LM with its default config, on the meta device: can it be cut, and where it has experts,
    are they found, so that shards can have some each? Can it be split over shards?
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    cut, refused, experts, split = [], {}, {}, {}
    kinds = [kind for kind in sorted(names) if any(part in kind for part in only.split(","))]
    for kind in kinds:
        try:
            config = transformers.AutoConfig.for_model(kind)
            family = Family(config, None)
            cut.append((kind, family.anatomy))
            if any(getattr(config.get_text_config(), key, None) for key in NUMBERS_OF_EXPERTS):
                experts[kind] = bool(expert_patterns(family.bare))
            if shards > 1:
                split[kind] = refused_for_shards(family.model(), shards)
                print(f"{kind:28} {split[kind] or 'can be split'}", file=sys.stderr, flush=True)
        except Exception as error:  # transformers' own, or a sentence of ours
            refused[kind] = " ".join(str(error).split())[:200] or type(error).__name__
    return {
        "total": len(kinds),
        "cut": len(cut),
        "kinds": [kind for kind, _ in cut],
        "not": refused,
        "experts": experts,
        "shards": split,
        "version": transformers.__version__,
    }


def refused_for_shards(model: Model, shards: int) -> str:
    """As the preflight does, without memory: a sentence, or nothing."""
    job = replace(_job(Path(), ""), shards=shards)
    try:
        model = with_summed(model, job)
        refuse_shards(shards, model.assembly.shared_out)
        plan = Cut(model.shard_plan, 0, shards)
        for layer in model.names:
            refuse_unsplittable(layer, skeleton(model, layer), plan)
        slots(model, range(len(model.names)), cut=plan)
        refuse_mixed(model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)}, shards)
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
