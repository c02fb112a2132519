"""Loading ahead changes when batches are made, never what they are; and waiting for data has a name."""

import os
import threading
import time
from typing import Any

import pytest
import torch

from everstep.engine.datasets.data import FunctionData, Synthetic
from everstep.engine.datasets.loading import ForkedData, Loader
from everstep.errors import UserError


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_what_is_expected_is_made_while_the_worker_computes() -> None:
    made, asked = threading.Event(), []

    class Data(Synthetic):
        def batch(self, step: int, microbatch: int) -> Any:
            asked.append((step, microbatch))
            if len(asked) == 3:
                made.set()
            return super().batch(step, microbatch)

    data = Data(vocab=9, sequence=4, rows=2)
    loader = Loader(data, ahead=2)
    loader.expect([(1, 0), (1, 1), (1, 2), (1, 3)])
    assert made.wait(10)
    assert asked == [(1, 0), (1, 1), (1, 2)]
    assert same(loader.batch(1, 1), Synthetic(vocab=9, sequence=4, rows=2).batch(1, 1))
    loader.expect([(7, 0)])  # another op list: a worker has died
    assert same(loader.batch(9, 9), Synthetic(vocab=9, sequence=4, rows=2).batch(9, 9))
    loader.close()


def test_a_users_function_runs_in_another_process_and_leaves_the_generators_alone() -> None:
    def batch(step: int, microbatch: int) -> Any:
        torch.manual_seed(step)
        return torch.randn(2), torch.tensor(os.getpid())

    loader = Loader(FunctionData(batch), ahead=2)
    torch.manual_seed(5)
    expected = torch.randn(1)
    torch.manual_seed(5)
    loader.expect([(1, 0), (1, 1)])
    value, pid = loader.batch(1, 0)
    assert torch.equal(torch.randn(1), expected)
    assert pid != os.getpid()
    torch.manual_seed(1)
    assert torch.equal(value, torch.randn(2))
    loader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_without_loading_ahead_it_runs_in_line_and_is_counted() -> None:
    def batch(step: int, microbatch: int) -> Any:
        time.sleep(0.03)
        return torch.tensor(os.getpid()), torch.ones(1)

    loader, shown = Loader(FunctionData(batch)), []
    loader.shows = lambda: shown.append(1)
    assert loader.batch(1, 0)[0] == os.getpid()
    assert loader.waited_s >= 0.03
    assert shown


def test_errors_of_the_child_are_those_of_the_data() -> None:
    def batch(step: int, microbatch: int) -> Any:
        if step == 1:
            raise ValueError("no row 7")
        if step == 2:
            raise UserError("the table has no rows.")
        os._exit(3)

    data = ForkedData(FunctionData(batch))
    with pytest.raises(RuntimeError, match="data raised ValueError: no row 7"):
        data.batch(1, 0)
    with pytest.raises(UserError, match="the table has no rows"):
        data.batch(2, 0)
    with pytest.raises(Exception, match="the process that loads data ended"):
        data.batch(3, 0)
    data.close()
