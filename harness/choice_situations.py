"""Ten situations for the planner, with real processes: what runs, what happens, and what happens later.

The same stories as the files in `tests/plan/situations`, with minutes in place of hours. On every cluster an
earlier task has changed its shape once, so that the planner knows what that takes here. Layers rest instead
of computing (`harness/slow_workers.py`), so that a worker needs no core of its own. A node with one slot is
the one that is lost: it has one worker at most.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError
from harness.cluster import Cluster
from harness.slow_workers import job_of

BATCH, BLOCKS, REST_MS = 12, 12, 10.0  # a step is 12 microbatches x 12 blocks x 20 ms: 2.88 s of one slot
STEPS = 100_000
SETTLED = 8  # steps before the event: by then the planner has measured

Deed = Callable[["Scene"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTask:
    name: str
    replicas: int = 2
    stages: int = 2
    weight: float = 1.0
    least_stages: int = 0
    first_stages: int = 0  # submitted in so many stages, which is then the most it can be cut into
    build_s: float = 0.0
    on_disk: bool = False
    rest_ms: float = REST_MS

    @property
    def first_workers(self) -> int:
        return self.first_stages or self.replicas * self.stages

    def job(self, folder: Path) -> dict[str, Any]:
        replicas, stages = (1, self.first_stages) if self.first_stages else (self.replicas, self.stages)
        made = job_of(
            rest_ms=[self.rest_ms] * BLOCKS,
            replicas=replicas,
            stages=stages,
            microbatches=BATCH // replicas,
            steps=STEPS,
            min_stages=self.least_stages,
            memory_interval=2,
            build_s=self.build_s,
        )
        disk = {"checkpoint": {"folder": str(folder / self.name), "interval": 5, "keep": 2}}
        return made | (disk if self.on_disk else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSituation:
    name: str
    story: str
    nodes: dict[str, int]  # slots
    tasks: tuple[ChoiceTask, ...]
    event: Deed
    prepare: Deed = lambda scene: None
    later: tuple[tuple[float, Deed], ...] = ()  # seconds after the event
    window_s: float = 45.0
    asked: str = r"node \w+ is gone"  # how the planner's question for the event begins


@dataclass
class Scene:
    cluster: Cluster
    at: ChoiceSituation
    folder: Path
    force: Path
    forced: dict[str, Any] = field(default_factory=dict)
    start_s: float = 0.0  # an agent took to start

    def submit(self, task: ChoiceTask) -> None:
        self.cluster.submit(task.job(self.folder), task.name, weight=task.weight)

    def wait(self, true: Callable[[], Any], what: str, within_s: float = 150.0) -> Any:
        """As `Cluster.until`, but asked less often: many of these run side by side."""
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(EverstepError, OSError, StopIteration):
                if found := true():
                    return found
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.at.name}: not within {within_s:g} s: {what}\n{self.cluster.logs()}"
                )
            time.sleep(0.2)

    def steps_more(self, name: str, count: int) -> None:
        first = self.cluster.task(name)["step"]
        self.wait(lambda: self.cluster.task(name)["step"] >= first + count, f"{count} more steps of {name}")

    def all_members(self, name: str, workers: int) -> None:
        def there() -> bool:
            seats = self.cluster.task(name)["seats"]
            return sum(seat["state"] == "member" for seat in seats) >= workers

        self.wait(there, f"{workers} workers of {name} take part")

    def one_change_of_shape(self) -> None:
        """By a task that is over when the others come."""
        name = EARLIER.name
        self.submit(EARLIER)
        self.steps_more(name, SETTLED)
        self.post(f"/v1/tasks/{name}/reshape", {"replicas": 1, "stages": 2})
        self.wait(lambda: self.cluster.task(name)["shape"]["stages"] == 2, f"{name} has another shape")
        self.steps_more(name, 2)
        self.post(f"/v1/tasks/{name}/cancel")
        self.wait(lambda: self.cluster.task(name)["state"] == "cancelled", f"{name} is over")

    def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        self.cluster.client.post(path, body or {})

    def lose(self, *nodes: str) -> None:
        for node in nodes:
            self.cluster.signal_node(node, signal.SIGKILL)
            self.cluster.agents[node].wait()

    def is_away(self, node: str) -> None:
        def away() -> bool:
            known = self.cluster.client.get("/v1/status")["nodes"]
            return any(n["node"] == node and n["state"] == "gone" for n in known)

        self.wait(away, f"{node} is given up")

    def release(self) -> None:
        """The planner decides again."""
        self.force.unlink(missing_ok=True)


# ------------------------------------------------------------------ what happens


def lose(*nodes: str) -> Deed:
    return lambda scene: scene.lose(*nodes)


def lose_and_promise(node: str, back_in_s: float) -> Deed:
    """The operator's shape is released when the promise is known: from then on the planner is free."""

    def deed(scene: Scene) -> None:
        scene.lose(node)
        scene.is_away(node)
        scene.post(f"/v1/nodes/{node}/expect", {"back_in_s": back_in_s})
        scene.post("/v1/tasks/t/release")

    return deed


def comes_back(node: str) -> Deed:
    def deed(scene: Scene) -> None:
        scene.release()
        scene.cluster.start_agent(node, slots=scene.at.nodes[node])

    return deed


def to_shape(name: str, replicas: int, stages: int) -> Deed:
    """Into the shape it has when the event comes, and kept there until then."""

    def deed(scene: Scene) -> None:
        scene.post(f"/v1/tasks/{name}/reshape", {"replicas": replicas, "stages": stages})
        scene.wait(lambda: scene.cluster.task(name)["shape"]["replicas"] == replicas, f"{name} has its shape")
        scene.all_members(name, replicas * stages)
        scene.steps_more(name, 8)

    return deed


def bound(name: str, workers: int) -> Deed:
    def deed(scene: Scene) -> None:
        scene.post(f"/v1/tasks/{name}/resize", {"workers": workers})
        scene.steps_more(name, 6)

    return deed


def one_of_each(scene: Scene) -> None:
    """Each task loses one of its two workers."""
    seats = {t.name: [s["node"] for s in scene.cluster.task(t.name)["seats"]] for t in scene.at.tasks}
    scene.lose(*(nodes[-1] for nodes in seats.values()))


EARLIER = ChoiceTask(name="earlier", replicas=2, stages=1, least_stages=1, rest_ms=1.0)
NEW = ChoiceTask(name="new", replicas=2, stages=1, weight=2.0)
PIPELINE = ChoiceTask(name="t", least_stages=1)
PROMISED = "the size of task t is released"
FOUR, FIVE = {"a": 3, "d": 1}, {"a": 3, "d": 1, "e": 1}

SITUATIONS = (
    ChoiceSituation(
        name="spare",
        story="a worker is lost, and a spare slot is there",
        nodes=FIVE,
        tasks=(ChoiceTask(name="t", least_stages=2),),
        event=lose("d"),
    ),
    ChoiceSituation(
        name="no spare",
        story="a worker is lost, there is no spare, and replicas can share its work",
        nodes=FOUR,
        tasks=(ChoiceTask(name="t", replicas=4, stages=1),),
        event=lose("d"),
    ),
    ChoiceSituation(
        name="back soon",
        story="the node is promised back in 15 s",
        nodes=FOUR,
        tasks=(PIPELINE,),
        prepare=to_shape("t", 2, 2),
        event=lose_and_promise("d", 15.0),
        asked=PROMISED,
        later=((15.0, comes_back("d")),),
    ),
    ChoiceSituation(
        name="back late",
        story="the node is promised back in 100 minutes",
        nodes=FOUR,
        tasks=(PIPELINE,),
        prepare=to_shape("t", 2, 2),
        event=lose_and_promise("d", 6000.0),
        asked=PROMISED,
        window_s=70.0,
    ),
    ChoiceSituation(
        name="heavy and light",
        story="the heavy task has lost a worker; the light one has two",
        nodes={"a": 3, "d": 1, "e": 2},
        tasks=(
            ChoiceTask(name="heavy", replicas=4, stages=1, weight=4.0),
            ChoiceTask(name="light", replicas=2, stages=1),
        ),
        event=lose("d"),
    ),
    ChoiceSituation(
        name="memory too small",
        story="a stage is lost, fewer stages do not fit in memory, and another task has three slots",
        nodes={"a": 6, "d": 1},
        tasks=(
            ChoiceTask(name="t", replicas=1, stages=4, on_disk=True),
            ChoiceTask(name="u", replicas=3, stages=1),
        ),
        event=lambda scene: scene.lose("d"),
    ),
    ChoiceSituation(
        name="memory large enough",
        story="two of four stages are lost, and two stages fit in memory",
        nodes={"a": 2, "c": 1, "d": 1},
        tasks=(ChoiceTask(name="t", replicas=1, stages=4, least_stages=2, on_disk=True),),
        event=lose("c", "d"),
    ),
    ChoiceSituation(
        name="operator's bound",
        story="an operator has limited the task to two workers; one of them is lost, two slots are free",
        nodes={"a": 1, "d": 1, "e": 2},
        tasks=(ChoiceTask(name="t", replicas=4, stages=1),),
        prepare=bound("t", 2),
        event=lambda scene: scene.lose(scene.cluster.task("t")["seats"][0]["node"]),
    ),
    ChoiceSituation(
        name="new task",
        story="a second task of weight 2 is submitted to a full cluster",
        nodes={"a": 4},
        tasks=(ChoiceTask(name="old", replicas=4, stages=1),),
        event=lambda scene: scene.submit(NEW),
        asked="task new was submitted",
    ),
    ChoiceSituation(
        name="slow reshape",
        story="the node is promised back in 30 s, and a change of shape has taken more than 8 s",
        nodes=FOUR,
        tasks=(ChoiceTask(name="t", least_stages=1, build_s=8.0),),
        prepare=to_shape("t", 2, 2),
        event=lose_and_promise("d", 30.0),
        asked=PROMISED,
        window_s=70.0,
        later=((30.0, comes_back("d")),),
    ),
    ChoiceSituation(
        name="slots for one",
        story="two tasks have each lost a stage, and the slots suffice for one",
        nodes={"a": 1, "b": 1, "c": 1, "d": 1},
        tasks=(
            ChoiceTask(name="heavy", replicas=1, stages=2, weight=3.0, on_disk=True),
            ChoiceTask(name="light", replicas=1, stages=2, on_disk=True),
        ),
        event=one_of_each,
    ),
)
