"""Other frameworks' checkpoints and ours: what goes in comes out, byte for byte, whoever reads it."""

import argparse
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from everstep.errors import UserError
from everstep.store import dtypes
from everstep.store.stored import Held, Stored, read_all
from everstep_convert.conversion import Reading, Target, detect, read_state, write_state
from everstep_convert.formats import dialects
from everstep_convert.formats.dialects import Heads
from everstep_convert.patterns import Pattern, Patterns
from everstep_convert.selfcheck import differences
from everstep_convert.state import TrainingState, scalar
from tests.store.states import REAL
from tests.store.zero_files import model_parallel, write_zero


def held(tensor: torch.Tensor) -> Held:
    return Held(dtypes.name_of(tensor.dtype), dtypes.array_of(tensor))


def value(stored: Stored) -> torch.Tensor:
    return dtypes.tensor_of(read_all(stored), stored.dtype)


def llama(layers: int = 2, groups: int = 2) -> TrainingState:
    """A Llama's names with random values and Adam's state; the norms in a group of their own."""
    draw = torch.Generator().manual_seed(1)
    width, hidden, heads, vocab = 8, 12, 4, 10
    rows = {"q": width, "k": width // heads * groups, "v": width // heads * groups}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{n}_proj.weight": (rows[n], width) for n in "qkv"}
        shapes |= {
            f"{at}self_attn.o_proj.weight": (width, width),
            f"{at}input_layernorm.weight": (width,),
            f"{at}post_attention_layernorm.weight": (width,),
            f"{at}mlp.gate_proj.weight": (hidden, width),
            f"{at}mlp.up_proj.weight": (hidden, width),
            f"{at}mlp.down_proj.weight": (width, hidden),
        }
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}
    config = {"num_attention_heads": heads, "num_key_value_heads": groups}
    state = TrainingState(step=7, meta={"hf_config": config})
    for name, shape in shapes.items():
        state.tensors[f"model/{name}"] = held(torch.randn(shape, generator=draw))
        for key in ("exp_avg", "exp_avg_sq"):
            state.tensors[f"optimizer/{name}/{key}"] = held(torch.randn(shape, generator=draw))
        state.tensors[f"optimizer/{name}/step"] = scalar(7.0)
    state.groups = [
        {"params": [n for n, s in shapes.items() if len(s) > 1], "lr": 0.01, "betas": [0.9, 0.95]},
        {"params": [n for n, s in shapes.items() if len(s) == 1], "lr": 0.003, "betas": [0.9, 0.99]},
    ]
    return state


def same(a: TrainingState, b: TrainingState) -> bool:
    assert differences(a, b, progress=lambda count: None) == []
    return True


ROUNDS = {
    "universal": Target(format="universal"),
    "dcp": Target(format="dcp"),
    "hf": Target(format="hf"),
    "deepspeed universal": Target(format="deepspeed-universal"),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_there_and_back_is_the_same(tmp_path: Path, name: str) -> None:
    state = llama()
    write_state(tmp_path / "there", state, ROUNDS[name])
    assert detect(tmp_path / "there") == ROUNDS[name].format
    there = read_state(tmp_path / "there")
    write_state(tmp_path / "back", there, Target(format="universal"))
    assert same(state, read_state(tmp_path / "back"))


def test_a_chain_through_all_formats_is_the_same(tmp_path: Path) -> None:
    state = llama()
    for i, target in enumerate(ROUNDS.values()):
        write_state(tmp_path / str(i), state, target)
        state = read_state(tmp_path / str(i))
    assert same(llama(), state)


# DeepSpeed.


@pytest.mark.parametrize(("stage", "world"), [(1, 3), (2, 1), (3, 2), (1, 16)])
def test_zero_files_of_any_number_of_ranks_are_read(tmp_path: Path, stage: int, world: int) -> None:
    state = llama()
    write_zero(tmp_path / "zero", state, stage=stage, world=world)
    assert detect(tmp_path / "zero") == "deepspeed"
    assert same(state, read_state(tmp_path / "zero"))


@pytest.mark.parametrize("to", ["deepspeed", "megatron"])
def test_a_format_that_is_read_only_is_not_written(tmp_path: Path, to: str) -> None:
    with pytest.raises(UserError, match=r"read and not written; write one of universal, deepspeed-universal"):
        write_state(tmp_path / "a", llama(), Target(format=to))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_deepspeed_wrote_is_read(stage: int) -> None:
    """The real files: two groups, a frozen embedding; weights as DeepSpeed's own model states have them."""
    state = read_state(REAL / f"deepspeed-zero{stage}")
    assert state.step == 2
    assert [group["lr"] for group in state.groups] == [0.01, 0.003]
    assert [group["weight_decay"] for group in state.groups] == [0.1, 0.0]
    assert state.frozen == ["embed.weight"]
    assert state.meta["deepspeed"]["client"] == {"next_step": 2}
    assert set(state.optimizer()["up.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state.optimizer()["embed.weight"] == {}
    assert float(value(state.tensors["optimizer/up.weight/step"])) == 2.0
    other = read_state(REAL / f"deepspeed-zero{4 - stage}")
    for name, stored in state.parameters().items():  # both trained the same, but for bf16's rounding
        apart = (value(stored) - value(other.tensors[f"model/{name}"])).abs()
        assert (apart < 2e-3).float().mean() > 0.98, name


def test_zero_one_has_the_weights_of_the_model_states() -> None:
    folder = REAL / "deepspeed-zero1"
    state = read_state(folder)
    module = torch.load(next(folder.glob("*/mp_rank_00_model_states.pt")), weights_only=False)["module"]
    for name, tensor in module.items():
        assert torch.equal(value(state.tensors[f"model/{name}"]).to(tensor.dtype), tensor), name


def test_any_optimizer_and_a_frozen_parameter(tmp_path: Path) -> None:
    state = llama()
    state.tensors = {n: s for n, s in state.tensors.items() if not n.startswith("optimizer/")}
    state.frozen = ["lm_head.weight"]
    state.groups[0]["params"].remove("lm_head.weight")
    for group in state.groups:
        for name in group["params"]:
            shape = state.tensors[f"model/{name}"].shape
            state.tensors[f"optimizer/{name}/momentum_buffer"] = held(torch.randn(shape))
    state.meta["precision"] = "fp32"
    for i, stage in enumerate((1, 3)):
        write_zero(tmp_path / str(i), state, stage=stage, world=2)
        assert same(state, read_state(tmp_path / str(i)))


def tp_shards(state: TrainingState, tp: int) -> list[dict[str, torch.Tensor]]:
    """Cut as Megatron does: q|k|v rows, gate|up halves, row-parallel columns."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(tp)]
    for name, stored in state.parameters().items():
        tensor = value(stored)
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        chunks = [tensor] * tp if tensor.ndim == 1 else tensor.chunk(tp, dim)
        for mine, chunk in zip(found, chunks, strict=True):
            mine[name] = chunk.contiguous()
    return found


def test_tensor_parallel_zero_is_made_whole_by_patterns(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, each with ZeRO-1 over two: written shard by shard, read as one."""
    state = llama()
    shards = tp_shards(state, 2)
    ranks = [replace(state, tensors={f"model/{n}": held(t) for n, t in shard.items()}) for shard in shards]
    out = model_parallel(tmp_path, ranks, tp=2, world=2)
    with pytest.raises(UserError, match="give --patterns"):
        read_state(out)
    patterns = Patterns(
        (
            Pattern(match=r".*(o_proj|down_proj)\.weight", kind="fragment", dim=1),
            Pattern(match=r".*norm\.weight", kind="replicated"),
            Pattern(
                match=r".*(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.weight", kind="fragment", dim=0
            ),
        )
    )
    whole = read_state(out, reading=Reading(patterns=patterns))
    for name, stored in state.parameters().items():
        assert torch.equal(value(whole.tensors[f"model/{name}"]), value(stored)), name


# PyTorch's distributed checkpoints.


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.01}]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flatten", [False, True])
def test_torch_reads_what_we_write_and_we_read_what_torch_writes(tmp_path: Path, flatten: bool) -> None:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "step": 3,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(saved, checkpoint_id=str(tmp_path / "theirs"))
    state = read_state(tmp_path / "theirs")
    assert state.step == 3
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in state.groups] == [
        (2, 0.001, 0.1),
        (4, 0.01, 0.0),
    ]
    write_state(tmp_path / "universal", state, Target(format="universal"))
    write_state(tmp_path / "ours", read_state(tmp_path / "universal"), Target(format="dcp"))
    fresh, other = trained()
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    loaded = {
        "model": get_model_state_dict(fresh),
        "optimizer": get_optimizer_state_dict(fresh, other, options=options),
    }
    torch_dcp.load(loaded, checkpoint_id=str(tmp_path / "ours"))
    fresh.load_state_dict(loaded["model"])
    set_optimizer_state_dict(fresh, other, loaded["optimizer"], options=options)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], other.state[q]["exp_avg_sq"])
        assert float(optimizer.state[p]["step"]) == float(other.state[q]["step"])


# Hugging Face.


def test_a_sharded_folder_of_many_files_is_read_and_ours_is_read_by_safetensors(tmp_path: Path) -> None:
    state = llama()
    model = {name: value(stored) for name, stored in state.parameters().items()}
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    names = list(model)
    files = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, keys in files.items():
        save_file({key: model[key] for key in keys}, theirs / file)
    index = {"metadata": {}, "weight_map": {key: file for file, keys in files.items() for key in keys}}
    (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "tie_word_embeddings": False}
    (theirs / "config.json").write_text(json.dumps(config))
    found = read_state(theirs)
    assert found.meta["hf_config"] == config
    write_state(tmp_path / "ours", found, Target(format="hf", dtype="BF16"))
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(ours[name], model[name].to(torch.bfloat16)) for name in model)
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == config


def test_tied_weights_are_written_once_and_known_as_tied(tmp_path: Path) -> None:
    state = llama()
    state.meta["hf_config"] |= {"model_type": "llama", "tie_word_embeddings": True}
    with pytest.raises(UserError, match="their values differ"):
        write_state(tmp_path / "a", state, Target(format="hf"))
    state.tensors["model/lm_head.weight"] = state.tensors["model/model.embed_tokens.weight"]
    write_state(tmp_path / "a", state, Target(format="hf"))
    assert "lm_head.weight" not in load_file(tmp_path / "a" / "model.safetensors")
    assert read_state(tmp_path / "a").tied == {"lm_head.weight": "model.embed_tokens.weight"}


# Names, and Megatron.


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_names_of_others_and_back(groups: int) -> None:
    state = llama(groups=groups)
    for to in ("everstep", "megatron"):
        there = dialects.translated(state, to)
        assert dialects.dialect_of(there) == to
        back = dialects.translated(there, "llama")
        assert same(replace(state, groups=[]), replace(back, groups=[]))
        assert [set(g["params"]) for g in back.groups] == [set(g["params"]) for g in state.groups]


def test_megatrons_qkv_takes_turns_by_groups_of_heads() -> None:
    state = llama(groups=2)
    fused = dialects.translated(state, "megatron")
    qkv = value(fused.tensors["model/decoder.layers.0.self_attention.linear_qkv.weight"])
    q, k, v = (value(state.tensors[f"model/model.layers.0.self_attn.{n}_proj.weight"]) for n in "qkv")
    expected = torch.cat([q.view(2, 4, 8), k.view(2, 2, 8), v.view(2, 2, 8)], dim=1).reshape(-1, 8)
    assert torch.equal(qkv, expected)
    moments = value(fused.tensors["optimizer/decoder.layers.0.mlp.linear_fc1.weight/exp_avg"])
    gate = value(state.tensors["optimizer/model.layers.0.mlp.gate_proj.weight/exp_avg"])
    assert torch.equal(moments[:12], gate)


@pytest.mark.filterwarnings("ignore")
def test_megatrons_torch_dist_is_read(tmp_path: Path) -> None:
    """Layers stacked along a first axis, fp32 masters and moments under `optimizer.state`."""
    state = dialects.translated(llama(), "megatron")
    keys: dict[str, Any] = {}
    layers: dict[str, list[torch.Tensor]] = {}
    for name, stored in state.tensors.items():
        kind, _, rest = name.partition("/")
        parameter, _, key = rest.rpartition("/") if kind == "optimizer" else (rest, "", "fp32_param")
        if key == "step":
            continue
        at = f"optimizer.state.{key}.{parameter}"
        if "decoder.layers." in at:
            layers.setdefault(re.sub(r"layers\.\d+\.", "layers.", at), []).append(value(stored))
        else:
            keys[at] = value(stored)
    keys |= {key: torch.stack(each) for key, each in layers.items()}
    keys |= {  # the working weights
        key.removeprefix("optimizer.state.fp32_param."): tensor.to(torch.bfloat16)
        for key, tensor in keys.items()
        if "fp32_param" in key
    }
    folder = tmp_path / "iter_0000007"
    torch_dcp.save(keys, checkpoint_id=str(folder), no_dist=True)
    (folder / "metadata.json").write_text("{}")
    torch.save({"iteration": 7, "args": argparse.Namespace(swiglu=True)}, folder / "common.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert detect(tmp_path) == "megatron"
    back = dialects.translated(read_state(tmp_path), "llama", Heads(4, 2))
    assert back.step == 7
    for name, stored in llama().tensors.items():
        if not name.endswith("/step"):
            assert np.array_equal(read_all(back.tensors[name]), read_all(stored)), name


# Mistakes.


def test_what_cannot_be_done_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is not a checkpoint of a known format"):
        detect(tmp_path / "empty")
    with pytest.raises(UserError, match="is not a directory"):
        detect(tmp_path / "nowhere")
    state = llama()
    with pytest.raises(UserError, match="no optimizer groups"):
        write_state(tmp_path / "a", replace(state, groups=[]), Target(format="deepspeed-universal"))
    assert not (tmp_path / "a").exists()
    (tmp_path / "empty" / "x").write_text("")
    with pytest.raises(UserError, match="is not empty"):
        write_state(tmp_path / "empty", state, Target(format="hf"))
    with pytest.raises(UserError, match="none of llama, everstep, megatron"):
        dialects.translated(TrainingState(tensors={"model/w": scalar(1.0)}), "llama")
    with pytest.raises(UserError, match="needs the number of heads"):
        dialects.translated(replace(state, meta={}), "megatron")
    with pytest.raises(UserError, match="'gguf' is not one of"):
        write_state(tmp_path / "b", state, Target(format="gguf"))
