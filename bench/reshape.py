"""A running task changes its shape again and again: losses, pause, and bytes against the least possible.

    python -m bench.reshape                      six nodes of one slot, five changes
    python -m bench.reshape --preset gpt-10m --shapes 2x2,1x4 --json
    python -m bench.reshape --shapes 2x2x1,1x2x2,4x1x1     with shards: nodes of as many slots
    python -m bench.reshape lost                 all replicas of a stage die: back from peers' memory
    python -m bench.reshape copies               what a copy in memory at every step costs

Every worker sits on a node of its own, so what it has not got must come from another node. The shards of a
worker share its node: what a node holds does not depend on them. `least` is what
`everstep_lab.reshard` moves when `harness.assignment.settled` has chosen the places. Beside it runs the same
job, never moved; losses are compared with ==.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from everstep.engine.layers.model import partition, slots
from everstep.engine.prepare.resolve import model_of
from everstep.job.job import Job
from everstep.layout.tensor import Tensor
from everstep_lab.layout import Layout, merged
from everstep_lab.layout_builders import replicated
from everstep_lab.reshard import reshard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.assignment import settled
from harness.cluster import Cluster, small_job

NODES = 6
EVERY = 4  # steps between two changes


def layout_of(job: Job, holders: dict[tuple[int, int], str]) -> Layout:
    """What each place of a shape holds: weights and AdamW's two moments and counter of its layers."""
    model = model_of(job)
    parts = []
    for stage, layers in enumerate(partition(model, job.stages)):
        there = sorted({holders[k, stage] for k in range(job.replicas)})
        for name, slot in slots(model, layers).items():
            for key in ("model", "exp_avg", "exp_avg_sq"):
                parts.append(replicated(Tensor(name=f"{key}/{name}", shape=slot.shape), there))
            parts.append(replicated(Tensor(name=f"step/{name}", shape=()), there))
    return merged(parts)


def least_bytes(job: Job, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, int]:
    """(moved when places are chosen best, whole new layout)."""
    old, new = job.reshaped(*before), job.reshaped(*after)
    nodes = [f"n{i}" for i in range(NODES)]
    places = [(k, s) for k in range(old.replicas) for s in range(old.stages)]
    a = layout_of(old, dict(zip(places, nodes, strict=False)))
    fresh = [(k, s) for k in range(new.replicas) for s in range(new.stages)]
    b = layout_of(new, {place: f"place {place}" for place in fresh})
    whole = sum(b.tensors[p.tensor].num_bytes * len(p.holders) for p in b.pieces)
    return reshard(a, settled(a, b, nodes)).moved_bytes, whole


def least_between(job: Job, move: dict[str, Any]) -> tuple[int, int]:
    """The same for the nodes that were taken: with several slots per node, a node has several workers."""
    a = layout_of(job.reshaped(*move["from"]), move["places"])
    b = layout_of(job.reshaped(*move["to"]), move["new_places"])
    whole = sum(b.tensors[p.tensor].num_bytes * len(p.holders) for p in b.pieces)
    return reshard(a, b).moved_bytes, whole


def places(cluster: Cluster) -> dict[tuple[int, int], str]:
    """The node of every worker."""
    found = {}
    for seat in cluster.task("moving")["seats"]:
        replica, stage = map(int, seat["worker"].split(":"))
        found[replica, stage] = seat["node"]
    return found


def run(cluster: Cluster, job: dict[str, Any], shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    """One task through all shapes, beside a second one that keeps its own."""
    cluster.submit(job, "still")
    clean = cluster.finished("still", within_s=500)
    clean_losses = {row["step"]: row["loss"] for row in clean["rows"]}
    cluster.submit(job, "moving")
    moves = []
    for number, shape in enumerate(shapes[1:]):
        cluster.step_reached((number + 1) * EVERY, "moving", within_s=300)
        asked, before = time.time(), places(cluster)
        counts = dict(zip(("replicas", "stages", "shards"), (*shape, 1), strict=False))
        cluster.client.post("/v1/tasks/moving/reshape", counts)
        moves.append({"from": shapes[number], "to": shape, "asked_at": asked, "places": before})
        cluster.until(lambda n=number: len(cluster.task("moving")["moves"]) > n, "it moved", within_s=300)  # type: ignore[misc]
        cluster.all_members("moving")
        moves[-1]["new_places"] = places(cluster)
    told = cluster.finished("moving", within_s=500)
    rows = told["rows"]
    losses = {row["step"]: row["loss"] for row in rows}
    base = Job.from_dict(job)
    for move, moved in zip(moves, told["moves"], strict=True):
        at = next(i for i, row in enumerate(rows) if row["step"] == moved["step"])
        steps = [row["seconds"] for row in rows[max(1, at - 2) : at + 1]]
        shared = any(len(move[key]) > 2 for key in ("from", "to"))
        least, whole = least_between(base, move) if shared else least_bytes(base, move["from"], move["to"])
        del move["places"], move["new_places"]
        move |= {
            "step": moved["step"],
            "pause_s": rows[at + 1]["seconds"] - statistics.median(steps),
            "step_s": statistics.median(steps),
            "fetch_s": moved["seconds"],
            "moved_bytes": moved["bytes_elsewhere"],
            "kept_bytes": moved["bytes_here"],
            "least_bytes": least,
            "all_bytes": whole,
        }
    return {
        "state": told["state"],
        "steps": len(losses),
        "equal_losses": sum(losses.get(step) == loss for step, loss in clean_losses.items()),
        "worst_relative_difference": max(
            abs(losses.get(s, float("nan")) - x) / abs(x) for s, x in clean_losses.items()
        ),
        "incidents": len([i for i in cluster.incidents() if i["task"] == "moving"]),
        "moves": moves,
    }


def lost(cluster: Cluster, job: dict[str, Any]) -> dict[str, Any]:
    """No checkpoint on disk; the node with a stage's only worker dies. How many steps are done again?"""
    cluster.submit(job, "clean")
    clean = {row["step"]: row["loss"] for row in cluster.finished("clean", within_s=400)["rows"]}
    cluster.submit(job, "job")
    cluster.step_reached(job["steps"] // 2, within_s=300)
    cluster.until(lambda: cluster.task()["kept_step"], "a state is in memory")
    victim = next(seat for seat in cluster.task()["seats"] if seat["worker"].endswith(":1"))
    before = cluster.task()["step"]
    killed = time.time()
    cluster.signal_node(victim["node"], signal.SIGKILL)
    told = cluster.finished(within_s=400)
    losses = {row["step"]: row["loss"] for row in told["rows"]}
    incident = next(i for i in cluster.incidents() if i["task"] == "job" and i["restored_from"] is not None)
    return {
        "state": told["state"],
        "equal_losses": sum(losses.get(step) == loss for step, loss in clean.items()),
        "steps": len(clean),
        "killed_at_step": before + 1,
        "restored_from": incident["restored_from"],
        "restored_where": incident["restored_where"],
        "steps_done_again": before - incident["restored_from"],
        "memory_interval": job["memory_interval"],
        "resumed_after_s": incident["closed_at"] - killed,
    }


def copies(cluster: Cluster, job: dict[str, Any]) -> dict[str, Any]:
    """The middle step without copies, with one every fourth step, and with one at every step; in turns."""
    seconds: dict[int, list[float]] = {0: [], 4: [], 1: []}
    for turn in range(3):
        for every, found in seconds.items():
            name = f"every-{every}-{turn}"
            cluster.submit(job | {"memory_interval": every, "steps": 24}, name)
            found += [row["seconds"] for row in cluster.finished(name, within_s=400)["rows"][4:]]
    middle = {every: statistics.median(found) for every, found in seconds.items()}
    return {f"step_s_memory_interval_{every}": value for every, value in middle.items()} | {
        "slower_every_step": middle[1] / middle[0] - 1
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("reshape", "lost", "copies"), default="reshape")
    parser.add_argument("--preset", default="gpt-1m")
    parser.add_argument("--shapes", default="2x2,1x4,4x1,3x2,2x3,2x2")
    parser.add_argument("--device", default="cpu", help="cuda: all workers share the GPUs there are")
    parser.add_argument("--every", type=int, default=1, help="memory_interval of `lost`")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shapes = [tuple(map(int, word.split("x"))) for word in options.shapes.split(",")]
    most_shards = max((*shape, 1)[2] for shape in shapes)
    with tempfile.TemporaryDirectory(prefix="reshape-") as name, Cluster(Path(name), eager=True) as cluster:
        cluster.start_coordinator()
        for node in range(NODES):
            cluster.start_agent(f"n{node}", slots=most_shards)
        cluster.nodes_up(NODES)
        replicas, stages, shards = (*shapes[0], 1)[:3]
        steps = EVERY * (len(shapes) + 1)
        job = small_job(
            Path(name),
            steps=steps,
            replicas=replicas,
            stages=stages,
            shards=shards,
            microbatches=12 // replicas,
            data={"kind": "synthetic", "rows": 1, "sequence": 32},
        )
        job |= {"model": {"preset": options.preset}, "device": options.device}
        if options.what == "lost":
            job |= {"replicas": 1, "stages": 2, "microbatches": 4, "memory_interval": options.every}
            found: Any = lost(cluster, job)
        elif options.what == "copies":
            found = copies(cluster, job)
        else:
            found = run(cluster, job, shapes)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    if options.what == "copies":
        return 0
    same = found["equal_losses"] == found["steps"]
    if most_shards > 1:  # additions inside a group of shards have another order
        same = found["worst_relative_difference"] < 2e-6
    whole = same and found["state"] == "finished"
    return 0 if whole else 1


def show(found: dict[str, Any]) -> None:
    for key, value in found.items():
        if key != "moves":
            print(f"{key:28} {value}")
    if "moves" in found:
        print("shape            pause s  in steps  fetch s   moved MB   least MB  moved/least   all MB")
    for move in found.get("moves", ()):
        shapes = " -> ".join("x".join(map(str, move[key])) for key in ("from", "to"))
        moved, least = move["moved_bytes"], move["least_bytes"]
        print(
            f"{shapes:16} {move['pause_s']:8.2f} {move['pause_s'] / move['step_s']:9.1f} "
            f"{move['fetch_s']:8.2f} {moved / 1e6:10.2f} {least / 1e6:10.2f} "
            f"{moved / least if least else 1:12.3f} {move['all_bytes'] / 1e6:8.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
