"""Votes: which steps and microbatches, who checks whom, and who is wrong when bits differ."""

import math
import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from everstep.core.faults.votes import Replay, VoteEnd, judge_replay, judge_votes
from everstep.core.task.step_book import StepBook
from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.suspicion import BAND, LEAST, Suspicion, why_spike
from everstep.core.worker.votes import Votes
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec, VerifySpec
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.shape import Shape
from everstep.protocol.work import Members, Resume, SuspectedStep, mean_loss
from tests.support.fake_cluster import FakeCluster

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
        "wrong": VoteEnd.WRONG_NUMBERS,
        "undecided": VoteEnd.UNDECIDED,
        "code": VoteEnd.NOT_DETERMINISTIC,
    }
    verdict = judge_votes(differed(*runs))
    assert (verdict.finding, verdict.worker) == (names[finding], wrong)


def test_a_tensor_that_is_not_what_was_sent_accuses_no_computation() -> None:
    """The checker has the damaged one: without the sender's hash its host would be blamed."""
    good = {"input": "11", "input as sent": "11"}
    bad = {"input": "22", "input as sent": "11"}
    runs = [(HOST, RIGHT, good), (CHECKER, WRONG, bad), (HOST, WRONG), (CHECKER, WRONG)]
    verdict = judge_votes(differed(*runs))
    assert (verdict.finding, verdict.worker) == (VoteEnd.DAMAGED_INPUT, CHECKER)


def test_differing_weight_gradients_have_not_spread_to_other_stages() -> None:
    runs = [(HOST, WRONG, {"head.weight": "1"}), (CHECKER, RIGHT, {"head.weight": "2"}), (HOST, RIGHT)]
    assert not judge_votes(differed(*runs)).has_spread
    runs[0] = (HOST, WRONG, {"output": "1"})
    assert judge_votes(differed(*runs)).has_spread


@pytest.mark.parametrize(
    ("votes", "cost", "microbatches", "period"),
    [
        ("off", 0.01, 4, 0),
        ("sampled", 0.01, 4, 25),
        ("sampled", 0.01, 8, 13),
        ("sampled", 0.01, 100, 1),
        ("sampled", 0.01, 512, 1),
        ("every", 0.01, 4, 1),
    ],
)
def test_the_share_that_is_checked_stays_within_its_cost(
    votes: str, cost: float, microbatches: int, period: int
) -> None:
    found = VerifySpec(votes=votes, cost=cost).period(microbatches)  # type: ignore[arg-type]
    assert found == period
    if votes == "sampled":
        assert 1 / (found * microbatches) <= cost


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


@pytest.mark.parametrize(("vote_every", "compared"), [(25, [1, 7, 25]), (0, [])])
def test_the_state_of_a_new_member_is_compared_in_its_first_step(
    vote_every: int, compared: list[int]
) -> None:
    """It was compared at the next vote or checkpoint, many steps later."""
    rules = TaskRules(replicas=3, stages=1, microbatches=4, steps=99, vote_every=vote_every)
    mail = Mailbox(Worker(0, 0), incarnation=1)
    members = (Members(1, ((0, 1),), (1,)), Members(7, ((0, 1, 2),), (2,)))
    mail.order = Resume(epoch=2, attempts=((0, 0),), step=5, members=members)
    votes = Votes(mail, rules)
    assert [step for step in range(1, 31) if votes.is_on(step, 0)] == compared
    mail.order = replace(mail.order, votes_from=8)
    assert not votes.is_on(7, 0), "a step that a new epoch breaks has no votes"


def test_every_needs_bits_that_can_be_compared() -> None:
    job = Job(model=ModelSpec(preset="gpt-tiny"), replicas=2, verify=VerifySpec(votes="every"))
    job.refuse_contradictions()
    for changes in ({"replicas": 1}, {"accumulate": "fp32"}, {"shards": 2}):
        with pytest.raises(UserError, match=r"verify\.votes"):
            replace(job, **changes).refuse_contradictions()  # type: ignore[arg-type]
    assert Job(model=ModelSpec(preset="gpt-tiny"), accumulate="fp32", replicas=2).vote_period == 0
    assert Job(model=ModelSpec(preset="gpt-tiny"), replicas=2).vote_period != 0
    assert Job(model=ModelSpec(preset="gpt-tiny"), device="cuda", replicas=2).vote_period == 0


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


@pytest.mark.parametrize("microbatch", [Microbatch(0, 1), None])
def test_of_exactly_two_none_is_blamed_and_a_person_is_told_what_to_run(
    microbatch: Microbatch | None,
) -> None:
    cluster = FakeCluster(nodes={"a": 1, "b": 1, "c": 1})
    cluster.submit(shape=Shape(2, 1, 2))
    cluster.seal()
    task = cluster.coordinator.tasks["t"]
    nodes = sorted({seat.node for seat in task.seats.values()})
    report(cluster, (A, "1"), (B, "2"), (A, "1"), (B, "2"), microbatch=microbatch)
    assert not any(node.isolated_slots for node in cluster.coordinator.nodes.values())
    remedy = cluster.coordinator.log.incidents[-1].remedies[-1]
    assert f"it is one of {' and '.join(nodes)}: run `everstep check` on both" in remedy.because
    assert remedy.what == ("go back to a kept state" if microbatch is None else "none: an operator can help")
    cluster.coordinator.validate()


def test_while_the_third_is_away_the_votes_go_on_and_it_tells_who_is_wrong() -> None:
    """Storm seeds 1149 and 3988 of `--corruption`."""
    cluster = cluster_of_three()
    cluster.seal()
    report(cluster, (A, "1"), (B, "2"), (A, "1"), (B, "2"), microbatch=Microbatch(0, 1))
    task = cluster.coordinator.tasks["t"]
    assert task.managed is not None
    assert task.managed._book.votes
    assert cluster.coordinator.log.incidents[-1].closed
    wrong = task.seats[B]
    runs = [(B, "2"), (A, "1"), (B, "2"), (A, "1"), (C, "1")]
    report(cluster, *runs, microbatch=Microbatch(0, 1))
    assert set(cluster.coordinator.nodes[wrong.node].isolated_slots) == {wrong.slot}
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
    cluster.says(node, msg.KernelSpoke(text=text, slots=(1,)), None)
    named = cluster.coordinator.nodes[node]
    assert set(named.isolated_slots) == {1}
    assert named.state == "up"
    assert A in cluster.coordinator.tasks["t"].seats
    cluster.wait(cluster.coordinator.patience.isolation_s + 1)
    assert not named.isolated_slots


# ------------------------------------------------------------------ NaNs and spikes


def test_a_spike_is_far_above_the_recent_band_and_noise_is_not() -> None:
    """A falling loss with 2 % of noise, 20,000 steps: none is a spike; a jump of half its value is."""
    rng = random.Random(3)
    losses = [2.0 + 8.0 / (1 + step / 500) + rng.gauss(0, 0.05) for step in range(20_000)]
    for step in range(LEAST, len(losses)):
        before = losses[max(0, step - BAND) : step]
        assert not why_spike(losses[step], before, 10.0), step
        if step % 100 == 0:
            assert why_spike(1.5 * losses[step], before, 10.0), step
    assert not why_spike(99.0, losses[: LEAST - 1], 10.0)  # too few are known
    assert not why_spike(99.0, losses[:BAND], 0.0)  # switched off
    assert not why_spike(0.0, losses[:BAND], 10.0)  # below the band is no harm


def recorded(loss: float, was: SuspectedStep, norm: float = 1.0) -> act.RecordStep:
    return act.RecordStep(
        step=was.step,
        epoch=2,
        attempt=1,
        losses=((Microbatch(0, 0), 1.0), (Microbatch(1, 0), 2 * loss - 1.0)),
        norm=norm,
        microbatches_committed=2,
        replayed_elsewhere=0,
        because="",
        suspect=was,
    )


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (9.0, 9.0, Replay.SAME),
        (math.nan, math.nan, Replay.SAME),
        (math.nan, math.inf, Replay.SAME),
        (9.0, 9.0001, Replay.OTHER),
        (9.0, 1.0, Replay.OTHER),
        (math.nan, 1.0, Replay.OTHER),
    ],
)
def test_the_second_run_of_a_step_tells_data_from_machines(
    first: float, second: float, found: Replay
) -> None:
    losses = ((Microbatch(1, 0), 2 * first - 1.0), (Microbatch(0, 0), 1.0))
    was = SuspectedStep(step=7, loss=first, losses=losses)
    assert judge_replay(recorded(second, was)) is found
    gradient = SuspectedStep(step=7, loss=1.0, stage=0)
    assert judge_replay(recorded(1.0, gradient, norm=math.nan)) is Replay.SAME
    assert judge_replay(recorded(1.0, gradient)) is Replay.OTHER


class Watcher:
    """One worker's eyes on its losses, which goes through steps one after the other."""

    def __init__(self) -> None:
        rules = TaskRules(replicas=1, stages=1, microbatches=1, steps=400, replays=True, spike=8.0)
        self.order = SimpleNamespace(suspect=None, rewind=None, restore=None, epoch=1)
        self.mail = SimpleNamespace(me=A, order=self.order, commands=[])
        self.suspicion = Suspicion(self.mail, rules)  # type: ignore[arg-type]

    def is_held(self, step: int, loss: float = 1.0) -> bool:
        everyone = SimpleNamespace(losses=((Microbatch(0, 0), loss),))
        held = self.suspicion.next(SimpleNamespace(step=step, everyone=everyone)) is not None  # type: ignore[arg-type]
        self.suspicion._held = None  # its replay is over
        return held

    def goes_back_to(self, step: int) -> None:
        self.order.restore, self.order.suspect = step, None
        self.suspicion.begin_epoch()
        self.order.restore = None


def test_after_going_back_a_spike_is_seen_as_before() -> None:
    """The band kept the highest steps, so every loss of a step done again was forgotten at once."""
    watcher = Watcher()
    assert not any(watcher.is_held(step) for step in range(1, 151))
    assert watcher.is_held(151, 50.0)
    watcher.goes_back_to(60)
    assert not any(watcher.is_held(step) for step in range(61, 80))
    assert watcher.is_held(80, 50.0)


@pytest.mark.parametrize("loss", [math.nan, 50.0])
def test_after_going_back_steps_before_the_one_that_came_from_the_data_are_looked_at(loss: float) -> None:
    """A confirmed NaN in step 150, and all up to step 170 was not looked at any more."""
    watcher = Watcher()
    for step in range(1, 150):
        watcher.is_held(step)
    watcher.order.suspect = SuspectedStep(step=150, loss=loss)
    watcher.suspicion.begin_epoch()  # it counts
    assert not watcher.is_held(150, loss)
    assert not watcher.is_held(165, loss)
    watcher.goes_back_to(60)
    for step in range(61, 90):
        assert not watcher.is_held(step)
    assert watcher.is_held(90, loss)
    assert not watcher.is_held(152, loss), "the data are known to do that there"


def test_the_coordinator_looks_into_the_steps_before_an_odd_one_again() -> None:
    cluster = cluster_of_three()
    task = cluster.coordinator.tasks["t"]
    assert task.managed is not None
    task.managed.handle(ev.ReplayJudged(step=150), cluster.now)
    cluster.seal()
    suspect(cluster, math.nan)
    order = cluster.resumes()[-1].facts
    assert order is not None
    assert order.rewind == 1


def suspect(cluster: FakeCluster, loss: float) -> None:
    recovery = cluster.coordinator.tasks["t"].recovery
    assert recovery is not None
    found = SuspectedStep(step=recovery.recorded + 1, loss=loss, losses=((Microbatch(2, 0), loss),))
    event = ev.StepSuspected(worker=A, epoch=recovery.epoch, found=found, because="its loss is odd")
    cluster.report("t", A, msg.TaskEvent(task="t", event=event))


def test_a_suspected_step_is_begun_again_and_other_numbers_isolate_nobody() -> None:
    cluster = cluster_of_three()
    cluster.seal()
    attempt = cluster.coordinator.tasks["t"].recovery.attempt_of(2)  # type: ignore[union-attr]
    suspect(cluster, math.nan)
    recovery = cluster.coordinator.tasks["t"].recovery
    assert recovery is not None
    assert recovery.attempt_of(2) > attempt  # nothing of the first run counts
    order = cluster.resumes()[-1].facts
    assert (order.rewind, order.votes_from) == (1, 2)  # type: ignore[union-attr]
    cluster.seal()  # with a loss of 1.0
    (incident,) = cluster.coordinator.log.incidents
    assert incident.verdict is not None
    assert incident.verdict.kind == "wrong numbers"
    assert "everstep check" in incident.remedies[-1].because
    assert not any(node.isolated_slots for node in cluster.coordinator.nodes.values())
    assert not list(cluster.coordinator.log.open_ones())
    cluster.coordinator.validate()


@pytest.mark.parametrize(("rule", "what"), [("skip", "skip the batch"), ("pause", "pause the task")])
def test_a_step_that_is_the_same_again_is_treated_by_the_rule(rule: str, what: str) -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
    cluster.submit(shape=Shape(3, 1, 2), has_checkpoints=True, on_spike=rule)
    for _ in range(3):
        cluster.seal()
    suspect(cluster, 1.0)
    facts = cluster.resumes()[-1].facts
    assert facts.suspect.skips == (rule == "skip")  # type: ignore[union-attr]
    cluster.seal()
    (incident,) = cluster.coordinator.log.incidents
    assert incident.verdict is not None
    assert incident.verdict.kind == "loss spike"
    assert incident.remedies[-1].what == what
    assert not any(node.isolated_slots for node in cluster.coordinator.nodes.values())
    recovery = cluster.coordinator.tasks["t"].recovery
    assert recovery is not None
    assert recovery.recorded == 4
    suspect(cluster, 1.0)  # shortly after: it is not computed again
    assert cluster.resumes()[-1].facts.rewind is None  # type: ignore[union-attr]


def test_a_job_that_pauses_needs_a_checkpoint() -> None:
    for name in ("nan", "spike"):
        verify = VerifySpec(**{name: "pause"})  # type: ignore[arg-type]
        with pytest.raises(UserError, match=rf"verify\.{name}"):
            Job(model=ModelSpec(preset="gpt-tiny"), verify=verify).refuse_contradictions()


def test_all_who_judge_a_step_get_the_same_mean_in_any_order_of_its_losses() -> None:
    """A plain sum gives other bits in another order, and from Python 3.12 on also in the same."""
    losses = [(Microbatch(k, m), 0.1 * (7 * k + m) + 1e-3 / (1 + m)) for k in range(4) for m in range(6)]
    orders = [losses, losses[::-1], losses[5:] + losses[:5], sorted(losses, key=lambda one: -one[1])]
    assert len({sum(loss for _, loss in order) for order in orders}) > 1 or sys.version_info >= (3, 12)
    assert len({mean_loss(order) for order in orders}) == 1
    assert mean_loss([]) is None
    for odd in (math.nan, math.inf, -math.inf):
        assert math.isnan(mean_loss([*losses, (Microbatch(9, 0), odd), (Microbatch(9, 1), math.inf)]) or 0.0)
    assert math.isnan(mean_loss([(Microbatch(0, m), 1e308) for m in range(4)]) or 0.0)


def test_a_replay_whose_losses_come_in_another_order_is_the_same_replay() -> None:
    losses = tuple((Microbatch(k, m), 0.1 * (7 * k + m) + 1e-3 / (1 + m)) for k in range(4) for m in range(6))
    suspect = SuspectedStep(step=7, loss=mean_loss(losses) or 0.0, losses=losses)
    record = act.RecordStep(
        step=7,
        attempt=1,
        epoch=1,
        microbatches_committed=24,
        replayed_elsewhere=0,
        losses=losses[::-1],
        norm=1.0,
        suspect=suspect,
        because="",
    )
    assert judge_replay(record) is Replay.SAME


def test_the_state_of_a_step_without_votes_counts_once_a_later_one_was_voted_on() -> None:
    """It was written before a wrong machine could be found, and the task would go back to it."""
    book = StepBook(shape=Shape(2, 1, 1), steps=500, recorded=0, closes=False, is_voting=True, every=True)

    def seal(step: int, *, voted: bool) -> None:
        sealed = ev.StepSealed(step=step, stage=0, attempt=1, microbatches=2, executed=6, voted=voted)
        book.seal(sealed, epoch=1, attempt=1, alone=lambda step: ())

    seal(1, voted=True)
    assert not book.is_state_verified(1), "states are compared in the next step"
    seal(2, voted=False)
    assert book.is_state_verified(1)
    seal(3, voted=False)
    assert not book.is_state_verified(2), "a new epoch broke it: nobody computed anything of it again"
    seal(4, voted=True)
    assert book.is_state_verified(2)
    assert book.is_state_verified(3)
    assert not book.is_state_verified(4)
    for step in range(5, 105):
        seal(step, voted=False)
    assert book.is_state_verified(4)
    assert not book.is_state_verified(5)
    seal(105, voted=False)
    assert book.is_state_verified(5), "a task must not lose everything because no vote is complete"


def test_a_state_that_was_kept_verifies_nothing_by_being_loaded_again() -> None:
    """Storm seeds 422 and 1803 of `--corruption`: a wrong machine was found after it, and its step stayed."""
    book = StepBook(shape=Shape(2, 1, 1), steps=9, recorded=4, verified=1, is_voting=True, every=True)
    book.go_back_to(3, is_verified=False)
    assert (book.recorded, book.verified) == (3, 1)
    book.go_back_to(2, is_verified=True)
    assert (book.recorded, book.verified) == (2, 2)


def test_a_stage_with_one_worker_is_not_waited_for_but_the_others_are() -> None:
    """Its state cannot be checked. What the others wrote can, and counted without it until here."""
    book = StepBook(shape=Shape(2, 2, 1), steps=9, recorded=0, is_voting=True, every=True)

    def seal(step: int, *, voted: tuple[bool, bool], alone: tuple[int, ...] = ()) -> None:
        for stage in (0, 1):
            sealed = ev.StepSealed(
                step=step, stage=stage, attempt=1, microbatches=2, executed=6, voted=voted[stage]
            )
            book.seal(sealed, epoch=1, attempt=1, alone=lambda step: alone)

    seal(1, voted=(False, False), alone=(1,))
    seal(2, voted=(False, False), alone=(1,))
    assert not book.is_state_verified(1), "stage 0 could vote, and a new epoch kept it from that"
    seal(3, voted=(True, False), alone=(1,))
    assert book.is_state_verified(1)
    assert book.is_state_verified(2)
    seal(4, voted=(True, False))
    seal(5, voted=(True, False))
    assert not book.is_state_verified(4), "stage 1 can vote again"
