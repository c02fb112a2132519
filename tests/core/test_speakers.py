"""Who may say what: every report by every speaker, made from the table of messages. One that has no business
to say it changes nothing.

    a    runs worker 0:0 of t, and that of u        every node may belong to somebody else, and whoever has
    b    runs worker 0:1 of t                       submitted a task speaks as its workers
    c    runs the worker of v
    d    runs nothing
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from everstep.core.cluster import fences
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.node import NodePair
from everstep.core.cluster.snapshot import freeze, thaw
from everstep.core.cluster.task import TaskState
from everstep.core.task.owed import Shape
from everstep.protocol import messages as msg
from everstep.protocol.codec import decode, encode
from everstep.protocol.events import Event
from everstep.protocol.ops import Worker
from everstep.protocol.table import AGENT, ASKED, PAIR, WORKER, AnyMessage, Fence, Row, rows
from tests.attacks.fuzzing import Maker
from tests.support.fake_cluster import FakeCluster

KINDS = [row for row in rows(msg.NodeReport | Event) if row.kind is not msg.TaskEvent]
W00, W01 = Worker(0, 0), Worker(0, 1)
STEP, KEY = 3, "of a pair"


def prepared() -> FakeCluster:
    """Node b was asked everything that a node can be asked about t, and to measure the network to d."""
    cluster = FakeCluster(nodes={"a": 2})
    cluster.submit("u", shape=Shape(1, 1, 2), steps=99)
    cluster.join("b", slots=1)
    cluster.submit("t", shape=Shape(1, 2, 2), steps=99)
    cluster.join("c", slots=1)
    cluster.submit("v", shape=Shape(1, 1, 2), steps=99)
    cluster.join("d", slots=1)
    for _ in range(STEP):
        cluster.seal("t")
    tasks, nodes = cluster.coordinator.tasks, cluster.coordinator.nodes
    seats = {(name, worker): seat.node for name in tasks for worker, seat in tasks[name].seats.items()}
    assert seats == {("u", W00): "a", ("t", W00): "a", ("t", W01): "b", ("v", W00): "c"}
    known = tasks["t"].checkpoints
    known.searcher, known.search = "b", 7
    known.committing[STEP], known.commit_asked_at[STEP] = "b", cluster.now
    tasks["t"].failures.links.probed["b"] = ()
    for node, peer in (("b", "d"), ("d", "b")):
        pair = NodePair(peer=peer, key=KEY, asked_at=cluster.now, measures=node == "b", beside_workers=True)
        nodes[node].pairs = [pair]
    return cluster


@dataclass(frozen=True)
class By:
    """A speaker. `sender`: the worker as which it speaks; None: the agent."""

    node: str
    sender: tuple[str, Worker] | None


SPEAKERS = {
    "the worker itself": By("a", ("t", W00)),
    "its agent": By("a", None),
    "the agent that was asked": By("b", None),
    "another worker of the task": By("b", ("t", W01)),
    "another node in its name": By("b", ("t", W00)),
    "the submitter of another task, on its node": By("a", ("u", W00)),
    "the submitter of another task, elsewhere": By("c", ("v", W00)),
    "a node of another task": By("c", None),
    "a node of another task, in its name": By("c", ("t", W00)),
    "a node that runs nothing": By("d", None),
    "a node that runs nothing, in its name": By("d", ("t", W00)),
}


def spoken(row: Row, cluster: FakeCluster) -> tuple[msg.NodeReport, AnyMessage]:
    """About worker 0:0 of t, in numbers that are all current."""
    task = cluster.coordinator.tasks["t"]
    assert task.recovery is not None
    known: dict[str, Any] = {
        "task": "t",
        "worker": W00,
        "stage": 0,
        "step": STEP if {Fence.COMMIT, Fence.SEARCH} & set(row.fences) else STEP + 1,
        "incarnation": task.seats[W00].incarnation,
        "epoch": task.recovery.epoch,
        "attempt": task.recovery.attempt_of(STEP + 1),
        "search": 7,
        "peer": "d" if PAIR in row.fences else W01,
        "key": KEY,
        "life": 0,
    }
    made = Maker(3).made(row.kind)
    told = {each.name: encode(known[each.name]) for each in fields(row.kind) if each.name in known}
    said = decode(row.kind, made | told)
    return (said if isinstance(said, msg.NodeReport) else msg.TaskEvent(task="t", event=said)), said


def may_say(row: Row, by: By) -> bool:
    """From the table alone."""
    if by.sender is not None:
        names_one = {"worker", "stage"} & {each.name for each in fields(row.kind)}
        peers = ("the worker itself",) if names_one else ("the worker itself", "another worker of the task")
        return WORKER in row.by and by in [SPEAKERS[name] for name in peers]
    if AGENT not in row.by:
        return False
    if asked := ASKED & set(row.fences):
        return by.node == "b" or (by.node == "a" and asked == {Fence.COMMIT})  # a has the task as well
    return issubclass(row.kind, msg.OwnReport)


def state(coordinator: Coordinator, but: str) -> dict[str, Any]:
    """Without the count of what was heard of the speaker."""
    frozen = freeze(coordinator)
    nodes = [{**node, "heard": None} if node["name"] == but else node for node in frozen["nodes"]]
    return {**frozen, "nodes": nodes, "events": None}


@pytest.fixture(scope="module")
def cluster() -> FakeCluster:
    return prepared()


@pytest.mark.parametrize("name", SPEAKERS)
@pytest.mark.parametrize("row", KINDS, ids=lambda row: row.kind.__name__)
def test_a_report_counts_only_from_who_may_say_it(row: Row, name: str, cluster: FakeCluster) -> None:
    by, coordinator = SPEAKERS[name], cluster.coordinator
    report, _ = spoken(row, cluster)
    sender = None if by.sender is None else msg.Sender(*by.sender, 1)
    refused = fences.refused(coordinator.nodes[by.node], report, sender, coordinator.tasks)
    assert (refused == "") == may_say(row, by), refused
    if not refused:
        return
    heard = coordinator.nodes[by.node].heard
    before = state(coordinator, by.node)
    event = msg.FromNode(node=by.node, boot="1", number=heard + 1, report=report, sender=sender)
    assert coordinator.handle(event, cluster.now) == []
    assert coordinator.nodes[by.node].heard == heard + 1, "it is heard, so that it is not said again"
    assert state(coordinator, by.node) == before


def test_every_kind_that_an_agent_may_say_of_a_task_must_have_been_asked() -> None:
    for row in KINDS:
        if AGENT in row.by and not issubclass(row.kind, msg.OwnReport):
            assert ASKED & set(row.fences), f"{row.kind.__name__} says nothing of who was asked for it"


def changed(said: AnyMessage) -> AnyMessage:
    return replace(
        said, **{name: value for name, value in (("search", 6), ("key", "x")) if hasattr(said, name)}
    )


@pytest.mark.parametrize(
    "row", [row for row in KINDS if {Fence.SEARCH, PAIR} & set(row.fences)], ids=lambda row: row.kind.__name__
)
def test_an_answer_to_an_earlier_question_does_not_count(row: Row, cluster: FakeCluster) -> None:
    coordinator = cluster.coordinator
    report, said = spoken(row, cluster)
    late = changed(said)
    report = replace(report, event=late) if isinstance(report, msg.TaskEvent) else late
    assert "was not asked" in fences.refused(coordinator.nodes["b"], report, None, coordinator.tasks)


def test_of_a_measured_pair_only_the_end_that_measures_speaks_and_once(cluster: FakeCluster) -> None:
    nodes, tasks = cluster.coordinator.nodes, cluster.coordinator.tasks
    by_peer = msg.PairMeasured(peer="b", key=KEY, error="no connection")
    assert "was not asked" in fences.refused(nodes["d"], by_peer, None, tasks)
    by_b = replace(by_peer, peer="d")
    pairs = nodes["b"].pairs
    try:
        nodes["b"].pairs = [replace(pair, found=by_b) for pair in pairs]
        assert "was not asked" in fences.refused(nodes["b"], by_b, None, tasks)
    finally:
        nodes["b"].pairs = pairs
    assert fences.refused(nodes["b"], by_b, None, tasks) == ""


# What a node that runs nothing of a task did to it, each by one report: it began again at step 1, was
# finished after 9 of 400 steps, failed.
FORGED: dict[str, Callable[[int], msg.NodeReport]] = {
    "the folder is empty": lambda search: msg.CheckpointFound(task="t", step=0, search=search),
    "all steps are done": lambda search: msg.CheckpointFound(task="t", step=9999, search=search),
    "it is of no use": lambda search: msg.CheckpointUnusable(
        task="t", because="forged", passing=False, search=search
    ),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_search_is_answered_by_the_node_that_makes_it(forged: str) -> None:
    cluster = FakeCluster(nodes={"a": 2, "m": 2})
    cluster.crew.hung_disks = {"a", "m"}
    cluster.submit(shape=Shape(1, 2, 2), steps=400, has_checkpoints=True)
    task = cluster.coordinator.tasks["t"]
    assert task.state is TaskState.SEARCHING
    searcher = task.checkpoints.searcher
    stranger = next(name for name in ("a", "m") if name != searcher)
    cluster.says(stranger, FORGED[forged](task.checkpoints.search))
    assert task.state is TaskState.SEARCHING
    cluster.says(searcher, msg.CheckpointFound(task="t", step=56, search=task.checkpoints.search))
    assert task.state is TaskState.RUNNING
    assert task.recovery is not None
    assert task.recovery.recorded == 56


def test_what_was_asked_outlives_a_restart() -> None:
    cluster = prepared()
    again = Coordinator()
    thaw(again, freeze(cluster.coordinator))
    for row in KINDS:
        if ASKED & set(row.fences):
            report, _ = spoken(row, cluster)
            assert fences.refused(again.nodes["b"], report, None, again.tasks) == ""
            assert fences.refused(again.nodes["c"], report, None, again.tasks) != ""
