"""A slow worker on the coordinator's desk: an incident, less work, and an end of it."""

from __future__ import annotations

from collections import deque

import pytest

from everstep.core.cluster.slowness import slow_links
from everstep.core.task.states import Gathering, Running
from everstep.drive.thinking import Thinking
from everstep.plan.measured import TaskMeasurements
from everstep.plan.throughput import TaskSpeed
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import ComputePlan
from everstep.protocol.incidents import Incident
from everstep.protocol.ops import Kind, Worker
from everstep.protocol.shape import Shape
from everstep.protocol.work import Ledger
from everstep.schedule.task_scheduler import TaskScheduler
from tests.support.fake_cluster import FakeCluster

SLOW = Worker(1, 1)


def running(shape: Shape | None = None) -> FakeCluster:
    cluster = FakeCluster()
    cluster.submit(shape=shape)
    cluster.seal()
    return cluster


def slowed(cluster: FakeCluster, worker: Worker = SLOW, factor: float = 2.0, incarnation: int = 1) -> None:
    cluster.hear(
        msg.SlownessFound(
            task="t",
            worker=worker,
            incarnation=incarnation,
            factor=factor,
            since_step=2,
            because=f"worker {worker} takes {factor} times as long",
            evidence=("its ops took twice the time",),
            ruled_out=("a link",),
        )
    )


def ended(cluster: FakeCluster, worker: Worker = SLOW) -> None:
    cluster.hear(msg.SlownessEnded(task="t", worker=worker, incarnation=1, because="it is fast again"))


def epoch(cluster: FakeCluster) -> int:
    recovery = cluster.coordinator.tasks["t"].recovery
    assert recovery is not None
    assert isinstance(recovery.phase, Running)
    return recovery.epoch


def one(cluster: FakeCluster) -> Incident:
    (incident,) = cluster.coordinator.log.incidents
    return incident


def test_a_slow_worker_is_an_open_incident_with_its_evidence_and_gets_less_work() -> None:
    cluster = running()
    before = epoch(cluster)
    slowed(cluster)
    incident = one(cluster)
    assert not incident.closed
    assert not incident.stops_training
    assert incident.verdict is not None
    assert incident.verdict.kind == "slow worker"
    assert [e.text for e in incident.evidence] == ["its ops took twice the time", "ruled out: a link"]
    assert incident.remedies[-1].what == "give it less work"
    assert "microbatches" in incident.remedies[-1].outcome
    assert epoch(cluster) == before + 1


def test_speed_again_closes_the_incident_and_brings_the_work_home() -> None:
    cluster = running()
    slowed(cluster)
    before = epoch(cluster)
    ended(cluster)
    assert one(cluster).closed
    assert cluster.coordinator.tasks["t"].speeds.planned == {}
    assert epoch(cluster) == before + 1


def test_a_slow_workers_death_ends_its_slowness_and_is_an_incident_of_its_own() -> None:
    cluster = running()
    slowed(cluster)
    cluster.exits(SLOW, "killed by SIGKILL")
    slow, death = cluster.coordinator.log.incidents
    assert slow.closed
    assert death.what == "killed by SIGKILL"
    assert cluster.coordinator.tasks["t"].speeds.slow == {}


def test_another_workers_death_does_not_become_part_of_a_slowness() -> None:
    cluster = running()
    slowed(cluster)
    cluster.exits(Worker(0, 0), "killed by SIGKILL")
    slow, death = cluster.coordinator.log.incidents
    assert not slow.closed
    assert slow.workers == [SLOW]
    assert death.workers == [Worker(0, 0)]
    assert cluster.coordinator.tasks["t"].speeds.planned == {SLOW: 2.0}


def test_the_only_worker_of_a_stage_is_told_slow_and_what_would_help() -> None:
    cluster = running(Shape(1, 2, 4))
    before = epoch(cluster)
    slowed(cluster, Worker(0, 1))
    incident = one(cluster)
    assert incident.verdict is not None
    assert "only one of stage 1" in incident.remedies[-1].because
    assert "where that pays: a slot on b is free" in incident.remedies[-1].because
    assert epoch(cluster) == before  # a new schedule would change nothing
    ended(cluster, Worker(0, 1))
    assert incident.closed


def test_a_slow_link_is_told_and_takes_work_from_nobody() -> None:
    cluster = running()
    before = epoch(cluster)
    link = {"task": "t", "worker": Worker(0, 0), "peer": Worker(0, 1)}
    for _ in range(2):
        cluster.hear(msg.SlowLinkFound(**link, because="messages take long"))
    incident = one(cluster)
    assert not incident.closed
    assert incident.verdict is not None
    assert incident.verdict.kind == "slow link"
    assert epoch(cluster) == before
    assert cluster.coordinator.tasks["t"].speeds.slow == {}
    cluster.hear(msg.SlowLinkEnded(**link, because="as before"))
    assert incident.closed


def test_a_slow_link_of_a_worker_that_is_gone_can_end() -> None:
    cluster = running()
    link = {"task": "t", "worker": Worker(0, 0), "peer": SLOW}
    cluster.hear(msg.SlowLinkFound(**link, because="its rate is a tenth"))
    incident = one(cluster)
    assert slow_links(cluster.coordinator.log, cluster.coordinator.tasks["t"]) == [(Worker(0, 0), SLOW)]
    cluster.silence(cluster.coordinator.tasks["t"].seats[SLOW].node)
    cluster.overdue(Worker(0, 1), busy=False, doing="A[2 stage 1 1.0]", elapsed_s=1.0)
    assert SLOW not in cluster.coordinator.tasks["t"].seats
    cluster.hear(msg.SlowLinkEnded(**link, because="worker 1:1 is gone"))
    assert incident.closed
    assert slow_links(cluster.coordinator.log, cluster.coordinator.tasks["t"]) == []


def test_after_a_restart_of_the_coordinator_a_slow_link_still_ends() -> None:
    cluster = running()
    sender, receiver = Worker(0, 0), Worker(1, 0)
    cluster.hear(msg.SlowLinkFound(task="t", worker=sender, peer=receiver, because="its rate is a tenth"))
    incident, thinking = one(cluster), Thinking()  # rates are not in the journal
    for step in range(3, 20):
        for worker in (sender, receiver):
            sent = {str(sender if worker == receiver else receiver): (1_000_000, 0.1)}
            report = msg.TimesReported(task="t", worker=worker, incarnation=1, step=step, times={}, sent=sent)
            for news in thinking.learn(cluster.coordinator, report):
                cluster.hear(news)
    assert incident.closed


def test_a_verdict_on_an_earlier_process_counts_for_nothing() -> None:
    cluster = running()
    cluster.exits(SLOW, "killed by SIGKILL")
    before = epoch(cluster)
    slowed(cluster, incarnation=1)
    assert epoch(cluster) == before
    assert cluster.coordinator.tasks["t"].speeds.slow == {}


def test_a_slowness_found_while_a_death_is_planned_for_is_planned_for_next() -> None:
    cluster = running()
    task = cluster.coordinator.tasks["t"]
    exited = ev.WorkerExited(worker=Worker(0, 0), incarnation=1, reason="killed by SIGKILL")
    assert task.recovery is not None
    node = task.seats[Worker(0, 0)].node
    cluster.crew.actors.pop(("t", Worker(0, 0)))
    number = cluster.coordinator.nodes[node].heard + 1
    actions = cluster.coordinator.handle(
        msg.FromNode(
            node=node,
            boot=cluster.coordinator.nodes[node].boot,
            number=number,
            report=msg.TaskEvent(task="t", event=exited),
            sender=msg.Sender("t", Worker(0, 0), 1),
        ),
        1.0,
    )
    for worker in (Worker(0, 1), Worker(1, 0), SLOW):
        ledger = ev.LedgerReported(worker=worker, epoch=task.recovery.epoch, ledger=Ledger(step=2))
        actions = cluster.coordinator.handle(msg.PlanAnswered(task="t", event=ledger), 1.0)
    (asked,) = [action for action in actions if isinstance(action, msg.Think)]
    assert asked.slow == {}
    slowed(cluster)
    answer = cluster.thinking.scheduler(task).answer(asked.question, asked.slow)
    actions = cluster.coordinator.handle(msg.PlanAnswered(task="t", event=answer), 1.0)
    assert isinstance(task.recovery.phase, Gathering)  # for the schedule that knows
    assert task.speeds.slow == {SLOW: 2.0}


def test_every_microbatch_of_a_balanced_step_has_one_host() -> None:
    desk = TaskScheduler(Shape(2, 2, 4), "staggered")
    question = ComputePlan(epoch=1, broken={}, dead=frozenset(), because="a test")
    steady = desk.answer(question, {SLOW: 3.0}).steady
    for stage in range(2):
        hosted = [
            op.microbatch
            for worker, ops in steady.items()
            for op in ops
            if op.kind is Kind.F and worker.stage == stage
        ]
        assert len(hosted) == len(set(hosted)) == 8


def slow_in(nodes: str, factor: float, *, steps: int = 100_000) -> FakeCluster:
    """Two replicas of two stages on nodes of two slots, a planner, steps of half a second, a slow worker."""
    cluster = FakeCluster(nodes=dict.fromkeys(nodes, 2), planned=True)
    cluster.submit(shape=Shape(2, 2, 4), steps=steps)
    cluster.seal()
    known = cluster.thinking.measured.of("t")
    known.last, known.steps = (2, 2, 4), {(2, 2, 4): deque([0.5, 0.5, 0.5])}
    slowed(cluster, factor=factor, incarnation=cluster.coordinator.tasks["t"].seats[SLOW].incarnation)
    return cluster


def test_a_slow_worker_moves_to_a_free_slot_where_that_pays() -> None:
    cluster = slow_in("abc", 3.0)
    (incident,) = cluster.coordinator.log.incidents
    assert [remedy.what for remedy in incident.remedies][-1] == "move it to a free slot"
    assert "times as long; in another slot the task is" in incident.remedies[-1].because
    before = {n.name: set(n.isolated_slots) for n in cluster.coordinator.nodes.values() if n.isolated_slots}
    assert len(before) == 1
    seat = cluster.coordinator.tasks["t"].seats[SLOW]
    assert seat.node not in before or seat.slot not in before[seat.node]
    assert SLOW not in cluster.coordinator.tasks["t"].speeds.slow
    assert not list(cluster.coordinator.log.open_ones())
    cluster.coordinator.validate()


def test_a_slow_worker_stays_where_a_move_does_not_pay() -> None:
    """No free slot; hardly slower; the task ends before another process has started."""
    for cluster in (slow_in("ab", 3.0), slow_in("abc", 1.0), slow_in("abc", 3.0, steps=5)):
        assert not any(node.isolated_slots for node in cluster.coordinator.nodes.values())
        task = cluster.coordinator.tasks["t"]
        assert not task.seats[SLOW].leaving
        assert SLOW in task.speeds.slow  # its peers run some of its work


def test_a_slow_worker_is_slow_in_any_shape() -> None:
    """The planner took the fastest worker of each stage for all of them, and a real run left its shape for
    nothing. With four peers in one stage there really is more to be gained than with two.
    """
    speed = TaskSpeed(Shape(2, 2, 4), TaskMeasurements(), {SLOW: 3.0})
    own, others = speed.own((2, 2)).throughput[4], speed.others(range(1, 5), (), 6)
    best = {
        stages: max(o.throughput[min(4, len(o.throughput) - 1)] for o in others if o.shape.stages == stages)
        for stages in (1, 2, 4)
    }
    assert own == pytest.approx(speed.now((2, 2)))
    assert best[2] <= 1.001 * own
    assert best[4] < own < best[1] < 4.0


def slow_link(cluster: FakeCluster, worker: Worker, peer: Worker) -> None:
    because = f"what worker {worker} sends to worker {peer} goes at 1 MB/s, usual are 10 MB/s"
    cluster.hear(msg.SlowLinkFound(task="t", worker=worker, peer=peer, because=because))


def links_slow_in(nodes: str, now_s: float, *, steps: int = 100_000, slots: int = 1) -> FakeCluster:
    """Three replicas on nodes of one slot each; the links of one of them are slow."""
    cluster = FakeCluster(nodes=dict.fromkeys(nodes, slots), planned=True)
    cluster.submit(shape=Shape(3, 1, 2), steps=steps)
    cluster.seal()
    known = cluster.thinking.measured.of("t")
    known.last = (3, 1, 3)
    known.steps = {known.last: deque([0.5, 0.5, 0.5, 0.5, 0.5, now_s, now_s, now_s])}
    slow_link(cluster, Worker(1, 0), Worker(0, 0))
    assert not any(node.state == "isolated" for node in cluster.coordinator.nodes.values()), (
        "one has two ends"
    )
    slow_link(cluster, Worker(2, 0), Worker(1, 0))
    return cluster


def test_the_workers_of_the_node_that_all_slow_links_share_move_where_that_pays() -> None:
    cluster = links_slow_in("abcd", 2.0)
    isolated = [node for node in cluster.coordinator.nodes.values() if node.state == "isolated"]
    assert [node.name for node in isolated] == ["b"]
    task = cluster.coordinator.tasks["t"]
    assert {seat.node for seat in task.seats.values() if not seat.leaving} == {"a", "c", "d"}
    remedies = {i.remedies[-1].what for i in cluster.coordinator.log.incidents if "link" in i.what}
    assert remedies == {"move the workers of node b"}
    because = cluster.coordinator.log.incidents[0].remedies[-1].because
    assert "steps take 2 s since the link of node b is slow, before 0.5 s" in because
    assert "300% faster" in because
    cluster.coordinator.validate()


def test_the_workers_of_a_slow_link_stay_where_a_move_does_not_pay() -> None:
    """No free slot; steps are hardly longer; the task ends first."""
    for cluster in (
        links_slow_in("abc", 2.0),
        links_slow_in("abcd", 0.5),
        links_slow_in("abcd", 2.0, steps=4),
    ):
        assert not any(node.state == "isolated" for node in cluster.coordinator.nodes.values())
        assert not any(seat.leaving for seat in cluster.coordinator.tasks["t"].seats.values())


def test_a_slow_link_of_one_task_takes_no_slot_from_another() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 2), planned=True)
    cluster.submit(shape=Shape(3, 1, 2), steps=100_000)
    cluster.submit("u", shape=Shape(1, 1, 2), steps=100_000)
    cluster.seal()
    tasks = cluster.coordinator.tasks
    other = tasks["u"].seats[Worker(0, 0)]
    slow = next(w for w, seat in tasks["t"].seats.items() if seat.node == other.node)
    known = cluster.thinking.measured.of("t")
    known.last, steps = (3, 1, 3), deque([0.5] * 5 + [2.0] * 3)
    known.steps = {known.last: steps}
    for peer in set(tasks["t"].seats) - {slow}:
        slow_link(cluster, slow, peer)
    node = cluster.coordinator.nodes[other.node]
    if len({seat.node for seat in tasks["t"].seats.values()}) == 3:
        assert node.state == "up"
        assert set(range(2)) - set(node.isolated_slots) == set(other.slots)
    assert tasks["u"].seats[Worker(0, 0)] == other
    cluster.coordinator.validate()


def alone_in(nodes: str, *, steps: int = 100_000, memory_port: int = 9) -> FakeCluster:
    """One replica of two stages on nodes of one slot, and the worker of the second stage is slow."""
    cluster = FakeCluster(nodes=dict.fromkeys(nodes, 1), planned=True, memory_port=memory_port)
    cluster.submit(shape=Shape(1, 2, 4), steps=steps)
    cluster.seal()
    known = cluster.thinking.measured.of("t")
    known.last, known.steps = (1, 2, 2), {(1, 2, 2): deque([0.5, 0.5, 0.5])}
    lone = Worker(0, 1)
    slowed(cluster, lone, 3.0, cluster.coordinator.tasks["t"].seats[lone].incarnation)
    return cluster


def test_a_slow_worker_without_a_peer_moves_with_the_state_safe_and_no_step_is_done_twice() -> None:
    cluster = alone_in("abc")
    task = cluster.coordinator.tasks["t"]
    slow_node = task.seats[Worker(0, 1)].node
    (incident,) = cluster.coordinator.log.incidents
    assert [r.what for r in incident.remedies] == ["none: an operator can help", "move it to a free slot"]
    assert not task.seats[Worker(0, 1)].leaving, "it trains on to the end of its step"
    assert set(cluster.coordinator.nodes[slow_node].isolated_slots) == {0}
    done = task.next_step
    cluster.seal()
    assert task.next_step == done + 1
    assert task.seats[Worker(0, 1)].node != slow_node
    assert slow_node not in {seat.node for seat in task.seats.values()}
    assert not task.speeds.slow
    assert incident.closed
    cluster.coordinator.validate()


def test_a_slow_worker_without_a_peer_stays_where_that_does_not_pay_or_its_state_is_nowhere_safe() -> None:
    for cluster in (alone_in("ab"), alone_in("abc", steps=6), alone_in("abc", memory_port=0)):
        assert not any(node.isolated_slots for node in cluster.coordinator.nodes.values())
        assert cluster.coordinator.tasks["t"].speeds.slow == {Worker(0, 1): 3.0}


def test_all_slow_workers_of_a_machine_move_together() -> None:
    """One of them alone gains nothing: the step waits for the other stage."""
    cluster = FakeCluster(nodes=dict.fromkeys("ab", 2), planned=True)
    cluster.submit(shape=Shape(2, 2, 4), steps=100_000)
    cluster.seal()
    known = cluster.thinking.measured.of("t")
    known.last, known.steps = (2, 2, 4), {(2, 2, 4): deque([0.5, 0.5, 0.5])}
    task = cluster.coordinator.tasks["t"]
    machine = task.seats[SLOW].node
    there = sorted(worker for worker, seat in task.seats.items() if seat.node == machine)
    assert len({worker.stage for worker in there}) == 2
    for worker in there:
        slowed(cluster, worker, 3.0, task.seats[worker].incarnation)
    cluster.join("c", 1)
    assert not cluster.coordinator.nodes[machine].isolated_slots, "one slot is not enough"
    cluster.join("d", 1)
    assert set(cluster.coordinator.nodes[machine].isolated_slots) == {0, 1}
    assert machine not in {seat.node for seat in task.seats.values()}
    assert not list(cluster.coordinator.log.open_ones())
    cluster.coordinator.validate()
