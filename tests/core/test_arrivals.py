"""Which rank of a script is slow, by when ranks enter collectives."""

import random

from everstep.core.faults.arrivals import SlowRanks, slowest
from everstep.protocol.messages import RankPace

STEP_S = 0.2


def pace(rank: int, late_s: float = 0.0, *, group: str = "0", first: int = 0, **more: object) -> RankPace:
    entered = {number: number * STEP_S + late_s for number in range(first, first + 20)}
    return RankPace(rank=rank, group=group, entered=entered, step_s=STEP_S, **more)  # type: ignore[arg-type]


def slow(paces: list[RankPace], ranks_per_node: int = 8) -> tuple[int, ...]:
    late = slowest(paces, ranks_per_node)
    return () if late is None else late.ranks


def test_who_is_last_by_a_tenth_of_a_step_is_slow() -> None:
    assert slow([pace(0), pace(1), pace(2, 0.021), pace(3)]) == (2,)
    assert slow([pace(0), pace(1), pace(2, 0.019), pace(3)]) == ()


def test_only_collectives_that_all_ranks_tell_of_count() -> None:
    assert slow([pace(0), pace(1, 0.1, first=10)]) == (1,)
    assert slow([pace(0), pace(1, 0.1, first=15)]) == ()  # five of them are too few


def test_ranks_that_are_last_by_turns_are_not_slow() -> None:
    draw = random.Random(1)
    late = {number: draw.randrange(4) for number in range(40)}
    paces = [
        RankPace(
            rank=rank,
            group="0",
            step_s=STEP_S,
            entered={number: number * STEP_S + 0.1 * (late[number] == rank) for number in late},
        )
        for rank in range(4)
    ]
    assert slow(paces) == ()


def test_partners_of_a_slow_rank_are_late_in_their_replicas_and_are_not_named() -> None:
    """Ranks 0, 1 and 2, 3 are tensor parallel; 0, 2 and 1, 3 are replicas. Rank 3 is slow, and 2 waits."""
    paces = [pace(0, group="tp0"), pace(1, group="tp0"), pace(2, group="tp1"), pace(3, 0.1, group="tp1")]
    paces += [
        pace(0, group="dp0"),
        pace(2, 0.1, group="dp0"),
        pace(1, group="dp1"),
        pace(3, 0.1, group="dp1"),
    ]
    assert slow(paces) == (3,)


def test_a_node_all_ranks_of_which_are_late_is_named_as_one() -> None:
    paces = [pace(0), pace(1), pace(2, 0.10), pace(3, 0.101)]
    assert slow(paces, ranks_per_node=2) == (2, 3)
    assert "ranks 2 to 3, all of one node, enter 20 of 20" in str(slowest(paces, 2))


def test_clocks_of_two_nodes_may_differ_by_milliseconds() -> None:
    assert slow([pace(0), pace(1, 0.0199)], ranks_per_node=1) == ()
    short = [
        RankPace(rank=p.rank, group="0", entered=p.entered, step_s=0.02) for p in (pace(0), pace(1, 0.01))
    ]
    assert slow(short, ranks_per_node=1) == ()
    assert slow(short, ranks_per_node=2) == (1,)


def test_a_device_says_how_long_a_rank_was_inside_and_no_clock_is_compared() -> None:
    entered = dict.fromkeys(range(20), -0.05)
    waits = [RankPace(rank=r, group="0", entered=entered, step_s=STEP_S, is_by_device=True) for r in range(3)]
    last = dict.fromkeys(range(20), -0.002)
    waits.append(RankPace(rank=3, group="0", entered=last, step_s=STEP_S, is_by_device=True))
    assert slow(waits, ranks_per_node=1) == (3,)


def test_one_look_is_not_enough_to_find_a_slow_rank_or_to_forget_it() -> None:
    late = slowest([pace(0), pace(1, 0.1)], 8)
    other = slowest([pace(0, 0.1), pace(1)], 8)
    watch = SlowRanks()
    assert [watch.see(each) for each in (late, None, late, other, late)] == [False] * 5
    assert watch.see(late)
    assert watch.slow == (1,)
    assert [watch.see(each) for each in (None, late, late, None)] == [False] * 4
    assert watch.see(None)
    assert watch.slow == ()
