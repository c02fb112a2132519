"""The frameworks as judges: PyTorch and DeepSpeed load what we wrote and say what they then hold."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.store.odd.judges import Truth, count, numbers, same
from tests.store.odd.model import Spec
from tests.store.odd.ranks import RankFailed, Ranks

TORCH, DEEPSPEED = "tests.store.odd.torch_ranks", "tests.store.odd.deepspeed_ranks"
MESHES = ([2, 1], [1, 2], [2, 2])


class Frameworks:
    """Their processes, started when they are first needed. `deepspeed`: the Python of a venv that has it."""

    def __init__(self, root: Path, python: str, deepspeed: str | None = None) -> None:
        self._root = root
        self._pythons = {TORCH: python, DEEPSPEED: deepspeed or ""}
        self._ranks: dict[str, Ranks] = {}
        self.has_deepspeed = bool(deepspeed)

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()
        self._ranks.clear()

    def run(self, module: str, job: dict[str, Any], ranks: int) -> tuple[Truth, dict[str, Any]]:
        """A job's truth, as tensors and as a table."""
        if module not in self._ranks:
            self._ranks[module] = Ranks(self._pythons[module], module, self._root)
        try:
            self._ranks[module].run(job, ranks)
        except RankFailed:
            self._ranks.pop(module).close()
            raise
        found = load_file(job["truth"] + ".safetensors")
        return found, json.loads(Path(job["truth"] + ".json").read_text())


@dataclass(slots=True, kw_only=True)
class Judgement:
    """What is judged: the folder `path`, written by us."""

    frameworks: Frameworks
    spec: Spec
    path: Path
    scratch: Path
    chance: random.Random
    source: str
    precision: str
    truth: Truth
    table: dict[str, Any]
    all_groups: bool  # a flattened DCP source makes one of two with the same numbers

    def renamed(self, found: Truth) -> Truth:
        """Buffers under their own kind."""
        return with_buffers(self.spec, found)


def with_buffers(spec: Spec, truth: Truth) -> Truth:
    buffers = {t["name"] for t in spec["tensors"] if t["role"] == "buffer"}
    return {
        f"buffer/{name[6:]}" if name.startswith("model/") and name[6:] in buffers else name: tensor
        for name, tensor in truth.items()
    }


def by_torch(given: Judgement) -> list[str]:
    """Another mesh, another style, another form of the optimizer's groups than it was saved with."""
    style = (
        "plain"
        if given.spec["optimizer"] == "adafactor"
        else given.chance.choice(["plain", "dtensor", "fsdp"])
    )
    mesh = [1, 1] if style == "plain" else given.chance.choice(MESHES)
    job = {
        "do": "load",
        "spec": given.spec,
        "folder": str(given.path),
        "truth": str(given.scratch / "loaded"),
        "style": style,
        "mesh": mesh,
        "flatten": given.chance.random() < 0.5 or not given.all_groups,
        "optimizer": True,
        "extras": given.source != "deepspeed",
        "floats": "float32" if given.source == "deepspeed" else None,
    }
    found, _ = given.frameworks.run(TORCH, job, mesh[0] * mesh[1])
    exact = given.source != "deepspeed"  # a 16-bit engine's frozen weights and buffers are its own
    same(given.renamed(found), given.truth, subset=True, exact=exact)
    return [f"loaded by torch {style} {mesh[0]} x {mesh[1]}"]


def by_deepspeed(given: Judgement) -> list[str]:
    if not given.frameworks.has_deepspeed:
        return []
    world = given.chance.choice([1, 2])
    scalars = any(not t["shape"] for t in given.spec["tensors"] if t["role"] != "buffer")
    if scalars or given.spec["optimizer"] != "adamw" or given.spec["never"]:
        return []  # DeepSpeed cannot make such an engine
    job: dict[str, Any] = {
        "do": "load",
        "spec": given.spec,
        "folder": str(given.path),
        "truth": str(given.scratch / "engine"),
        "stage": 1,
        "precision": given.precision,
        "universal": True,
        "optimizer": True,
        "client": given.source == "deepspeed",
    }
    found, table = given.frameworks.run(DEEPSPEED, job, world)
    # Its loader leaves frozen weights and buffers alone.
    trained = {t["name"] for t in given.spec["tensors"] if t["role"] == "trained" and count(t["shape"])}
    wanted = {n: t for n, t in given.truth.items() if _parameter(n) in trained}
    same(given.renamed(found), in_engine(given.spec, given.precision, wanted), subset=True, exact=False)
    _same_groups(given, table)
    return [f"loaded by DeepSpeed universal x {world} {given.precision}"]


def _parameter(name: str) -> str:
    kind, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest


def in_engine(spec: Spec, precision: str, truth: Truth) -> Truth:
    """What an engine that has loaded it holds: masters and states in fp32, whatever the file had. A 16-bit
    engine casts frozen weights, and leaves buffers as they are unless `buffer_dtype` says otherwise.
    """
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    roles = {t["name"]: t["role"] for t in spec["tensors"]}
    found = dict(truth)
    for name, tensor in truth.items():
        role = roles.get(_parameter(name), "trained")  # a tied name is that of a trained one
        if role == "buffer" or not tensor.is_floating_point():
            continue
        if role != "trained":
            found[name] = tensor.to(kind)
        elif tensor.dtype == torch.float64:
            found[name] = tensor.to(torch.float32)
    return found


def _same_groups(given: Judgement, table: dict[str, Any]) -> None:
    rows = [t for t in given.spec["tensors"] if t["role"] == "trained" and count(t["shape"])]
    filled = [g for g in range(len(given.spec["groups"])) if any(t["group"] == g for t in rows)]
    ours, theirs = [numbers(g) for g in table["groups"]], [numbers(given.table["groups"][g]) for g in filled]
    assert ours == theirs, f"groups {ours} are not {theirs}"
    if given.source == "deepspeed" and given.precision == "fp16":
        scales = table["scale"], given.table["scale"]
        assert scales[0] == scales[1], f"loss scale {scales[0]} is not {scales[1]}"
