"""A stream becomes replayable: each batch belongs to one (step, microbatch), whichever reader dies."""

import mmap
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep.engine.datasets import stream as stream_module
from everstep.engine.datasets.stream import BufferedStream
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec


def numbers(start: int = 0) -> Iterator[tuple[Any, Any]]:
    for n in range(start, 1000):
        yield torch.tensor([n]), torch.tensor([n])


class Stateful:
    """Like torchdata's loaders: it can say where it is."""

    def __init__(self) -> None:
        self.next = 0
        self.begun = mmap.mmap(-1, 1)  # read in another process

    def __iter__(self) -> Iterator[Any]:
        self.begun[0] += 1
        while self.next < 1000:
            self.next += 1
            yield {"x": torch.tensor([self.next - 1])}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def bound(
    folder: Path, source: Any, *, microbatches: int = 2, fresh: bool = False, **more: Any
) -> BufferedStream:
    job = Job(model=ModelSpec(preset="gpt-tiny"), microbatches=microbatches, steps=100)
    made = everstep.stream(source, folder=folder, **more).for_job(job)
    made.prepare(fresh=fresh)
    return made


def test_a_worker_without_a_launcher_begins_a_stream(tmp_path: Path) -> None:
    """As on a cluster: there was no folder."""
    job = Job(model=ModelSpec(preset="gpt-tiny"), microbatches=2, steps=100)
    stream = everstep.stream(numbers, folder=tmp_path / "not" / "there")
    data, other = stream.for_job(job), stream.for_job(replace(job, microbatches=3))
    assert first(data.batch(2, 1)) == 3
    data.close()
    with pytest.raises(UserError, match="with 2 microbatches per step, and the job has 3"):
        other.batch(9, 0)


def first(batch: Any) -> int:
    return int((batch["x"] if isinstance(batch, dict) else batch[0])[0])


def test_a_batch_can_be_asked_for_again(tmp_path: Path) -> None:
    data = bound(tmp_path, numbers)
    assert [first(data.batch(step, m)) for step in (1, 2, 3) for m in (0, 1)] == list(range(6))
    assert first(data.batch(1, 1)) == 1
    other = bound(tmp_path, numbers)  # another process reads what the first has stored
    assert first(other.batch(2, 0)) == 2
    data.close()
    assert first(other.batch(20, 1)) == 39
    other.close()


@pytest.mark.parametrize("source", [numbers, Stateful])
def test_a_reader_that_is_killed_is_replaced(tmp_path: Path, source: Any) -> None:
    """Children read, and are killed at some point of it: nothing is lost and nothing comes twice."""
    for at in (3, 9, 10):
        pid = os.fork()
        if pid == 0:
            data = bound(tmp_path, source)
            data.batch(at, 0)
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    data = bound(tmp_path, source)
    assert [first(data.batch(step, m)) for step in range(1, 30) for m in (0, 1)] == list(range(58))
    data.close()


def test_a_state_spares_the_skipping(tmp_path: Path) -> None:
    data = bound(tmp_path, Stateful)
    data.batch(10, 0)
    data.close()
    again = Stateful()
    data = bound(tmp_path, again)
    assert first(data.batch(30, 0)) == 58
    assert again.begun[0] == 1
    data.close()


class Augmented(Stateful):
    """Draws with every batch, as augmentation does."""

    def __iter__(self) -> Iterator[Any]:
        while self.next < 1000:
            self.next += 1
            yield {
                "x": torch.tensor([self.next - 1]),
                "noise": torch.cat([torch.rand(2), torch.tensor([random.random(), np.random.rand()])]),
            }


class Forgetful:
    """The same without a state: it is read again from its beginning."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Augmented())


@pytest.mark.parametrize("source", [Augmented, Forgetful])
def test_what_a_stream_draws_is_what_it_would_have_drawn_without_a_death(tmp_path: Path, source: Any) -> None:
    """The generators of a new reader began at the beginning: batches after a death were others."""

    def noise(data: BufferedStream, step: int) -> list[list[float]]:
        return [data.batch(step, m)["noise"].tolist() for m in (0, 1)]

    whole = bound(tmp_path / "a", source)
    expected = [noise(whole, step) for step in range(1, 16)]
    whole.close()
    data = bound(tmp_path / "b", source)
    found = [noise(data, step) for step in range(1, 5)]
    data.close()
    data = bound(tmp_path / "b", source)
    found += [noise(data, step) for step in range(5, 16)]
    data.close()
    assert found == expected
    assert len({tuple(one) for step in expected for one in step}) == 30


def test_the_buffer_is_bounded_and_says_how_far_it_goes_back(tmp_path: Path) -> None:
    data = bound(tmp_path, numbers, keep_steps=3)
    for step in range(1, 40):
        data.batch(step, 0)
    assert len(data.buffer.numbers()) <= 3 * 2 + 2 * 2 + 3
    with pytest.raises(
        UserError, match=r"batch 0 of the stream is no longer stored.*larger keep_steps \(now 3\)"
    ):
        data.batch(1, 0)
    data.close()


def test_a_stream_that_ends_says_so_or_begins_again(tmp_path: Path) -> None:
    def few() -> Any:
        return [(torch.tensor([n]), torch.tensor([n])) for n in range(3)]

    data = bound(tmp_path / "a", few)
    assert first(data.batch(2, 0)) == 2
    with pytest.raises(UserError, match="ended after 3 batches; give fewer steps, more data or repeat=True"):
        data.batch(2, 1)
    data.close()
    data = bound(tmp_path / "b", few, repeat=True)
    assert [first(data.batch(step, m)) for step in (1, 2, 3) for m in (0, 1)] == [0, 1, 2, 0, 1, 2]
    data.close()
    data = bound(tmp_path / "b", few, repeat=True)
    assert first(data.batch(20, 1)) == 39 % 3
    data.close()


def test_a_stream_that_fails_is_tried_again_and_then_told(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.modules["everstep.engine.datasets.stream_reader"], "_AGAIN_S", 0.01)
    tries = []

    def flaky() -> Iterator[Any]:
        tries.append(1)
        for n in range(100):
            if n == 5 and len(tries) < 3:
                raise OSError("reset by peer")
            yield torch.tensor([n]), torch.tensor([n])

    data = bound(tmp_path / "a", flaky)
    assert first(data.batch(10, 0)) == 18
    data.close()

    def broken() -> Iterator[Any]:
        yield torch.tensor([0]), torch.tensor([0])
        raise ValueError("no such column")

    data = bound(tmp_path / "b", broken)
    with pytest.raises(UserError, match="the stream raised ValueError: no such column"):
        data.batch(3, 0)
    data.close()


def test_rows_make_microbatches(tmp_path: Path) -> None:
    data = bound(tmp_path, lambda: ({"x": [n]} for n in range(100)), rows=3)
    assert data.batch(1, 1)["x"].tolist() == [[3], [4], [5]]
    data.close()


def test_another_number_of_microbatches_is_refused(tmp_path: Path) -> None:
    bound(tmp_path, numbers)
    with pytest.raises(UserError, match="was read with 2 microbatches per step, and the job has 3"):
        bound(tmp_path, numbers, microbatches=3)
    bound(tmp_path, numbers, microbatches=3, fresh=True)


def test_a_loader_of_torch_and_a_state_that_cannot_be_stored(tmp_path: Path) -> None:
    pairs = torch.utils.data.TensorDataset(torch.arange(40), torch.arange(40))
    data = bound(tmp_path / "a", torch.utils.data.DataLoader(pairs, batch_size=4))
    assert data.batch(2, 1)[0].tolist() == [12, 13, 14, 15]
    data.close()

    class Odd(Stateful):
        def state_dict(self) -> Any:
            return {"next": self}

    data = bound(tmp_path / "b", Odd)
    with pytest.raises(UserError, match="not plain values or tensors"):
        data.batch(1, 0)
    data.close()


def evaluated(folder: Path, source: Any, batches: int, *, microbatches: int = 2) -> BufferedStream:
    job = Job(model=ModelSpec(preset="gpt-tiny"), microbatches=microbatches, steps=100)
    made = everstep.stream(source, folder=folder).for_evaluation(job, batches)
    made.prepare(fresh=False)
    return made


def test_an_evaluation_has_the_first_batches_of_its_stream_again_and_again(tmp_path: Path) -> None:
    data = evaluated(tmp_path, numbers, 5)
    assert first(data.preview()) == 0
    assert sorted(data.buffer.numbers()) == list(range(5)), "all are there before the start, and no more"
    assert [first(data.batch(1, number)) for number in (*range(5), *range(5))] == [*range(5), *range(5)]
    data.close()
    other = evaluated(tmp_path, lambda: numbers(100), 5)  # a later start, with other data
    assert first(other.preview()) == 100
    other.close()


def test_an_evaluation_with_more_batches_than_its_stream_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: Any
) -> None:
    with pytest.raises(UserError, match=r"ended after 5 batches; give an evaluation 5 batches"):
        evaluated(tmp_path, lambda: numbers(995), 6).preview()
    with pytest.raises(UserError, match="the stream has no batch at all"):
        evaluated(tmp_path, lambda: iter(()), 6).preview()
    monkeypatch.setattr(stream_module, "MOST_BYTES", 300)
    with pytest.raises(UserError, match=r"of 6 batches to evaluate on take 0 GB"):
        evaluated(tmp_path, numbers, 6).preview()


def test_the_length_of_a_stream_is_that_of_its_source() -> None:
    loader = torch.utils.data.DataLoader(range(100), batch_size=4)  # type: ignore[arg-type]
    assert everstep.stream(loader).length() == 25
    assert everstep.stream(loader, rows=2).length() == 12
    assert everstep.stream(numbers).length() is None
