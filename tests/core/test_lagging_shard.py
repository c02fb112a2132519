"""Which shard of a worker do the others wait for?"""

from everstep.core.faults.detector import DetectorLimits, Hung, OverdueReports, locate
from everstep.core.faults.lagging_shard import ShardProgress, hung_shard, slow_shard
from everstep.protocol.messages import OpOverdue
from everstep.protocol.ops import Worker

W = Worker(0, 1)


def at(entered: int, *, inside: bool = True, stopped: bool = False) -> ShardProgress:
    return ShardProgress(entered=entered, is_inside=inside, stopped=stopped)


def test_the_others_wait_in_a_collective_for_the_one_that_has_not_entered_it() -> None:
    assert hung_shard([at(8), at(8), at(7, inside=False), at(8)]) == 2
    assert hung_shard([at(7, inside=False), at(8)]) == 0, "the leader can be the one"


def test_a_stopped_shard_is_named_wherever_it_is() -> None:
    assert hung_shard([at(8), at(8, stopped=True)]) == 1
    assert hung_shard([at(8, inside=False), at(8, inside=False, stopped=True)]) == 1


def test_where_all_are_in_the_same_collective_none_is_named() -> None:
    assert hung_shard([at(8), at(8)]) is None
    assert hung_shard([at(8, inside=False), at(8, inside=False)]) is None, "or all between two"
    assert hung_shard([at(8, inside=False), at(7)]) is None, "none waits for it yet"


def test_a_slow_shard_is_the_one_that_waits_for_no_other() -> None:
    assert slow_shard((0.4, 0.02, 0.41), 1.0) == 1
    assert slow_shard((0.04, 0.0, 0.04), 1.0) is None, "what the others wait is little"
    assert slow_shard((0.4, 0.3, 0.4), 1.0) is None, "they all wait alike"
    assert slow_shard((0.4,), 1.0) is None
    assert slow_shard((), 1.0) is None


def overdue(*, stopped: bool, shard: int | None) -> OpOverdue:
    return OpOverdue(
        task="t",
        worker=W,
        incarnation=1,
        doing="1F0.0",
        busy=True,
        stopped=stopped,
        elapsed_s=100.0,
        expected_s=0.1,
        step=3,
        shard=shard,
    )


def located(report: OpOverdue) -> object:
    known = OverdueReports({W: report})
    return locate(known, is_member=lambda worker: worker == W, num_members=1, limits=DetectorLimits())


def test_the_verdict_names_the_shard() -> None:
    for stopped, words in (
        (True, "the process of shard 1 of worker 0:1 is stopped"),
        (False, "shard 1 of worker 0:1 hung"),
    ):
        found = located(overdue(stopped=stopped, shard=1))
        assert isinstance(found, Hung)
        assert found.because.startswith(words)
    found = located(overdue(stopped=True, shard=None))
    assert isinstance(found, Hung)
    assert found.because.startswith("the process of worker 0:1 is stopped")
