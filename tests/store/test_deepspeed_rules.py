"""DeepSpeed's `universal_checkpoint_info`, every key of it, and the patterns that we write as one."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.errors import UserError
from everstep.store import dtypes
from everstep.store.stored import Held, Stored, read_all
from everstep_convert import selfcheck
from everstep_convert.conversion import Reading, Target, read_state, write_state
from everstep_convert.formats import pickles
from everstep_convert.formats.deepspeed_meta import loss_scaler
from everstep_convert.formats.shards import ShardRules
from everstep_convert.patterns import Patterns, read_patterns
from everstep_convert.state import TrainingState, scalar
from tests.store.zero_files import model_parallel, write_zero

DRAW = torch.Generator().manual_seed(5)


def held(tensor: torch.Tensor) -> Held:
    name = dtypes.name_of(tensor.dtype)
    assert name is not None
    return Held(name, dtypes.array_of(tensor.contiguous()))


def value(stored: Stored) -> torch.Tensor:
    return dtypes.tensor_of(read_all(stored), stored.dtype)


def whole(info: dict[str, Any], shards: list[torch.Tensor]) -> torch.Tensor:
    ranks = {rank: held(shard) for rank, shard in enumerate(shards)}
    return value(ShardRules(info=info).whole("w", ranks, len(shards)))


def test_a_loss_scale_of_ours_is_that_of_the_scaler_which_deepspeed_reads() -> None:
    state = TrainingState(tensors={"extra/loss_scale/w": held(torch.tensor(1024.0, dtype=torch.float64))})
    inside = loss_scaler(state, "fp16")["loss_scaler"].state
    assert (inside["cur_scale"], inside["dynamic"]) == (1024.0, True)
    assert loss_scaler(TrainingState(), "fp16")["loss_scaler"].state["cur_scale"] == 65536.0
    assert loss_scaler(state, "bf16")["loss_scaler"].state["cur_scale"] == 1.0


def test_shard_widths_of_fused_heads_are_read() -> None:
    """Version 0.4: five query heads over two ranks are three and two, two key heads one each."""
    q, k, v = (torch.randn(rows, 3, generator=DRAW) for rows in (10, 4, 4))
    shards = [torch.cat([q[:6], k[:2], v[:2]]), torch.cat([q[6:], k[2:], v[2:]])]
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [{"patterns": ["^w$"], "shape": [(10, 4, 4), 3], "partition_dim": 0}],
        "sub_param_shard_widths": {"^w$": [[6, 4], [2, 2], [2, 2]]},
    }
    assert torch.equal(whole(info, shards), torch.cat([q, k, v]))


def test_sub_parameters_of_a_view_with_more_dimensions_are_read() -> None:
    """Four experts of twelve rows in one matrix, each split along its own rows: the view is 3-dimensional."""
    experts = torch.randn(4, 12, 3, generator=DRAW)
    shards = [experts[:, :6].reshape(24, 3), experts[:, 6:].reshape(24, 3)]
    row = {"patterns": ["w"], "shape": (4, (12,), 3), "partition_dim": 1}
    assert torch.equal(whole({"parameter_with_sub_params": [row]}, shards), experts.reshape(48, 3))
    halves = experts.reshape(4, 2, 6, 3)  # gate and up of every expert
    shards = [halves[:, :, part].reshape(24, 3) for part in (slice(0, 3), slice(3, 6))]
    row = {"patterns": ["w"], "shape": (4, (6, 6), 3), "partition_dim": 1}
    assert torch.equal(whole({"parameter_with_sub_params": [row]}, shards), experts.reshape(48, 3))


def test_a_number_of_sub_parameters_and_a_size_to_be_found_are_read() -> None:
    """Before version 0.4: (3, -1) is three of one size."""
    parts = torch.randn(3, 4, 5, generator=DRAW)
    shards = [parts[:, :2].reshape(6, 5), parts[:, 2:].reshape(6, 5)]
    row = {"patterns": ["w"], "shape": (3, -1), "partition_dim": 0}
    assert torch.equal(whole({"parameter_with_sub_params": [row]}, shards), parts.reshape(12, 5))


def piece(shape: list[int], source: int, strides: list[int], dest: int, ranks: list[int]) -> dict[str, Any]:
    """As deepspeed/checkpoint/affine.py writes it; the shards here have the strides of the whole."""
    return {"shape": shape, "source": [source, strides], "dest": [dest, strides], "locations": ranks}


def mapped(ranks: dict[int, Any], shape: list[int], version: int = 1) -> dict[str, Any]:
    return {"affine_map": {"version": version, "params": {"^w$": {"logical_shape": shape, "ranks": ranks}}}}


def segmented(shared: list[int]) -> dict[str, Any]:
    """Four rows of queries, two on each rank, and two rows of one key head, which both hold."""
    ranks = {
        rank: {
            "shard_shape": [4, 3],
            "pieces": [
                piece([2, 3], 6 * rank, [3, 1], 0, [rank]),
                piece([2, 3], 12, [3, 1], 6, shared),
            ],
        }
        for rank in (0, 1)
    }
    return mapped(ranks, [6, 3])


def test_an_affine_map_is_read_and_what_several_ranks_hold_is_compared() -> None:
    w = torch.randn(6, 3, generator=DRAW)
    shards = [torch.cat([w[:2], w[4:]]), w[2:]]
    assert torch.equal(whole(segmented([0, 1]), shards), w)
    shards[1] = torch.cat([w[2:4], w[4:] + 1])
    with pytest.raises(
        UserError, match=r"rank 0 and tensor-parallel rank 1 hold other values from index \[4, 0\]"
    ):
        whole(segmented([0, 1]), shards)


def test_a_map_that_is_not_understood_is_refused() -> None:
    shards = [torch.zeros(4, 3)] * 2
    turned = segmented([0, 1])
    turned["affine_map"]["params"]["^w$"]["ranks"][0]["pieces"][0]["source"][1] = [1, 6]
    scaled = segmented([0, 1])
    scaled["affine_map"]["params"]["^w$"]["ranks"][0]["pieces"][0]["scale"] = 0.5
    outside = segmented([0, 1])
    outside["affine_map"]["params"]["^w$"]["ranks"][0]["pieces"][0]["source"][0] = 15
    hole = segmented([0, 1])
    del hole["affine_map"]["params"]["^w$"]["ranks"][0]["pieces"][0]
    for info, says in (
        (turned, "not a box"),
        (scaled, "scales it"),
        (outside, "reaches outside"),
        (hole, "is not whole by its affine_map"),
        (mapped({}, [6, 3], version=2), "affine_map is of version 2"),
        ({"later_key": 1}, "has 'later_key', which is not known"),
        ({"autotp_unsupported_parameter_patterns": {"^w$": "codegen"}}, "could not say how parameter 'w'"),
    ):
        with pytest.raises(UserError, match=says):
            whole(info, shards)


# What we write.

SHAPES = {
    "embed.weight": (10, 6),
    "qkv.weight": (12, 6),
    "qkv.bias": (12,),
    "dense.weight": (6, 8),
    "up.weight": (16, 6),
    "norm.weight": (6,),
    "grid.weight": (4, 3, 8),
    "drift.bias": (5,),
    "router.weight": (3, 6),
}
PATTERNS = r"""
[[pattern]]
match = 'embed\.weight'
kind = "fragment"
dim = 0
pad_to = 4
[[pattern]]
match = 'qkv\..*'
kind = "fragment"
dim = 0
parts = [8, 2, "=2"]
[[pattern]]
match = 'dense\.weight'
kind = "fragment"
dim = 1
[[pattern]]
match = 'up\.weight'
kind = "fragment"
dim = 0
parts = [8, 8]
[[pattern]]
match = 'norm\.weight'
kind = "replicated"
[[pattern]]
match = 'grid\.weight'
kind = "fragment"
splits = [{dim = 0, over = 2}, {dim = 2, over = TPHALF}]
[[pattern]]
match = 'drift\.bias'
kind = "average"
[[pattern]]
match = 'router\.weight'
kind = "unique"
"""


def patterns(tp: int) -> Patterns:
    return read_patterns(PATTERNS.replace("TPHALF", str(tp // 2)))


def drawn(without: tuple[str, ...] = ()) -> TrainingState:
    state = TrainingState(step=3, meta={"precision": "fp32"})
    names = [name for name in SHAPES if name not in without]
    for name in names:
        for full in (f"model/{name}", f"optimizer/{name}/exp_avg", f"optimizer/{name}/exp_avg_sq"):
            state.tensors[full] = held(torch.randn(SHAPES[name], generator=DRAW))
        state.tensors[f"optimizer/{name}/step"] = scalar(3.0)
    state.groups = [{"params": names, "lr": 0.1}]
    return state


def test_the_universal_folder_says_how_deepspeed_must_split_each_atom(tmp_path: Path) -> None:
    """Every atom said cat_dim 0: a row-parallel matrix was cut along the wrong dimension."""
    state = drawn(without=("grid.weight", "qkv.weight", "qkv.bias"))
    three = patterns(2).patterns
    fused = [p for p in three if not p.match.startswith("qkv")]
    extra = read_patterns("[[pattern]]\nmatch='kqv'\nkind='fragment'\ndim=1\nparts=[8, 4]").patterns
    state.tensors["model/kqv"] = held(torch.randn(3, 12, generator=DRAW))
    state.frozen = ["kqv"]
    target = Target(format="deepspeed-universal", patterns=Patterns((*fused, *extra)))
    write_state(tmp_path / "u", state, target)

    def atom(name: str) -> Any:
        return pickles.load(next((tmp_path / "u").glob(f"*/zero/{name}/fp32.pt")))

    assert atom("dense.weight")["cat_dim"] == 1
    assert atom("embed.weight")["vocab_tensor"] is True
    assert (atom("up.weight")["cat_dim"], atom("up.weight")["param_n_sub_params"]) == (0, 2)
    shape = atom("kqv")["sub_param_shape"]
    assert (shape.module, shape.name) == ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    assert (shape.get("shape"), shape.get("partition_dim")) == ((3, (8, 4)), 1)
    assert all(
        torch.equal(value(s), value(state.tensors[n])) for n, s in read_state(tmp_path / "u").tensors.items()
    )


def test_experts_of_one_tensor_are_tagged_in_the_universal_folder(tmp_path: Path) -> None:
    state = drawn(without=tuple(name for name in SHAPES if name != "grid.weight"))
    rows = read_patterns("[[pattern]]\nmatch='grid.weight'\nkind='fragment'\nexperts=4")
    write_state(tmp_path / "u", state, Target(format="deepspeed-universal", patterns=rows))
    atom = pickles.load(next((tmp_path / "u").glob("*/zero/grid.weight/exp_avg.pt")))
    assert (atom["is_expert_param"], atom["ep_num_experts"]) == (True, 4)


def test_a_pattern_of_several_dimensions_reads_a_grid_of_shards(tmp_path: Path) -> None:
    """Two by two tensor-parallel ranks: rows over one half of the number, columns over the other."""
    state = drawn(without=tuple(name for name in SHAPES if name not in ("grid.weight", "norm.weight")))
    ranks = []
    for rows, columns in itertools.product((slice(0, 2), slice(2, 4)), (slice(0, 4), slice(4, 8))):
        mine = {
            name: held(value(one)[rows, :, columns].contiguous()) if len(one.shape) == 3 else one
            for name, one in state.tensors.items()
        }
        ranks.append(replace(state, tensors=mine))
    source = model_parallel(tmp_path, ranks, tp=4, world=2)
    with pytest.raises(UserError, match="give --patterns"):
        read_state(source)
    found = read_state(source, reading=Reading(patterns=patterns(4)))
    assert all(np.array_equal(read_all(found.tensors[n]), read_all(s)) for n, s in state.tensors.items())


# Pipelines and experts.


def pipeline() -> TrainingState:
    state = TrainingState(
        step=3, meta={"precision": "fp32", "deepspeed": {"pipeline": {"tied_layers": {"0": "e"}}}}
    )
    names = ["tied_modules.e.weight", *(f"{i}.{n}" for i in (1, 2, 4, 5) for n in ("up.weight", "up.bias"))]
    for i, name in enumerate(names):
        shape = (4 + i, 3) if name.endswith("weight") else (5,)
        for full in (f"model/{name}", f"optimizer/{name}/exp_avg"):
            state.tensors[full] = held(torch.randn(shape, generator=DRAW))
        state.tensors[f"optimizer/{name}/step"] = scalar(3.0)
    state.tensors["buffer/4.scale"] = held(torch.ones(2))
    state.groups = [
        {"params": [n for n in names if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [n for n in names if n.endswith("bias")], "weight_decay": 0.0},
    ]
    return state


def test_the_stages_of_a_pipeline_are_one_model_and_deepspeed_finds_its_layers(tmp_path: Path) -> None:
    state = pipeline()
    tied = "tied_modules.e.weight"
    stages = []
    for layers in ((1, 2), (4,), (5,)):
        names = {name for name in state.parameters() if name.partition(".")[0] in map(str, layers)}
        names |= {tied} if layers != (4,) else set()
        mine = {
            full: one
            for full, one in state.tensors.items()
            if any(f"/{name}" in full for name in names) or (layers == (4,) and full.startswith("buffer"))
        }
        groups = [{**group, "params": [n for n in group["params"] if n in names]} for group in state.groups]
        stages.append(replace(state, tensors=mine, groups=[group for group in groups if group["params"]]))
    found = read_state(model_parallel(tmp_path, stages, tp=1, world=2))
    assert [sorted(g["params"]) for g in found.groups] == [sorted(g["params"]) for g in state.groups]
    assert found.meta["deepspeed"]["pipeline"] == {"tied_layers": {"0": "e"}}
    assert all(np.array_equal(read_all(found.tensors[n]), read_all(s)) for n, s in state.tensors.items())
    write_state(tmp_path / "u", found, Target(format="deepspeed-universal"))
    layers_ = sorted(path.name for path in (tmp_path / "u").glob("*/layer_*"))
    assert layers_ == [f"layer_0{i}-model_states.pt" for i in (0, 1, 2, 4, 5)]
    again = read_state(tmp_path / "u")
    assert all(np.array_equal(read_all(again.tensors[n]), read_all(s)) for n, s in state.tensors.items())


def moe(experts: int = 4) -> TrainingState:
    state = TrainingState(step=3, meta={"precision": "fp32"})
    at = "{}.deepspeed_moe.experts.deepspeed_experts.{}.{}"
    own = [at.format(layer, e, n) for layer in ("a", "b") for e in range(experts) for n in ("up", "down")]
    for name in ("embed.weight", *own):
        for full in (f"model/{name}", f"optimizer/{name}/exp_avg"):
            state.tensors[full] = held(torch.randn(3, 5, generator=DRAW))
        state.tensors[f"optimizer/{name}/step"] = scalar(3.0)
    state.groups = [{"params": ["embed.weight"], "lr": 0.1}, {"params": own, "lr": 0.1, "moe": True}]
    return state


@pytest.mark.parametrize(("stage", "world", "ep"), [(1, 4, 1), (1, 4, 2), (2, 4, 4), (1, 6, 2)])
def test_experts_of_any_number_of_expert_parallel_ranks_are_read(
    tmp_path: Path, stage: int, world: int, ep: int
) -> None:
    state = moe()
    write_zero(tmp_path / "moe", state, stage=stage, world=world, ep=ep)
    folder = tmp_path / "moe/global_step3"
    assert len(list(folder.glob("layer_*_expert_*_mp_rank_00_model_states.pt"))) == 8
    rank = pickles.load(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert rank["partition_count"] == [world, world // ep]
    numbers = {int(re.findall(r"experts\.(\d+)", name)[0]) for name in rank["param_slice_mappings"][1]}
    assert max(numbers) < 4 // ep, "a rank counts its own experts"
    found = read_state(tmp_path / "moe")
    assert found.groups == state.groups
    assert all(np.array_equal(read_all(found.tensors[n]), read_all(s)) for n, s in state.tensors.items())


@pytest.mark.parametrize("to", ["universal", "dcp", "hf", "deepspeed-universal"])
def test_experts_reach_every_format(tmp_path: Path, to: str) -> None:
    """Weights, moments and groups of two expert-parallel ranks."""
    state = moe()
    write_zero(tmp_path / "two", state, world=2, ep=2)
    write_state(tmp_path / "to", read_state(tmp_path / "two"), Target(format=to))
    assert selfcheck.changes(state, read_state(tmp_path / "to", to)) == []


def test_an_expert_s_file_that_is_another_s_is_refused(tmp_path: Path) -> None:
    """The ranks' order decides which expert a fragment is of: the working weights are by number."""
    write_zero(tmp_path / "moe", moe(), world=2, ep=2)
    folder = tmp_path / "moe/global_step3"
    files = [folder / f"layer_0_expert_{e}_mp_rank_00_model_states.pt" for e in (0, 3)]
    tables = [torch.load(file, weights_only=False) for file in files]
    torch.save(dict(zip(tables[0], tables[1].values(), strict=True)), files[0])
    with pytest.raises(UserError, match=r"the optimizer's files have other values of 'a.deepspeed_moe"):
        read_state(tmp_path / "moe")
