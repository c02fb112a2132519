"""DeepSpeed's `universal_checkpoint_info`, every key of it, and the patterns that we write as one."""

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


@pytest.mark.parametrize(("stage", "tp", "world"), [(1, 2, 1), (1, 4, 3), (2, 2, 2), (3, 2, 2)])
def test_tensor_parallel_files_are_written_by_patterns_and_read_without_them(
    tmp_path: Path, stage: int, tp: int, world: int
) -> None:
    """The self-check reads them by the rules that were written with them."""
    state = drawn()
    target = Target(format="deepspeed", stage=stage, world=world, tp=tp, patterns=patterns(tp))
    if tp == 4:  # two key rows over four ranks
        target = replace(
            target, patterns=read_patterns(PATTERNS.replace("TPHALF", "2").replace("8, 2,", '8, "=2",'))
        )
    write_state(tmp_path / "tp", state, target)
    assert len(list((tmp_path / "tp").rglob("*optim_states.pt"))) == tp * world
    found = read_state(tmp_path / "tp")
    for name, stored in state.tensors.items():
        assert np.array_equal(read_all(found.tensors[name]), read_all(stored)), name
    write_state(tmp_path / "one", found, Target(format="deepspeed", stage=1, world=2))
    again = read_state(tmp_path / "one")
    assert all(np.array_equal(read_all(again.tensors[n]), read_all(s)) for n, s in state.tensors.items())


def test_every_rank_has_its_shards_in_deepspeed_s_own_shapes(tmp_path: Path) -> None:
    state = drawn()
    write_state(tmp_path / "tp", state, Target(format="deepspeed", tp=2, patterns=patterns(2)))
    files = sorted((tmp_path / "tp").rglob("mp_rank_*_model_states.pt"))
    module = [torch.load(file, weights_only=False)["module"] for file in files]
    w = {name: value(stored) for name, stored in state.parameters().items()}
    qkv = w["qkv.weight"]
    assert torch.equal(module[1]["qkv.weight"], torch.cat([qkv[4:8], qkv[9:10], qkv[10:]]))
    assert torch.equal(module[1]["dense.weight"], w["dense.weight"][:, 4:])
    assert torch.equal(module[1]["up.weight"], torch.cat([w["up.weight"][4:8], w["up.weight"][12:]]))
    assert module[1]["embed.weight"].shape == (8, 6), "padded to a multiple of 4 on each of 2 ranks"
    assert torch.equal(module[1]["embed.weight"][:2], w["embed.weight"][8:])
    assert not module[1]["embed.weight"][2:].any()
    assert torch.equal(module[0]["norm.weight"], module[1]["norm.weight"])
    assert "router.weight" in module[0]
    assert "router.weight" not in module[1]


def test_tensor_parallel_without_patterns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"nothing says how 'embed.weight' is split over 2 .* give --to-patterns"
    ):
        write_state(tmp_path / "tp", drawn(), Target(format="deepspeed", tp=2))


def test_the_source_s_own_rules_serve_for_another_number_of_ranks(tmp_path: Path) -> None:
    state = drawn(without=("grid.weight", "router.weight", "qkv.weight", "qkv.bias"))
    write_state(tmp_path / "two", state, Target(format="deepspeed", tp=2, patterns=patterns(2)))
    write_state(tmp_path / "u", read_state(tmp_path / "two"), Target(format="universal"))
    write_state(tmp_path / "four", read_state(tmp_path / "u"), Target(format="deepspeed", tp=4))
    found = read_state(tmp_path / "four")
    assert all(np.array_equal(read_all(found.tensors[n]), read_all(s)) for n, s in state.tensors.items())
    module = torch.load(next((tmp_path / "four").rglob("mp_rank_03_model_states.pt")), weights_only=False)[
        "module"
    ]
    assert torch.equal(module["dense.weight"], value(state.tensors["model/dense.weight"])[:, 6:])


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
    write_state(tmp_path / "tp", state, Target(format="deepspeed", tp=4, world=2, patterns=patterns(4)))
    for file in (tmp_path / "tp").rglob("mp_rank_*_model_states.pt"):
        told = torch.load(file, weights_only=False)
        del told["universal_checkpoint_info"]
        torch.save(told, file)
    with pytest.raises(UserError, match="give --patterns"):
        read_state(tmp_path / "tp")
    found = read_state(tmp_path / "tp", reading=Reading(patterns=patterns(4)))
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


@pytest.mark.parametrize("starts", [(), (0, 2, 5), (0, 1, 4)])
def test_a_pipeline_goes_to_another_number_of_stages(tmp_path: Path, starts: tuple[int, ...]) -> None:
    state = pipeline()
    target = Target(format="deepspeed", world=2, pp=3, stage_starts=starts)
    write_state(tmp_path / "three", state, target)
    assert bool(state.notes) == (not starts), "stages that were not asked for are named"
    folder = tmp_path / "three/global_step3"
    assert sorted(p.name for p in folder.glob("layer_*")) == [
        f"layer_0{i}-model_states.pt" for i in (0, 1, 2, 4, 5)
    ]
    found = read_state(tmp_path / "three")
    assert found.groups == state.groups
    assert found.meta["deepspeed"]["pipeline"] == {"tied_layers": {"0": "e"}}
    assert all(np.array_equal(read_all(found.tensors[n]), read_all(s)) for n, s in state.tensors.items())
    write_state(tmp_path / "one", found, Target(format="deepspeed", world=3))
    again = read_state(tmp_path / "one")
    assert all(np.array_equal(read_all(again.tensors[n]), read_all(s)) for n, s in state.tensors.items())


def test_impossible_pipelines_are_refused(tmp_path: Path) -> None:
    state = pipeline()
    for target, says in (
        (Target(format="deepspeed", pp=9), "5 layers cannot be divided into 9 pipeline stages"),
        (Target(format="deepspeed", pp=2, stage=2), "pipelines know ZeRO stage 1"),
        (Target(format="deepspeed", pp=2, stage_starts=(0, 0)), "are not 2 layers, rising from 0 on"),
    ):
        with pytest.raises(UserError, match=says):
            write_state(tmp_path / "x", state, target)
    with pytest.raises(UserError, match=r"'embed.weight' is not named by a pipeline's layer"):
        write_state(tmp_path / "x", drawn(), Target(format="deepspeed", pp=2))


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
def test_experts_go_to_another_number_of_expert_parallel_ranks(
    tmp_path: Path, stage: int, world: int, ep: int
) -> None:
    state = moe()
    write_state(tmp_path / "moe", state, Target(format="deepspeed", stage=stage, world=world, ep=ep))
    folder = tmp_path / "moe/global_step3"
    assert len(list(folder.glob("layer_*_expert_*_mp_rank_00_model_states.pt"))) == 8
    rank = pickles.load(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert rank["partition_count"] == [world, world // ep]
    numbers = {int(re.findall(r"experts\.(\d+)", name)[0]) for name in rank["param_slice_mappings"][1]}
    assert max(numbers) < 4 // ep, "a rank counts its own experts"
    found = read_state(tmp_path / "moe")
    assert found.groups == state.groups
    assert all(np.array_equal(read_all(found.tensors[n]), read_all(s)) for n, s in state.tensors.items())


@pytest.mark.parametrize("through", ["universal", "dcp", "hf", "megatron"])
def test_experts_pass_through_every_format_to_another_number_of_ranks(tmp_path: Path, through: str) -> None:
    """The column of experts in the matrix: weights, moments and groups, from two ranks to four."""
    state = moe()
    write_state(tmp_path / "two", state, Target(format="deepspeed", stage=1, world=2, ep=2))
    write_state(tmp_path / "hub", read_state(tmp_path / "two"), Target(format=through))
    hub = read_state(tmp_path / "hub", through)
    write_state(tmp_path / "four", hub, Target(format="deepspeed", stage=1, world=4, ep=4))
    assert selfcheck.changes(state, read_state(tmp_path / "four")) == []


def test_experts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="are not a multiple of --ep 3"):
        write_state(tmp_path / "moe", moe(), Target(format="deepspeed", world=3, ep=3))
    with pytest.raises(UserError, match="2 expert-parallel ranks need ZeRO stage 1 or 2"):
        write_state(tmp_path / "moe", moe(), Target(format="deepspeed", world=3, ep=2))


def test_an_expert_s_file_that_is_another_s_is_refused(tmp_path: Path) -> None:
    """The ranks' order decides which expert a fragment is of: the working weights are by number."""
    write_state(tmp_path / "moe", moe(), Target(format="deepspeed", world=2, ep=2))
    folder = tmp_path / "moe/global_step3"
    files = [folder / f"layer_0_expert_{e}_mp_rank_00_model_states.pt" for e in (0, 3)]
    tables = [torch.load(file, weights_only=False) for file in files]
    torch.save(dict(zip(tables[0], tables[1].values(), strict=True)), files[0])
    with pytest.raises(UserError, match=r"the optimizer's files have other values of 'a.deepspeed_moe"):
        read_state(tmp_path / "moe")
