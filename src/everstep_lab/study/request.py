"""A study as people ask for it, by file or by flags: names and numbers, checked, then made into a setup."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from everstep.errors import UserError
from everstep_lab.study import readers, sources
from everstep_lab.study.failures import DAY_S, Trace
from everstep_lab.study.policies import Elastic, Megatron, Policy
from everstep_lab.study.setting import DEFAULT_MIX, Asked, build, of_mix, parse_task
from everstep_lab.study.study import ABLATIONS, OF_C4, POLICIES, Setup

MOST_NODES = 100_000
VARIED = ("spares", "rate", "mtbf_hours", "checkpoint_minutes", "repair_hours", "nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    trace: str = "trace-a"  # a name, or what a file's ending says
    text: str | None = None  # the file's content
    policies: tuple[str, ...] = ()  # none: all
    ablation: bool = False
    nodes: int | None = None  # None: as the trace has them
    slots: int | None = None
    gpu: str | None = None
    stack: str | None = None
    mix: str = DEFAULT_MIX
    tasks: tuple[str, ...] = ()
    rate: str = "rsc-1"  # of poisson: a name of `sources.RATES`, or per 1,000 node-days
    mtbf_hours: float | None = None  # of the whole cluster; instead of a rate
    days: float | None = None
    repair_hours: tuple[float, float] | None = None
    checkpoint_minutes: float = 30.0
    spares: int = 0
    seeds: int = 5

    def __post_init__(self) -> None:
        for name, least in (("seeds", 1), ("spares", 0), ("nodes", 1), ("slots", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; make it at least {least}.")
        if self.nodes is not None and self.nodes > MOST_NODES:
            raise UserError(f"nodes is {self.nodes}; make it at most {MOST_NODES}.")
        for name in ("days", "mtbf_hours", "checkpoint_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name} is {value}; make it more than 0, and finite.")
        if self.repair_hours is not None and not 0 < self.repair_hours[0] <= self.repair_hours[1] < math.inf:
            raise UserError("repair_hours must be two numbers, shortest first, such as 4:72.")

    def traces(self) -> list[Trace]:
        """One per seed; a file that leaves nothing to chance gives one."""
        match self.trace:
            case "trace-a":
                return [sources.trace_a(seed, nodes=self.nodes or 16) for seed in range(self.seeds)]
            case "trace-b":
                repair = self.repair_hours or sources.TRACE_B_REPAIR_H
                nodes = self.nodes or 16
                return [sources.trace_b(seed, nodes=nodes, repair_h=repair) for seed in range(self.seeds)]
            case "llama3":
                return [
                    sources.llama3(seed, nodes=self.nodes or 2048, days=self.days or 54.0)
                    for seed in range(self.seeds)
                ]
            case "c4":
                repair = self.repair_hours or (4.0, 72.0)
                nodes = self.nodes or sources.C4_NODES
                return [sources.c4(seed, nodes=nodes, repair_h=repair) for seed in range(self.seeds)]
            case "poisson":
                return [self._poisson(seed) for seed in range(self.seeds)]
        if self.text is None:
            known = ("trace-a", "trace-b", "llama3", "c4", "poisson")
            near = get_close_matches(self.trace, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(known)} or a file."
            raise UserError(f"trace {self.trace!r} is neither a name nor a file; {hint}")
        return self._from_text(self.text)

    def _from_text(self, text: str) -> list[Trace]:
        if readers.TITAN.fits(text):
            return [self._titan(text, seed) for seed in range(self.seeds)]
        found = [readers.read(text, name=self.trace, seed=seed) for seed in range(self.seeds)]
        found = [self._widened(trace) for trace in found]
        return found if any(trace != found[0] for trace in found) else found[:1]

    def _widened(self, trace: Trace) -> Trace:
        """With nodes that never failed, where a file names only those that did."""
        if self.nodes is None or trace.spot:
            return trace
        if self.nodes < trace.nodes:
            raise UserError(
                f"nodes is {self.nodes}, but {trace.name} names {trace.nodes}; give at least those."
            )
        return replace(trace, nodes=self.nodes)

    def _titan(self, text: str, seed: int) -> Trace:
        nodes, slots = self.nodes or 128, self.slots or 8
        return sources.titan(
            text,
            nodes=nodes,
            gpus_per_node=slots,
            days=self.days or 90.0,
            repair_h=self.repair_hours or (4.0, 72.0),
            first_location=seed * nodes * slots,
            seed=seed,
        )

    def _poisson(self, seed: int) -> Trace:
        nodes = self.nodes or 16
        return sources.poisson(
            seed,
            nodes=nodes,
            days=self.days or 56.0,
            per_1000_node_days=self._per_1000_node_days(nodes),
            repair_h=self.repair_hours or (4.0, 72.0),
        )

    def _per_1000_node_days(self, nodes: int) -> float:
        if self.mtbf_hours is not None:
            return 1000 * DAY_S / (self.mtbf_hours * 3600 * nodes)
        if self.rate in sources.RATES:
            return sources.RATES[self.rate]
        with contextlib.suppress(ValueError):
            if 0 <= (rate := float(self.rate)) < math.inf:
                return rate
        names = ", ".join(sources.RATES)
        raise UserError(f"rate {self.rate!r} is neither a number per 1,000 node-days nor one of {names}.")

    def setup(self, trace: Trace) -> Setup:
        """If nothing is said: six tasks on A800 nodes, Llama-3 on its own cluster, one task on spot GPUs."""
        alone = trace.spot or self.trace == "llama3"
        asked: Sequence[Asked]
        if self.tasks:
            asked = [parse_task(text) for text in self.tasks]
        elif self.trace == "llama3":
            asked = [Asked(model="llama3-405b")]
        elif self.trace == "c4":
            asked = [Asked(model="gpt3-175b")]
        else:
            asked = [Asked(model="gpt3-1.3b")] if alone else of_mix(self.mix)
        llama = self.trace == "llama3"
        return build(
            asked,
            nodes=trace.nodes,
            slots=self.slots or (1 if trace.spot else 8),
            gpu_name=self.gpu or ("H100" if llama else "A800"),
            stack_name=self.stack or ("llama3" if llama else "megatron-2022"),
            spares=self.spares,
        )

    def chosen(self) -> Mapping[str, Callable[[], Policy]]:
        known = ABLATIONS if self.ablation else POLICIES
        every = tuple(name for name in known if self.trace == "c4" or name not in OF_C4)
        names = every if not self.policies or self.policies == ("all",) else self.policies
        for name in names:
            if name not in known:
                near = get_close_matches(name, list(known), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"use some of {', '.join(known)}."
                raise UserError(f"policy {name!r} is not known; {hint}")
        return {name: self._with_interval(known[name]) for name in names}

    def _with_interval(self, make: Callable[[], Policy]) -> Callable[[], Policy]:
        def made() -> Policy:
            policy = make()
            policy.disk_interval_s = self.checkpoint_minutes * 60
            if isinstance(policy, Megatron | Elastic):
                policy.checkpoint_s = self.checkpoint_minutes * 60
            return policy

        return made

    def varied(self, name: str, value: str) -> Request:
        """The same request with one thing changed, for sweeps."""
        key = name.replace("-", "_")
        if key not in VARIED:
            raise UserError(f"--vary {name!r} is not one of {', '.join(VARIED)}.")
        try:
            changed: Any = {"spares": int, "nodes": int, "rate": str}.get(key, float)(value)
        except ValueError:
            raise UserError(f"--vary {name}: {value!r} is not a number.") from None
        if key == "repair_hours":
            changed = (changed, changed)
        return replace(self, **{key: changed})


def from_document(document: Mapping[str, Any], name: str) -> Request:
    """study.toml: [cluster], [failures], [study] and [[task]]."""
    sections = {
        "cluster": {"nodes", "slots", "gpu", "stack", "spares"},
        "failures": {"trace", "rate", "mtbf_hours", "days", "repair_hours"},
        "study": {"policies", "seeds", "ablation", "mix", "checkpoint_minutes"},
    }
    given: dict[str, Any] = {}
    for section, content in document.items():
        if section == "task":
            continue
        if section not in sections:
            raise UserError(
                f"{name}: [{section}] is not known; use [cluster], [failures], [study] and [[task]]."
            )
        for key, value in content.items():
            if key not in sections[section]:
                near = get_close_matches(key, sorted(sections[section]), n=1)
                hint = (
                    f"did you mean {near[0]!r}?" if near else f"use {', '.join(sorted(sections[section]))}."
                )
                raise UserError(f"{name}: {section}.{key} is not known; {hint}")
            given[key] = tuple(value) if isinstance(value, list) else value
    given["rate"] = str(given.get("rate", "rsc-1"))
    tasks = document.get("task", [])
    if tasks:
        given["tasks"] = tuple(f"{_model(task, name)}:{task.get('weight', 1.0)}" for task in tasks)
    _check_types(given, name)
    return Request(**given)


def _model(task: Any, name: str) -> str:
    if not isinstance(task, Mapping) or "model" not in task:
        raise UserError(f'{name}: every [[task]] needs model = "...", such as gpt3-7b.')
    return str(task["model"])


def _check_types(given: Mapping[str, Any], name: str) -> None:
    kinds: dict[str, type | tuple[type, ...]] = {
        "nodes": int,
        "slots": int,
        "spares": int,
        "seeds": int,
        "days": (int, float),
        "mtbf_hours": (int, float),
        "checkpoint_minutes": (int, float),
        "policies": tuple,
        "repair_hours": tuple,
        "ablation": bool,
    }
    known = {f.name for f in fields(Request)}
    for key, value in given.items():
        assert key in known
        if key in kinds and not isinstance(value, kinds[key]):
            raise UserError(
                f"{name}: {key} is {value!r}, which is of the wrong kind; see everstep simulate --help."
            )
    repair = given.get("repair_hours")
    if repair is not None and (len(repair) != 2 or not all(isinstance(x, int | float) for x in repair)):
        raise UserError(f"{name}: repair_hours must be two numbers, shortest first, such as [4, 72].")
