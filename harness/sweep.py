"""SIGKILL at every kind of moment: the points, and how one is tried and compared with a clean run."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from everstep.engine.telemetry.faults import parse_fault
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.ops import Worker
from harness.addresses import spread_over_addresses
from harness.in_a_row import run_in_a_row
from harness.transports import carried_by

SHORT = DataSpec(kind="synthetic", rows=1, sequence=16)  # where the time of a step does not matter
TRIES = 8  # of a point in which not all deaths happened
TOLERANCE = 1e-6  # relative, for sums in fp32; all other sums have the same bits in any order


@dataclass(frozen=True)
class Point:
    name: str
    faults: tuple[str, ...]
    replicas: int = 2
    stages: int = 2
    checkpoint: bool = False
    job: tuple[tuple[str, Any], ...] = ()  # changes to the job, for instance stagger
    killed: tuple[Worker, ...] = ()  # besides, from outside: all at once, when step 2 is on record


def every_op() -> list[Point]:
    """Each op kind, at both ends of the pipeline and in both replicas, before and after it runs."""
    points = []
    for stage in (0, 1):
        for replica in (0, 1):
            for op in ("F0", "F3", "I0", "I2", "W1", "W3"):
                when = "after" if (stage + replica + len(points)) % 2 else "before"
                text = f"stage={stage},replica={replica},step=3,op={op},when={when}"
                points.append(Point(f"op {text}", (text,)))
    return points


def in_reduce_and_update() -> list[Point]:
    points = []
    for stage in (0, 1):
        for replica in (0, 1):
            for op, whens in (("R", ("before", "sending", "during", "after")), ("U", ("before", "after"))):
                for when in whens:
                    text = f"stage={stage},replica={replica},step=3,op={op},when={when}"
                    points.append(Point(f"reduce {text}", (text,)))
    return points


def pairs() -> list[Point]:
    """Two deaths: at once, in a row, while the first heals; neighbours, a whole replica, a whole stage."""

    def at(*texts: str) -> tuple[str, ...]:
        return texts

    return [
        Point(
            "pair same stage of three",
            at("stage=1,replica=0,step=3,op=F1", "stage=1,replica=1,step=3,op=I1"),
            3,
        ),
        Point(
            "pair same stage in reduce",
            at("stage=0,replica=0,step=3,op=R,when=sending", "stage=0,replica=2,step=3,op=R,when=during"),
            3,
        ),
        Point(
            "pair neighbours", at("stage=0,replica=0,step=3,op=W0", "stage=1,replica=0,step=3,op=W1"), 2, 3
        ),
        Point(
            "pair neighbours crossed",
            at("stage=0,replica=0,step=3,op=I1", "stage=1,replica=1,step=3,op=F2"),
            2,
            3,
        ),
        Point("pair whole replica", at("stage=0,replica=1,step=3,op=I0", "stage=1,replica=1,step=3,op=I0")),
        Point(
            "pair whole replica after the last stage has reduced",
            at("stage=0,replica=1,step=3,op=I0", "stage=1,replica=1,step=3,op=R,when=after"),
        ),
        Point(
            "pair update and forward",
            at("stage=1,replica=0,step=3,op=U,when=after", "stage=0,replica=1,step=4,op=F0"),
        ),
        Point(
            "pair one after the other", at("stage=0,replica=0,step=2,op=W2", "stage=0,replica=1,step=4,op=W2")
        ),
        Point(
            "pair while the first heals",
            at("stage=0,replica=0,step=3,op=F0", "stage=0,replica=1,step=3,op=F0.1"),
        ),
        Point(
            "pair three of a pipeline of three",
            at(
                "stage=0,replica=0,step=3,op=F2",
                "stage=1,replica=1,step=3,op=I0",
                "stage=2,replica=0,step=3,op=W0",
            ),
            2,
            3,
        ),
        Point(
            "lost stage, no checkpoint",
            at("stage=1,replica=0,step=3,op=F1", "stage=1,replica=1,step=3,op=F1"),
        ),
        Point(
            "lost stage, checkpoint",
            at("stage=0,replica=0,step=4,op=I1", "stage=0,replica=1,step=4,op=I1"),
            2,
            2,
            True,
        ),
        Point(
            "lost everything but one",
            at(
                "stage=0,replica=0,step=4,op=F1",
                "stage=0,replica=1,step=4,op=F1",
                "stage=1,replica=1,step=4,op=F1",
            ),
            2,
            2,
            True,
        ),
        Point("raises instead of dying", at("stage=1,replica=1,step=3,op=I1,how=raise")),
        Point("raises in the update", at("stage=0,replica=0,step=3,op=U,how=raise")),
    ]


def staggered() -> list[Point]:
    """Eager updates, with and without a norm that forbids them, and deaths among them."""
    always = (("stagger", "always"),)
    loose, tight = (*always, ("clip", 100.0)), (*always, ("clip", 0.05))
    kill = ("stage=1,replica=0,step=3,op=I2",)
    late = ("stage=0,replica=1,step=4,op=F1", "stage=1,replica=1,step=3,op=U,when=after")
    return [
        Point("eager, valid", kill, job=loose),
        Point("eager, valid, after the update", late, job=loose),
        Point("eager, always undone", kill, job=tight),
        Point("eager, undone and two deaths", late, job=tight),
        Point("eager, three stages", kill, 2, 3, job=tight),
    ]


def sharded(shards: int = 1) -> list[Point]:
    """Sharded states: owners and guards, alone and together, in the update and while being filled."""
    found = []
    for stage in (0, 1):
        for replica in range(3):
            for when in ("before", "sending", "after"):
                text = f"stage={stage},replica={replica},step=3,op=U,when={when}"
                found.append(Point(f"shard owner in its update {text}", (text,), 3))
    first = "stage=1,replica=0,step=3,op=F1"
    for when in ("before", "during", "after"):
        for replica in (1, 2):
            second = f"stage=1,replica={replica},step=3,op=U,when={when}"
            found.append(Point(f"shard guard while being filled {second}", (first, second), 4))
    for a, b in ((0, 1), (1, 2), (0, 2)):
        pair = tuple(f"stage=0,replica={k},step=3,op=I1" for k in (a, b))
        found.append(Point(f"shard owner and guard {a} {b}", pair, 3))
        found.append(Point(f"shard owner and guard {a} {b}, checkpoint", pair, 3, checkpoint=True))
    back = ("stage=0,replica=0,step=2,op=W1", "stage=0,replica=1,step=5,op=F1")
    return of_shards([*found, Point("shard one returns, then another dies", back, 3)], shards)


def crowded() -> list[Point]:
    """Two replicas of a stage on each of two nodes (`per_node=2`): sums are added up by node."""
    found = []
    for stages in (1, 2):
        for replica, when in (
            (0, "gathering"),
            (1, "gathering"),
            (2, "gathering"),
            (3, "gathering"),
            (0, "sending"),
            (3, "during"),
            (1, "after"),
        ):
            text = f"stage={stages - 1},replica={replica},step=3,op=R,when={when}"
            found.append(Point(f"crowded {stages} stages {text}", (text,), 4, stages))
    gathers = [f"stage=0,replica={replica},step=3,op=R,when=gathering" for replica in range(4)]
    return [
        *found,
        Point("crowded both of a node", (gathers[0], "stage=0,replica=1,step=3,op=U"), 4, 1),
        Point("crowded one of each node", (gathers[1], gathers[2]), 4, 1),
        Point("crowded before the reduce and in it", ("stage=0,replica=2,step=3,op=I0", gathers[0]), 4, 1),
        Point("crowded and in the update", ("stage=0,replica=0,step=3,op=U", gathers[3]), 4, 1),
    ]


def of_shards(found: list[Point], shards: int) -> list[Point]:
    """Every point kills another shard of its worker: the leader, a follower, …"""
    if shards == 1:
        return found
    return [
        replace(point, faults=tuple(f"{fault},shard={i % shards}" for fault in point.faults))
        for i, point in enumerate(found)
    ]


def in_collectives(shards: int) -> list[Point]:
    """A shard dies inside a collective of its worker, in every op that has one."""
    return [
        Point(f"inside {text}", (text,))
        for shard in range(shards)
        for stage, op in ((0, "F1"), (1, "F2"), (0, "I1"), (1, "I0"), (0, "R"), (1, "R"))
        for text in (f"stage={stage},replica={shard % 2},step=3,op={op},when=inside,shard={shard}",)
    ]


def points(shards: int = 1) -> list[Point]:
    found = [*every_op(), *in_reduce_and_update(), *pairs(), *staggered()]
    return [*of_shards(found, shards), *(in_collectives(shards) if shards > 1 else ())]


Losses = dict[int, float]  # by step


class Sweep:
    """Runs points in one fork server. Clean runs are made once per shape: `clean` has those made before, and
    gets those made here.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        precision: str = "fp32",
        preset: str = "gpt-tiny",
        steps: int = 6,
        limit_s: float = 300.0,
        transport: str = "auto",
        shards: int = 1,
        shard: bool = False,
        graphs: str = "never",
        clean: dict[str, Losses] | None = None,
        data: DataSpec | None = None,
        depth: int | None = None,
        per_node: int = 0,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Healed runs take `transport` and `graphs`; clean ones are by tcp and eager, so that two ways of
        carrying and of launching are compared. `per_node`: in healed runs so many replicas are on one address
        of this machine, the next ones on the next.
        """
        self.per_node = per_node
        self.transport, self.shard, self.graphs = transport, shard, graphs
        options = {key: value for key, value in (("depth", depth),) if value}
        self.job = Job(
            model=ModelSpec(preset=preset, options=options),
            data=data or DataSpec(kind="synthetic"),
            steps=steps,
            microbatches=4,
            device=device,
            precision=precision,
            transport="tcp",
            graphs="never",
            shards=shards,
        )  # type: ignore[arg-type]
        self.limit_s = limit_s
        self._shared = fork_server is not None
        self.fork_server = fork_server or ForkServer().start()
        self.first_step_s = 0.0  # of the last run: until its first step was on record
        self.clean = {} if clean is None else clean

    def close(self) -> None:
        if not self._shared:
            self.fork_server.close()

    def try_point(self, point: Point) -> dict[str, Any]:
        """Where not all its deaths happened it is tried again, and fails after `TRIES`."""
        planned = len(point.faults) + len(point.killed)
        for _ in range(TRIES):
            result = self._try_once(point)
            if result["struck"] >= planned or not result["ok"]:
                return result
        return result | {"ok": False, "failure": result["failure"] or f"{result['struck']} of {planned} died"}

    def _try_once(self, point: Point) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            job = self._job(point)
            clean = self._clean_run(job)
            job = carried_by(replace(job, graphs=self.graphs), self.transport)  # type: ignore[arg-type]
            if point.checkpoint:
                job = replace(job, checkpoint=CheckpointSpec(folder=folder, interval=1))
            started = time.monotonic()
            with spread_over_addresses(self.per_node):
                outcome = self.run(job, point.faults, killed=point.killed)
        return {
            "point": point.name,
            "seconds": round(time.monotonic() - started, 2),
            "first_step_s": round(self.first_step_s, 2),
            "incidents": len(outcome.incidents),
            "struck": deaths(outcome),
            **compared(clean, outcome, job),
        }

    def try_in_a_row(self, points: list[Point], *, rest_s: float, limit_s: float) -> dict[str, Any]:
        """One run with the deaths of all these points, then a clean run of as many steps. For points of one
        shape that lose no whole stage: after that, the run would begin anew.
        """
        job = self._job(points[0])
        job = replace(job, optimizer=replace(job.optimizer, decay="constant"))  # whatever the number of steps
        healing = replace(job, transport=self.transport, graphs=self.graphs)  # type: ignore[arg-type]
        faults = [point.faults for point in points]
        started = time.monotonic()
        watch, healed = run_in_a_row(healing, faults, self.fork_server, rest_s=rest_s, limit_s=limit_s)
        ours = losses_of(healed)
        clean = losses_of(self.run(replace(job, steps=max(ours, default=1)), ()))
        found = compared(clean, healed, job)
        return {
            "point": f"{len(watch.struck)} of {len(points)} points in a row",
            "points": [points[number].name for number in watch.struck],
            "missed": [points[number].name for number in watch.missed],
            "seconds": round(time.monotonic() - started, 2),
            "steps": len(clean),
            "incidents": len(healed.incidents),
            "what": Counter(incident.what[:160] for incident in healed.incidents),
            "first_op_ms": watch.first_op_ms,
            **found,
            "ok": found["ok"] and bool(watch.struck) and len(ours) == len(clean),
        }

    def _job(self, point: Point) -> Job:
        changes = dict(point.job)
        return replace(
            self.job,
            replicas=point.replicas,
            stages=point.stages,
            optimizer=replace(OptimizerSpec(), shard=self.shard, **changes),
        )

    def _clean_run(self, job: Job) -> Losses:
        key = (
            f"{job.model.preset} on {job.device} in {job.precision}, {job.shards} shards"
            ", "
            f"{job.replicas} x {job.stages}, {job.steps} steps, {job.optimizer}"
        )
        if key not in self.clean:
            outcome = self.run(job, ())
            if outcome.failure is not None:
                raise RuntimeError(f"the clean run failed: {outcome.failure}")
            self.clean[key] = losses_of(outcome)
        return self.clean[key]

    def run(
        self, job: Job, faults: tuple[str, ...], *, until: int | None = None, killed: tuple[Worker, ...] = ()
    ) -> Outcome:
        """One run to its end, or until that step, where every worker is killed. `killed`: as of a point."""
        doomed = list(killed)
        began = time.monotonic()
        deadline = began + self.limit_s
        self.first_step_s = 0.0

        def watch(kind: str, what: Any) -> None:
            if kind == "step":
                self.first_step_s = self.first_step_s or time.monotonic() - began
            if kind == "tick" and time.monotonic() > deadline:
                raise TimeoutError(told(what))
            if kind == "tick" and what.last_step >= 2:
                while doomed:
                    what.kill(doomed.pop())
            if kind == "tick" and until is not None and what.last_step >= until:
                for worker in what.processes:
                    what.kill(worker)
                what.finish("everybody is killed")

        task = LocalTask(
            job, fork_server=self.fork_server, faults=tuple(map(parse_fault, faults)), watch=watch
        )
        return task.run()


def told(task: LocalTask) -> str:
    """Where a run stands, for a run that should have ended."""
    readings = "; ".join(
        f"{w}: step {r.step} {r.doing}" if r else f"{w}: silent" for w, r in task.readings().items()
    )
    logs = "\n".join(
        f"{path.name}: {path.read_text()[-1500:]}"
        for path in map(task.words, task.processes)
        if path.exists()
    )
    return (
        f"no end in sight: {task.recovery.phase}, {task.recovery.recorded} steps recorded; {readings}\n{logs}"
    )


def deaths(outcome: Outcome) -> int:
    """Workers that died or raised; one that is only slow has not."""
    return sum(len(incident.workers) for incident in outcome.incidents if "slow" not in incident.what)


def losses_of(outcome: Outcome) -> Losses:
    return {step: row.loss for step, row in outcome.by_step().items()}


def compare(clean: Outcome, healed: Outcome, job: Job) -> dict[str, Any]:
    return compared(losses_of(clean), healed, job)


def compared(clean: Losses, healed: Outcome, job: Job) -> dict[str, Any]:
    ours = losses_of(healed)
    differences = [
        abs(ours[step] - loss) / abs(loss) if step in ours else float("inf") for step, loss in clean.items()
    ]
    restored = any(i.restored_from is not None for i in healed.incidents)
    once = healed.committed == healed.issued or restored
    return {
        "max_relative_loss_difference": max(differences, default=float("inf")),
        "issued": healed.issued,
        "committed": healed.committed,
        "restored": restored,
        "replayed_ops": sum(i.replayed_ops for i in healed.incidents),
        "replayed_elsewhere": healed.replayed_elsewhere,
        "failure": healed.failure,
        "ok": healed.failure is None
        and once
        and max(differences, default=float("inf")) <= (TOLERANCE if job.accumulate == "fp32" else 0.0),
    }
