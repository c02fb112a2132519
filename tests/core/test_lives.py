"""The lives of a script task, through the whole coordinator: events in, orders to nodes out."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.core.cluster import snapshot
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.task import TaskState
from everstep.plan.ask import choose
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.messages import RankPace, RankPosition, RankRules, Sender
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape

CONNECTION = "RuntimeError: Connection closed by peer [10.0.0.2]:4711"


class Cluster:
    """A coordinator, and nodes that do at once what they are ordered."""

    def __init__(self, nodes: int, *, slots: int = 2, planned: bool = False) -> None:
        self.machine, self.now, self.slots = Coordinator(planned=planned), 100.0, slots
        self._nested = 0
        self.sent: list[msg.Order] = []
        self.begun: list[msg.BeginLife] = []
        self.numbers: dict[str, int] = {}
        self.ended: list[str] = []
        self.deaf: set[str] = set()  # these carry nothing out
        for number in range(nodes):
            self.join(f"n{number}")

    def join(self, node: str, boot: str = "1") -> None:
        self.numbers[node] = 0
        self.deaf.discard(node)
        self.hear(msg.NodeJoined(node=node, boot=boot, slots=self.slots, host=node))

    def submit(self, **rules: Any) -> None:
        ranks = RankRules(
            **{"command": ("train.py",), "run_id": "x", "folder": "/", "ranks": 2, "most": 2, **rules}
        )
        shape = Shape(ranks.most, 1, 1, shards=ranks.ranks)
        self.hear(msg.TaskSubmitted(task="t", job=None, shape=shape, steps=0, secret="s", ranks=ranks))

    def hear(self, event: msg.ClusterEvent) -> None:
        """And what is due then, as a driver does."""
        self._hear(event)
        while not self._nested and (due := self.machine.due_at()) is not None and due <= self.now:
            self._hear(msg.TimePassed())

    def _hear(self, event: msg.ClusterEvent) -> None:
        self._nested += 1
        self._handle(event)
        self._nested -= 1

    def _handle(self, event: msg.ClusterEvent) -> None:
        for action in self.machine.handle(event, self.now):
            match action:
                case msg.Dispatch():
                    self.sent.append(action.order)
                    if action.node not in self.deaf:
                        self.carry_out(action.node, action.order)
                case msg.TaskEnded():
                    self.ended.append(action.state)
                case msg.ChooseAssignment():
                    self._hear(choose(self.machine, action.version, action.because, now=self.now))
        self.machine.validate()
        frozen = snapshot.freeze(self.machine)
        thawed = Coordinator()
        snapshot.thaw(thawed, frozen)
        assert snapshot.freeze(thawed) == frozen

    def carry_out(self, node: str, order: msg.Order) -> None:
        if getattr(order, "task", "t") != "t":
            return
        match order:
            case msg.StartProcess():
                self.say(node, msg.RanksIdle, order, life=0, address=(node, 7), memory=(node, 9))
            case msg.BeginLife():
                self.begun.append(order)
                self.say(node, msg.RanksStarted, order, life=order.life)
            case msg.EndLife():
                self.say(node, msg.RanksIdle, order, life=order.life, address=(node, 7 + order.life))
            case msg.CloseTask() | msg.KillProcess():
                for worker, seat in list(self.task.seats.items()):
                    if seat.node == node:
                        self.exited(worker, "exited with code 0")

    def say(self, node: str, kind: Any, about: Any, **fields: Any) -> None:
        sender = Sender("t", about.worker, about.incarnation)
        report = kind(task="t", worker=about.worker, incarnation=about.incarnation, **fields)
        self.report(node, report, sender)

    def report(self, node: str, report: msg.NodeReport, sender: Sender | None) -> None:
        self.numbers[node] += 1
        boot = self.machine.nodes[node].boot
        self.hear(msg.FromNode(node=node, boot=boot, number=self.numbers[node], report=report, sender=sender))

    def exited(self, worker: Worker, reason: str) -> None:
        seat = self.task.seats[worker]
        event = ev.WorkerExited(worker=worker, incarnation=seat.incarnation, reason=reason)
        sender = Sender("t", worker, seat.incarnation)
        self.report(seat.node, msg.TaskEvent(task="t", event=event), sender)

    def keeper(self, group: int) -> Any:
        return self.life[group]

    def tell(self, group: int, kind: Any, **fields: Any) -> None:
        order = self.keeper(group)
        self.say(self.task.seats[order.worker].node, kind, order, life=order.life, **fields)

    def fail(self, rank: int, text: str, **fields: Any) -> None:
        group = rank // self.task.request.ranks.ranks  # type: ignore[union-attr]
        given = {"source": "exit", "text": text, "what": f"rank {rank} {text}", **fields}
        self.tell(group, msg.RankFailed, rank=rank, **given)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.hear(msg.TimePassed())

    @property
    def task(self) -> Any:
        return self.machine.tasks["t"]

    @property
    def life(self) -> list[msg.BeginLife]:
        last = self.begun[-1].life
        return [order for order in self.begun if order.life == last]

    @property
    def incident(self) -> Any:
        return self.machine.log.incidents[-1]


def test_a_life_gives_every_node_its_ranks_as_torchrun_numbers_them() -> None:
    cluster = Cluster(2)
    cluster.submit()
    first, second = cluster.life
    assert (first.group, first.first_rank, first.world, first.hosts_store) == (0, 0, 4, True)
    assert (second.group, second.first_rank, second.world, second.hosts_store) == (1, 2, 4, False)
    assert first.master == second.master == ("n0", 7)
    cluster.tell(0, msg.RanksIdle, address=("n0", 8), codes={0: 0, 1: 0})
    assert cluster.task.state is TaskState.RUNNING
    cluster.tell(1, msg.RanksIdle, address=("n1", 8), codes={2: 0, 3: 0})
    assert cluster.ended == ["finished"]
    assert cluster.task.because == "all 4 ranks have ended with code 0"


def test_nothing_begins_with_fewer_nodes_than_asked_for_and_more_are_waited_for_a_moment() -> None:
    cluster = Cluster(1)
    cluster.submit(least=2, most=3)
    assert not cluster.begun
    assert cluster.task.because == "slots needed: 4, free: 2"
    cluster.join("n1")
    assert not cluster.begun, "a third one may be on its way"
    cluster.wait(5.0)
    assert [order.num_groups for order in cluster.life] == [2, 2]


def test_a_killed_rank_ends_the_life_of_all_and_the_next_begins_with_another_store() -> None:
    cluster = Cluster(2)
    cluster.submit()
    cluster.fail(3, "killed by SIGKILL")
    assert [order.life for order in cluster.begun] == [1, 1, 2, 2]
    assert cluster.life[0].restarts == 1
    assert cluster.life[0].master == ("n0", 8)
    incident = cluster.incident
    assert (incident.what, incident.node, incident.closed) == ("rank 3 killed by SIGKILL", "n1", True)
    assert incident.remedies[0].what == "restart all ranks, 1 of 3"


def test_hearsay_waits_for_a_better_witness_on_another_node() -> None:
    cluster = Cluster(2)
    cluster.submit()
    cluster.fail(0, CONNECTION, source="exception")
    cluster.fail(1, CONNECTION, source="exception")
    assert len(cluster.begun) == 2, "no life has ended yet"
    cluster.now += 0.1
    cluster.fail(2, "killed by SIGSEGV")
    assert cluster.incident.what == "rank 2 killed by SIGSEGV"
    assert "ranks 0, 1 only lost touch with it" in [each.text for each in cluster.incident.evidence]


def test_hearsay_alone_names_the_one_that_spoke_first() -> None:
    cluster = Cluster(2)
    cluster.submit()
    cluster.fail(1, CONNECTION, source="exception")
    cluster.wait(0.3)
    assert cluster.incident.what.startswith("rank 1 ")
    assert len(cluster.begun) == 4


def test_a_rank_that_left_early_is_the_cause_of_closed_connections() -> None:
    """Its data ended before that of the others; they were named until now."""
    cluster = Cluster(2)
    cluster.submit()
    cluster.fail(3, CONNECTION, source="exception", finished=(2,))
    cluster.wait(1.0)
    assert cluster.incident.what.startswith("rank 2 ended with code 0 while others still communicate: rank 3")
    assert cluster.incident.rank == 2


def test_a_crash_after_a_rank_left_early_is_laid_to_that_rank() -> None:
    """Seen on a GPU: rank 3 of 4 ended with code 0, and NCCL crashed in rank 1. Where most ranks have come to
    the end, a crash is the crashed rank's own.
    """
    for finished, named in (((3,), 3), ((0, 2, 3), 1)):
        cluster = Cluster(2)
        cluster.submit()
        cluster.fail(1, "killed by SIGSEGV", finished=finished)
        cluster.wait(1.0)
        assert cluster.incident.rank == named


def test_a_rank_that_has_left_its_script_is_the_cause_though_its_process_has_not_ended_yet() -> None:
    """Modules take their time to end; and it may be on a node where nothing fails."""
    cluster = Cluster(2)
    cluster.submit()
    cluster.fail(3, CONNECTION, source="exception")
    cluster.tell(0, msg.RanksLeft, ranks=(1,))
    cluster.wait(1.0)
    assert cluster.incident.what.startswith("rank 1 ended with code 0 while others still communicate: rank 3")
    assert (cluster.incident.rank, cluster.incident.node) == (1, "n0")
    assert "rank 1 came to the end of the script before the others" in cluster.incident.verdict.because


def paces(ranks: range, late: int | None) -> tuple[RankPace, ...]:
    return tuple(
        RankPace(
            rank=rank,
            group="0",
            step_s=0.2,
            entered={number: number * 0.2 + 0.05 * (rank == late) for number in range(8, 24)},
        )
        for rank in ranks
    )


def test_a_rank_that_enters_collectives_last_is_reported_after_two_looks_until_it_does_not() -> None:
    cluster = Cluster(2)
    cluster.submit()

    def look(late: int | None) -> None:
        for group, ranks in enumerate((range(2), range(2, 4))):
            cluster.tell(group, msg.RanksPaced, paces=paces(ranks, late))

    look(3)
    assert not cluster.machine.log.incidents
    look(3)
    assert cluster.incident.what == "rank 3 is slow"
    assert (cluster.incident.rank, cluster.incident.node) == (3, "n1")
    assert "rank 3 enters 16 of 16 collectives last, 50 ms after" in cluster.incident.verdict.because
    assert not cluster.incident.stops_training
    look(None)
    assert cluster.incident.resumed_at is None
    look(None)
    assert cluster.incident.resumed_at is not None
    assert len(cluster.machine.log.incidents) == 1
    assert len(cluster.begun) == 2  # nothing was ended


def slow_rank(nodes: int, *, after_s: float = 20.0, saves: bool = False) -> Cluster:
    """Two nodes of two ranks, and a planner; rank 3 makes steps of 150 ms last 200."""
    cluster = Cluster(nodes, planned=True)
    cluster.submit(least=2)
    if saves:
        cluster.tell(0, msg.RankProgressed, rank=0, step=10, is_saved=True)
    cluster.wait(after_s)
    for _ in range(2):
        for group, ranks in enumerate((range(2), range(2, 4))):
            cluster.tell(group, msg.RanksPaced, paces=paces(ranks, 3))
    return cluster


def test_the_ranks_of_a_slow_node_move_to_a_free_one_where_that_pays() -> None:
    cluster = slow_rank(3)
    assert {seat.node for seat in cluster.task.seats.values()} == {"n0", "n2"}
    incident = cluster.machine.log.incidents[0]
    assert [remedy.what for remedy in incident.remedies] == ["wait for it", "move it to a free slot"]
    assert "steps take 1.33 times as long as without its ranks; on another node the task is 33% faster" in (
        incident.remedies[-1].because
    )
    assert incident.closed
    assert set(cluster.machine.nodes["n1"].isolated_slots) == {0, 1}
    assert [order.life for order in cluster.begun] == [1, 1, 2, 2]
    assert cluster.task.lives is not None
    assert cluster.task.lives.failures == 0, "it is no failure of the script"


def test_the_ranks_of_a_slow_node_stay_without_a_free_one() -> None:
    cluster = slow_rank(2)
    assert len(cluster.begun) == 2
    assert cluster.task.speeds.awaited
    cluster.join("n2")
    assert {seat.node for seat in cluster.task.seats.values()} == {"n0", "n2"}


def test_slow_ranks_move_when_the_script_has_just_saved() -> None:
    """Not before: what was done since the last time would be done again."""
    cluster = slow_rank(3, saves=True)
    assert len(cluster.begun) == 2
    cluster.tell(0, msg.RankProgressed, rank=0, step=20, is_saved=True)
    assert len(cluster.begun) == 4
    assert {seat.node for seat in cluster.task.seats.values()} == {"n0", "n2"}


def test_a_slow_ranks_incident_ends_with_its_life_and_is_not_what_ended_it() -> None:
    cluster = Cluster(2)
    cluster.submit()
    for _ in range(2):
        for group, ranks in enumerate((range(2), range(2, 4))):
            cluster.tell(group, msg.RanksPaced, paces=paces(ranks, 3))
    cluster.fail(3, "killed by SIGKILL", code=-9)
    slow, killed = cluster.machine.log.incidents
    assert (slow.what, killed.what) == ("rank 3 is slow", "rank 3 killed by SIGKILL")
    assert slow.resumed_at is not None
    assert len(cluster.begun) == 4


def test_a_lost_node_is_replaced_by_a_spare_and_costs_no_restart() -> None:
    cluster = Cluster(3)
    cluster.submit()
    cluster.deaf.add("n1")
    cluster.hear(msg.NodeFellSilent(node="n1", silent_s=1.0))
    assert len(cluster.begun) == 2, "its line may be cut, and its ranks train"
    cluster.fail(0, CONNECTION, source="exception")  # its peers have lost it too
    assert {cluster.task.seats[order.worker].node for order in cluster.life} == {"n0", "n2"}
    assert cluster.life[0].restarts == 0
    assert cluster.incident.node == "n1"


def test_a_node_that_falls_silent_after_its_peers_have_failed_is_given_up_at_once() -> None:
    cluster = Cluster(3)
    cluster.submit()
    cluster.deaf.add("n1")
    cluster.fail(0, CONNECTION, source="exception")
    cluster.wait(0.3)
    assert len(cluster.begun) == 2, "its keeper has not said that its ranks are gone"
    cluster.now += 0.7
    cluster.hear(msg.NodeFellSilent(node="n1", silent_s=1.1))
    assert {cluster.task.seats[order.worker].node for order in cluster.life} == {"n0", "n2"}


def test_a_node_that_is_lost_while_a_life_ends_for_another_reason_is_not_waited_for_long() -> None:
    cluster = Cluster(3)
    cluster.submit()
    cluster.deaf.add("n1")
    cluster.fail(0, "killed by SIGKILL")
    cluster.hear(msg.NodeFellSilent(node="n1", silent_s=1.0))
    assert len(cluster.begun) == 2
    cluster.wait(3.0)
    assert {cluster.task.seats[order.worker].node for order in cluster.life} == {"n0", "n2"}


def test_ranks_that_stand_still_are_witnesses_against_a_silent_node() -> None:
    cluster = Cluster(2)
    cluster.submit(least=1)
    cluster.deaf.add("n1")
    cluster.hear(msg.NodeFellSilent(node="n1", silent_s=1.0))
    cluster.tell(0, msg.RanksStill, still_s=2.0)
    assert [order.num_groups for order in cluster.life] == [1]


def test_a_node_that_returns_is_let_in_when_the_script_says_that_its_state_is_safe() -> None:
    cluster = Cluster(2)
    cluster.submit(least=1)
    cluster.tell(0, msg.RankProgressed, rank=0, step=5, is_saved=True)
    cluster.deaf.add("n1")
    cluster.hear(msg.NodeLeft(node="n1"))
    assert [order.num_groups for order in cluster.life] == [1]
    cluster.join("n1", boot="2")
    cluster.wait(60.0)
    assert len(cluster.life) == 1, "what it has done since would be lost"
    cluster.tell(0, msg.RankProgressed, rank=0, step=9, is_saved=True)
    assert [order.num_groups for order in cluster.life] == [2, 2]
    assert cluster.life[0].restarts == 0


def test_a_script_that_never_says_so_grows_once_the_new_node_has_waited() -> None:
    cluster = Cluster(1)
    cluster.submit(least=1)
    cluster.wait(5.0)
    assert len(cluster.life) == 1
    cluster.join("n1")
    cluster.wait(4.0)
    assert len(cluster.life) == 1
    cluster.wait(6.0)
    assert [order.num_groups for order in cluster.life] == [2, 2]


def test_restarts_are_counted_and_wait_longer_each_time() -> None:
    cluster = Cluster(1)
    cluster.submit(most=1, max_restarts=2)
    cluster.fail(0, "killed by SIGKILL")
    assert cluster.life[0].life == 2
    cluster.fail(0, "killed by SIGKILL")
    assert cluster.life[0].life == 2
    cluster.wait(1.0)
    assert cluster.life[0].life == 3
    cluster.fail(0, "killed by SIGKILL")
    assert cluster.ended == ["failed"]
    assert cluster.task.because == "rank 0 killed by SIGKILL. All 2 restarts are used up."


def test_a_life_that_has_trained_for_a_while_is_followed_by_the_next_at_once() -> None:
    cluster = Cluster(2)
    cluster.submit(max_restarts=9)
    for kill in range(1, 7):
        cluster.wait(60.0)
        cluster.fail(1, "killed by SIGKILL")
        cluster.wait(1.0)
        assert cluster.life[0].life == kill + 1


def test_the_same_mistake_twice_is_not_tried_again() -> None:
    cluster = Cluster(1)
    cluster.submit(most=1, max_restarts=9)
    for _ in range(2):
        cluster.fail(0, "NameError: x", source="exception", program_error="NameError: x at train.py:4")
    assert cluster.ended == ["failed"]
    assert "The same error twice" in cluster.task.because


def test_a_script_that_needs_more_ranks_than_the_least_is_told_so() -> None:
    cluster = Cluster(1)
    cluster.submit(least=1, most=2, join_s=1.0)
    cluster.wait(1.0)
    for _ in range(2):
        assert len(cluster.life) == 1
        error = "ValueError: 2 ranks are not divisible by tp=4"
        cluster.fail(0, error, source="exception", program_error=f"{error} at train.py:3 in <module>")
        cluster.wait(0.0)
    assert cluster.ended == ["failed"]
    assert cluster.task.because.endswith("or it needs more than the 2 ranks it had; MIN is 1.")


def test_a_gpu_that_two_tasks_call_broken_isolates_its_node_and_the_words_of_one_script_do_not() -> None:
    cluster = Cluster(3)
    cluster.submit(least=1, max_restarts=9)
    for _ in range(4):
        cluster.fail(2, "OSError: no disk", source="exception")
        cluster.wait(60.0)
    broken = "Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"
    cluster.fail(2, broken)
    cluster.wait(60.0)
    assert {node.admin for node in cluster.machine.nodes.values()} == {"up"}
    assert [order for order in cluster.sent if isinstance(order, msg.CheckNode)], "the node is checked"
    cluster.machine.nodes["n1"].accused["another"] = cluster.now
    cluster.fail(2, broken)
    cluster.wait(60.0)
    isolated = [node.name for node in cluster.machine.nodes.values() if node.admin == "isolated"]
    assert isolated == ["n1"]
    assert {cluster.task.seats[order.worker].node for order in cluster.life} == {"n0", "n2"}


def test_a_hang_is_called_one_when_no_node_moves_and_names_the_rank_the_others_wait_for() -> None:
    cluster = Cluster(2)
    cluster.submit(hang_after_s=10.0)
    cluster.now += 20
    cluster.tell(0, msg.RanksStill, still_s=15.0)
    assert not [order for order in cluster.sent if isinstance(order, msg.LocateRanks)]
    cluster.tell(1, msg.RanksStill, still_s=12.0)
    assert len([order for order in cluster.sent if isinstance(order, msg.LocateRanks)]) == 2

    cluster.tell(0, msg.RanksLocated, positions=(at(0, 8), at(1, 8)))
    cluster.tell(1, msg.RanksLocated, positions=(at(2, 7), at(3, 8)))
    assert cluster.incident.what == "hang at rank 2: no rank has made progress for 12.0 s"
    assert cluster.incident.node == "n1"
    because = "rank 2 has not entered collective 8 of process group 0, in which 3 ranks wait"
    assert because in [each.text for each in cluster.incident.evidence]
    assert len(cluster.begun) == 4


def test_no_rank_is_called_hung_while_its_node_is_not_heard() -> None:
    """They stood still for a moment when the coordinator's line was cut, and trained on behind it."""
    cluster = Cluster(2)
    cluster.submit(hang_after_s=10.0)
    for group in (0, 1):
        cluster.tell(group, msg.RanksStill, still_s=2.0)
    cluster.now += 0.9
    for node in ("n0", "n1"):
        cluster.deaf.add(node)
        cluster.hear(msg.NodeFellSilent(node=node, silent_s=1.0))
    for _ in range(200):
        cluster.wait(1.0)
    assert looks(cluster) == 0
    assert not [order for order in cluster.sent if isinstance(order, msg.EndLife)]
    for node in ("n0", "n1"):
        cluster.deaf.discard(node)
        cluster.hear(msg.NodeJoined(node=node, boot="1", slots=2, host=node))
    assert len(cluster.begun) == 2
    for group in (0, 1):
        cluster.tell(group, msg.RanksStill, still_s=12.0)
    assert looks(cluster) == 2


def at(rank: int, number: int, **more: Any) -> RankPosition:
    place = "train.py:9 in step"
    return RankPosition(rank=rank, at=place, is_inside_torch=True, entered={"0": number}, **more)


def looks(cluster: Cluster) -> int:
    return len([order for order in cluster.sent if isinstance(order, msg.LocateRanks)])


def test_a_spinning_rank_is_named_first_and_ended_when_it_is_still_in_the_same_place() -> None:
    cluster = Cluster(2)
    cluster.submit(hang_after_s=10.0)
    lives = cluster.task.lives
    for group in (0, 1):
        cluster.tell(group, msg.RanksStill, still_s=2.0)
    assert looks(cluster) == 0
    cluster.wait(3.0)
    assert looks(cluster) == 2
    spins = at(2, 7, is_busy=True, stack="spin (train.py)")
    cluster.tell(0, msg.RanksLocated, positions=(at(0, 8), at(1, 8)))
    cluster.tell(1, msg.RanksLocated, positions=(spins, at(3, 8)))
    assert "rank 2 has not entered collective 8" in lives.suspicion
    assert len(cluster.begun) == 2, "nothing is ended yet"
    cluster.wait(5.0)
    assert looks(cluster) == 4
    cluster.tell(0, msg.RanksLocated, positions=(at(0, 8), at(1, 8)))
    cluster.tell(1, msg.RanksLocated, positions=(spins, at(3, 8)))
    assert cluster.incident.what == "hang at rank 2: no rank has made progress for 10.0 s"
    assert any("; it uses a CPU" in each.text for each in cluster.incident.evidence)
    assert len(cluster.begun) == 4
    assert lives.suspicion == ""


def test_ranks_that_all_compute_in_one_long_call_are_given_more_time_than_those_that_wait() -> None:
    """Lightning's loader made an index of ten million rows in one call; all ranks were restarted for it."""
    cluster = Cluster(2)
    cluster.submit(hang_after_s=10.0)
    made = {"stack": "__iter__ (sampler.py)", "is_busy": True}

    def look(still_s: float) -> None:
        cluster.now += 10.0
        for group in (0, 1):
            cluster.tell(group, msg.RanksStill, still_s=still_s)
        for group, ranks in enumerate(((0, 1), (2, 3))):
            positions = tuple(at(rank, 8, **made) for rank in ranks)
            cluster.tell(group, msg.RanksLocated, positions=positions)

    for still_s in (6.0, 12.0, 25.0):
        look(still_s)
        assert not cluster.machine.log.incidents
    look(60.0)
    assert cluster.incident.what == "hang: no rank has made progress for 60.0 s"


@pytest.mark.parametrize("seconds", [10.0, 1000.0])
def test_a_rank_that_works_while_the_others_wait_is_told_of_and_left_alone(seconds: float) -> None:
    """It writes a checkpoint, or evaluates: each time it is elsewhere."""
    cluster = Cluster(2)
    cluster.submit(hang_after_s=10.0)
    for group in (0, 1):
        cluster.tell(group, msg.RanksStill, still_s=2.0)
    passed, number = 0.0, 0
    while passed < seconds:
        cluster.wait(1.0)
        passed += 1.0
        if looks(cluster) > number:
            number = looks(cluster)
            works = at(0, 7, is_busy=True, stack=f"layer {number}")
            cluster.tell(0, msg.RanksLocated, positions=(works, at(1, 8)))
            cluster.tell(1, msg.RanksLocated, positions=(at(2, 8), at(3, 8)))
    assert number > 2
    assert len(cluster.begun) == 2
    assert "rank 0 may be at work: its stack changes" in cluster.task.lives.suspicion


def test_without_a_limit_a_hang_is_reported_and_nothing_is_ended_until_a_rank_moves() -> None:
    cluster = Cluster(2)
    cluster.submit()
    for group in (0, 1):
        cluster.tell(group, msg.RanksStill, still_s=2.0)
    cluster.wait(57.0)
    assert looks(cluster) == 0
    cluster.wait(1.0)
    assert looks(cluster) == 2
    cluster.tell(0, msg.RanksLocated, positions=(at(0, 8), at(1, 8)))
    cluster.tell(1, msg.RanksLocated, positions=(at(2, 7), at(3, 8)))
    assert "rank 2 has not entered collective 8" in cluster.task.lives.suspicion
    assert len(cluster.begun) == 2
    cluster.tell(1, msg.RanksMoved)
    assert cluster.task.lives.suspicion == ""
    cluster.wait(600.0)
    assert looks(cluster) == 2


def test_a_rank_that_moves_while_stacks_are_collected_is_no_hang() -> None:
    cluster = Cluster(2)
    cluster.submit(hang_after_s=10.0)
    cluster.now += 20
    for group in (0, 1):
        cluster.tell(group, msg.RanksStill, still_s=12.0)
    cluster.tell(0, msg.RanksMoved)
    cluster.tell(0, msg.RanksLocated, positions=(at(0, 8), at(1, 8)))
    cluster.tell(1, msg.RanksLocated, positions=(at(2, 7), at(3, 8)))
    assert len(cluster.begun) == 2


def test_no_hang_while_one_node_moves() -> None:
    cluster = Cluster(2)
    cluster.submit(hang_after_s=10.0)
    cluster.now += 20
    cluster.tell(0, msg.RanksStill, still_s=15.0)
    cluster.tell(0, msg.RanksMoved)
    cluster.tell(1, msg.RanksStill, still_s=15.0)
    assert not [order for order in cluster.sent if isinstance(order, msg.LocateRanks)]


def test_a_drained_node_lets_its_ranks_save_and_the_rest_go_on() -> None:
    cluster = Cluster(2)
    cluster.submit(least=1)
    cluster.hear(msg.DrainRequested(node="n1"))
    assert not [order for order in cluster.sent if isinstance(order, msg.KillProcess)]
    assert [order.num_groups for order in cluster.life] == [1]
    assert not cluster.machine.log.incidents


def test_a_keeper_that_does_not_answer_is_ended() -> None:
    cluster = Cluster(2)
    cluster.submit(least=1)
    cluster.deaf.add("n1")
    cluster.fail(0, "killed by SIGKILL")
    cluster.wait(36.0)
    assert [o.worker for o in cluster.sent if isinstance(o, msg.KillProcess)] == [Worker(1, 0)]


def test_a_planner_can_give_its_slots_to_another_task() -> None:
    cluster = Cluster(2)
    cluster.submit()
    cluster.machine.policy.planned = True
    cluster.hear(msg.TaskSubmitted(task="u", job={}, shape=Shape(4, 1, 1), steps=9, secret="s"))
    version = cluster.machine.version
    cluster.hear(msg.AssignmentChosen(version=version, workers={"t": 0, "u": 4}, because="it is worth more"))
    assert cluster.task.state is TaskState.WAITING
    assert not cluster.task.seats


def test_cancelled_ranks_end_and_nothing_begins() -> None:
    cluster = Cluster(2)
    cluster.submit()
    cluster.hear(msg.CancelRequested(task="t"))
    assert cluster.ended == ["cancelled"]
    assert len(cluster.begun) == 2


@pytest.mark.parametrize("late", [1, 2])
def test_reports_of_an_earlier_life_do_not_count(late: int) -> None:
    cluster = Cluster(2)
    cluster.submit()
    old = cluster.life
    cluster.fail(0, "killed by SIGKILL")
    order = old[late - 1]
    node = cluster.task.seats[order.worker].node
    cluster.say(
        node, msg.RankFailed, order, life=1, rank=0, what="rank 0 exited", source="exit", text="exited"
    )
    assert cluster.life[0].life == 2
    assert len(cluster.machine.log.incidents) == 1


# ------------------------------------------------------------------ states in memory


def taken(cluster: Cluster, step: int) -> None:
    """Every node of the life hands over one file; copies are made at once."""
    for group in range(len(cluster.life)):
        files = {f"rank-{group}": msg.SnapshotFile(size=1, hash=f"{step}.{group}")}
        cluster.tell(group, msg.SnapshotTaken, step=step, files=files)


def copied(cluster: Cluster, failed: str = "") -> None:
    orders = [order for order in cluster.sent if isinstance(order, msg.CopySnapshot)]
    for order in orders:
        cluster.sent.remove(order)
        seat = cluster.task.seats.get(order.worker)
        if seat is not None and seat.node not in cluster.deaf:
            about = {"life": order.life, "step": order.step, "owner": order.owner, "failed": failed}
            cluster.say(seat.node, msg.SnapshotCopied, order, **about)


def test_a_state_that_two_nodes_keep_is_restored_after_one_of_them_is_lost() -> None:
    cluster = Cluster(3)
    cluster.submit(least=1, most=3)
    taken(cluster, 7)
    assert cluster.machine.tasks["t"].protected == 0, "no node has a copy yet"
    copied(cluster)
    assert cluster.task.protected == 7
    cluster.deaf.add("n1")
    cluster.hear(msg.NodeLeft(node="n1"))
    (first, second) = cluster.life
    assert first.restore == second.restore
    assert first.restore is not None
    assert (first.restore.step, len(first.restore.files)) == (7, 3)
    holders = {file.name: [host for host, _ in file.holders] for file in first.restore.files}
    assert holders == {"rank-0": ["n0"], "rank-1": ["n2"], "rank-2": ["n2", "n0"]}


def test_a_state_that_is_not_whole_is_not_restored() -> None:
    cluster = Cluster(2)
    cluster.submit(least=1)
    taken(cluster, 7)
    copied(cluster)
    cluster.tell(0, msg.SnapshotTaken, step=8, files={"rank-0": msg.SnapshotFile(size=1, hash="x")})
    cluster.fail(1, "killed by SIGKILL")
    assert cluster.life[0].restore is not None
    assert cluster.life[0].restore.step == 7


def test_states_that_come_faster_than_they_are_copied_are_passed_over_and_one_is_always_whole() -> None:
    """The third one removed the first, whose copy then came to nothing: the coordinator ended with it."""
    cluster = Cluster(2)
    cluster.submit(least=1)
    for step in range(1, 6):
        taken(cluster, step)
    copied(cluster)
    assert cluster.task.protected == 1
    taken(cluster, 6)
    assert {order.step for order in cluster.sent if isinstance(order, msg.CopySnapshot)} == {5}
    copied(cluster)
    assert cluster.task.protected == 5
    copied(cluster)
    assert cluster.task.protected == 6
    for step in range(7, 200):
        taken(cluster, step)
    assert len(cluster.machine.tasks["t"].recovery._book.snapshots) <= 5, "however long a copy takes"
    cluster.fail(1, "killed by SIGKILL")  # 199 waits to be copied, and all of it is there
    assert cluster.life[0].restore is not None
    assert cluster.life[0].restore.step == 199
    cluster.sent.clear()
    taken(cluster, 200)
    copied(cluster)
    assert cluster.task.protected == 200, "no copy of the life before is waited for"


def test_what_was_handed_over_last_is_the_newest_whatever_its_step() -> None:
    """A script that could not use state 8 began with its own checkpoint, of a lower step."""
    cluster = Cluster(2)
    cluster.submit(least=1)
    for step in (7, 8, 3, 4):
        taken(cluster, step)
        copied(cluster)
        assert cluster.task.protected == step
    cluster.fail(1, "killed by SIGKILL")
    assert cluster.life[0].restore is not None
    assert cluster.life[0].restore.step == 4


def test_states_whose_copies_failed_take_the_place_of_none_that_two_nodes_have() -> None:
    cluster = Cluster(2)
    cluster.submit(least=1)
    taken(cluster, 7)
    copied(cluster)
    for step in (8, 9, 10):
        taken(cluster, step)
        copied(cluster, failed="no room")
    cluster.deaf.add("n1")
    cluster.hear(msg.NodeLeft(node="n1"))
    (alone,) = cluster.life
    assert alone.restore is not None
    assert alone.restore.step == 7, "of 10 the files of n1 are gone"


def test_a_state_of_another_life_does_not_become_part_of_one_of_this_life() -> None:
    cluster = Cluster(2)
    cluster.submit(least=1)
    taken(cluster, 7)
    copied(cluster)
    cluster.deaf.add("n1")
    cluster.hear(msg.NodeLeft(node="n1"))
    (alone,) = cluster.life
    assert alone.restore is not None
    taken(cluster, 7)  # as the only node
    assert cluster.task.protected == 7
    cluster.fail(0, "killed by SIGKILL")
    assert cluster.life[0].restore is not None
    assert [file.name for file in cluster.life[0].restore.files] == ["rank-0"]


def test_without_its_nodes_a_state_is_lost_and_the_script_begins_with_its_own() -> None:
    cluster = Cluster(2)
    cluster.submit(least=1)
    taken(cluster, 7)  # and no copy was made yet
    cluster.deaf.add("n0")
    cluster.hear(msg.NodeLeft(node="n0"))
    assert [order.restore for order in cluster.life] == [None]


def drained(cluster: Cluster, failed: str = "") -> list[int]:
    """Every node writes what it was told to; the steps."""
    orders = [order for order in cluster.sent if isinstance(order, msg.DrainSnapshot)]
    for order in orders:
        cluster.sent.remove(order)
        node = cluster.task.seats[order.worker].node
        cluster.say(node, msg.SnapshotDrained, order, life=order.life, step=order.step, failed=failed)
    return [order.step for order in orders]


def test_a_state_on_disk_is_restored_when_both_nodes_that_kept_it_are_lost() -> None:
    cluster = Cluster(3)
    cluster.submit(least=1, most=3, snapshots="/shared")
    for step in (7, 8):
        taken(cluster, step)
        copied(cluster)
    assert drained(cluster) == [7, 7, 7], "8 waits: one state at a time is on its way"
    for node in ("n0", "n1"):  # n1 had the only copy of what n0 handed over
        cluster.deaf.add(node)
        cluster.hear(msg.NodeLeft(node=node))
    (alone,) = cluster.life
    assert alone.restore is not None
    assert alone.restore.step == 7
    assert [(file.name, file.holders) for file in alone.restore.files] == [
        (f"rank-{group}", ()) for group in range(3)
    ]


def test_a_state_that_could_not_be_written_is_followed_by_the_next() -> None:
    cluster = Cluster(2)
    cluster.submit(least=1, snapshots="/shared")
    taken(cluster, 7)
    copied(cluster)
    assert drained(cluster, failed="No space left on device") == [7, 7]
    taken(cluster, 8)
    copied(cluster)
    assert drained(cluster) == [8, 8]
    cluster.fail(0, "cannot be read", source="log", lost_snapshot=8)
    assert cluster.task.lives._book.on_disk is None, "what cannot be read is not tried again"


def test_a_state_that_a_node_cannot_read_is_given_up_for_the_one_before() -> None:
    cluster = Cluster(2)
    cluster.submit()
    for step in (6, 7):
        taken(cluster, step)
        copied(cluster)
    cluster.fail(0, "killed by SIGKILL")
    cluster.wait(1.0)
    assert cluster.life[0].restore.step == 7  # type: ignore[union-attr]
    cluster.fail(0, "cannot be read", source="log", lost_snapshot=7)
    cluster.wait(2.0)
    assert cluster.life[0].restore.step == 6  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("told", "own", "code"),
    [
        ({"source": "exit", "code": 3}, 3, 3),
        ({"source": "exit", "code": -9}, -9, 137),
        ({"source": "exception", "code": 1}, 5, 5),  # it ended by itself after it had raised
        ({"source": "exception", "code": 1}, -15, 1),  # it was ended while it was saying last words
        ({"source": "progress"}, -9, 1),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(
    told: dict[str, Any], own: int, code: int
) -> None:
    cluster = Cluster(1)
    cluster.submit(most=1, max_restarts=0)
    lives = cluster.task.lives
    cluster.deaf.add("n0")
    cluster.fail(1, "exited", **told)
    cluster.deaf.clear()
    cluster.tell(0, msg.RanksIdle, address=("n0", 8), codes={0: -15, 1: own})
    assert cluster.ended == ["failed"]
    assert lives.exit_code == code
    assert lives.exit_codes == {0: -15, 1: own}


def test_a_life_that_ends_well_after_another_that_failed_has_exit_code_0() -> None:
    cluster = Cluster(1)
    cluster.submit(most=1)
    lives = cluster.task.lives
    cluster.fail(1, "killed by SIGKILL", code=-9)
    assert len(cluster.begun) == 2
    cluster.tell(0, msg.RanksIdle, address=("n0", 8), codes={0: 0, 1: 0})
    assert (cluster.ended, lives.exit_code) == (["finished"], 0)


def test_an_incident_of_a_script_has_the_rank_and_its_traceback() -> None:
    cluster = Cluster(1)
    cluster.submit(most=1)
    cluster.fail(1, "OSError: no disk", source="exception", traceback="Traceback: here")
    assert (cluster.incident.rank, cluster.incident.traceback) == (1, "Traceback: here")
