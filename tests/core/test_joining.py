"""States between peers: which transfer counts, and that a state is never made of two."""

from everstep.core.worker.joining import Feeder, FrameUse, Joiner, WorkerLife
from everstep.core.worker.mailbox import Mailbox
from everstep.protocol.events import StateCopied
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import StateTransfer
from everstep.protocol.work import Resume

DROP, BEGIN, ADD = FrameUse


def joiner() -> Joiner:
    return Joiner(Mailbox(Worker(0, 1), incarnation=3))


def transfer(number: int, state_step: int, *, source: int = 1, incarnation: int = 3) -> StateTransfer:
    return StateTransfer(number, state_step, source, incarnation)


def test_frames_of_an_earlier_transfer_that_come_late_are_dropped() -> None:
    """Two sources, the first slow and given up: a state of step 8 with a tensor of step 5 was loaded."""
    one = joiner()
    late, good = transfer(1, 5), transfer(2, 8, source=2)
    assert [one.take_state(t) for t in (late, good, late, good, late)] == [BEGIN, BEGIN, DROP, ADD, DROP]
    one.state_arrived(good)
    assert one.mail.commands == [StateCopied(worker=Worker(0, 1), incarnation=3, transfer=2, state_step=8)]
    assert one.take_state(late) is DROP
    assert one.take_state(good) is DROP, "it is loaded"


def test_a_later_transfer_counts_though_its_step_is_earlier() -> None:
    """What the first source sent may be of a step that was taken back since."""
    one = joiner()
    one.take_state(transfer(1, 8))
    one.state_arrived(transfer(1, 8))
    assert one.take_state(transfer(2, 6)) is BEGIN
    one.state_arrived(transfer(2, 6))
    assert one.state_step == 6


def test_a_transfer_sent_again_from_a_later_step_begins_anew() -> None:
    one = joiner()
    assert [one.take_state(transfer(1, step)) for step in (5, 5, 6, 5, 6)] == [BEGIN, ADD, BEGIN, DROP, ADD]


def test_a_frame_for_an_earlier_process_is_dropped() -> None:
    assert joiner().take_state(transfer(7, 5, incarnation=2)) is DROP


def test_a_member_needs_no_state() -> None:
    one = joiner()
    one.restore()
    assert one.life is WorkerLife.MEMBER
    assert one.take_state(transfer(1, 5)) is DROP


def test_a_source_names_what_it_sends_and_keeps_the_name_when_it_sends_again() -> None:
    feeder = Feeder(Mailbox(Worker(1, 1), incarnation=1))
    feeder.copy_to(0, incarnation=3, transfer=7)
    first = feeder.next(5)
    assert first is not None
    assert first.transfer == transfer(7, 5)
    feeder.snapshot_sent(0, None)
    assert feeder.next(6) is None
    feeder.copy_again(0)
    feeder.copy_again(0)
    again = feeder.next(6)
    assert again is not None
    assert again.transfer == transfer(7, 6)
    feeder.snapshot_sent(0, None)
    assert feeder.next(7) is None, "once is enough"


def test_a_joiner_that_never_got_a_snapshot_is_not_fed() -> None:
    """The order to copy found no address for it; the order to resume that follows lists it."""
    feeder = Feeder(Mailbox(Worker(1, 1), incarnation=1))
    feeder.obey(Resume(epoch=2, attempts=((0, 0),), step=4, feeds={0: None}))
    assert feeder.feeds == {}
