"""Six tasks on one cluster, shared by rule of thumb and by plan.

The five mixes follow Unicron's multi-task experiment *as we recall it* (six GPT-3 tasks on 128 A800; weights
0.5 to 2.0); the paper's exact sizes per mix were not at hand, so these are mixes in its manner, not its
figures. Every rule gets the same throughput model, and may leave workers idle where fewer are faster.

    equally    everybody the same
    weighted   in proportion to weight
    sized      in proportion to parameters
    planned    the plan; and the same with `must_run`, because the plain optimum may park a light task
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from everstep_lab.plan.answer import decide
from everstep_lab.plan.cluster import Assignment, Cluster, PlanNode
from everstep_lab.plan.curve import Curve
from everstep_lab.plan.hardware import GPUS
from everstep_lab.plan.models import PRESETS
from everstep_lab.plan.stacks import MEGATRON_2022
from everstep_lab.plan.task import TaskSpec
from everstep_lab.plan.throughput import from_model

RISING = (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
EVEN = (1.0,) * 6
ALIKE = ("gpt3-7b",) * 6
MIXED = ("gpt3-1.3b", "gpt3-1.3b", "gpt3-1.3b", "gpt3-7b", "gpt3-7b", "gpt3-13b")
MIXES: Mapping[str, tuple[Sequence[str], Sequence[float]]] = {
    "1: all 7B, equal weights": (ALIKE, EVEN),
    "2: mixed sizes, equal weights": (MIXED, EVEN),
    "3: all 7B, rising weights": (ALIKE, RISING),
    "4: mixed sizes, rising weights": (MIXED, RISING),
    "5: mixed sizes, falling weights": (MIXED, RISING[::-1]),
}


@dataclass(frozen=True, slots=True)
class Shared:
    """One way to share: workers per task, and the weighted achieved FLOP/s of all."""

    rule: str
    workers: tuple[int, ...]
    waf: float


def share(mix: str, *, nodes: int = 16, slots: int = 8, most_shards: int | None = None) -> list[Shared]:
    """The rules of thumb, then the plan. `most_shards`: 1 leaves the search two dimensions."""
    models, weights = MIXES[mix]
    total = nodes * slots
    stack = MEGATRON_2022 if most_shards is None else replace(MEGATRON_2022, most_shards=most_shards)
    curves = {
        name: from_model(PRESETS[name], GPUS["A800"], stack, most=total, slots_per_node=slots)
        for name in set(models)
    }
    tasks = [
        TaskSpec(name=f"{i} {name}", weight=weight, curve=curves[name])
        for i, (name, weight) in enumerate(zip(models, weights, strict=True))
    ]
    sizes = [PRESETS[name].parameters for name in models]
    rows = [
        _by_rule("equally", tasks, EVEN, total),
        _by_rule("weighted", tasks, weights, total),
        _by_rule("sized", tasks, sizes, total),
    ]
    cluster = Cluster(nodes=[PlanNode(name=f"node-{i}", slots=slots) for i in range(nodes)])
    for rule, must_run in (("planned", False), ("planned, all run", True)):
        asked = [replace(task, must_run=must_run) for task in tasks]
        chosen = decide(cluster, asked, Assignment()).choices
        waf = sum(task.weight * chosen[task.name].throughput for task in asked)
        rows.append(Shared(rule, tuple(one.workers for one in chosen.values()), waf))
    return rows


def _by_rule(rule: str, tasks: Sequence[TaskSpec], keys: Sequence[float], total: int) -> Shared:
    """Shares rounded down; what is left goes one by one to the largest remainders."""
    exact = [total * key / sum(keys) for key in keys]
    given = [int(x) for x in exact]
    for i in sorted(range(len(keys)), key=lambda i: given[i] - exact[i])[: total - sum(given)]:
        given[i] += 1
    waf = sum(t.weight * best_within(t.curve, x) for t, x in zip(tasks, given, strict=True))
    return Shared(rule, tuple(given), waf)


def best_within(curve: Curve, workers: int) -> float:
    """The best throughput of at most so many workers."""
    return float(curve.throughput[: workers + 1].max())
