"""Sums of gradients that do not depend on which rank has what: beside plain ones, which do."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep import exact
from everstep.errors import UserError

RANKS = 3
ORDERS = ((0, 1, 2), (2, 0, 1), (1, 2, 0))  # which share of the batch each rank has


def contribution(share: int) -> torch.Tensor:
    """Of many magnitudes, not a whole number of blocks."""
    generator = torch.Generator().manual_seed(share)
    sizes = torch.randn(5003, generator=generator).mul_(4).exp_()
    return torch.randn(5003, generator=generator) * sizes


def trained(share: int, is_exact: bool) -> list[torch.Tensor]:
    """Weights after some steps of this share of each batch, and the losses of the others are elsewhere."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 8))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
    if is_exact:
        exact.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + share))
        model(rows).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in layers.parameters()]


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    found: dict[str, list[Any]] = {"plain": [], "exact": [], "weights": [], "plain weights": []}
    for order in ORDERS:
        for kind in ("plain", "exact"):
            tensor = contribution(order[rank])
            (exact if kind == "exact" else dist).all_reduce(tensor)
            found[kind].append(tensor)
        found["weights"].append(trained(order[rank], True))
        found["plain weights"].append(trained(order[rank], False))
    given = torch.stack([contribution(10 * rank + part)[:700] for part in range(RANKS)])
    mine = torch.zeros(700)
    exact.reduce_scatter(mine, given, dist.ReduceOp.SUM)
    whole = given.clone()
    exact.all_reduce(whole)
    found["scattered"] = [mine, whole[rank]]
    exact.install()
    found["installed"] = [trained(rank, False)]
    summed = contribution(rank)
    dist.all_reduce(summed)
    parameter = torch.full((3,), 1.0 + rank, requires_grad=True)
    exact.all_reduce(parameter)
    found["asked"] = [summed, parameter.detach()]
    odd = contribution(rank).bfloat16().reshape(-1, 1)[:1000]
    odd[300] = float("inf") if rank == 1 else 1.0
    exact.all_reduce(odd, dist.ReduceOp.AVG)
    tiny = torch.full((3,), 2.0**-140)
    exact.all_reduce(tiny)
    largest = torch.full((3,), torch.finfo(torch.float32).max / 4)
    exact.all_reduce(largest)
    empty = torch.zeros(0)
    exact.all_reduce(empty)
    found["odd"] = [odd, tiny, largest, empty]
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("exact")
    torch.multiprocessing.spawn(rank_main, (os.fspath(folder),), RANKS)
    read: dict[str, list[Any]] = pickle.loads((folder / "found").read_bytes())
    return read


def test_a_sum_is_the_same_whichever_rank_has_what(found: dict[str, list[Any]]) -> None:
    first, *others = found["exact"]
    assert all(first.equal(other) for other in others)
    first, *others = found["plain"]
    assert not all(first.equal(other) for other in others)


def test_a_sum_is_as_good_as_a_plain_one(found: dict[str, list[Any]]) -> None:
    true = sum(contribution(share).double() for share in range(RANKS))
    assert isinstance(true, torch.Tensor)
    wrong = (found["exact"][0].double() - true).norm() / true.norm()
    assert wrong < 1e-7
    plain = (found["plain"][0].double() - true).norm() / true.norm()
    assert plain > 1e-9


def test_weights_are_the_same_whichever_rank_has_what(found: dict[str, list[Any]]) -> None:
    def are_equal(runs: list[list[torch.Tensor]]) -> bool:
        return all(a.equal(b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))

    assert are_equal(found["weights"])
    assert not are_equal(found["plain weights"])
    for a, b in zip(found["weights"][0], found["plain weights"][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_reduce_scatter_gives_what_an_all_reduce_gives(found: dict[str, list[Any]]) -> None:
    mine, whole = found["scattered"]
    torch.testing.assert_close(mine, whole, rtol=1e-6, atol=0.0)


def test_once_installed_a_script_does_nothing_for_it(found: dict[str, list[Any]]) -> None:
    assert all(a.equal(b) for a, b in zip(found["installed"][0], found["weights"][0], strict=True))
    summed, parameter = found["asked"]
    assert summed.equal(found["plain"][0]), "what a script sums itself stays as it is"
    assert (parameter == 6).all()


def test_what_is_not_finite_spoils_its_block_and_no_other(found: dict[str, list[Any]]) -> None:
    odd, tiny, largest, empty = found["odd"]
    block = slice(exact.BLOCK, 2 * exact.BLOCK)
    assert odd.dtype == torch.bfloat16
    assert odd.shape == (1000, 1)
    assert odd[block].isnan().all()
    assert odd[: block.start].isfinite().all()
    assert odd[block.stop :].isfinite().all()
    assert (tiny == 0).all()
    torch.testing.assert_close(largest, torch.full((3,), torch.finfo(torch.float32).max * 0.75))
    assert not empty.numel()


def test_what_cannot_be_summed_exactly_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="takes a DistributedDataParallel model; this is a Linear"):
        exact.attach(torch.nn.Linear(1, 1))
    with pytest.raises(UserError, match="SUM or AVG of fp32, bf16 or fp16"):
        exact.all_reduce(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(UserError, match="SUM or AVG of fp32, bf16 or fp16"):
        exact.all_reduce(torch.zeros(3), dist.ReduceOp.MAX)
