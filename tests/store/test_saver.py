"""An asynchronous save writes the state of the moment it was asked for, and holds two copies at most."""

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.engine.worker.work_items import share_of
from everstep.store.saver import AsyncSaver, Bubbles


def test_what_is_written_is_the_state_of_the_call_not_of_the_writing() -> None:
    go, written = threading.Event(), {}

    def write(step: int, tensors: dict) -> int:
        assert go.wait(10)
        written[step] = {name: tensor.clone() for name, tensor in tensors.items()}
        return step

    saver = AsyncSaver(write)
    state = {"big": torch.zeros(1 << 17), "small": torch.zeros(3), "step": torch.tensor(0.0)}
    futures = []
    for step in (1, 2):
        for tensor in state.values():
            tensor.fill_(step)
        futures.append(saver.save(step, state))
    for tensor in state.values():
        tensor.fill_(99)
    go.set()
    saver.finish()
    assert [future.result() for future in futures] == [1, 2]
    assert all((written[step][name] == step).all() for step in (1, 2) for name in state)


class OnlyBubbles(Bubbles):
    """Nothing is copied while the worker computes."""

    def pace(self) -> Callable[[], None]:
        return lambda: self._waits.wait(10) or pytest.fail("no bubble came")


def test_a_state_is_copied_in_bubbles_and_an_update_waits_for_the_rest() -> None:
    bubbles = OnlyBubbles()
    bubbles.end()
    saver, waited = AsyncSaver(bubbles=bubbles), []
    state = {"big": torch.ones(1 << 17), "small": torch.ones(3)}
    done = saver.save(1, state, hold=False, write=lambda step, tensors: tensors["big"].clone())
    (snapshots, _), *_ = saver._pending
    assert not snapshots.whole.is_set(), "it was not copied while the worker computed"
    assert (snapshots.tensors["small"] == 1).all(), "what is small is copied at once"
    saver.before_update(lambda: waited.append(1))
    state["big"].fill_(2)
    assert (done.result(10) == 1).all()
    assert not bubbles._waits.is_set(), "the worker computes again"
    saver.before_update(lambda: waited.append(2))
    assert 2 not in waited, "there is nothing left to wait for"


def test_without_a_bubble_a_piece_waits_as_long_as_the_last_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    bubbles, now, waits = Bubbles(), [0.0], []
    monkeypatch.setattr("everstep.store.saver.time.monotonic", lambda: now[0])
    monkeypatch.setattr(bubbles._waits, "wait", waits.append)
    pace = bubbles.pace()
    for took in (0.5, 0.25):
        now[0] += took
        pace()
    assert waits == [0.5, 0.25]


@given(moves=st.lists(st.sampled_from(["save", "update", "bubble", "work"]), max_size=30))
def test_whenever_the_worker_waits_each_copy_is_the_state_of_its_save(moves: list[str]) -> None:
    bubbles = Bubbles()
    saver = AsyncSaver(bubbles=bubbles)
    state, value, futures = {"w": torch.zeros(1 << 16), "s": torch.zeros(2)}, 0, []
    for move in moves:
        if move == "save":
            kept = saver.save(
                value, state, hold=False, write=lambda _, t: {n: x.clone() for n, x in t.items()}
            )
            futures.append((value, kept))
        elif move == "update":
            saver.before_update()
            value += 1
            for tensor in state.values():
                tensor.fill_(value)
        else:
            bubbles.begin() if move == "bubble" else bubbles.end()
    assert saver.finish(10)
    for wanted, kept in futures:
        assert kept is not None
        assert all((tensor == wanted).all() for tensor in kept.result(10).values())


def test_a_third_save_waits_for_the_first_and_reuses_its_memory() -> None:
    order, places = [], []
    gates = {step: threading.Event() for step in (1, 2, 3)}

    def write(step: int, tensors: dict) -> None:
        assert gates[step].wait(10)
        order.append(step)
        places.append(tensors["w"].data_ptr())

    saver = AsyncSaver(write)
    state = {"w": torch.zeros(1 << 17)}
    first = saver.save(1, state)
    saver.save(2, state)
    assert not first.done()
    third = threading.Thread(target=lambda: saver.save(3, state))
    third.start()
    for step in (1, 2, 3):
        gates[step].set()
    third.join()
    saver.finish()
    assert order == [1, 2, 3]
    assert places[0] == places[2] != places[1]


def test_storage_that_does_not_answer_costs_saves_and_holds_nothing_up() -> None:
    """Before: the third save waited for ever, and training with it."""
    answers, written = threading.Event(), []

    def write(step: int, tensors: dict) -> None:
        assert answers.wait(10)
        written.append(step)

    saver = AsyncSaver(write, num_written=lambda: len(written), stall_s=0.05)
    state = {"w": torch.zeros(4)}
    assert saver.save(1, state) is not None
    second = saver.save(2, state)
    assert saver.save(3, state) is None
    assert saver.save(4, state) is None
    answers.set()
    assert second is not None
    second.result(10)
    assert saver.save(5, state) is not None
    assert saver.finish(10)
    assert written == [1, 2, 5]


def test_the_last_state_waits_for_room_though_the_storage_did_not_answer_before() -> None:
    """It was refused at once, and all workers of the task held it for ten minutes."""
    answers = threading.Event()
    saver = AsyncSaver(lambda step, tensors: answers.wait(10), stall_s=0.01)
    state = {"w": torch.zeros(4)}
    assert all(saver.save(step, state) is not None for step in (1, 2))
    assert saver.save(3, state) is None
    threading.Timer(0.1, answers.set).start()
    assert saver.save(4, state, wait_s=10.0) is not None
    assert saver.finish(10)


def test_storage_that_is_slow_and_alive_is_waited_for() -> None:
    ticks, go = 0, threading.Event()

    def written() -> int:
        nonlocal ticks
        ticks += 1
        if ticks == 20:
            go.set()
        return ticks

    saver = AsyncSaver(lambda step, tensors: go.wait(10), num_written=written, stall_s=0.01)
    assert all(saver.save(step, {"w": torch.zeros(4)}) is not None for step in (1, 2, 3))
    assert ticks >= 20
    assert saver.finish(10)


def test_a_failed_write_is_told_by_its_future_and_ends_nothing_else() -> None:
    def write(step: int, tensors: dict) -> int:
        if step == 1:
            raise OSError("disk full")
        return step

    saver = AsyncSaver(write)
    futures = [saver.save(step, {"w": torch.zeros(2)}) for step in (1, 2, 3)]
    saver.finish()
    with pytest.raises(OSError, match="disk full"):
        futures[0].result()
    assert [future.result() for future in futures[1:]] == [2, 3]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    count=st.integers(1, 5),
)
def test_peers_share_the_writing_of_a_state_they_all_have(sizes: list[int], count: int) -> None:
    state = {f"t{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    shares = [share_of(state, index, count) for index in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(state)  # each by one of them
    loads = [sum(t.nbytes for t in share.values()) for share in shares]
    assert max(loads) - min(loads) <= 4 * max(sizes)
