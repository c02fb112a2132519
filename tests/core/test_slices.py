"""The slices of a worker's shards: a parcel counts for all of them or for none."""

from everstep.core.worker.joining import FrameUse
from everstep.core.worker.slices import SliceCount, SlicesInHand
from everstep.protocol.ops import Microbatch
from everstep.protocol.parcels import Parcel, ParcelKind, StateTransfer
from everstep.protocol.shard_messages import ParcelIsHere


def activation(step: int, attempt: int = 1) -> Parcel:
    return Parcel(ParcelKind.ACTIVATION, attempt, step, 1, Microbatch(0, 0))


def attempt_in_force(step: int) -> int:
    return 1


def test_a_parcel_counts_once_every_shard_has_its_slice() -> None:
    leader = SliceCount(3)
    assert not leader.own(activation(1), "slice 0")
    assert not leader.others(2, activation(1))
    assert leader.others(1, activation(1))
    assert leader.take(activation(1)) == "slice 0"
    assert len(leader) == 0


def test_a_slice_of_a_step_that_is_done_again_is_kept_until_the_order_comes() -> None:
    """Peers that heard the order first send slices of a later attempt at a step that is long over here."""
    leader, follower = SliceCount(2), SlicesInHand()
    for attempt in (1, 2):
        leader.own(activation(1, attempt), "slice 0")
        assert follower.arrived(activation(1, attempt), "slice 1") == ParcelIsHere(
            parcel=activation(1, attempt)
        )
    leader.forget_before(4, attempt_in_force)
    follower.forget_before(4, attempt_in_force)
    assert (len(leader), len(follower)) == (1, 1), "of the attempt in force nothing is needed"
    assert leader.others(1, activation(1, 2))
    assert follower.take(activation(1, 2)) == "slice 1"
    assert follower.take(activation(1, 1)) is None


def test_a_slice_that_comes_twice_is_there_as_often_as_it_was_announced() -> None:
    """Else the leader could believe in a slice that its shard has dropped."""
    leader, follower = SliceCount(2), SlicesInHand()
    for _ in range(2):
        follower.arrived(activation(1), "slice 1")
        leader.others(1, activation(1))
    for _ in range(2):
        assert leader.own(activation(1), "slice 0")
        leader.take(activation(1))
        assert follower.take(activation(1)) == "slice 1"
    assert not leader.own(activation(1), "slice 0"), "the shard has none any more"
    assert follower.take(activation(1)) is None


def test_a_state_is_made_of_the_newest_transfer_s_frames() -> None:
    follower = SlicesInHand()
    older, newer = (StateTransfer(n, 3, 0, 1) for n in (1, 2))
    assert follower.use(older) is FrameUse.BEGIN
    assert follower.use(older) is FrameUse.ADD
    assert follower.use(newer) is FrameUse.BEGIN
    assert follower.use(older) is FrameUse.DROP
    follower.state_arrived(newer, "state")
    assert follower.use(newer) is FrameUse.DROP, "it is whole"
    assert follower.take_state(newer) == "state"
