"""What a held rank refuses is said in a sentence, before a death."""

from __future__ import annotations

import io
import weakref
from pathlib import Path

import pytest
import torch

from everstep.hold import same_gpu, state_tree
from everstep.hold.rank import HeldRank
from everstep.hold.settings import HoldSettings
from everstep.protocol.held import RankRefused, RankWord


class Script:
    """One rank of two, with a model and its optimizer."""

    def __init__(self, folder: Path) -> None:
        self.said: list[RankWord] = []
        settings = HoldSettings(rank=0, world=2, unit=1, key="00" * 32, slate=str(folder / "slate"))
        self.held = HeldRank(settings, self.said.append)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.held.optimizers.append(weakref.ref(self.optimizer))

    def snapshot(self, step: int) -> None:
        self.held.snapshot(
            step, lambda: {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )

    def update(self) -> None:
        self.model(torch.ones(1, 4)).sum().backward()
        self.held.before_update(self.optimizer)
        self.optimizer.step()
        self.held.after_update(self.optimizer)
        self.optimizer.zero_grad()

    @property
    def refused(self) -> list[str]:
        return [word.because for word in self.said if isinstance(word, RankRefused)]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_one_update_per_snapshot_is_held(script: Script) -> None:
    for step in range(4):
        script.snapshot(step)
        script.update()
    assert not script.refused


def test_several_updates_from_one_snapshot_to_the_next_are_refused(
    script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    script.snapshot(0)
    script.update()
    script.update()
    assert "several steps from one everstep.snapshot to the next" in script.refused[0]
    assert "cannot be held: an optimizer makes several steps" in capfd.readouterr().err


def test_parameters_that_are_changed_outside_of_the_optimizer_are_refused(script: Script) -> None:
    script.snapshot(0)
    script.update()
    script.snapshot(1)
    with torch.no_grad():
        script.model.weight.clamp_(-1.0, 1.0)
    script.update()
    assert "changed outside of their optimizer's step" in script.refused[0]


def test_a_snapshot_where_gradients_are_kept_is_no_place_to_begin(script: Script) -> None:
    script.snapshot(0)
    script.model(torch.ones(1, 4)).sum().backward()
    script.snapshot(1)
    (*_, last) = script.held._slate.records()
    assert "gradients are kept" in last.refusal


def test_what_is_on_the_gpu_of_the_peer_that_asks_goes_by_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = torch.arange(4.0), torch.arange(6).reshape(2, 3)
    monkeypatch.setattr(same_gpu, "shared", lambda tensor, gpu: [gpu] if tensor is here else None)
    monkeypatch.setattr(same_gpu, "opened", lambda handle, dtype, shape: {"gpu 7": here}[handle[0]].clone())
    packed = state_tree.Packed(tensors=[here, there], tree=[{"b": 0}, {"b": 1}])
    stream = io.BytesIO(b"".join(packed.parts("gpu 7")))
    first, second = state_tree.unpack(stream.read, stream.readinto)
    assert torch.equal(first, here)
    assert torch.equal(second, there)
    assert stream.read() == b""
