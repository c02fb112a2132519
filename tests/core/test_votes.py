"""Votes: which steps and microbatches, who checks whom, and who is wrong when bits differ."""

from dataclasses import replace

import pytest

from everstep.core.faults.votes import Finding, judge_votes
from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.votes import Votes
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec, VerifySpec
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.shape import Shape
from everstep.protocol.work import Members, Resume
from tests.core.fake_cluster import FakeCluster

HOST, CHECKER, THIRD = Worker(0, 1), Worker(1, 1), Worker(2, 1)
M = Microbatch(0, 3)
RIGHT, WRONG, OTHER = "a1", "b2", "c3"


def differed(
    *runs: tuple[Worker, str, dict[str, str]] | tuple[Worker, str],
    microbatch: Microbatch | None = M,
    **more: object,
) -> ev.VoteDiffered:
    return ev.VoteDiffered(
        worker=CHECKER,
        host=HOST,
        epoch=1,
        step=7,
        microbatch=microbatch,
        runs=tuple(
            ev.VoteRun(worker=run[0], incarnation=1, whole=run[1], hashes=run[2] if len(run) > 2 else {})
            for run in runs
        ),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("runs", "finding", "wrong"),
    [
        # the host was wrong once: its replays agree with the checker
        ([(HOST, WRONG), (CHECKER, RIGHT), (HOST, RIGHT), (HOST, RIGHT), (CHECKER, RIGHT)], "wrong", HOST),
        ([(HOST, RIGHT), (CHECKER, WRONG), (HOST, RIGHT), (CHECKER, RIGHT)], "wrong", CHECKER),
        # a machine that computes wrong numbers again and again, each time others
        ([(HOST, WRONG), (CHECKER, RIGHT), (HOST, OTHER), (CHECKER, RIGHT)], "wrong", HOST),
        # all steady: the third decides
        ([(HOST, WRONG), (CHECKER, RIGHT), (HOST, WRONG), (CHECKER, RIGHT), (THIRD, RIGHT)], "wrong", HOST),
        ([(HOST, RIGHT), (CHECKER, WRONG), (CHECKER, WRONG), (THIRD, RIGHT)], "wrong", CHECKER),
        ([(HOST, RIGHT), (CHECKER, WRONG), (THIRD, OTHER)], "undecided", None),
        ([(HOST, RIGHT), (CHECKER, WRONG), (HOST, RIGHT), (CHECKER, WRONG)], "undecided", None),
        # several workers differ from themselves: the code
        ([(HOST, RIGHT), (CHECKER, WRONG), (HOST, OTHER), (CHECKER, RIGHT)], "code", None),
        (
            [(HOST, "1"), (CHECKER, "2"), (HOST, "3"), (CHECKER, "4"), (THIRD, "5"), (THIRD, "6")],
            "code",
            None,
        ),
    ],
)
def test_runs_decide_who_is_wrong(runs: list[tuple[Worker, str]], finding: str, wrong: Worker | None) -> None:
    names = {
        "wrong": Finding.WRONG_NUMBERS,
        "undecided": Finding.UNDECIDED,
        "code": Finding.NOT_DETERMINISTIC,
    }
    verdict = judge_votes(differed(*runs))
    assert (verdict.finding, verdict.worker) == (names[finding], wrong)


def test_a_tensor_that_is_not_what_was_sent_accuses_no_computation() -> None:
    """The checker has the damaged one: without the sender's hash its host would be blamed."""
    good = {"input": "11", "input as sent": "11"}
    bad = {"input": "22", "input as sent": "11"}
    runs = [(HOST, RIGHT, good), (CHECKER, WRONG, bad), (HOST, WRONG), (CHECKER, WRONG)]
    verdict = judge_votes(differed(*runs))
    assert (verdict.finding, verdict.worker) == (Finding.DAMAGED_INPUT, CHECKER)


def test_a_run_from_a_kept_state_decides_between_two() -> None:
    runs = [(HOST, WRONG), (CHECKER, RIGHT), (HOST, WRONG), (CHECKER, RIGHT)]
    assert judge_votes(differed(*runs, microbatch=None)).finding is Finding.UNDECIDED
    assert judge_votes(differed(*runs, microbatch=None, truth=RIGHT)).worker == HOST
    assert judge_votes(differed(*runs, microbatch=None, truth=OTHER)).worker is None


def test_differing_weight_gradients_have_not_spread_to_other_stages() -> None:
    runs = [(HOST, WRONG, {"head.weight": "1"}), (CHECKER, RIGHT, {"head.weight": "2"}), (HOST, RIGHT)]
    assert not judge_votes(differed(*runs)).has_spread
    runs[0] = (HOST, WRONG, {"output": "1"})
    assert judge_votes(differed(*runs)).has_spread


@pytest.mark.parametrize(
    ("votes", "cost", "microbatches", "period"),
    [
        ("off", 0.01, 4, (0, 0)),
        ("sampled", 0.01, 4, (25, 1)),
        ("sampled", 0.01, 8, (13, 1)),
        ("sampled", 0.01, 100, (1, 1)),
        ("sampled", 0.01, 512, (1, 5)),
        ("every", 0.01, 4, (1, 4)),
    ],
)
def test_the_share_that_is_checked_stays_within_its_cost(
    votes: str, cost: float, microbatches: int, period: tuple[int, int]
) -> None:
    found = VerifySpec(votes=votes, cost=cost).period(microbatches)  # type: ignore[arg-type]
    assert found == period
    if votes == "sampled":
        assert found[1] / (found[0] * microbatches) <= cost


@pytest.mark.parametrize("live", [(0, 1), (0, 2, 3), (0, 1, 2, 3, 4)])
def test_each_worker_checks_one_other_and_in_the_end_every_other(live: tuple[int, ...]) -> None:
    rules = TaskRules(replicas=5, stages=1, microbatches=4, steps=99, vote_every=1)
    pairs = set()
    for step in range(1, 60):
        found = {}
        for replica in live:
            mail = Mailbox(Worker(replica, 0), incarnation=1)
            mail.order = Resume(epoch=1, attempts=((0, 0),), step=1, members=(Members(1, (live,), (1,)),))
            found[replica] = Votes(mail, rules)._host(step).replica
        assert sorted(found.values()) == list(live)
        assert all(checker != host for checker, host in found.items())
        pairs |= set(found.items())
    assert len(pairs) == len(live) * (len(live) - 1)


def test_what_is_saved_was_voted_on_and_is_compared_in_the_step_after() -> None:
    rules = TaskRules(replicas=2, stages=1, microbatches=4, steps=99, vote_every=25, checkpoint_every=10)
    assert [step for step in range(1, 31) if rules.is_voted(step)] == [10, 20, 25, 30]
    assert [step for step in range(1, 31) if rules.is_compared(step)] == [11, 21]
    assert sum(rules.is_voted(25, number) for number in range(4)) == 1


def test_every_needs_bits_that_can_be_compared() -> None:
    job = Job(model=ModelSpec(preset="gpt-tiny"), replicas=2, verify=VerifySpec(votes="every"))
    job.refuse_contradictions()
    for changes in ({"replicas": 1}, {"accumulate": "fp32"}, {"shards": 2}):
        with pytest.raises(UserError, match=r"verify\.votes"):
            replace(job, **changes).refuse_contradictions()  # type: ignore[arg-type]
    assert Job(model=ModelSpec(preset="gpt-tiny"), accumulate="fp32", replicas=2).vote_period == (0, 0)
    assert Job(model=ModelSpec(preset="gpt-tiny"), replicas=2).vote_period != (0, 0)
    assert Job(model=ModelSpec(preset="gpt-tiny"), device="cuda", replicas=2).vote_period == (0, 0)


# ------------------------------------------------------------------ what the coordinator does about it


def cluster_of_three() -> FakeCluster:
    """Three replicas of one stage, each on a node of its own with a second slot; a spare node."""
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2, "d": 2})
    cluster.submit(shape=Shape(3, 1, 2))
    return cluster


def report(cluster: FakeCluster, *runs: tuple[Worker, str], microbatch: Microbatch | None) -> None:
    task = cluster.coordinator.tasks["t"]
    assert task.recovery is not None
    host, checker = runs[0][0], runs[1][0]
    event = ev.VoteDiffered(
        worker=checker,
        host=host,
        epoch=task.recovery.epoch,
        step=task.recovery.recorded + 1,
        microbatch=microbatch,
        runs=tuple(
            ev.VoteRun(worker=worker, incarnation=task.seats[worker].incarnation, whole=found)
            for worker, found in runs
        ),
    )
    cluster.report("t", checker, msg.TaskEvent(task="t", event=event))


A, B, C = Worker(0, 0), Worker(1, 0), Worker(2, 0)


def test_the_slot_of_a_wrong_worker_is_isolated_and_no_other() -> None:
    cluster = cluster_of_three()
    cluster.seal()
    seat = cluster.coordinator.tasks["t"].seats[A]
    node, slot = seat.node, seat.slot
    report(cluster, (A, WRONG), (B, RIGHT), (A, RIGHT), (B, RIGHT), (C, RIGHT), microbatch=Microbatch(0, 1))
    found = {n.name: set(n.isolated_slots) for n in cluster.coordinator.nodes.values()}
    assert found == {"a": set(), "b": set(), "c": set(), "d": set(), node: {slot}}
    (incident,) = cluster.coordinator.log.incidents
    assert incident.workers == [A]
    assert incident.verdict is not None
    assert incident.verdict.severity == 1
    assert incident.remedies[0].what == "isolate the slot"
    assert any(WRONG in evidence.text for evidence in incident.evidence)
    cluster.exits(A, "asked to go")
    moved = cluster.coordinator.tasks["t"].seats[A]
    assert (moved.node, moved.slot) != (node, slot)
    cluster.coordinator.validate()


def test_nondeterministic_code_isolates_nothing_and_ends_the_votes() -> None:
    cluster = cluster_of_three()
    epoch = cluster.coordinator.tasks["t"].recovery.epoch  # type: ignore[union-attr]
    report(cluster, (A, "1"), (B, "2"), (A, "3"), (B, "4"), microbatch=Microbatch(0, 1))
    assert not any(node.isolated_slots for node in cluster.coordinator.nodes.values())
    (incident,) = cluster.coordinator.log.incidents
    assert incident.verdict is not None
    assert incident.verdict.kind == "nondeterministic code"
    recovery = cluster.coordinator.tasks["t"].recovery
    assert recovery is not None
    assert recovery.epoch > epoch
    assert not recovery._book.votes


def test_a_gpu_that_the_kernel_names_costs_its_slot_and_not_its_node() -> None:
    cluster = cluster_of_three()
    node = cluster.coordinator.tasks["t"].seats[A].node
    text = "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."
    cluster._report(node, msg.KernelSpoke(text=text, slots=(1,)), None)
    named = cluster.coordinator.nodes[node]
    assert set(named.isolated_slots) == {1}
    assert named.state == "up"
    assert A in cluster.coordinator.tasks["t"].seats
    cluster.wait(cluster.coordinator.patience.isolation_s + 1)
    assert not named.isolated_slots
