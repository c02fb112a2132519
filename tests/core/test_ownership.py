"""The map of chunks: whatever dies, joins and is filled, its rules hold, and work is shared out evenly."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.task.ownership import (
    COPIES,
    Holders,
    first_holders,
    is_settled,
    lost_chunk,
    reassigned,
    without_dead,
)
from everstep.protocol.shape import Shape


def whole(holders: Holders, live: list[int]) -> dict[int, frozenset[int]]:
    """Every holder has the states it should have."""
    return {k: frozenset(c for c, row in enumerate(holders) if k in row) for k in live}


def test_at_the_beginning_every_replica_owns_as_much_and_its_guards_differ() -> None:
    holders = first_holders(16, [0, 1, 2, 3])
    assert [row[0] for row in holders] == [k for k in range(4) for _ in range(4)]
    for replica in range(4):
        guards = {row[1] for row in holders if row[0] == replica}
        assert guards == {0, 1, 2, 3} - {replica}


def test_at_the_beginning_every_replica_holds_as_many_chunks() -> None:
    """Else the fullest worker has more bytes than the memory model says."""
    for count in (2, 3, 4, 5, 8, 16):
        holders = first_holders(4 * count, range(count))
        assert {sum(k in row for row in holders) for k in range(count)} == {8}


def test_a_single_replica_has_no_guard() -> None:
    assert first_holders(4, [2]) == ((2,),) * 4


def test_the_guard_of_a_dead_owner_is_its_owner_and_another_becomes_guard() -> None:
    before = first_holders(12, [0, 1, 2])
    after = reassigned(before, [0, 2], whole(before, [0, 2]))
    for old, new in zip(before, after, strict=True):
        assert set(new) == {0, 2}
        if 1 in old:
            (left,) = set(old) - {1}
            assert new[0] == left, "only it has the state"


def test_a_chunk_is_lost_with_its_owner_and_its_guard() -> None:
    before = first_holders(16, [0, 1, 2, 3])
    owner, guard = before[0]
    live = [k for k in range(4) if k not in (owner, guard)]
    assert lost_chunk(before, whole(before, live)) == 0
    assert lost_chunk(before, whole(before, [k for k in range(4) if k != owner])) is None


def test_a_guard_on_its_way_does_not_count() -> None:
    before = first_holders(12, [0, 1, 2])
    filled = whole(before, [0, 2])
    chunk = next(c for c, row in enumerate(before) if row == (1, 2))
    assert lost_chunk(reassigned(before, [0, 2], filled), {0: filled[0], 2: frozenset()}) is not None
    assert chunk in filled[2]


def test_a_newcomer_is_the_third_holder_until_it_is_filled() -> None:
    before = first_holders(12, [0, 1])
    filled = {**whole(before, [0, 1]), 2: frozenset()}
    third = reassigned(before, [0, 1, 2], filled)
    given_to_it = {c for c, row in enumerate(third) if 2 in row}
    assert len(given_to_it) in (7, 8, 9)
    assert all(row[:2] == old or set(row[:2]) == set(old) for row, old in zip(third, before, strict=True))
    after = reassigned(third, [0, 1, 2], {**filled, 2: frozenset(given_to_it)})
    assert all(len(row) == 2 for row in after)
    assert [sum(row[0] == k for row in after) for k in range(3)] == [4, 4, 4]
    assert max(sum(k in row for row in after) for k in range(3)) <= 9


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    return draw(
        st.lists(st.tuples(st.sampled_from(["dies", "joins", "filled"]), st.integers(0, 4)), max_size=25)
    )


@given(replicas=st.integers(1, 5), history=histories())
def test_the_rules_hold_through_any_history(replicas: int, history: list[tuple[str, int]]) -> None:
    live = list(range(replicas))
    holders = first_holders(4 * replicas, live)
    filled = {k: set(c) for k, c in whole(holders, live).items()}
    for what, replica in history:
        if what == "dies" and replica in live and len(live) > 1:
            live.remove(replica)
            filled.pop(replica)
        elif what == "joins" and replica < replicas and replica not in live:
            live = sorted([*live, replica])
            filled[replica] = set()
        elif what == "filled" and replica in live:
            filled[replica] |= {c for c, row in enumerate(holders) if replica in row}
        frozen = {k: frozenset(c) for k, c in filled.items()}
        if lost_chunk(holders, frozen) is not None:
            return
        before, holders = holders, reassigned(holders, live, frozen)
        for chunk, row in enumerate(holders):
            assert len(set(row)) == len(row)
            assert set(row) <= set(live)
            assert chunk in filled[row[0]], "the owner has the state"
            assert min(COPIES, len(live)) <= len(row) <= COPIES + 1
            ready = [k for k in row if chunk in filled[k]]
            kept = [k for k in without_dead(before, live)[chunk] if chunk in filled[k]]
            assert len(ready) >= min(COPIES, len(kept)), "no copy is let go before its successor is filled"
        for k in live:  # a replica keeps what it is a holder of, and nothing else
            filled[k] &= {c for c, row in enumerate(holders) if k in row}
    for _ in range(3):  # at rest: even
        filled = {k: {c for c, row in enumerate(holders) if k in row} for k in live}
        holders = reassigned(holders, live, {k: frozenset(c) for k, c in filled.items()})
    assert all(len(row) == min(COPIES, len(live)) for row in holders)
    loads = [sum(k in row for row in holders) for k in live]
    owned = [sum(row[0] == k for row in holders) for k in live]
    assert max(loads) - min(loads) <= 3
    assert max(owned) - min(owned) <= 4


def test_another_shape_has_chunks_of_its_own() -> None:
    """The planner moved a task from 4 x 1 to 2 x 3 with the chunks of four replicas: every worker raised."""
    assert Shape(4, 1, 4, chunks=16).cut(2, 3) == Shape(2, 3, 8, chunks=8)
    assert Shape(4, 1, 4, shards=2).cut(2, 3) == Shape(2, 3, 8, shards=2)


@given(st.integers(2, 6), st.data())
def test_a_map_settles_after_few_changes_and_is_even_then(count: int, data: st.DataObject) -> None:
    """Each change costs an interruption, so they must end; and nobody may be left with all of the states."""
    holders = first_holders(4 * count, range(count))
    for _ in range(data.draw(st.integers(1, 4))):
        live = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
        filled = whole(holders, live)
        if lost_chunk(holders, filled) is None:
            holders = reassigned(holders, live, filled)
    everyone = list(range(count))
    holders = reassigned(holders, everyone, whole(holders, everyone))
    changes = 0
    while not is_settled(holders, everyone):
        holders = reassigned(holders, everyone, whole(holders, everyone))
        changes += 1
        assert changes <= 4
    loads = [sum(k in row for row in holders) for k in everyone]
    assert {len(row) for row in holders} == {COPIES}
    assert max(loads) - min(loads) <= 2, loads
