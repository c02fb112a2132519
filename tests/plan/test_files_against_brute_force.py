"""`everstep plan FILE --json` on random small files: no allocation is worth more."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from everstep.cli.main import run


def random_file(seed: int) -> tuple[str, list[dict], dict]:
    draw = random.Random(seed)
    cluster = {
        "nodes": draw.randint(1, 3),
        "slots_per_node": draw.randint(1, 3),
        "running_s": draw.choice((20.0, 500.0, 1e5)),
    }
    left = cluster["nodes"] * cluster["slots_per_node"]
    total, tasks = left, []
    for i in range(draw.randint(1, 4)):
        workers = draw.randint(0, left)
        left -= workers
        table = [0.0] + [round(draw.uniform(0, 9) * x**0.7, 3) for x in range(1, total + 1)]
        tasks.append(
            {
                "name": f"t{i}",
                "weight": round(draw.uniform(0.1, 3), 3),
                "min_workers": draw.randint(1, total),
                "throughput": table,
                "workers": workers,
                "transition_s": round(draw.uniform(0, 100), 3),
            }
        )
    lines = ["[cluster]", *(f"{k} = {v}" for k, v in cluster.items())]
    for task in tasks:
        lines += ["[[task]]", *(f"{k} = {json.dumps(v)}" for k, v in task.items())]
    return "\n".join(lines), tasks, cluster


def brute_force(tasks: list[dict], cluster: dict) -> float:
    total = cluster["nodes"] * cluster["slots_per_node"]

    def waf(task: dict, x: int) -> float:
        return task["weight"] * task["throughput"][x] if x >= task["min_workers"] else 0.0

    def worth(task: dict, x: int) -> float:
        cost = waf(task, task["workers"]) * task["transition_s"] if x != task["workers"] else 0.0
        return waf(task, x) * cluster["running_s"] - cost

    rows = [[worth(task, x) for x in range(total + 1)] for task in tasks]
    splits = itertools.product(range(total + 1), repeat=len(rows))
    return max(sum(r[x] for r, x in zip(rows, s, strict=True)) for s in splits if sum(s) <= total)


@pytest.mark.parametrize("ten", range(10))
def test_no_allocation_is_worth_more(ten: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    for seed in range(10 * ten, 10 * ten + 10):
        text, tasks, cluster = random_file(seed)
        path.write_text(text)
        assert run(["plan", str(path), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["objective"] == pytest.approx(brute_force(tasks, cluster), rel=1e-9, abs=1e-9), seed
