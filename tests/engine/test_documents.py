"""Rows that hold several documents: each trains as if it stood alone; no token is lost, none counts twice."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline import by_name, run_step, stages
from torch import Tensor

from everstep.engine.datasets.documents import DocumentPiece, PackedDocuments, packed, positions_in_documents
from everstep.engine.datasets.rows import rows
from everstep.engine.datasets.tokens import tokens
from everstep.engine.layers.boundary import Value
from everstep.engine.layers.gpt import check_tokens, gpt
from everstep.engine.layers.model import Model, token_loss
from everstep.engine.prepare.preflight import preflight
from everstep.engine.prepare.program import Program
from everstep.errors import UserError
from everstep.job.job import DataSpec, Job, ModelSpec

VOCAB, END = 61, 0


def small_gpt() -> Model:
    made = gpt(width=32, heads=4, kv_heads=2, depth=2, vocab=VOCAB, context=32)
    return replace(made, loss=token_loss)


def small_llama() -> Model:
    transformers = pytest.importorskip("transformers")
    from everstep.engine.hf.model import hf

    return hf(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=64,
        )
    )


def documents(*lengths: int) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(len(lengths))
    return [{"input_ids": torch.randint(1, VOCAB, (length,), generator=draw).tolist()} for length in lengths]


class Alone:
    """Each document in a microbatch of its own."""

    def __init__(self, given: list[dict[str, list[int]]]) -> None:
        self.given = given

    def batch(self, step: int, microbatch: int) -> tuple[Value, Tensor]:
        row = torch.tensor([self.given[microbatch]["input_ids"]])
        targets = torch.full_like(row, -100)
        targets[:, :-1] = row[:, 1:]
        return row, targets


def trained(model: Model, data: Any, microbatches: int, count: int) -> tuple[float, dict[str, Tensor]]:
    """The loss of all tokens of a step, and its gradients, undivided."""
    pipeline = stages(model, count, data, seed=3, contributions=8)
    losses = run_step(pipeline, 1, microbatches)
    return float(losses.sum()), by_name(pipeline, [stage.take_gradients() for stage in pipeline])


@pytest.mark.parametrize("family", [small_gpt, small_llama])
@pytest.mark.parametrize("count", [1, 3])
def test_packed_documents_train_as_each_would_alone(family, count: int) -> None:
    given = documents(3, 20, 9, 12, 7, 2, 25)
    data = rows(given, pack=26, rows=1, shuffle=False)
    assert len(data.dataset) < len(given)
    together = trained(family(), data, len(data.dataset), count)
    alone = trained(family(), Alone(given), len(given), count)
    assert together[0] == pytest.approx(alone[0], rel=1e-5)
    for name, gradient in alone[1].items():
        assert torch.allclose(together[1][name], gradient, rtol=1e-4, atol=1e-5), name


def test_without_positions_a_document_would_see_the_one_before_it() -> None:
    """The test above can fail: the same tokens as one document give another loss."""

    class Blind:
        def batch(self, step: int, microbatch: int) -> tuple[Value, Tensor]:
            inputs, targets = data.batch(step, microbatch)
            return inputs["input_ids"], targets

    data = rows(documents(13, 13), pack=26, rows=1, shuffle=False)
    assert trained(small_gpt(), Blind(), 1, 1)[0] != pytest.approx(
        trained(small_gpt(), data, 1, 1)[0], rel=1e-4
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(2, 17))
def test_every_token_but_the_first_of_a_document_is_learned_once(lengths: list[int], sequence: int) -> None:
    """Of a document longer than a row, the token at each cut was no target of any other."""
    count = iter(range(1, 10_000))
    given = [{"input_ids": [next(count) for _ in range(length)]} for length in lengths]
    found = PackedDocuments(given, sequence)
    learned = [int(t) for index in range(len(found)) for t in found[index]["targets"] if t >= 0]
    assert sorted(learned) == sorted(token for one in given for token in one["input_ids"][1:])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(2, 17))
def test_every_token_is_in_one_row_at_one_place(lengths: list[int], sequence: int) -> None:
    found = PackedDocuments(documents(*lengths), sequence)
    pieces = sorted(piece for row in found.rows for piece in row)
    assert all(sum(p.stop - p.start for p in row) <= sequence for row in found.rows)
    covered: dict[int, list[tuple[int, int]]] = {}
    for document, start, stop in pieces:
        covered.setdefault(document, []).append((start, stop))
    for document, length in enumerate(lengths):
        edges = covered[document]
        assert edges[0][0] == 0
        assert edges[-1][1] == length
        assert all(a[1] == b[0] for a, b in pairwise(edges))
    assert 0 < found.filled <= 1


def test_rows_are_filled_well() -> None:
    draw = np.random.default_rng(1)
    lengths = np.minimum(draw.lognormal(5.5, 1.0, 20_000).astype(int) + 1, 2048)
    pieces = [DocumentPiece(number, 0, int(length)) for number, length in enumerate(lengths)]
    assert lengths.sum() / (2048 * len(packed(pieces, 2048))) > 0.995


def test_a_row_says_where_its_documents_begin_and_counts_no_target_of_another() -> None:
    (row,) = PackedDocuments([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}], 7)
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 0, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert row["targets"].tolist() == [6, 7, -100, 9, -100, -100, -100]


def test_positions_begin_anew_behind_each_end() -> None:
    ends = torch.tensor([[0, 0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    assert positions_in_documents(ends).tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]]


def test_tokens_of_a_file_know_their_documents(tmp_path: Path) -> None:
    np.array([5, 6, END, 7, 8, 9, END, 4, 3], dtype=np.uint16).tofile(tmp_path / "a.bin")
    data = tokens(tmp_path / "a.bin", sequence=8, rows=1, document_end=END, shuffle=False)
    inputs, targets = data.batch(1, 0)
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert targets.tolist() == [[6, END, -100, 8, 9, END, -100, 3]]


def test_a_job_file_packs_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets, arrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    lists = [row["input_ids"] for row in documents(3, 9, 14, 5, 1)]
    parquet.write_table(arrow.table({"input_ids": lists}), tmp_path / "t.parquet", row_group_size=2)
    job = Job(
        model=ModelSpec(preset="gpt-1m", options={"vocab": VOCAB, "depth": 2}),
        data=DataSpec(kind="table", path=str(tmp_path / "t.parquet"), pack=True, sequence=16, rows=1),
        microbatches=2,
        stages=2,
    )
    program = Program.of(job)
    assert program.model.loss is token_loss
    preflight(job)
    inputs, targets = program.data.batch(1, 0)
    assert inputs["input_ids"].shape == targets.shape == (1, 16)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: rows([[1, 2]], pack=8), "dicts with input_ids"),
        (lambda: rows([{"input_ids": [[1, 2]]}], pack=8), "one line of tokens"),
        (lambda: rows([{"input_ids": []}], pack=8), "no row of the data set holds a token"),
        (lambda: rows(documents(3), pack=1), "at least 2"),
        (lambda: rows(documents(3), pack=8, collate=list), "no collate"),
        (lambda: DataSpec(kind="synthetic", pack=True), 'data.pack is for data.kind = "table"'),
        (lambda: DataSpec(kind="table", path="x", document_end=0), 'is for data.kind = "tokens"'),
        (lambda: check_tokens(9, {"input_ids": torch.ones(1, 2)}, None), "input_ids and position_ids"),
    ],
)
def test_what_cannot_be_packed_is_a_sentence(make, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


def test_a_document_that_changes_its_length_is_a_sentence() -> None:
    given = documents(4, 5)
    data = rows(given, pack=16, rows=1)
    given[1]["input_ids"].append(3)
    with pytest.raises(UserError, match="had 5 tokens and now has 6"):
        data.batch(1, 0)


@pytest.mark.parametrize(
    ("kind", "changes", "crosses"),
    [
        ("llama", {}, False),
        ("gemma3_text", {"sliding_window": 8}, False),
        ("gpt2", {}, False),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, True),  # its masks know no documents
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, True),
        (
            "minimax",
            {"num_local_experts": 4, "layer_types": ["full_attention", "linear_attention"] * 2},
            True,
        ),
    ],
)
def test_a_model_in_which_documents_would_see_each_other_is_refused_before_the_start(
    kind: str, changes: dict[str, Any], crosses: bool
) -> None:
    """As transformers computes it: a document behind another has other logits than alone."""
    transformers = pytest.importorskip("transformers")
    from everstep.engine.hf.model import hf

    small = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    depth = len(changes.get("layer_types", "abc"))
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=VOCAB, num_hidden_layers=depth, intermediate_size=48, **small | changes
    )
    tokens = torch.randint(1, VOCAB, (1, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.cat((torch.arange(7), torch.arange(9)))[None]
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        made, alone = (
            whole(input_ids=tokens[:, start:], position_ids=positions[:, start:], use_cache=False).logits[
                :, -9:
            ]
            for start in (0, 7)
        )
    assert torch.allclose(made, alone, atol=1e-4) is not crosses
    batch = {"input_ids": tokens, "position_ids": positions}
    check = hf(config).assembly.check
    if crosses:
        with pytest.raises(UserError, match=r"layers\.\d of .* a document would see the one before it"):
            check(batch, batch)
    else:
        check(batch, batch)
    check({**batch, "position_ids": torch.arange(16)[None]}, batch)
