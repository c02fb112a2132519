"""Comparisons with the truth, and judges that need no process of their own: safetensors, torch's readers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from everstep.store import dtypes
from everstep.store.stored import read_all
from everstep_convert.state import TrainingState
from tests.store.odd.model import Spec

Truth = dict[str, Tensor]


def numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {k: group[k] for k in ("lr", "weight_decay")}


def count(shape: list[int]) -> int:
    return torch.Size(shape).numel()


def elements(stored: Any) -> int:
    return torch.Size(stored.shape).numel()


def tensor_of(stored: Any) -> Tensor:
    return dtypes.tensor_of(read_all(stored), stored.dtype)


def compare(state: TrainingState, truth: Truth, table: dict[str, Any], spec: Spec, *, exact: bool) -> None:
    """Our state against the truth: names, types, bytes, groups, roles."""
    found = {
        n: tensor_of(s) for n, s in state.tensors.items() if n.startswith(("model/", "buffer/", "optimizer/"))
    }
    for alias, name in state.tied.items():
        found.setdefault(f"model/{alias}", found[f"model/{name}"])
    same(found, _expanded(truth, spec), subset=not exact, exact=exact)
    wanted = [
        {"params": [t["name"] for t in spec["tensors"] if t["role"] == "trained" and t["group"] == g]}
        for g in range(len(spec["groups"]))
    ]
    names = {frozenset(group["params"]) for group in state.groups}
    alike = {frozenset(n for g in wanted for n in g["params"])}  # groups of the same numbers may be one
    given = {frozenset(group["params"]) for group in wanted}
    assert names in (given, alike) or _merged(names, given), f"groups {names} are not {given}"
    for group in state.groups:
        row = next(t for t in spec["tensors"] if t["name"] == group["params"][0])
        assert numbers(group) == numbers(table["groups"][row["group"]]), f"{group} is not {table['groups']}"


def _merged(names: set[frozenset[str]], given: set[frozenset[str]]) -> bool:
    """Is every group made of whole given ones?"""
    return all(
        group == frozenset(itertools.chain.from_iterable(g for g in given if g <= group)) for group in names
    )


def _expanded(truth: Truth, spec: Spec) -> Truth:
    """With tied names: DeepSpeed's engine gives each tensor once."""
    return {**truth, **{f"model/{a}": truth[f"model/{n}"] for a, n in spec["tied"].items()}}


def same(found: Truth, wanted: Truth, *, subset: bool, exact: bool) -> None:
    """`subset`: more may be found than is wanted. Not `exact`: another type of the same values will do."""
    missing = sorted(set(wanted) - set(found))
    assert not missing, f"missing: {missing[:4]}"
    more = sorted(set(found) - set(wanted))
    assert subset or not more, f"more than there was: {more[:4]}"
    for name, tensor in wanted.items():
        other = found[name]
        assert tuple(other.shape) == tuple(tensor.shape), (
            f"{name}: {tuple(other.shape)} is not {tuple(tensor.shape)}"
        )
        if other.dtype == tensor.dtype:
            assert _bytes(other) == _bytes(tensor), f"{name}: other bytes"
        else:
            assert not exact, f"{name}: {other.dtype} is not {tensor.dtype}"
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            a, b = other.to(wide), tensor.to(wide)
            assert torch.equal(a.nan_to_num(7e77), b.nan_to_num(7e77)), f"{name}: other values"


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


# Judges that need no process.


def hf_folder(path: Path, spec: Spec, truth: Truth) -> None:
    files = sorted(path.glob("model*.safetensors"))
    index = path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    found: Truth = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():
                assert where.get(key, file.name) == file.name, f"{key} is not where the index says"
                found[key] = opened.get_tensor(key)
    wanted = {n.partition("/")[2]: t for n, t in truth.items() if not n.startswith("optimizer/")}
    wanted = {n: t for n, t in wanted.items() if n not in spec["tied"] or n in found}
    same(found, wanted, subset=False, exact=False)


def universal_parts(path: Path, truth: Truth, spec: Spec) -> None:
    found: Truth = {}
    for file in path.glob("step-*/*.safetensors"):
        found |= load_file(file)
    wanted = {n: t for n, t in truth.items() if n.partition("/")[2] not in spec["tied"] or n in found}
    same(found, wanted, subset=True, exact=False)
