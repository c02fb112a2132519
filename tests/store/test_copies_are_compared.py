"""Where a checkpoint holds one thing several times, all are read: what differs is refused by its name."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from everstep.cli import main
from everstep.errors import UserError
from everstep.store import dtypes
from everstep.store.stored import Held, read_all
from everstep_convert.conversion import Accepted, Reading, Target, read_state, write_state
from everstep_convert.formats import dialects
from everstep_convert.patterns import Pattern, Patterns
from everstep_convert.state import TrainingState, scalar
from tests.store.zero_files import change, model_parallel, write_zero

ALL_COPIES = Patterns((Pattern(match=".*", kind="replicated"),))


def held(tensor: torch.Tensor) -> Held:
    return Held(dtypes.name_of(tensor.dtype), dtypes.array_of(tensor))


def drawn(seed: int, shapes: dict[str, tuple[int, ...]]) -> TrainingState:
    draw = torch.Generator().manual_seed(seed)
    state = TrainingState(step=7, meta={"precision": "fp32"})
    for name, shape in shapes.items():
        for full in (f"model/{name}", f"optimizer/{name}/exp_avg"):
            state.tensors[full] = held(torch.randn(shape, generator=draw))
        state.tensors[f"optimizer/{name}/step"] = scalar(7.0)
    state.groups = [{"params": list(shapes), "lr": 0.01}]
    return state


def refused(source: Path, target: Path, patterns: Patterns | None = ALL_COPIES) -> str:
    """What a conversion says that must not be done; nothing is written."""

    def convert() -> None:
        state = read_state(source, reading=Reading(patterns=patterns))
        write_state(target, state, Target(format="universal"))

    with pytest.raises(UserError) as error:
        convert()
    assert not target.exists()
    return str(error.value)


def test_a_wrong_replicated_pattern_is_refused_by_the_parameter_s_name(tmp_path: Path) -> None:
    """Two halves of one matrix, called copies: the second half was gone, and the self-check content."""
    halves = [drawn(seed, {"up.weight": (3, 5)}) for seed in (1, 2)]
    source = model_parallel(tmp_path, halves, tp=2)
    said = refused(source, tmp_path / "u")
    assert "parameter 'up.weight' is read as copies" in said
    assert "tensor-parallel rank 0 and tensor-parallel rank 1 hold other values from index [0, 0] on" in said
    assert 'kind = "fragment"' in said


@pytest.mark.parametrize("what", ["optimizer/up.weight/exp_avg", "optimizer/up.weight/step"])
def test_optimizer_state_of_copies_is_compared_too(tmp_path: Path, what: str) -> None:
    first = drawn(1, {"up.weight": (3, 5)})
    second = replace(first, tensors=dict(first.tensors))
    second.tensors[what] = held(read(first, what) + 1)
    said = refused(model_parallel(tmp_path, [first, second], tp=2), tmp_path / "u")
    assert f"{what.rpartition('/')[2]} of parameter 'up.weight' is read as copies" in said


def read(state: TrainingState, name: str) -> torch.Tensor:
    return dtypes.tensor_of(read_all(state.tensors[name]), state.tensors[name].dtype)


def test_real_copies_are_taken_once(tmp_path: Path) -> None:
    one = drawn(1, {"up.weight": (3, 5), "norm.weight": (5,)})
    source = model_parallel(tmp_path, [one, one], tp=2)
    write_state(
        tmp_path / "u", read_state(source, reading=Reading(patterns=ALL_COPIES)), Target(format="universal")
    )
    found = read_state(tmp_path / "u")
    assert all(torch.equal(read(found, name), read(one, name)) for name in one.tensors)


def test_copies_of_two_types_or_shapes_are_refused(tmp_path: Path) -> None:
    states = [drawn(1, {"w": (4,)}), drawn(1, {"w": (5,)})]
    said = refused(model_parallel(tmp_path, states, tp=2), tmp_path / "u")
    assert "parameter 'w' is read as copies, and they are F32 [4] and F32 [5]" in said


def test_a_parameter_of_the_second_tensor_parallel_rank_alone_is_not_forgotten(tmp_path: Path) -> None:
    """Only the names of the first rank were looked at."""
    states = [drawn(1, {"w": (4,)}), drawn(1, {"w": (4,), "router.weight": (3, 3)})]
    source = model_parallel(tmp_path, states, tp=2)
    assert "'router.weight' is on 1 of 2 tensor-parallel ranks" in refused(source, tmp_path / "u")
    patterns = Patterns(
        (Pattern(match="w", kind="replicated"), Pattern(match=r"router\.weight", kind="unique"))
    )
    found = read_state(source, reading=Reading(patterns=patterns))
    assert torch.equal(read(found, "model/router.weight"), read(states[1], "model/router.weight"))
    assert found.groups[0]["params"] == ["w", "router.weight"]


def test_one_name_in_two_pipeline_stages_must_be_one_tensor(tmp_path: Path) -> None:
    """The first stage's was taken, whatever the second one held."""
    first, last = (drawn(seed, {"tied.weight": (3, 5), f"{seed}.weight": (2,)}) for seed in (1, 2))
    source = model_parallel(tmp_path, [first, last], tp=1)
    said = refused(source, tmp_path / "u", None)
    assert (
        "'model/tied.weight' is read as copies, and pipeline stage 0 and pipeline stage 1 hold other" in said
    )
    for name in ("model/tied.weight", "optimizer/tied.weight/exp_avg"):
        last.tensors[name] = first.tensors[name]
    shutil.rmtree(source)
    found = read_state(model_parallel(tmp_path / "again", [first, last], tp=1))
    assert torch.equal(read(found, "model/tied.weight"), read(first, "model/tied.weight"))
    assert found.groups[0]["params"] == ["tied.weight", "1.weight", "2.weight"]


def test_a_stage_s_group_joins_the_one_with_its_numbers(tmp_path: Path) -> None:
    """Stage 1 has only the second kind of group: its parameters came under the first one's weight decay."""
    first = drawn(1, {"0.weight": (2, 2), "0.bias": (2,)})
    first.groups = [
        {"params": ["0.weight"], "lr": 0.1, "weight_decay": 0.1},
        {"params": ["0.bias"], "lr": 0.1, "weight_decay": 0.0},
    ]
    last = drawn(2, {"1.bias": (2,)})
    last.groups = [{"params": ["1.bias"], "lr": 0.1, "weight_decay": 0.0}]
    found = read_state(model_parallel(tmp_path, [first, last], tp=1))
    assert [(group["params"], group["weight_decay"]) for group in found.groups] == [
        (["0.weight"], 0.1),
        (["0.bias", "1.bias"], 0.0),
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_data_parallel_ranks_of_two_steps_are_not_mixed(tmp_path: Path, stage: int) -> None:
    """A rank's file of another step: its share of the moments, the first rank's count of steps."""
    early, late = drawn(1, {"w": (40,)}), drawn(2, {"w": (40,)})
    late.tensors["optimizer/w/step"] = scalar(8.0)
    for name, state in (("a", early), ("b", late)):
        write_zero(tmp_path / name, state, stage=stage, world=2)
    second = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "b/global_step7" / second, tmp_path / "a/global_step7" / second)
    said = refused(tmp_path / "a", tmp_path / "u", None)
    assert (
        "step of optimizer group 0 is read as copies, and data-parallel rank 0 and data-parallel rank 1"
        in said
    )


def test_optimizer_numbers_that_differ_between_data_parallel_ranks_are_refused(tmp_path: Path) -> None:
    one = drawn(1, {"w": (40,)})
    for name, lr in (("a", 0.01), ("b", 0.02)):
        one.groups[0]["lr"] = lr
        write_zero(tmp_path / name, one, stage=1, world=2)
    second = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "b/global_step7" / second, tmp_path / "a/global_step7" / second)
    assert "optimizer group 0 has other numbers on data-parallel rank 1" in refused(
        tmp_path / "a", tmp_path / "u"
    )


def test_model_files_of_two_steps_are_refused(tmp_path: Path) -> None:
    one = drawn(1, {"w": (4,)})
    source = model_parallel(tmp_path, [one, one], tp=2)
    change(source, "mp_rank_01_model_states.pt", lambda told: told.update(global_steps=8))
    assert "its files are of steps 7 and 8" in refused(source, tmp_path / "u")


def test_buffers_that_differ_between_ranks_are_named_and_may_be_accepted(tmp_path: Path) -> None:
    one = drawn(1, {"w": (40,)})
    one.tensors["buffer/running_mean"] = held(torch.ones(3))
    other = replace(one, tensors={**one.tensors, "buffer/running_mean": held(torch.zeros(3))})
    for name, states, files in (
        ("tp", model_parallel(tmp_path / "tp", [one, other], tp=2), "model-parallel"),
        ("dp", _two_ranks(tmp_path / "dp", one, other), "data-parallel"),
    ):
        said = refused(states, tmp_path / f"u-{name}")
        lost = f"buffer/running_mean of other {files} ranks"
        assert f"lost: {lost}" in said
        state = read_state(states, reading=Reading(patterns=ALL_COPIES))
        changes = write_state(
            tmp_path / f"u-{name}", state, Target(format="universal"), accepted=Accepted((f"lost:{lost}",))
        )
        assert [str(one) for one in changes] == [f"lost:{lost}"]


def _two_ranks(root: Path, one: TrainingState, other: TrainingState) -> Path:
    """ZeRO-3, where every rank has a model file; the second rank's is of another state."""
    for name, state in (("a", one), ("b", other)):
        write_zero(root / name, state, stage=3, world=2)
    second = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    shutil.copy(root / "b/global_step7" / second, root / "a/global_step7" / second)
    return root / "a"


def test_a_universal_folder_of_two_stages_keeps_every_parameter_in_its_group(tmp_path: Path) -> None:
    """Only the first stage's model file was read: the parameters of the others were called frozen."""
    state = drawn(1, {"0.weight": (2, 2), "1.weight": (3,)})
    state.tensors["buffer/1.mask"] = held(torch.ones(2))
    write_state(tmp_path / "u", state, Target(format="deepspeed-universal"))
    folder = tmp_path / "u/global_step7_universal"
    (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    for stage in (0, 1):
        path = folder / f"mp_rank_{stage:02d}_model_states.pt"
        told = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
        told["param_shapes"] = [{f"{stage}.weight": told["param_shapes"][0][f"{stage}.weight"]}]
        told["module"] = {k: v for k, v in told["module"].items() if k.startswith(f"{stage}.")}
        told["buffer_names"] = ["1.mask"] * stage
        told["everstep"] = None
        torch.save(told, folder / f"new_{path.name}")
    for path in folder.glob("new_*"):
        path.rename(folder / path.name.removeprefix("new_"))
    for path in folder.glob("mp_rank_*"):  # the name inside, as torch.save has it
        path.write_bytes(path.read_bytes().replace(b"new_mp_rank", b"xxx_mp_rank"))
    found = read_state(folder)
    assert found.frozen == []
    assert sorted(found.groups[0]["params"]) == ["0.weight", "1.weight"]
    assert list(found.buffers()) == ["1.mask"]


# Fusing parameters.


def llama(**shapes: tuple[int, ...]) -> TrainingState:
    at = "model.layers.0."
    names = {f"{at}self_attn.{n}_proj.weight": (4, 4) for n in "qkvo"}
    names |= {f"{at}{n}.weight": (4,) for n in ("input_layernorm", "post_attention_layernorm")}
    names |= {f"{at}mlp.gate_proj.weight": (6, 4), f"{at}mlp.up_proj.weight": (6, 4)}
    names |= {f"{at}mlp.down_proj.weight": (4, 6), "model.norm.weight": (4,)}
    names |= {"model.embed_tokens.weight": (8, 4), "lm_head.weight": (8, 4), **shapes}
    return drawn(1, names)


GATE = "model.layers.0.mlp.gate_proj.weight"
HEADS = dialects.Heads(2, 2)


def test_what_cannot_be_fused_is_refused_by_name() -> None:
    """Counts of steps, types, groups and halves: the first one's stood for all, or a half was gone."""
    state = llama()
    state.tensors[f"optimizer/{GATE}/step"] = scalar(3.0)
    fused = dialects.translated(state, "megatron", HEADS)
    with pytest.raises(
        UserError, match=r"step of 'decoder.layers.0.mlp.linear_fc1.weight' is read as copies"
    ):
        read_all(fused.tensors["optimizer/decoder.layers.0.mlp.linear_fc1.weight/step"])
    state = llama()
    state.tensors[f"model/{GATE}"] = held(torch.zeros(6, 4).to(torch.bfloat16))
    with pytest.raises(
        UserError, match=r"'decoder.layers.0.mlp.linear_fc1.weight' is made of parts of BF16 and F32"
    ):
        dialects.translated(state, "megatron", HEADS)
    state = llama()
    state.groups.append({"params": [GATE], "lr": 0.5})
    state.groups[0]["params"].remove(GATE)
    with pytest.raises(UserError, match="of parameters of two optimizer groups"):
        dialects.translated(state, "megatron", HEADS)
    state = llama()
    del state.tensors[f"model/{GATE.replace('gate', 'up')}"]
    with pytest.raises(UserError, match=re.escape(f"parameter {GATE!r} has no name in the other naming")):
        dialects.translated(state, "megatron", HEADS)
    state = llama()
    del state.tensors[f"optimizer/{GATE}/exp_avg"]
    with pytest.raises(UserError, match="is there for some of what is fused into it only"):
        dialects.translated(state, "megatron", HEADS)


# What a checkpoint says, and was not heard.


def test_a_foreign_model_whose_names_begin_like_ours_is_converted_to_hugging_face(tmp_path: Path) -> None:
    """KeyError 'embed.tokens.weight', and a traceback."""
    state = drawn(1, {"blocks.0.attention.q.weight": (4, 4), "stem.weight": (3,)})
    write_state(tmp_path / "u", state, Target(format="universal"))
    assert main.run(["ckpt", "convert", str(tmp_path / "u"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert not (tmp_path / "hf/config.json").exists()


@pytest.mark.parametrize(
    "extra",
    [
        {"step": 3},
        {"step": torch.tensor(3)},
        {"train_state": {"step": torch.tensor([3], dtype=torch.int32), "loss": torch.ones(2)}},
        {"trainer": {"global_step": 3}, "lr_scheduler": {"step": 9, "last_epoch": 9}},
        {},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_step_of_a_distributed_checkpoint_is_found(tmp_path: Path, extra: dict[str, Any]) -> None:
    """A step that was a tensor, or not at the top, was step 0."""
    saved = {
        "model": {"w": torch.ones(2)},
        "optimizer": {"state": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}},
        **extra,
    }
    torch_dcp.save(saved, checkpoint_id=str(tmp_path / "dcp"))
    state = read_state(tmp_path / "dcp")
    assert state.step == 3
    assert len(state.notes) == (not extra)
