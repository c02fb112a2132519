"""What a storm on real processes should have earned: the same faults, in virtual time.

The coordinator and planner are the real ones; nodes and workers are coarse (`coarse_cluster`). The times
are those that the storm has measured before its first fault (`harness.storm_measures`), and when a
killed coordinator or agent was up again is the trace's; everything that waits for something else follows from
the decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from everstep.core.cluster.task import OVER
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker, parse_worker
from everstep.protocol.shape import Shape
from everstep_lab.forecast.coarse_cluster import HANG_S, CoarseCluster
from everstep_lab.forecast.coarse_steps import ForecastKind

NODES = ("a", "b", "c")
KINDS = {
    "heavy": (4.0, Shape(2, 2, 2), 3),
    "middle": (2.0, Shape(2, 1, 2), 0),
    "light": (1.0, Shape(1, 2, 4), 0),
}  # weight, shape, steps between two copies in memory
AGENT_S, COORDINATOR_S = 1.5, 1.5  # until they are up, where the trace does not say
LOOK_S = 0.1  # as often as the storm looks
SCALES = (0.97, 1.0, 1.03)


class StormForecast:
    """`is_warm`: fork servers are up when it begins."""

    def __init__(
        self, kinds: Sequence[ForecastKind], nodes: Sequence[str], *, cores: int = 2, is_warm: bool = True
    ) -> None:
        self.cluster = CoarseCluster(kinds, nodes, cores=cores, is_warm=is_warm)
        self._counts = {kind.name: 0 for kind in kinds}
        self._knows_starts = False  # the trace says when agents and coordinators were up again

    def run(self, trace: Sequence[dict[str, Any]], seconds: float) -> dict[str, int]:
        """Steps on record after so long, by kind of task."""
        agenda = self.cluster.agenda
        self._knows_starts = any(entry["what"] == "coordinator up" for entry in trace)
        for entry in trace:
            if entry["what"] != "submit" and entry["at_s"] < seconds:
                self.cluster.at(entry["at_s"], self._strike, entry)
        self._look()
        while (at := agenda.next_at()) is not None and at <= seconds * 1e6:
            agenda.step()
        return self.cluster.done

    def _look(self) -> None:
        """One task of each kind at a time, as the storm keeps it."""
        cluster = self.cluster
        for kind in cluster.kinds.values():
            if cluster.hears and not self._alive(kind.name):
                self._counts[kind.name] += 1
                cluster.submit(f"{kind.name}-{self._counts[kind.name]}", kind)
        if cluster.hears:
            cluster.driver.look_at_clock()
        cluster.after(LOOK_S, self._look)

    def _alive(self, kind: str) -> str:
        """The task of that kind that is there now."""
        tasks = self.cluster.machine.tasks.values()
        alive = [t.name for t in tasks if _kind(t.name) == kind and t.state not in OVER]
        return alive[-1] if alive else ""

    # -------------------------------------------------------------- the trace

    def _strike(self, entry: dict[str, Any]) -> None:
        what, node, cluster = entry["what"], entry.get("node", ""), self.cluster
        task = self._alive(_kind(entry.get("task", "")))
        match what:
            case "kill worker" | "stop worker" | "continue worker":
                self._hit(what, task, parse_worker(entry["worker"]))
            case "kill agent" | "kill node":
                cluster.lose(node)
            case "start agent":
                cluster.starts(node)
                if not self._knows_starts:
                    cluster.after(AGENT_S, cluster.bring_back, node)
            case "agent up":
                cluster.bring_back(node)
            case "stop agent" | "stop node":
                cluster.freeze(node, whole=what == "stop node")
            case "continue agent" | "continue node":
                cluster.thaw(node)
            case "kill fork server":
                cluster.servers.kill(node)
            case "stop fork server" | "continue fork server":
                cluster.servers.stop(node, is_stopped=what == "stop fork server")
            case "kill coordinator" | "stop coordinator" | "rotate the token":
                cluster.miss_coordinator(is_dead=what != "stop coordinator")
            case "start coordinator":
                cluster.starts("coordinator")
                if not self._knows_starts:
                    cluster.after(COORDINATOR_S, cluster.hear_again)
            case "coordinator up" | "continue coordinator":
                cluster.hear_again()
            case "drain" | "drain at once":
                cluster.tell(msg.DrainRequested(node=node, force=what == "drain at once"))
            case "readmit":
                cluster.tell(msg.ReadmitRequested(node=node, by="an operator"))
            case "pause" | "resume" | "resize" | "cancel" if task:
                self._ask(what, task, entry)
        cluster.steps.settle_all()

    def _ask(self, what: str, task: str, entry: dict[str, Any]) -> None:
        match what:
            case "pause":
                self.cluster.tell(msg.PauseRequested(task=task))
            case "resume":
                self.cluster.tell(msg.UnpauseRequested(task=task))
            case "resize":
                self.cluster.tell(msg.ResizeRequested(task=task, workers=entry["number"]))
            case _:
                self.cluster.tell(msg.CancelRequested(task=task))

    def _hit(self, what: str, task: str, worker: Worker) -> None:
        actor = self.cluster.actors.get((task, worker))
        if actor is None:
            return
        if what == "kill worker":
            self.cluster.ends(task, worker, "killed by SIGKILL")
            return
        actor.stopped = what == "stop worker"
        if actor.stopped:
            self.cluster.after(HANG_S, self.cluster.overdue, task, worker, actor)
        self.cluster.steps.settle(task)


def _kind(task: str) -> str:
    return task.rpartition("-")[0]


def forecast(storm: dict[str, Any], *, faults: bool = True) -> dict[str, int]:
    """The mean of a few: which fault hits which task changes with the smallest difference, and with it what
    is earned (by 3 to 8 %).
    """
    runs = [_forecast(storm, scale, faults=faults) for scale in (SCALES if faults else (1.0,))]
    return {name: round(fmean(run[name] for run in runs)) for name in KINDS}


def _forecast(storm: dict[str, Any], scale: float, *, faults: bool) -> dict[str, int]:
    """`scale`: of all measured times."""
    kinds = [
        ForecastKind(
            name=name,
            weight=weight,
            shape=shape,
            steps=storm["steps"],
            copy_every=copy_every,
            alone_s=scale * measured["alone_s"],
            beside_s=scale * measured["beside_s"],
            begin_s=scale * measured["begin_s"],
            cold_s=scale * measured.get("cold_s", measured["begin_s"]),
            again_s=scale * measured.get("again_s", 0.0),
        )
        for name, (weight, shape, copy_every) in KINDS.items()
        for measured in (storm["measured"][name],)
    ]
    world = StormForecast(kinds, NODES, cores=storm.get("cores", 2), is_warm=storm.get("warm", True))
    return dict(world.run(storm["trace"] if faults else (), storm["seconds"]))


def weighed(steps: dict[str, int]) -> float:
    return sum(KINDS[name][0] * count for name, count in steps.items())
