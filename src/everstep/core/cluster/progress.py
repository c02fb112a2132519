"""What is said of a task's progress: derived from its workers and its steps, not from what is intended.

stalled          it is running by intent, but a stage has no worker that takes part, or no node of it is
                 heard, and no step is made
slots lacking    for stages that have no worker, nor one on its way: it waits for slots, like one in the queue
cost of a drain  a stage whose workers are all on one node loses its state with them, if it is not made safe
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.core.cluster.node_states import NodeState
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.task import Task, TaskState
from everstep.core.task.states import Member

STALLED = "stalled"  # shown in place of a task's state
SHOWN_STATES: tuple[str, ...] = (*TaskState, STALLED)
STALLED_AFTER_STEPS = 10.0  # times the usual step
STALLED_AFTER_S = 5.0  # and at least so long


def empty_stages(task: Task, *, without: str = "") -> list[int]:
    """The stages in which no worker takes part; those that were asked to go do not count, nor those on the
    node `without`.
    """
    places = task.recovery.places if task.recovery is not None else {}
    there = {
        worker.stage
        for worker, seat in task.seats.items()
        if isinstance(places.get(worker), Member) and seat.node != without and not seat.leaving
    }
    return [stage for stage in range(task.shape.stages) if stage not in there]


def why_stalled(roster: Roster, task: Task, *, since_step_s: float, usual_step_s: float) -> str:
    """Why a task that should run does not; empty: it trains, or is about to."""
    if task.state is not TaskState.RUNNING or task.is_script:
        return ""
    if since_step_s < max(STALLED_AFTER_S, STALLED_AFTER_STEPS * usual_step_s):
        return ""
    if empty := empty_stages(task):
        return f"no step for {since_step_s:.0f} s: {_stages(empty)} without a worker; {task.because}"
    if any(map(roster.is_heard, roster.nodes_of(task))):
        return ""
    return f"no step for {since_step_s:.0f} s: none of its nodes is heard; its workers may train on"


def slots_lacking(task: Task) -> int:
    """The slots without which a task that is running by intent does nothing; 0: it lacks none."""
    if task.state is not TaskState.RUNNING:
        return 0
    staying = [worker for worker, seat in task.seats.items() if not seat.leaving]
    if task.is_script:
        return max(0, task.least - len(staying)) * task.shape.shards
    return (task.shape.stages - len({worker.stage for worker in staying})) * task.shape.shards


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCost:
    """What a task loses if the workers of a node are ended at once."""

    task: str
    step: int  # it is at
    protected: int  # it would go back to
    stages: tuple[int, ...]  # that only this node has
    is_savable: bool  # its state can be made safe first: on disk, or in another node's memory

    def sentence(self, node: str) -> str:
        back = f"go back from step {self.step} to step {self.protected}"
        return f"task {self.task} would {back}: only node {node} has {_stages(list(self.stages))}"


def costs_of_drain(roster: Roster, node: str) -> list[DrainCost]:
    """Of each task that would lose steps if this node's workers were ended now."""
    others = [other for other in roster.nodes.values() if other.name != node]
    has_memory = any(other.state is NodeState.UP and other.memory_port for other in others)
    found = []
    for task in roster.tasks_on_node(node):
        if task.state is not TaskState.RUNNING or task.recovery is None or task.is_script:
            continue
        lost = sorted(set(empty_stages(task, without=node)) - set(empty_stages(task)))
        if lost and task.recovery.recorded > task.protected:
            found.append(
                DrainCost(
                    task=task.name,
                    step=task.recovery.recorded,
                    protected=task.protected,
                    stages=tuple(lost),
                    is_savable=task.request.has_checkpoints or has_memory,
                )
            )
    return found


def _stages(stages: list[int]) -> str:
    return f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"
