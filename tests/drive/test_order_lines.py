"""What goes over a line to an agent: little of a large task, and enough for every worker of its node."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from everstep.core.agent.agent import AgentState, LeaveLine, OrderHeard
from everstep.core.agent.agent_messages import PassOn, ProcessSpawned
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import digest, freeze, thaw
from everstep.drive.order_lines import FactTexts, OrderLine, unpacked
from everstep.errors import PeerError
from everstep.protocol import messages as msg
from everstep.protocol.codec import decode, encode
from everstep.protocol.ops import OpLists, Replicas, Worker, parse_op, parse_replicas
from everstep.protocol.shape import Shape
from everstep.protocol.work import (
    EpochFacts,
    FactChanges,
    Members,
    OwnOrders,
    StateDirections,
    applied,
    changes,
)
from tests.support.fake_cluster import FakeCluster

A, B = Worker(0, 0), Worker(1, 0)


def facts_of(epoch: int, chance: random.Random, *, chunks: int = 0) -> EpochFacts:
    live = Replicas(sorted(chance.sample(range(8), chance.randint(1, 8))))
    holders = tuple(
        tuple((chance.randrange(8), chance.randrange(8)) for _ in range(chunks)) for _ in range(2)
    )
    return EpochFacts(
        epoch=epoch,
        attempts=((0, 0),),
        members=tuple(Members(first, (live, live), (1, epoch), holders) for first in (3, 5)),
        recorded=epoch,
        book={Worker(k, s): ("host", chance.randrange(3)) for k in live for s in range(2)},
    )


@pytest.mark.parametrize("seed", range(50))
def test_changes_and_what_is_known_are_the_whole_facts(seed: int) -> None:
    chance = random.Random(seed)
    chunks = chance.choice([0, 4])
    before, after = facts_of(4, chance, chunks=chunks), facts_of(5, chance, chunks=chunks)
    news = changes(before, after)
    assert news is not None
    sent = decode(FactChanges, json.loads(json.dumps(encode(news))))
    assert applied(before, sent) == after


def test_changes_are_of_no_use_to_one_who_knows_another_epoch() -> None:
    chance = random.Random(1)
    news = changes(facts_of(4, chance), facts_of(5, chance))
    for known in (None, facts_of(3, chance)):
        with pytest.raises(PeerError, match="facts since epoch 4"):
            applied(known, news)


@pytest.mark.parametrize("seed", range(30))
def test_replicas_come_back_from_their_text(seed: int) -> None:
    chance = random.Random(seed)
    some = Replicas(sorted(chance.sample(range(60), chance.randint(0, 60))))
    assert parse_replicas(str(some)) == some
    assert decode(Replicas, encode(some)) == some
    assert str(Replicas(range(1024))) == "0-1023"


def test_the_ops_of_replicas_that_do_the_same_are_one_pattern() -> None:
    lists = {
        Worker(k, s): tuple(map(parse_op, (f"{s}F{k}.0", f"{s}I{k}.0", f"{s}R")))
        for k in range(300)
        for s in (0, 1)
    }
    lists[Worker(12, 1)] = (parse_op("1F1.0"), parse_op("1F12.0"), parse_op("1F112.1"))
    del lists[Worker(1, 1)]
    ops = OpLists.of(lists)
    assert len(ops.patterns) == 3
    assert ops == lists
    assert decode(OpLists, json.loads(json.dumps(encode(ops)))) == lists
    assert Worker(1, 1) not in ops
    assert ops.text(Worker(12, 1)) == "1F1.0 1F12.0 1F112.1"


class Line:
    """A line to a real agent's machine; what is written on it is counted."""

    def __init__(self) -> None:
        self.agent = AgentState()
        self.texts = FactTexts()
        self.orders = OrderLine({})
        self.told: dict[Worker, msg.ResumeWorker] = {}
        self.written: list[str] = []
        self.number = 0

    def open_again(self) -> None:
        known = {task: facts.epoch for task, facts in self.agent.processes.facts.items()}
        self.orders = OrderLine(known)

    def send(self, order: msg.Order, *, arrives: bool = True) -> list[Any]:
        self.number += 1
        action = msg.Dispatch(node="a", number=self.number, order=order, because="so")
        text = self.orders.text(action, self.texts, term=1)
        self.written.append(text)
        if not arrives:
            return []
        said = json.loads(text)
        heard = OrderHeard(said["number"], decode(msg.Order, said["order"]), said["term"])
        actions = self.agent.handle(heard, 0.0)
        for action in actions:
            if isinstance(action, PassOn) and isinstance(action.order, msg.ResumeWorker):
                self.told[action.sender.worker] = action.order
        return actions

    def start(self, *workers: Worker, incarnation: int = 1) -> None:
        starts = tuple(
            msg.StartProcess(task="t", worker=w, incarnation=incarnation, slot=w.replica) for w in workers
        )
        self.send(msg.StartProcesses(task="t", starts=starts))
        for worker in workers:
            self.agent.handle(ProcessSpawned(msg.Sender("t", worker, incarnation)), 0.0)


def resume(before: EpochFacts | None, facts: EpochFacts, *workers: Worker) -> msg.ResumeTask:
    own = OwnOrders(step=1, steady="0F~.0")
    resumed = tuple(msg.WorkerResume(w, own, StateDirections()) for w in workers)
    news = None if before is None else changes(before, facts)
    return msg.ResumeTask(task="t", facts=facts, news=news, workers=resumed)


def running() -> tuple[Line, list[EpochFacts]]:
    line, chance = Line(), random.Random(3)
    epochs = [facts_of(epoch, chance) for epoch in range(1, 9)]
    line.send(msg.OpenTask(task="t", job={}, secret="s", shape=Shape(2, 2, 2), needs=msg.TaskNeeds()))
    line.start(A, B)
    line.send(resume(None, epochs[0], A, B))
    return line, epochs


def test_facts_are_told_once_and_then_what_has_changed() -> None:
    line, epochs = running()
    assert [line.told[w].facts for w in (A, B)] == [epochs[0], epochs[0]], "a new worker needs all"
    line.send(resume(epochs[0], epochs[1], A, B))
    for worker in (A, B):
        news = line.told[worker].facts
        assert isinstance(news, FactChanges)
        assert applied(epochs[0], news) == epochs[1]
    assert json.loads(line.written[-1])["order"]["facts"] is None


def test_a_worker_that_came_later_is_told_all_where_its_node_knows_most() -> None:
    line, epochs = running()
    line.send(msg.KillProcess(task="t", worker=B, incarnation=1))
    line.send(resume(epochs[0], epochs[1], A))
    line.start(Worker(2, 0))
    line.send(resume(epochs[1], epochs[2], A, Worker(2, 0)))
    assert isinstance(line.told[A].facts, FactChanges)
    assert line.told[Worker(2, 0)].facts == epochs[2]
    assert json.loads(line.written[-1])["order"]["facts"] is None, "its agent knows the epoch before"


def test_after_a_cut_an_agent_says_what_it_knows_and_misses_nothing() -> None:
    line, epochs = running()
    lost = resume(epochs[0], epochs[1], A, B)
    line.send(lost, arrives=False)
    line.open_again()
    line.number -= 1
    line.send(lost)
    line.send(resume(epochs[1], epochs[2], A, B))
    assert line.agent.processes.facts["t"] == epochs[2]
    line.open_again()
    line.send(resume(epochs[3], epochs[4], A, B))
    assert line.told[A].facts == epochs[4], "changes since an epoch that it does not know are of no use"
    line.send(msg.CloseTask(task="t", gently=False))
    assert not line.agent.processes.facts


def test_an_agent_that_lacks_the_facts_leaves_the_line_and_counts_the_order_as_not_done() -> None:
    line, epochs = running()
    done = line.agent.done
    short = replace(resume(epochs[4], epochs[5], A), facts=None)
    (left,) = line.agent.handle(OrderHeard(done + 1, short, 1), 0.0)
    assert isinstance(left, LeaveLine)
    assert line.agent.done == done


def test_facts_are_encoded_once_for_all_lines() -> None:
    chance = random.Random(1)
    before, after = facts_of(1, chance), facts_of(2, chance)
    texts, order = FactTexts(), resume(before, after, A)
    lines = [OrderLine({"t": 1}), OrderLine({}), OrderLine({"t": 1})]
    action = msg.Dispatch(node="a", number=1, order=order, because="so")
    written = [line.text(action, texts, term=1) for line in lines]
    assert written[0] == written[2] != written[1]
    assert texts.of(after) is texts.of(after)
    for text, name in zip(written, ("news", "facts", "news"), strict=True):
        sent = json.loads(text)["order"]
        assert sent[name] == json.loads(json.dumps(encode(getattr(order, name))))
        assert sent["facts" if name == "news" else "news"] is None


def test_facts_of_many_workers_are_packed() -> None:
    """Those of 16,384 workers were 0.5 MB for each of 2,048 nodes."""
    book = {Worker(r, 0): (f"10.0.{r // 256}.{r % 256}", 32768 + 7919 * r % 28000) for r in range(1000)}
    large = replace(facts_of(1, random.Random(1)), book=book)
    texts, order = FactTexts(), resume(None, large, A)
    action = msg.Dispatch(node="a", number=1, order=order, because="so")
    packed, plain = OrderLine({}).text(action, texts, term=1), encode(order)
    assert decode(msg.Order, unpacked(json.loads(packed)["order"])) == order
    assert unpacked(plain) == plain, "what is not packed stays"
    assert 2 * len(packed) < len(json.dumps(plain, separators=(",", ":")))
    small = resume(None, facts_of(1, random.Random(1)), A)
    action = msg.Dispatch(node="a", number=1, order=small, because="so")
    assert json.loads(OrderLine({}).text(action, texts, term=1))["order"]["facts"]["epoch"] == 1


@pytest.mark.parametrize("text", ["", "not base 85 \N{EURO SIGN}", "c$~aa", "VQh"])
def test_facts_that_cannot_be_unpacked_are_a_peers_error(text: str) -> None:
    with pytest.raises(PeerError, match="the facts of an order cannot be read"):
        unpacked({"is": "ResumeTask", "facts": text})


def test_a_snapshot_has_the_facts_that_waiting_orders_share_once_and_gives_them_back() -> None:
    """A snapshot while hundreds of nodes had not acknowledged the first facts held them hundreds of times."""
    cluster = FakeCluster(nodes=dict.fromkeys("abcdefgh", 1))
    cluster.submit(shape=Shape(4, 2, 2))
    cluster.cut.update("abcdefgh")
    task = cluster.coordinator.tasks["t"]
    for node in cluster.coordinator.nodes.values():
        assert not node.pending
    facts = task.progress.facts
    assert facts is not None
    order = msg.ResumeTask(task="t", facts=facts, news=None, workers=())
    for node in cluster.coordinator.nodes.values():
        node.pending.append(msg.Dispatch(node=node.name, number=99, order=order, because="so"))
    frozen = json.loads(json.dumps(freeze(cluster.coordinator)))
    assert len(frozen["epochs"]) == 1
    again = Coordinator()
    thaw(again, frozen)
    assert digest(again) == digest(cluster.coordinator)
    orders = [node.pending[0].order for node in again.nodes.values()]
    assert all(isinstance(one, msg.ResumeTask) and one.facts == facts for one in orders)
