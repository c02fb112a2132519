"""Data is a function of (step, microbatch) and the seed, and of nothing else."""

import numpy as np
import pytest
import torch

from everstep.engine import keys
from everstep.engine.datasets.data import Synthetic


def test_a_batch_depends_on_its_keys_alone() -> None:
    one, other = (Synthetic(vocab=100, sequence=9, rows=3, seed=4) for _ in range(2))
    for key in [(5, 1), (0, 0), (5, 1), (1, 5)]:
        assert all(torch.equal(a, b) for a, b in zip(one.batch(*key), other.batch(*key), strict=True))
        other.batch(9, 9)
    assert not torch.equal(one.batch(5, 1)[0], one.batch(1, 5)[0])
    seeded = Synthetic(vocab=100, sequence=9, rows=3, seed=5)
    assert not torch.equal(one.batch(0, 0)[0], seeded.batch(0, 0)[0])


def test_targets_are_the_tokens_that_follow() -> None:
    inputs, targets = Synthetic(vocab=5000, sequence=64, rows=8).batch(0, 0)
    assert inputs.shape == targets.shape == (8, 64)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.min() >= 0
    assert inputs.max() < 5000
    assert len(set(inputs.flatten().tolist())) <= 256


def test_a_token_nearly_tells_the_next_one() -> None:
    data = Synthetic(vocab=32, sequence=512, rows=64)
    counts = np.zeros((32, 32))
    for microbatch in range(8):
        inputs, targets = data.batch(0, microbatch)
        np.add.at(counts, (inputs.flatten().numpy(), targets.flatten().numpy()), 1)
    odds = counts / counts.sum(1, keepdims=True)
    entropy = -(counts / counts.sum() * np.log(np.where(odds > 0, odds, 1))).sum()
    assert entropy == pytest.approx(Synthetic.floor, abs=0.02)


def test_keys_are_spread_and_ordered() -> None:
    assert len({keys.key(a, b) for a in range(50) for b in range(50)}) == 2500
    assert keys.key(1, 2) != keys.key(2, 1)
    assert keys.key(-1) == keys.key(2**64 - 1)
    assert np.array_equal(keys.draws(7, 5), keys.draws(7, 9)[:5])
    assert abs(keys.uniform(3, 10_000).mean() - 0.5) < 0.02


def test_the_stream_never_changes() -> None:
    """A dataset of last year must be the dataset of today."""
    assert keys.key(1, 2, 3) == 15020427595393229491
    data = Synthetic(vocab=256, sequence=6, rows=1, seed=0)
    assert data.batch(3, 1)[0].tolist() == [[176, 212, 178, 135, 182, 14]]
