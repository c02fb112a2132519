"""What a worker reports of steps that its stage has sealed, if the coordinator was away meanwhile."""

from __future__ import annotations

from dataclasses import replace

from everstep.core.worker.announcements import Announcements
from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState
from everstep.protocol.events import StepSealed
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.parcels import Part
from everstep.protocol.work import Members, Resume, Send

RULES = TaskRules(replicas=2, stages=1, microbatches=1, steps=900)


def order(epoch: int, live: tuple[int, ...], *, recorded: int = 0) -> Resume:
    members = (Members(1, (live,), (epoch,)),)
    return Resume(epoch=epoch, attempts=((1, 1),), step=1, members=members, recorded=recorded)


def second_peer(steps: int) -> Announcements:
    news = Announcements(Mailbox(Worker(1, 0), incarnation=1), RULES)
    news.mail.order = order(1, (0, 1))
    seal(news, steps)
    assert reported(news) == [], "the first peer does"
    return news


def seal(news: Announcements, steps: int) -> None:
    for step in range(1, steps + 1):
        losses = ((Microbatch(0, 0), float(step)), (Microbatch(1, 0), float(step)))
        state = StepState(step, 1)
        both = tuple(microbatch for microbatch, _ in losses)
        state.everyone = Part(microbatches=both, losses=losses, executed=6, weights=(1.0, 1.0))
        news.announce(state, 1.0)


def reported(news: Announcements) -> list[int]:
    return [command.step for command in news.mail.commands if isinstance(command, StepSealed)]


def test_after_the_first_peer_s_death_the_next_one_reports_all_that_is_not_on_record() -> None:
    """Found by a storm on real processes: the losses of 150 steps were lost with the node whose agent had
    kept their reports while the coordinator was away.
    """
    news = second_peer(300)
    news.mail.order = order(2, (1,), recorded=144)
    news.begin_epoch()
    assert reported(news) == list(range(145, 301))
    assert all(command.losses for command in news.mail.commands if isinstance(command, StepSealed))


def test_what_is_on_record_is_not_reported_again_and_other_stages_hear_of_it_all_the_same() -> None:
    """After a kill survivors and coordinator spent 2 ms of CPU on it, before and beside the first op."""
    news = Announcements(Mailbox(Worker(1, 0), incarnation=1), RULES)
    news.mail.order = replace(order(1, (1,)), members=(Members(1, ((1,), (0, 1)), (1, 1)),))
    seal(news, 6)
    news.mail.commands.clear()
    news.mail.order = replace(news.mail.order, epoch=2, recorded=5)
    news.begin_epoch()
    assert reported(news) == [6]
    assert [c.parcel.step for c in news.mail.commands if isinstance(c, Send) and c.replica == 0] == [
        3,
        4,
        5,
        6,
    ]


def test_what_is_on_record_is_forgotten_and_what_is_kept_is_bounded() -> None:
    news = second_peer(800)
    news.mail.order = order(2, (0, 1), recorded=790)
    news.begin_epoch()
    news.mail.order = order(3, (1,))
    news.begin_epoch()
    assert reported(news) == list(range(791, 801))

    news = second_peer(800)
    news.mail.order = order(2, (1,))
    news.begin_epoch()
    assert reported(news) == list(range(289, 801))
