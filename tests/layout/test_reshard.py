"""Any layout to any layout keeps every byte, and moves no byte that need not move."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import UserError
from everstep.layout import Tensor
from everstep.layout.box import Box, flat_range, overlapping, uncovered
from everstep_lab import layout_builders as build
from everstep_lab.layout import Holder, Layout, merged
from everstep_lab.reshard import least_bytes, reshard
from tests.layout.drawn import layouts, tensors
from tests.layout.moving import gathered, move, placed


def values(over: list[Tensor], seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {t.name: draw.standard_normal(t.shape).astype(np.float32) for t in over}


def moved(a: Layout, b: Layout, buffers: dict) -> dict:
    target = {key: np.zeros(size, np.float32) for key, size in b.buffers.items()}
    move(reshard(a, b), buffers, target)
    return target


def doubly_held(layout: Layout) -> tuple[Holder, str] | None:
    """A holder that has some element of a tensor in two places; None if every holder has each once."""
    mine: dict[tuple[Holder, str], list[Box]] = {}
    for piece in layout.pieces:
        for holder in piece.holders:
            mine.setdefault((holder, piece.tensor), []).append(piece.box)
    return next((key for key, boxes in mine.items() if overlapping(boxes) is not None), None)


@given(st.data())
def test_any_layout_to_any_layout_and_back_has_the_same_bytes(data: st.DataObject) -> None:
    over = data.draw(tensors())
    a, b, c = (data.draw(layouts(over)) for _ in range(3))
    given_values = values(over)
    for layout in (a, b, c):
        layout.validate()
    start = placed(a, given_values)
    there = moved(a, b, start)
    expected = placed(b, given_values)
    assert all(np.array_equal(there[key], expected[key]) for key in expected)  # padding too is untouched
    again = moved(c, a, moved(b, c, there))
    assert all(np.array_equal(again[key], start[key]) for key in start)
    assert all(np.array_equal(gathered(b, there)[t.name], given_values[t.name]) for t in over)


@given(st.data())
def test_what_moves_is_what_each_holder_lacks_and_no_more(data: st.DataObject) -> None:
    over = data.draw(tensors(count=2))
    a, b = (data.draw(layouts(over)) for _ in range(2))
    lacking = 0
    for holder in b.holders:
        for t in over:
            have, need = np.zeros(t.shape, bool), np.zeros(t.shape, bool)
            for layout, marks in ((a, have), (b, need)):
                for piece in layout.of(t.name):
                    if holder in piece.holders:
                        marks[piece.box.slices()] = True
            lacking += 4 * int((need & ~have).sum())
    found = reshard(a, b)
    if doubly_held(b) is None:
        assert found.moved_bytes == lacking == least_bytes(a, b)
    assert sum(found.sent_bytes().values()) == found.moved_bytes == sum(found.received_bytes().values())


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple), st.data())
def test_a_flat_range_is_its_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = int(np.prod(shape, dtype=int))
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    numbers = np.arange(size).reshape(shape)
    boxes = list(flat_range(shape, low, high))
    assert [int(x) for box in boxes for x in numbers[box.slices()].reshape(-1)] == list(range(low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3))))
def test_the_proof_of_coverage_finds_every_hole(corners: list[tuple[int, int, int, int]]) -> None:
    boxes = [Box((a, b), (min(n, 5 - a), min(m, 5 - b))) for a, b, n, m in corners]
    marks = np.zeros((5, 5), bool)
    for box in boxes:
        marks[box.slices()] = True
    hole = uncovered((5, 5), boxes)
    assert (hole is None) == bool(marks.all())
    if hole is not None:
        assert not marks[hole.slices()].any()


def test_the_nearest_holder_sends() -> None:
    t = Tensor(name="w", shape=(8, 8))
    a = build.replicated(t, [0, 4])
    b = build.replicated(t, [5])
    same_node = lambda source, target: abs(source // 4 - target // 4)  # noqa: E731
    assert reshard(a, b, same_node).sent_bytes() == {4: 256}
    half = build.split(t, 0, [[4], [0]])  # holder 4 is near, but has only half
    assert reshard(half, b, same_node).sent_bytes() == {4: 128, 0: 128}


def test_replicas_share_the_sending() -> None:
    t = Tensor(name="w", shape=(1024, 64))
    sent = reshard(build.replicated(t, [0, 1, 2, 3]), build.replicated(t, [7])).sent_bytes()
    assert sorted(sent.values()) == [t.num_bytes // 4] * 4
    small = [Tensor(name=f"b{i}", shape=(16,)) for i in range(40)]
    a = merged([build.replicated(s, [0, 1, 2, 3]) for s in small])
    b = merged([build.replicated(s, [8]) for s in small])
    assert sorted(reshard(a, b).sent_bytes().values()) == [640] * 4


def test_what_stays_in_place_is_not_moved() -> None:
    t = Tensor(name="w", shape=(8, 4))
    a = build.split(t, 0, [[0], [1], [2], [3]])
    found = reshard(a, a)
    assert found.moved_bytes == 0
    assert all(transfer.stays for transfer in found)


def test_three_by_two_from_two_by_two_moves_only_what_the_newcomers_need() -> None:
    """Workers (replica, stage): two replicas more of nothing but a third of each stage."""
    weights = [Tensor(name=f"l{i}", shape=(32, 32)) for i in range(4)]

    def shape(replicas: int, stages: int) -> Layout:
        per = len(weights) // stages
        return merged(
            [build.replicated(w, [(k, i // per) for k in range(replicas)]) for i, w in enumerate(weights)]
        )

    assert reshard(shape(2, 2), shape(3, 2)).moved_bytes == 4 * 32 * 32 * 4
    assert reshard(shape(3, 2), shape(2, 2)).moved_bytes == 0
    assert reshard(shape(2, 2), shape(1, 4)).moved_bytes == 3 * 32 * 32 * 4


def test_a_tensor_to_average_is_the_mean_of_its_holders() -> None:
    t = Tensor(name="norm", shape=(3,), combine="mean")
    a = build.replicated(t, [0, 1])
    b = build.replicated(Tensor(name="norm", shape=(3,)), [2])
    buffers = {(0, "norm"): np.array([1.0, 2, 3]), (1, "norm"): np.array([3.0, 2, 1])}
    target = {(2, "norm"): np.zeros(3)}
    move(reshard(a, b), buffers, target)
    assert target[2, "norm"].tolist() == [2.0, 2.0, 2.0]


def test_a_tied_name_leads_to_its_tensor() -> None:
    embed, head = Tensor(name="embed", shape=(4, 2)), Tensor(name="head", shape=(4, 2))
    a = build.tied(build.replicated(embed, [0]), {"head": "embed"})
    a.validate()
    b = merged([build.replicated(embed, [0]), build.replicated(head, [1])])
    start = placed(a, {"embed": np.arange(8.0).reshape(4, 2)})
    there = {key: np.zeros(size) for key, size in b.buffers.items()}
    move(reshard(a, b), start, there)
    assert there[1, "head"].tolist() == list(range(8))


def test_grouped_heads_fewer_than_parts_are_whole_in_each() -> None:
    qkv = Tensor(name="qkv", shape=(12, 2))
    layout = build.fused(
        qkv, 0, [8, build.Segment(2, split=False), build.Segment(2, split=False)], [[0], [1]]
    )
    layout.validate()
    assert layout.buffers == {(0, "qkv"): 16, (1, "qkv"): 16}
    held = placed(layout, {"qkv": np.arange(24.0).reshape(12, 2)})
    assert held[1, "qkv"].reshape(8, 2)[:, 0].tolist() == [8, 10, 12, 14, 16, 18, 20, 22]


def test_a_padded_vocabulary_pads_every_shard_alike() -> None:
    embed = Tensor(name="embed", shape=(10, 2))
    layout = build.padded(embed, 0, [[0], [1]], multiple=4)
    layout.validate()
    assert layout.buffers == {(0, "embed"): 16, (1, "embed"): 16}
    assert layout.held_bytes() == {0: 64, 1: 16}


def test_zero_one_and_three_lay_out_as_deepspeed_does() -> None:
    """1743 elements over two: ZeRO-1 pads the whole to 872 a rank, ZeRO-3 every tensor alone."""
    over = [Tensor(name="a", shape=(41, 42)), Tensor(name="b", shape=(21,))]
    one = build.flat(over, [0, 1], align=2)
    assert set(one.buffers.values()) == {872}
    assert one.held_bytes() == {0: 872 * 4, 1: 871 * 4}
    three = build.flat_by_tensor(over, [0, 1])
    assert set(three.buffers.values()) == {861 + 11}


BROKEN = {
    "no worker holds 4 elements of tensor 'w'": lambda t: build.split(t, 0, [[0], [1]]).pieces[:1],
    "outside the tensor": lambda t: [_changed(t, box=Box((3, 0), (2, 4)))],
    "lies outside buffer": lambda t: [_changed(t, offset=3)],
    "lie on one place": lambda t: [_changed(t, strides=(1, 1))],
}


def _changed(t: Tensor, **changes: object):
    from dataclasses import replace

    return replace(build.replicated(t, [0]).pieces[0], **changes)


@pytest.mark.parametrize("says", BROKEN)
def test_a_layout_that_cannot_be_is_refused(says: str) -> None:
    t = Tensor(name="w", shape=(2, 4))
    buffers = {(0, "w"): 8, (1, "w"): 8}
    layout = Layout(tensors={"w": t}, pieces=tuple(BROKEN[says](t)), buffers=buffers)
    with pytest.raises(UserError, match=says):
        layout.validate()


def test_two_pieces_interleaved_by_columns_do_not_collide_and_shifted_ones_do() -> None:
    from dataclasses import replace

    t = Tensor(name="w", shape=(4, 6))
    piece = build.replicated(t, [0]).pieces[0]
    left = replace(piece, box=Box((0, 0), (4, 2)), offset=0, strides=(6, 1))
    right = replace(piece, box=Box((0, 2), (4, 4)), offset=2, strides=(6, 1))
    Layout(tensors={"w": t}, pieces=(left, right), buffers={(0, "w"): 24}).validate()
    shifted = replace(right, offset=1)
    with pytest.raises(UserError, match="lie on one place"):
        Layout(tensors={"w": t}, pieces=(left, shifted), buffers={(0, "w"): 24}).validate()


def test_sizes_that_do_not_fit_are_named() -> None:
    t = Tensor(name="w", shape=(6, 4))
    with pytest.raises(UserError, match="sizes \\[1, 2\\] do not add up"):
        build.split(t, 0, [[0], [1]], [1, 2])
    with pytest.raises(UserError, match="no dimension 2"):
        build.split(t, 2, [[0]])
    with pytest.raises(UserError, match="sub-parameters \\[4, 4\\] do not add up"):
        build.fused(t, 0, [4, 4], [[0]])
    with pytest.raises(UserError, match="'v' is not in the layout to start from"):
        reshard(build.replicated(t, [0]), build.replicated(Tensor(name="v", shape=(1,)), [0]))
    with pytest.raises(UserError, match="does not convert"):
        reshard(build.replicated(t, [0]), build.replicated(Tensor(name="w", shape=(6, 4), dtype="BF16"), [0]))
