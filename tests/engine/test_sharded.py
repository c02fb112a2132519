"""Sharded states: chunks give the bits of the whole, move between holders, and make up a checkpoint."""

import weakref

import pytest
import torch
from pipeline import stages

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer import Updater, adamw
from everstep.engine.state.sharded import ShardedUpdater, StoredState, chunk_ranges, pieces_in
from everstep.errors import UserError
from everstep.layout.box import Box
from everstep.store import folder

DATA = Synthetic(vocab=32, sequence=8, rows=2)
SMALL = {"vocab": 32, "width": 16, "heads": 2, "hidden": 24, "depth": 2}
CHUNKS = 8
FACTORIES = {
    "adamw": adamw(lr=1e-2),
    "adam, not fused": lambda named: torch.optim.Adam(named, lr=1e-2, amsgrad=True),
    "sgd": lambda named: torch.optim.SGD(named, lr=1e-1, momentum=0.9, dampening=0.1),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=1e-2),
    "nadam": lambda named: torch.optim.NAdam(named, lr=1e-2),
}


def stage(**options) -> Stage:
    return stages(gpt(**SMALL), 1, DATA, **options)[0]


def gradient(of: Stage, step: int) -> torch.Tensor:
    return torch.randn(of.size, generator=torch.Generator().manual_seed(step))


def means(updater: ShardedUpdater, step: int, chunks=range(CHUNKS)) -> dict[int, torch.Tensor]:
    whole = gradient(updater.stage, step)
    return {chunk: whole[updater.ranges[chunk]] for chunk in chunks}


def sharded(factory=FACTORIES["adamw"], **options) -> ShardedUpdater:
    return ShardedUpdater(stage(sharded=True, **options), factory, chunks=CHUNKS)


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_chunks_get_the_bits_that_the_whole_stage_gets(name: str, precision: str) -> None:
    whole = Updater(stage(precision=precision), FACTORIES[name])
    owner, guard = (sharded(FACTORIES[name], precision=precision) for _ in range(2))
    owner.begin(range(CHUNKS))
    guard.begin([1, 4])
    for step, scale in ((1, 1.0), (2, 0.3), (3, 1.0)):
        whole.apply(step, gradient(whole.stage, step), scale)
        owner.apply(step, means(owner, step), scale)
        guard.apply(step, means(guard, step, [1, 4]), scale)
    assert torch.equal(owner.stage.working, whole.stage.working)
    for chunk in (1, 4):
        assert torch.equal(guard.held[chunk].masters, owner.held[chunk].masters)
        assert torch.equal(guard.weights_of(chunk), owner.weights_of(chunk))


def test_chunks_cover_the_stage_are_cut_between_rows_and_do_not_depend_on_the_precision() -> None:
    one = stage()
    ranges = chunk_ranges(one.slots, one.size, CHUNKS)
    assert [r.start for r in ranges[1:]] == [r.stop for r in ranges[:-1]]
    assert (ranges[0].start, ranges[-1].stop) == (0, one.size)
    found = [piece for where in ranges for piece in pieces_in(one.slots, where)]
    assert sum(piece.size for piece in found) == sum(slot.size for slot in one.slots.values())
    assert all(len(piece.rows) == len(piece.shape) for piece in found)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_new_holder_goes_on_with_the_owner_s_bits(name: str) -> None:
    owner, other = sharded(FACTORIES[name]), sharded(FACTORIES[name])
    owner.begin(range(CHUNKS))
    other.begin([])
    owner.apply(1, means(owner, 1), 1.0)
    live, facts = owner.fill_of(3)
    tensors = [tensor.clone() for tensor in live]  # as they travel
    owner.apply(2, means(owner, 2), 0.5)
    other.take_fill(3, tensors, facts)
    other.apply(2, means(other, 2, [3]), 0.5)
    assert torch.equal(other.held[3].masters, owner.held[3].masters)
    for (index, key, a), (_, _, b) in zip(other.held[3].states(), owner.held[3].states(), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), (index, key)


def test_parts_of_different_owners_are_one_checkpoint_that_loads_whole_and_sharded(tmp_path) -> None:
    one, two = sharded(), sharded()
    one.begin([0, 1, 2, 3, 4])
    two.begin([4, 5, 6, 7])
    for updater in (one, two):
        updater.apply(1, means(updater, 1, updater.held), 1.0)
    parts = []
    for updater, chunks in ((one, range(5)), (two, range(5, 8))):
        for chunk in chunks:
            slices = [(s.tensor, s.shape, s.box, s.values) for s in updater.slices(chunk, 1)]
            parts.append(folder.write_slices(tmp_path, 1, f"chunk-{chunk}", slices))
    folder.commit(tmp_path, 1, parts, {}, groups=one.groups(1))
    state = folder.open_step(tmp_path, "step-00000001").read()
    whole, again = Updater(stage(), FACTORIES["adamw"]), sharded()
    whole.load(state, 1)
    again.load(state, 1, range(CHUNKS))
    whole.apply(2, gradient(whole.stage, 2), 1.0)
    again.apply(2, means(again, 2), 1.0)
    plain = Updater(stage(), FACTORIES["adamw"])
    for step in (1, 2):
        plain.apply(step, gradient(plain.stage, step), 1.0)
    assert torch.equal(whole.stage.working, plain.stage.working)
    assert torch.equal(again.stage.working, plain.stage.working)
    assert one.groups(1) == plain.groups(1)


class Reads:
    """A state somewhere else: how many bytes were read of it, and how many of them are in memory at once."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.alive = self.most = self.bytes = 0
        self.tensors = {name: tensor.clone() for name, tensor in state.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        self.stored = StoredState(shapes, self._read)

    def _read(self, name: str, box: Box | None) -> torch.Tensor:
        found = self.tensors[name] if box is None else self.tensors[name][box.slices()]
        found, size = found.clone(), found.nbytes
        self.bytes += size
        self.alive += size
        self.most = max(self.most, self.alive)
        weakref.finalize(found, self._gone, size)
        return found

    def _gone(self, size: int) -> None:
        self.alive -= size


def stored_state(ema: float | None = None) -> tuple[Updater, Reads]:
    updater = Updater(stage(), FACTORIES["adamw"], ema=ema)
    updater.apply(1, gradient(updater.stage, 1), 1.0)
    return updater, Reads(updater.state(1))


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_state_is_loaded_tensor_by_tensor_and_read_once(ema: float | None) -> None:
    """All of it was in host memory at once, beside the one that it was loaded into."""
    one, reads = stored_state(ema)
    other = Updater(stage(), FACTORIES["adamw"], ema=ema)
    other.load(reads.stored, 1)
    largest = 4 * max(slot.size for slot in one.stage.slots.values())
    assert reads.bytes == sum(tensor.nbytes for tensor in reads.tensors.values())
    assert reads.most < 3 * largest + 1024 < reads.bytes / 2
    for updater in (one, other):
        updater.apply(2, gradient(updater.stage, 2), 1.0)
    assert all(torch.equal(a, b) for a, b in zip(one.state(2).values(), other.state(2).values(), strict=True))


def test_sharded_a_weight_is_read_once_and_states_only_of_the_chunks_that_are_held() -> None:
    one, reads = stored_state()
    other = sharded()
    other.load(reads.stored, 1, [2, 3])
    weights = sum(tensor.nbytes for name, tensor in reads.tensors.items() if name.startswith("model/"))
    held = sum(4 * 2 * piece.size for chunk in (2, 3) for piece in other.held[chunk].pieces)
    assert reads.bytes - weights - held < 100 * len(one.stage.slots)  # counters and limits
    assert held < weights
    one.apply(2, gradient(one.stage, 2), 1.0)
    other.apply(2, means(other, 2, [2, 3]), 1.0)
    for chunk in (2, 3):
        assert torch.equal(other.weights_of(chunk), one.stage.working[other.ranges[chunk]])


def test_masters_are_gone_once_the_chunks_have_them() -> None:
    updater = sharded(precision="bf16")
    updater.begin([0, 1])
    assert updater.stage.masters.numel() == 0
    updater.release([1])
    assert sorted(updater.held) == [0]


def test_an_optimizer_that_looks_at_whole_tensors_is_refused_by_name() -> None:
    class Muon(torch.optim.SGD):
        pass

    with pytest.raises(UserError, match=r"Muon may not; use one of torch's own like AdamW"):
        sharded(lambda named: Muon([p for _, p in named]))
