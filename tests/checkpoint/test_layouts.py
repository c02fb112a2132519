"""Saved under any layout, loaded under any other: the same bytes, every one written once."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.folder import commit, open_checkpoint
from everstep.checkpoint.layouts import load_part, save_part
from everstep.errors import UserError
from everstep.layout import Tensor, merged
from everstep.layout import builders as build
from everstep.layout.moving import placed
from everstep.layout.sharing import writing_shares
from tests.layout.drawn import layouts, tensors


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_layout_is_saved_and_any_other_loads_it(data: st.DataObject) -> None:
    over = data.draw(tensors())
    a, b = data.draw(layouts(over)), data.draw(layouts(over))
    draw = np.random.default_rng(0)
    values = {t.name: draw.standard_normal(t.shape).astype(np.float32) for t in over}
    held, wanted = placed(a, values), placed(b, values)
    with tempfile.TemporaryDirectory() as name:
        parts = []
        for holder in a.holders:
            buffers = {n: torch.from_numpy(array) for (h, n), array in held.items() if h == holder}
            parts.append(save_part(name, 1, a, holder, buffers, chunk_bytes=16))
        commit(name, 1, parts, {})
        written = sum(np.prod(row["size"]) for part in parts for row in part["slices"])
        assert written == sum(t.num_elements for t in over)
        checkpoint = open_checkpoint(Path(name) / "step-00000001")
        for holder in b.holders:
            for buffer, loaded in load_part(checkpoint, b, holder).items():
                assert np.array_equal(loaded.numpy(), wanted[holder, buffer])


def test_replicas_share_the_writing() -> None:
    weights = [Tensor(name=f"w{i}", shape=(1024, 64)) for i in range(3)]
    layout = merged([build.replicated(w, [0, 1, 2, 3]) for w in weights])
    sizes = [sum(s.box.volume for s in shares) for shares in writing_shares(layout).values()]
    assert sizes == [3 * 1024 * 64 // 4] * 4


def test_what_the_checkpoint_has_not_is_named(tmp_path: Path) -> None:
    layout = build.replicated(Tensor(name="w", shape=(4,)), [0])
    commit(tmp_path, 1, [save_part(tmp_path, 1, layout, 0, {"w": torch.zeros(4)})], {})
    checkpoint = open_checkpoint(tmp_path / "step-00000001")
    with pytest.raises(UserError, match="tensor 'v' is not there"):
        load_part(checkpoint, build.replicated(Tensor(name="v", shape=(4,)), [0]), 0)
    with pytest.raises(UserError, match=r"tensor 'w' is F32 \[4\]"):
        load_part(checkpoint, build.replicated(Tensor(name="w", shape=(5,)), [0]), 0)
