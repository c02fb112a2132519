"""Odd models by seed: parameters of one element, of no dimension, of none at all; frozen, tied, in groups.

Only torch is needed here: this file is used by PyTorch's and DeepSpeed's own processes, which know nothing
of Everstep. `draw(seed, flavour)` gives a plain table; `OddModel` is the model it describes; `truth_of` is
what a framework holds after it has trained or loaded, as plain tensors by logical name.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

Spec = dict[str, Any]
FLOATS = ("float32", "bfloat16", "float16", "float64")
FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
BUFFERS = (
    *FLOATS, *FP8, "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
    "complex64",
)  # fmt: skip
OPTIMIZERS = {
    "torch": ("adamw", "adamw", "adamw", "momentum", "sgd", "amsgrad", "tensor-lr", "adafactor"),
    "sharded": ("adamw", "adamw", "adamw", "momentum", "amsgrad", "tensor-lr"),
    "deepspeed": ("adamw", "adamw", "adamw", "momentum", "sgd"),
}
_LEAVES = (
    "embed", "head", "a", "a.b", "a.b.c", "layers.0", "layers.1.mlp", "norm", "x0",
    "decoder.layers.0.mlp", "decoder.layers.1.mlp", "decoder.layers.2.mlp", "model.inner", "state.odd",
)  # fmt: skip


def draw(seed: int, flavour: str = "torch") -> Spec:
    """`torch`: anything goes. `sharded`: what DTensors can do. `deepspeed`: fp32, gradients for all."""
    chance = random.Random(f"odd {seed} {flavour}")
    plain = flavour == "deepspeed"
    num_groups = chance.choice([1, 1, 2, 2, 3])
    one_type = chance.choice(FLOATS[:2]) if chance.random() < 0.6 else None
    tensors: list[dict[str, Any]] = []
    for leaf in chance.sample(_LEAVES, chance.randint(2, 7)):
        for name in chance.sample(["weight", "bias", "scale"], chance.randint(1, 3)):
            frozen = chance.random() < 0.2
            kinds = FLOATS if not frozen else (*FLOATS, *FP8)
            dtype = "float32" if plain else (one_type or chance.choice(kinds))
            if frozen and not plain and chance.random() < 0.3:
                dtype = chance.choice(FP8)
            row = {"name": f"{leaf}.{name}", "shape": _shape(chance, plain), "dtype": dtype}
            tensors.append(
                {**row, "role": "frozen" if frozen else "trained", "group": chance.randrange(num_groups)}
            )
        for i in range(chance.choice([0, 0, 1, 2])):
            dtype = chance.choice(BUFFERS)
            tensors.append(
                {
                    "name": f"{leaf}.buffer{i}",
                    "shape": _shape(chance, plain),
                    "dtype": dtype,
                    "role": "buffer",
                }
            )
    first = next((t for t in tensors if t["role"] == "trained"), None)
    if first is None:
        first = {"name": "only.weight", "dtype": "float32", "role": "trained", "group": 0}
        tensors.append(first)
    first["shape"] = [chance.randint(1, 5), chance.randint(1, 5)]  # something to train
    trained = [t for t in tensors if t["role"] == "trained"]
    for number, group in enumerate(sorted({t["group"] for t in trained})):  # no group without parameters
        for t in trained:
            t["group"] = number if t["group"] == group else t["group"]
    tied = {}
    if chance.random() < 0.35:
        tied[f"{chance.choice(['tie', 'out.tie', 'z.z'])}.weight"] = first["name"]
    never = [] if plain or chance.random() < 0.8 else [chance.choice(trained)["name"]]
    late = [] if plain or chance.random() < 0.9 else [chance.choice(trained)["name"]]
    optimizer = chance.choice(OPTIMIZERS[flavour])
    if optimizer == "adafactor" and any(0 in t["shape"] for t in trained):
        optimizer = "adamw"  # torch's Adafactor divides by the number of elements
    groups = [
        {"lr": chance.choice([0.01, 0.003, 1e-4]), "weight_decay": chance.choice([0.0, 0.1])}
        for _ in {t["group"] for t in trained}
    ]
    return {
        "seed": seed, "tensors": tensors, "tied": tied, "optimizer": optimizer, "groups": groups,
        "never": [n for n in never if n != first["name"]], "late": [n for n in late if n != first["name"]],
    }  # fmt: skip


def _shape(chance: random.Random, plain: bool) -> list[int]:
    kind = chance.random()
    if kind < 0.1:
        return [1] if plain else []  # DeepSpeed cannot send a parameter without dimensions to its peers
    if kind < 0.22:
        return chance.choice([[1], [1, 1], [1, 3], [3, 1]])
    if kind < (0.22 if plain else 0.28):
        return chance.choice([[0], [0, 3], [2, 0]])
    return [chance.choice([1, 2, 3, 5, 7, 8, 13, 17]) for _ in range(chance.choice([1, 1, 2, 2, 2, 3]))]


class Leaf(nn.Module):
    """Its own parameters in its own forward: ZeRO-3 fetches them by module."""

    def forward(self) -> Tensor:
        total = torch.zeros(())
        for p in self.parameters(recurse=False):
            if p.requires_grad and p.numel():
                total = total + (p.float() * 0.5 + p.float().square()).sum()
            elif p.numel() and p.is_floating_point():
                total = total + p.float().sum() * 1e-3
        return total


class OddModel(nn.Module):
    def __init__(self, spec: Spec, *, zeros: bool = False, floats: str | None = None) -> None:
        """`zeros`: to load into. `floats`: all parameters in this type, whatever the spec says."""
        super().__init__()
        draw_values = torch.Generator().manual_seed(spec["seed"])
        for row in spec["tensors"]:
            dtype = getattr(torch, floats if floats and row["role"] != "buffer" else row["dtype"])
            made = _values(draw_values, row["shape"], getattr(torch, row["dtype"])).to(dtype)
            made = torch.zeros_like(made) if zeros else made
            home, _, name = row["name"].rpartition(".")
            leaf = self._leaf(home)
            if row["role"] == "buffer":
                leaf.register_buffer(name, made)
            else:
                leaf.register_parameter(name, nn.Parameter(made, requires_grad=row["role"] == "trained"))
        for alias, name in spec["tied"].items():
            home, _, attribute = alias.rpartition(".")
            self._leaf(home).register_parameter(attribute, self.get_parameter(name))

    def _leaf(self, path: str) -> nn.Module:
        module: nn.Module = self
        for part in path.split("."):
            if part not in module._modules:
                module.add_module(part, Leaf())
            module = module.get_submodule(part)
        return module

    def forward(self) -> Tensor:
        return torch.stack([m() for m in self.modules() if isinstance(m, Leaf)]).sum()


def _values(draw_values: torch.Generator, shape: list[int], dtype: torch.dtype) -> Tensor:
    if dtype == torch.complex64:
        return torch.randn(*shape, 2, generator=draw_values).contiguous().view(torch.complex64).reshape(shape)
    if dtype == torch.int64:
        return torch.randint(-(2**62), 2**62, shape, generator=draw_values)
    if not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=draw_values).to(dtype)
    return torch.randn(shape, generator=draw_values).to(dtype)


def optimizer_of(spec: Spec, model: nn.Module) -> torch.optim.Optimizer:
    rows = [t for t in spec["tensors"] if t["role"] == "trained"]
    groups = [
        {"params": [model.get_parameter(t["name"]) for t in rows if t["group"] == g], **numbers}
        for g, numbers in enumerate(spec["groups"])
    ]
    match spec["optimizer"]:
        case "momentum":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        case "sgd":
            return torch.optim.SGD(groups, lr=0.1)
        case "adafactor":
            return torch.optim.Adafactor(groups)
        case "tensor-lr":
            for group in groups:
                group["lr"] = torch.tensor(group["lr"])
            return torch.optim.AdamW(groups)
        case kind:
            return torch.optim.AdamW(groups, amsgrad=kind == "amsgrad")


def train(spec: Spec, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Gradients are made from the weights."""
    names = {id(model.get_parameter(t["name"])): t["name"] for t in spec["tensors"] if t["role"] == "trained"}
    for step in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = names[id(p)]
                skip = name in spec["never"] or (step == 0 and name in spec["late"])
                p.grad = None if skip else (p.detach() * 0.25 + 0.5)
        optimizer.step()


_ADAM = ("exp_avg", "exp_avg_sq")
_STATES = {
    "adamw": _ADAM, "tensor-lr": _ADAM, "amsgrad": (*_ADAM, "max_exp_avg_sq"),
    "momentum": ("momentum_buffer",), "sgd": (),
}  # fmt: skip


def train_shards(spec: Spec, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The same for DTensors, shard by shard: torch takes minutes to plan an optimizer's step on a
    strided shard of two axes, and what is saved is a DTensor all the same.
    """
    from torch.distributed.tensor import DTensor

    names = {id(model.get_parameter(t["name"])): t["name"] for t in spec["tensors"] if t["role"] == "trained"}
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names[id(p)]
            if name in spec["never"]:
                continue
            for i, key in enumerate(_STATES[spec["optimizer"]]):
                with torch.no_grad():
                    local = p._local_tensor if isinstance(p, DTensor) else p.detach()
                    made = local * (0.25 + i) + 0.5
                    local.sub_(made * 0.01)
                if isinstance(p, DTensor):
                    made = DTensor.from_local(
                        made, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                    )
                optimizer.state[p][key] = made
            if "exp_avg" in _STATES[spec["optimizer"]]:
                optimizer.state[p]["step"] = torch.tensor(1.0 if name in spec["late"] else 2.0)


def whole(tensor: Any) -> Tensor:
    """A DTensor is put together from the ranks' shards, by the offsets that DCP saves them with: torch's own
    `full_tensor` hangs for an uneven shard of two axes.
    """
    if not hasattr(tensor, "placements"):
        found: Tensor = tensor.detach().cpu().contiguous().clone()
        return found
    from torch.distributed import all_gather_object, get_world_size
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = tensor.detach().to_local()
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    parts: list[Any] = [None] * get_world_size()
    all_gather_object(parts, (tuple(offset), local.contiguous()[tuple(slice(0, n) for n in shape)]))
    made = torch.zeros(tensor.shape, dtype=local.dtype)
    for start, part in parts:
        if part.numel():
            made[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part
    return made


def truth_of(
    spec: Spec, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by logical name, tied names too; and the groups. All ranks call it: shards are gathered."""
    tensors = {f"model/{name}": whole(tensor) for name, tensor in model.state_dict().items()}
    named = {id(model.get_parameter(t["name"])): t["name"] for t in spec["tensors"] if t["role"] == "trained"}
    groups = []
    for group in optimizer.param_groups:
        names = [named[id(p)] for p in group["params"]]
        numbers = {k: plain(v) for k, v in group.items() if k != "params"}
        groups.append({"params": names, **numbers})
        for p in group["params"]:
            for key, value in optimizer.state[p].items() if p in optimizer.state else ():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{named[id(p)]}/{key}"] = whole(value)
                elif value is not None:
                    tensors[f"optimizer/{named[id(p)]}/{key}#{type(value).__name__}"] = torch.tensor(value)
    return tensors, {"groups": groups}


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"$scalar": [{"torch.float32": "F32", "torch.float64": "F64"}[str(value.dtype)], float(value)]}
    return list(value) if isinstance(value, tuple) else value
