"""Rows, tokens and tables in shuffled epochs: every row exactly once in each, whoever asks."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import everstep
from everstep.engine.datasets.data import dataset_of
from everstep.engine.datasets.order import RowOrder, permuted
from everstep.errors import UserError


@given(size=st.integers(1, 400), key=st.integers(0, 2**64 - 1))
def test_a_permutation_is_one(size: int, key: int) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


def test_a_permutation_costs_the_same_for_any_size() -> None:
    far = permuted(np.array([10**15 - 1, 3]), 10**15, 7)
    assert far.max() < 10**15
    assert permuted(np.array([3]), 10**15, 7)[0] == far[1]


def test_a_shuffle_looks_like_one() -> None:
    order = permuted(np.arange(20_000), 20_000, 3)
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03
    neighbours = np.abs(np.diff(order))
    assert (neighbours < 200).mean() < 0.04  # 2 % by chance
    other = permuted(np.arange(20_000), 20_000, 4)
    assert (order == other).mean() < 0.001


@given(size=st.integers(1, 50), rows=st.integers(1, 9), microbatches=st.integers(1, 5), shuffle=st.booleans())
def test_every_row_comes_once_in_every_epoch(size: int, rows: int, microbatches: int, shuffle: bool) -> None:
    order = RowOrder(size=size, rows=rows, microbatches=microbatches, seed=5, shuffle=shuffle)
    steps = order.steps(3)
    seen = Counter(
        place for step in range(1, steps + 1) for m in range(microbatches) for place in order.places(step, m)
    )
    assert set(seen.values()) == {1}
    whole = Counter(epoch for epoch, _ in seen)
    assert [whole[epoch] for epoch in range(3)] == [size] * 3
    assert order.steps(3) * rows * microbatches >= 3 * size > (order.steps(3) - 1) * rows * microbatches


class Squares:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.tensor([float(index)]), torch.tensor([float(index**2)])


class Noisy(Squares):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.randn(3) + index, torch.tensor([random.random(), np.random.rand()])


def test_rows_are_stacked_and_shuffled_by_the_seed() -> None:
    data = everstep.rows(Squares(), rows=4)
    x, y = data.batch(1, 0)
    assert torch.equal(x**2, y)
    assert x.shape == (4, 1)
    assert not torch.equal(everstep.rows(Squares(), rows=10, seed=1).batch(1, 0)[0], data.batch(1, 0)[0])
    plain = everstep.rows(Squares(), rows=10, shuffle=False)
    assert plain.batch(1, 0)[0].flatten().tolist() == list(range(10))


def test_randomness_inside_a_data_set_repeats_and_leaves_no_trace() -> None:
    data = everstep.rows(Noisy(), rows=2)
    before = torch.get_rng_state()
    first = data.batch(2, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    random.seed(99)
    again = data.batch(2, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], data.batch(7, 0)[1])  # another epoch, other draws


def test_short_rows_of_tokens_are_filled_up() -> None:
    ragged = [
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "text": "a"},
        {"input_ids": [4], "labels": [4], "text": "b"},
    ]
    batch = everstep.rows(ragged, rows=2, shuffle=False).batch(1, 0)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert "text" not in batch


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: everstep.rows([(torch.ones(2), 1), (torch.ones(3), 1)], rows=2, shuffle=False).batch(
                1, 0
            ),
            r"part 0 .* different shapes, such as \(2,\) and \(3,\); give collate=.*token_loss",
        ),
        (lambda: everstep.rows([{"text": "a"}]).batch(1, 0), "none of which is numbers"),
        (lambda: everstep.rows([torch.ones(2)]).batch(1, 0), r"a row is \(input, target\)"),
        (lambda: everstep.rows(iter([1])), "give it to everstep.stream"),
        (lambda: everstep.rows([]), "without rows"),
        (lambda: everstep.tokens("nowhere.bin", sequence=4), "not a file of tokens"),
        (lambda: everstep.table("nowhere.parquet"), "not a .parquet"),
        (lambda: dataset_of([1, 2]), r"everstep.rows\(data"),
        (lambda: dataset_of(torch.utils.data.DataLoader(Squares())), "give everstep.rows"),
        (lambda: dataset_of(x for x in ()), "everstep.stream"),
        (lambda: dataset_of(7), "data is a int; give a function"),
    ],
)
def test_what_cannot_be_data_is_said_with_the_fix(make: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


def test_packed_tokens_are_targets_once_per_epoch(tmp_path: Path) -> None:
    line = np.arange(1, 102, dtype=np.uint16)
    line[:51].tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", line[51:])
    data = everstep.tokens(tmp_path, sequence=7, rows=1)
    assert data.num_rows == 50 // 7 + 49 // 7
    seen = Counter[int]()
    for step in range(1, data.num_rows + 1):
        inputs, targets = data.batch(step, 0)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        seen.update(targets.flatten().tolist())
    assert set(seen.values()) == {1}
    assert len(seen) == 7 * data.num_rows


def test_the_header_of_llm_c_is_skipped(tmp_path: Path) -> None:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 20
    (tmp_path / "t.bin").write_bytes(header.tobytes() + np.arange(20, dtype=np.uint16).tobytes())
    x, _ = everstep.tokens(tmp_path / "t.bin", sequence=19, rows=1).batch(1, 0)
    assert x.tolist() == [list(range(19))]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "datasets"])
def test_tables_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    datasets, arrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tmp_path = tmp_path / "table"
    tmp_path.mkdir()
    table = arrow.table({"input_ids": [[i, i + 1] for i in range(30)], "name": [str(i) for i in range(30)]})
    if kind == "parquet":
        import pyarrow.parquet as parquet

        for part in range(2):
            parquet.write_table(table.slice(15 * part, 15), tmp_path / f"{part}.parquet", row_group_size=4)
    elif kind == "arrow":
        with (
            arrow.OSFile(str(tmp_path / "t.arrow"), "wb") as sink,
            arrow.ipc.new_file(sink, table.schema) as out,
        ):
            out.write_table(table)
    else:
        datasets.Dataset(table).save_to_disk(str(tmp_path))
    data = everstep.table(tmp_path, columns=["input_ids"], rows=3)
    seen = [row for step in range(1, 11) for row in data.batch(step, 0)["input_ids"].tolist()]
    assert sorted(seen) == [[i, i + 1] for i in range(30)]
    with pytest.raises(UserError, match="no column 'tokens'; it has input_ids, name"):
        everstep.table(tmp_path, columns=["tokens"])


def test_a_table_that_cannot_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1" + bytes(40))
    with pytest.raises(UserError, match=r"torn\.parquet' cannot be read: ArrowInvalid: [^\n]*\.$"):
        everstep.table(tmp_path / "torn.parquet")
    (tmp_path / "b.arrow").write_bytes(b"")
    with pytest.raises(UserError, match="one of these kinds"):
        everstep.table(tmp_path)
