"""Every bug that once lost or changed something in a conversion, each with the checkpoint that showed it."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from everstep.cli import main
from everstep.errors import UserError
from everstep.layout.box import Box
from everstep.store import dtypes
from everstep.store.dtypes import Array
from everstep.store.stored import Held, Stored, read_all
from everstep_convert.conversion import Accepted, Reading, Target, read_state, write_state
from everstep_convert.formats import pickles
from everstep_convert.formats.sidecar import find_ties
from everstep_convert.state import TrainingState, scalar
from tests.store.zero_files import write_zero


def held(tensor: torch.Tensor) -> Held:
    name = dtypes.name_of(tensor.dtype)
    assert name is not None
    return Held(name, dtypes.array_of(tensor))


def value(stored: Stored) -> torch.Tensor:
    return dtypes.tensor_of(read_all(stored), stored.dtype)


class Odd(nn.Module):
    """A frozen embedding, a tied head, buffers of several types, parameters of one element and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.embed.weight.requires_grad_(False)
        self.up = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5]))
        self.head = nn.Linear(3, 7, bias=False)
        self.out = nn.Linear(3, 7, bias=False)
        self.out.weight = self.head.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("small", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("ids", torch.arange(3).to(torch.uint16))


def trained(lr: Any = 0.01) -> tuple[Odd, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Odd()
    with torch.no_grad():
        model.norm.num_batches_tracked.add_(2**40 + 1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return model, optimizer


def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, flatten: bool = True) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def save(path: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(state, checkpoint_id=str(path))
    return path


def load(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(state, checkpoint_id=str(path))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 3, 64])
def test_frozen_weights_and_buffers_of_every_stage_are_read(tmp_path: Path, stage: int, world: int) -> None:
    """DCP to ZeRO-3 lost them in silence; stage 1 and 2 made F32 of an int64 buffer."""
    model, optimizer = trained()
    save(tmp_path / "dcp", state_dict(model, optimizer))
    write_zero(tmp_path / "ds", read_state(tmp_path / "dcp"), stage=stage, world=world)
    found = read_state(tmp_path / "ds")
    named = {**found.parameters(), **found.buffers()}
    for name, tensor in model.state_dict().items():
        if name != "out.weight":  # tied: a name of head.weight
            assert (named[name].dtype, named[name].shape) == (dtypes.name_of(tensor.dtype), tensor.shape)
            assert torch.equal(value(named[name]), tensor), name
    assert found.tied == {"out.weight": "head.weight"}
    assert set(found.frozen) == {"embed.weight", "small"}  # an fp8 tensor may be either
    assert set(found.buffers()) == {
        "mask",
        "ids",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    rank = torch.load(next((tmp_path / "ds").glob("*/*_model_states.pt")), weights_only=False)
    assert set(rank["frozen_param_shapes"]) == set(found.frozen)
    assert int(rank["module"]["norm.num_batches_tracked"]) == 2**40 + 1
    if stage == 3:
        assert rank["module"]["embed.weight"].numel() == 0


def test_a_tensor_that_is_a_buffer_only_for_the_user_is_named_by_him(tmp_path: Path) -> None:
    """DCP does not say whether a float tensor outside the groups is a buffer."""
    model, optimizer = trained()
    save(tmp_path / "dcp", state_dict(model, optimizer))
    state = read_state(tmp_path / "dcp", reading=Reading(buffers=("em*", "small"), frozen=("ids",)))
    assert {"embed.weight", "small"} <= set(state.buffers())
    assert set(state.frozen) == {"ids"}
    write_state(tmp_path / "ds", state, Target(format="deepspeed-universal"))
    found = read_state(tmp_path / "ds")
    assert torch.equal(value(found.tensors["model/ids"]), model.ids)
    assert torch.equal(value(found.tensors["buffer/embed.weight"]), model.embed.weight)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("target", ["universal", "dcp", "hf", "deepspeed-universal"])
def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path: Path, target: str, flatten: bool) -> None:
    """It became a tensor `extra/…lr` that no stage wrote."""
    model, optimizer = trained(torch.tensor(0.25))
    save(tmp_path / "dcp", state_dict(model, optimizer, flatten))
    state = read_state(tmp_path / "dcp")
    assert [group["lr"] for group in state.groups] == [{"$scalar": ["F32", 0.25]}] * 2
    assert not state.others()
    write_state(tmp_path / "to", state, Target(format=target))
    assert read_state(tmp_path / "to").groups == state.groups
    if target == "deepspeed-universal":
        file = next((tmp_path / "to").glob("*/zero/optimizer_state.pt"))
        groups = pickles.load(file)["param_groups"]  # ours, as DeepSpeed's classes are not here
        assert torch.equal(value(groups[0]["lr"]), torch.tensor(0.25))


@pytest.mark.parametrize("world", [2, 5, 7, 64])
def test_zero_three_of_parameters_smaller_than_the_world_is_read(tmp_path: Path, world: int) -> None:
    """Ranks beyond the end of a parameter have none of it: (world - 1) * ceil(n / world) may exceed n."""
    state = TrainingState(step=1, frozen=["still"])
    for n in (1, 2, 3, 5, 9, 33):
        state.tensors[f"model/w{n}"] = held(torch.randn(n))
        state.tensors[f"optimizer/w{n}/exp_avg"] = held(torch.randn(n))
        state.tensors[f"optimizer/w{n}/step"] = scalar(1.0)
    state.tensors["model/still"] = held(torch.randn(world // 2 + 1))
    state.groups = [{"params": [f"w{n}" for n in (1, 2, 3, 5, 9, 33)], "lr": 0.1}]
    write_zero(tmp_path / "z", state, stage=3, world=world)
    found = read_state(tmp_path / "z")
    assert found.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(value(found.tensors[n]), value(s)) for n, s in state.tensors.items())


def test_a_tied_model_loads_from_what_we_write(tmp_path: Path) -> None:
    """torch said: Missing key in checkpoint state_dict: model.out.weight."""
    model, optimizer = trained()
    state = read_state(save(tmp_path / "theirs", state_dict(model, optimizer)))
    assert state.tied == {"out.weight": "head.weight"}
    assert "model/out.weight" not in state.tensors
    write_state(tmp_path / "ours", state, Target(format="dcp"))
    assert read_state(tmp_path / "ours").tied == state.tied
    size = sum(f.stat().st_size for f in (tmp_path / "ours").iterdir())
    assert size < sum(f.stat().st_size for f in (tmp_path / "theirs").iterdir()) * 1.5
    for flatten in (True, False):
        fresh, other = trained()
        with torch.no_grad():
            for tensor in fresh.state_dict().values():
                tensor.zero_()
        loaded = state_dict(fresh, other, flatten)
        load(tmp_path / "ours", loaded)
        fresh.load_state_dict(loaded["model"])
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        set_optimizer_state_dict(fresh, other, loaded["optimizer"], options=options)
        for name, tensor in model.state_dict().items():
            assert torch.equal(fresh.state_dict()[name].to(torch.float64), tensor.to(torch.float64)), name
        for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
            if p.requires_grad:
                assert torch.equal(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"])


def test_a_frozen_copy_is_not_taken_for_a_tie_where_it_is_named_frozen_or_constant(tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = state_dict(model, optimizer)
    saved["model"] |= {"teacher.weight": model.up.weight.detach().clone(), "zeros": torch.zeros(5, 3)}
    save(tmp_path / "dcp", saved)
    assert read_state(tmp_path / "dcp").tied == {"out.weight": "head.weight", "teacher.weight": "up.weight"}
    named = read_state(tmp_path / "dcp", reading=Reading(frozen=("teacher.*",)))
    assert named.tied == {"out.weight": "head.weight"}
    assert {"teacher.weight", "zeros"} <= set(named.frozen)


@dataclass(frozen=True, slots=True)
class CountedReads:
    """A tensor that notes each read."""

    stored: Held
    reads: list[int]

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def read(self, box: Box, out: Array) -> None:
        self.reads.append(box.volume)
        self.stored.read(box, out)


def test_ties_are_found_with_a_bounded_number_of_reads_per_tensor() -> None:
    """Every frozen matrix was compared with every trained one."""
    torch.manual_seed(0)
    reads: list[int] = []
    count = 40
    weights = {f"{kind}.{i}": torch.randn(4, 4) for kind in ("base", "adapter") for i in range(count)}
    weights["head"] = weights["adapter.7"]
    tensors: dict[str, Stored] = {f"model/{n}": CountedReads(held(w), reads) for n, w in weights.items()}
    state = TrainingState(tensors=tensors, groups=[{"params": [f"adapter.{i}" for i in range(count)]}])
    find_ties(state, Reading())
    assert state.tied == {"head": "adapter.7"}
    assert "model/head" not in state.tensors
    assert len(reads) <= 2 * len(weights) + 2


TYPES = [dtype for word in dtypes.IN_TORCH.values() if (dtype := getattr(torch, word))]


@pytest.mark.parametrize("to", ["universal", "dcp", "hf", "deepspeed-universal"])
def test_a_buffer_of_every_type_goes_everywhere(tmp_path: Path, to: str) -> None:
    """FP8 could not go to DCP at all."""
    state = TrainingState(groups=[{"params": ["w"], "lr": 0.1}])
    state.tensors["model/w"] = held(torch.ones(3))
    buffers = {str(dtype)[6:]: torch.arange(4).to(torch.float32).to(dtype) for dtype in TYPES}
    for name, tensor in buffers.items():
        state.tensors[f"buffer/{name}"] = held(tensor)
    write_state(tmp_path / "to", state, Target(format=to))
    found = read_state(tmp_path / "to").buffers()
    assert {name: stored.dtype for name, stored in found.items()} == {
        name: dtypes.name_of(tensor.dtype) for name, tensor in buffers.items()
    }
    if to == "dcp":
        loaded = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in buffers.items()}
        load(tmp_path / "to", loaded)
        for name, tensor in buffers.items():
            assert torch.equal(loaded[f"model.{name}"].view(torch.uint8), tensor.view(torch.uint8)), name


class Hidden:
    """An object with __reduce__: its state dict holds it as it is."""

    def __reduce__(self) -> Any:
        return Hidden, ()


@pytest.fixture
def everstep(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: Any) -> tuple[int, str]:
        code = main.run([str(argument) for argument in arguments])
        return code, capfd.readouterr().err

    return run


def test_a_pickled_object_in_the_scheduler_is_refused_by_name(
    tmp_path: Path, everstep: Callable[..., tuple[int, str]]
) -> None:
    """It was skipped without a word. Now it is refused, or accepted by its name and listed."""
    model, optimizer = trained()
    state = state_dict(model, optimizer) | {"lr_scheduler": {"last_epoch": 3, "lambdas": [Hidden()]}}
    save(tmp_path / "dcp", state)
    code, said = everstep("ckpt", "convert", tmp_path / "dcp", tmp_path / "u")
    assert code == 2
    assert "lost: lr_scheduler.lambdas.0; to accept this, give --accept lost:lr_scheduler.lambdas.0." in said
    assert said.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["dcp"], "no empty folder either"
    for to in ("universal", "hf"):
        code, _ = everstep("ckpt", "convert", tmp_path / "dcp", tmp_path / "a" / "b" / "u", "--to", to)
        assert code == 2
        assert [p.name for p in tmp_path.iterdir()] == ["dcp"], "nor its parents"
    code, said = everstep(
        "ckpt", "convert", tmp_path / "dcp", tmp_path / "u", "--accept", "lost:lr_scheduler*"
    )
    assert code == 0
    assert "accepted: lost:lr_scheduler.lambdas.0" in said
    assert read_state(tmp_path / "u").meta["extra"]["lr_scheduler.last_epoch"] == 3


def test_accept_wants_a_kind_and_a_name() -> None:
    for wrong in ("lr_scheduler", "gone:x", "lost:"):
        with pytest.raises(UserError, match="is not KIND:NAME"):
            Accepted((wrong,))
