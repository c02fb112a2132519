"""PyTorch's own side of a case: save and load distributed checkpoints, plain or as FSDP2 and DTensors.

Run as `python -m tests.store.odd.torch_ranks`; jobs as in `ranks`. A job is {"do": "save" | "load", "spec",
"mesh": [dp, tp], "style", "flatten", "folder", "truth"}. Styles: `plain` tensors; `dtensor`: every parameter
with its own placements; `fsdp`: `fully_shard` over the first axis, of DTensors over the second.
"""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import torch
import torch._dynamo  # DTensors import it when they are first made: seconds in every rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.store.odd.model import OddModel, Spec, optimizer_of, train, train_shards, truth_of
from tests.store.odd.ranks import serve

GLOO_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def run(job: dict[str, Any], rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    spec = job["spec"]
    if job["style"] != "plain":
        dist.init_process_group("gloo")
    model = OddModel(spec, floats=job.get("floats"))
    if job["style"] != "plain":
        mesh = init_device_mesh("cpu", tuple(job["mesh"]), mesh_dim_names=("dp", "tp"))
        _shard(job, model, mesh)
    optimizer = optimizer_of(spec, model)
    (train if job["style"] == "plain" else train_shards)(spec, model, optimizer)
    if job["do"] == "save":
        state = _state(job, model, optimizer) | extras(spec)
        dcp.save(state, checkpoint_id=job["folder"], no_dist=job["style"] == "plain")
    else:
        _load(job, spec, model, optimizer)
    if job["do"] == "save" and job["style"] != "plain":  # the truth is a twin's that was never sharded
        model = OddModel(spec)
        optimizer = optimizer_of(spec, model)
        train_shards(spec, model, optimizer)
    tensors, table = truth_of(spec, model, optimizer)
    if rank == 0:
        save_file(tensors, job["truth"] + ".safetensors")
        with open(job["truth"] + ".json", "w", encoding="utf-8") as out:
            json.dump(table, out)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def extras(spec: Spec) -> dict[str, Any]:
    """What people save besides: counters, a scheduler, a random state."""
    chance = random.Random(spec["seed"])
    found: dict[str, Any] = {"step": 2}
    if chance.random() < 0.5:
        found["lr_scheduler"] = {
            "last_epoch": 2,
            "base_lrs": [0.01],
            "best": float("inf"),
            "milestones": [(30, 1)],
        }
    if chance.random() < 0.5:
        found["rng"] = torch.arange(5, dtype=torch.uint8)
    return found


def _load(job: dict[str, Any], spec: Spec, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Into the same structure with other values; what torch asks for must be there."""
    state = _state(job, model, optimizer) | (extras(spec) if job.get("extras") else {})
    for tensor in _tensors(state):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        with torch.no_grad():
            local.copy_(torch.zeros_like(local))
    dcp.load(state, checkpoint_id=job["folder"], no_dist=job["style"] == "plain")
    options = StateDictOptions(flatten_optimizer_state_dict=job["flatten"], strict=not spec["never"])
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=True))
    if job["optimizer"]:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    if job.get("extras"):
        assert state["step"] == 2
        for key, value in extras(spec).items():
            same = torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value
            assert same, f"{key}: {state[key]} is not {value}"


def _state(job: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=job["flatten"])
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if job["optimizer"]:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
    return state


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


# Sharding.


def _shard(job: dict[str, Any], model: OddModel, mesh: DeviceMesh) -> None:
    chance = random.Random(job["spec"]["seed"])
    rows = [t for t in job["spec"]["tensors"] if t["role"] != "buffer"]
    for row in rows:
        p = model.get_parameter(row["name"])
        if p.dtype not in GLOO_TYPES:
            continue
        if job["style"] == "dtensor":
            _replace(model, job["spec"], row["name"], mesh, _placements(chance, p, mesh.ndim))
        elif mesh["tp"].size() > 1 and p.ndim and p.numel() and chance.random() < 0.6:
            _replace(model, job["spec"], row["name"], mesh["tp"], [Shard(chance.randrange(p.ndim))])
    if job["style"] == "fsdp":
        tied = {id(model.get_parameter(name)) for name in job["spec"]["tied"].values()}
        for leaf in sorted({row["name"].rpartition(".")[0] for row in rows}):
            module = model.get_submodule(leaf)
            mine = [p for p in module.parameters(recurse=False) if _fits(p) and id(p) not in tied]
            mine = [p for p in mine if p.dtype == mine[0].dtype]  # FSDP2 wants one type per module
            known = {id(p) for p in mine}
            if mine:
                others = {p for p in module.parameters() if id(p) not in known}
                fully_shard(module, mesh=mesh["dp"], ignored_params=others)


def _fits(p: nn.Parameter) -> bool:
    """FSDP2 takes no scalars, and an already sharded child is its own."""
    sharded = hasattr(p, "device_mesh") and "dp" in (p.device_mesh.mesh_dim_names or ())
    return bool(p.ndim and p.numel()) and p.dtype in GLOO_TYPES and not sharded


def _placements(chance: random.Random, p: torch.Tensor, axes: int) -> list[Placement]:
    found: list[Placement] = []
    free = list(range(p.ndim))
    for _ in range(axes):
        if free and p.numel() and chance.random() < 0.8:
            found.append(Shard(free.pop(chance.randrange(len(free)))))
        else:
            found.append(Replicate())
    return found


def _replace(model: OddModel, spec: Spec, name: str, mesh: DeviceMesh, placements: list[Placement]) -> None:
    old = model.get_parameter(name)
    new = nn.Parameter(distribute_tensor(old.detach(), mesh, placements), requires_grad=old.requires_grad)
    for one in (name, *(alias for alias, tied in spec["tied"].items() if tied == name)):
        home, _, attribute = one.rpartition(".")
        model.get_submodule(home).register_parameter(attribute, new)


if __name__ == "__main__":
    serve(run)
