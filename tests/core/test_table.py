"""The table of messages: what is derived from it is complete."""

from __future__ import annotations

import string
from dataclasses import fields
from typing import Any

import pytest

from everstep.core.agent.processes import NodeProcesses
from everstep.core.cluster import fences
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.training import Training
from everstep.core.task.recovery import Recovery
from everstep.core.worker.control import WorkerControl
from everstep.errors import InternalError
from everstep.protocol import messages as msg
from everstep.protocol.codec import decode, encode
from everstep.protocol.events import Event
from everstep.protocol.ops import Worker
from everstep.protocol.table import AGENT, TABLE, WORKER, Fence, Handlers, Row, rows
from tests.attacks.fuzzing import Maker
from tests.support.fake_cluster import FakeCluster

MACHINES = (Coordinator, NodeProcesses, Training, Recovery, WorkerControl)
AROUND = {"node", "task"}


@pytest.mark.parametrize("handlers", Handlers.ALL, ids=lambda h: str(h.wires[0]).rsplit(".", 1)[-1])
def test_every_message_of_a_wire_has_a_handler(handlers: Handlers[Any]) -> None:
    assert not handlers.missing()


def test_a_message_without_a_handler_is_named_and_not_dropped() -> None:
    with pytest.raises(InternalError, match="object has no handler in type"):
        Recovery.on.handler(Recovery, object())


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.kind.__name__)
def test_a_row_agrees_with_its_class(row: Row) -> None:
    names = {each.name for each in fields(row.kind)}
    asked = {found.split(".")[0] for _, found, _, _ in string.Formatter().parse(row.says) if found}
    assert asked <= names | AROUND
    needed = {
        Fence.INCARNATION: {"worker", "incarnation"},
        Fence.EPOCH: {"epoch"},
        Fence.ATTEMPT: {"step", "attempt"},
        Fence.NEXT_ATTEMPT: {"step", "attempt"},
        Fence.SEARCH: {"search"},
        Fence.COMMIT: {"step"},
        Fence.PROBE: {"unreached"},
        Fence.PAIR: {"peer", "key"},
    }
    for fence in row.fences:
        assert needed[fence] <= names
    assert [w for w in row.kind.__mro__[1:-1] if not issubclass(w, tuple)], "it is on no wire"


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.kind.__name__)
def test_every_message_survives_its_codec(row: Row) -> None:
    """Whatever its fields hold: made from the types alone."""
    for seed in range(5):
        made = decode(row.kind, Maker(seed).made(row.kind))
        wire = row.kind.__mro__[1]
        assert decode(wire, encode(made)) == made


SAID = [row for row in rows(Event | msg.TaskReport | msg.RankReport) if row.kind is not msg.TaskEvent]
OF_WORKERS = [row for row in SAID if WORKER in row.by]


@pytest.mark.parametrize("row", OF_WORKERS, ids=lambda row: row.kind.__name__)
def test_whatever_a_worker_may_say_passes_the_fence(row: Row) -> None:
    """`ChunksFilled` was forgotten in a list of the fence: the third holder of a chunk was never let go."""
    cluster = FakeCluster(nodes={"a": 4})
    cluster.submit()
    task, worker = cluster.coordinator.tasks["t"], Worker(0, 0)
    seat, recovery = task.seats[worker], task.recovery
    assert recovery is not None
    known = {
        "task": "t",
        "worker": worker,
        "stage": 0,
        "step": 1,
        "incarnation": seat.incarnation,
        "epoch": recovery.epoch,
        "attempt": recovery.attempt_of(1),
    }
    made = Maker(1).made(row.kind) | {
        each.name: encode(known[each.name]) for each in fields(row.kind) if each.name in known
    }
    said = decode(row.kind, made)
    report = said if isinstance(said, msg.NodeReport) else msg.TaskEvent(task="t", event=said)
    sender = msg.Sender("t", worker, seat.incarnation)
    node, tasks = cluster.coordinator.nodes[seat.node], cluster.coordinator.tasks
    assert fences.refused(node, report, sender, tasks) == ""
    elsewhere = msg.Sender("t", worker, seat.incarnation + 1)
    assert "given up" in fences.refused(node, report, elsewhere, tasks)


@pytest.mark.parametrize(
    "row", [r for r in rows(Event) if not {WORKER, AGENT} & set(r.by)], ids=lambda row: row.kind.__name__
)
def test_what_only_the_coordinator_says_is_refused_from_nodes(row: Row) -> None:
    event = decode(row.kind, Maker(1).made(row.kind))
    node = FakeCluster(nodes={"a": 1}).coordinator.nodes["a"]
    for sender in (None, msg.Sender("t", Worker(0, 0), 1)):
        assert fences.refused(node, msg.TaskEvent(task="t", event=event), sender, {})
