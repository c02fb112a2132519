"""Low precision with real workers: is each run a plain loop of torch, and does it keep its bits?

    python bench/precision.py                   fp16 and bf16, 2 x 2 workers and with sharded states
    python bench/precision.py fp16 --json

Each is run clean, with two workers killed, and killed as a whole and resumed in another shape. The losses of
the clean run are compared with those of one process that computes in the same precision, with masters in fp32
and, in fp16, torch's GradScaler, whose scale after every step is compared too. Of the other runs: the largest
difference of a loss (relative) to the clean run; 0 is every bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.job.job import CheckpointSpec, Job, ModelSpec, OptimizerSpec
from everstep.store import folder
from everstep.store.places import place_of
from harness.optimizer_runs import OPTIONS, plain_loop
from harness.sweep import SHORT, Sweep, losses_of

STEPS = 12
KILLS = ("stage=1,replica=0,step=3,op=I1", "stage=0,replica=1,step=5,op=U,when=after")


def job_of(precision: Any, *, shard: bool) -> Job:
    """In fp16 with a scale that overflows at first, and grows every other step, so that it does so again."""
    scale = {"loss_scale": 2.0**18, "loss_scale_interval": 2} if precision == "fp16" else {}
    return Job(
        model=ModelSpec(preset="gpt-tiny", options=OPTIONS),
        data=SHORT,
        optimizer=OptimizerSpec(decay="constant", clip=None, shard=shard),
        steps=STEPS,
        replicas=2,
        stages=2,
        microbatches=4,
        precision=precision,
        transport="tcp",
        **scale,  # type: ignore[arg-type]
    )


def scales_in(root: str) -> dict[int, float]:
    """The scale that each checkpoint holds; every parameter tells the same one."""
    found = {}
    for step, name in place_of(root).complete():
        stored = folder.open_step(root, name)
        told = {float(stored.read_box(one)) for one in stored.tensors if one.startswith("extra/loss_scale/")}
        if told:
            (found[step],) = told
    return found


def compared(job: Job, sweep: Sweep) -> dict[str, Any]:
    scales: dict[int, float] = {}
    expected, _ = plain_loop(job, scales)
    with tempfile.TemporaryDirectory() as root:
        saving = replace(job, checkpoint=CheckpointSpec(folder=f"{root}/clean", interval=1, keep=STEPS))
        outcome = sweep.run(saving, ())
        clean, held = losses_of(outcome), scales_in(f"{root}/clean")
        healed = losses_of(sweep.run(job, KILLS))
        begun = replace(job, checkpoint=CheckpointSpec(folder=f"{root}/resumed", interval=2))
        sweep.run(begun, (), until=STEPS // 2)
        resumed = sweep.run(begun.reshaped(1, 3), ()).all_losses()
    skipped = sum(row.grad_norm != row.grad_norm for row in outcome.by_step().values())
    return {
        "plain": difference(expected, clean),
        "scales": f"{len(set(scales.values()))} different, all equal" if held == scales else "-",
        "skipped": skipped,
        "killed": difference(clean, healed),
        "resumed": difference(clean, resumed),
    }


def difference(expected: dict[int, float], found: dict[int, float]) -> float:
    missing = expected.keys() - found.keys()
    worst = max(abs(found[step] - loss) / abs(loss) for step, loss in expected.items() if step in found)
    return float("inf") if missing and min(missing) > min(found) else worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("precisions", nargs="*", default=["fp16", "bf16"])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows, sweep = [], Sweep()
    for precision in given.precisions:
        for shard in (False, True):
            row = {"precision": precision, "sharded states": shard}
            rows.append(row | compared(job_of(precision, shard=shard), sweep))
            if not given.json:
                print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    sweep.close()
    if given.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
