"""Megatron-LM's checkpoints: `torch_dist`, which is PyTorch's format with its own keys, and the legacy one.

    torch_dist   iter_0000100/{metadata.json, common.pt, .metadata, __0_0.distcp}
                 decoder.layers.<...>       all layers stacked along a first axis, or decoder.layers.7.<...>
                 optimizer.state.<key>.<model key>       fp32_param, exp_avg, exp_avg_sq
    legacy       iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt       one shard a tensor and pipeline rank

Legacy optimizer state is bound to the order of buffers in Megatron's memory and to the run that wrote it; it
is neither read nor written, and the state's notes say so.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from everstep.checkpoint.formats import dcp, pickles, torchfile
from everstep.checkpoint.formats.shards import Rules, cut_for
from everstep.checkpoint.formats.torchfile import Global, Instance
from everstep.checkpoint.parts import Progress
from everstep.checkpoint.state import State, plain
from everstep.checkpoint.stored import Block, Pieces, Stored, Woven
from everstep.errors import UserError
from everstep.layout.box import Box
from everstep.layout.layout import Tensor
from everstep.layout.patterns import Pattern, Patterns

LATEST = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
PATTERNS = Patterns(
    (
        Pattern(match=r".*(word_embeddings|output_layer)\.weight", kind="fragment", dim=0, pad_to=1),
        Pattern(match=r".*linear_qkv\.(weight|bias)", kind="fragment", dim=0),
        Pattern(match=r".*linear_fc1\.(weight|bias)", kind="fragment", dim=0),
        Pattern(match=r".*(linear_proj|linear_fc2)\.weight", kind="fragment", dim=1),
        Pattern(match=r".*(linear_proj|linear_fc2)\.bias", kind="replicated"),
        Pattern(match=r".*(layer_norm_(weight|bias)|layernorm\.(weight|bias))", kind="replicated"),
        Pattern(match=r".*position_embeddings\.weight", kind="replicated"),
    )
)


def folder_of(path: Path) -> Path | None:
    """The iteration's folder, for it or for the folder with the file that names the newest."""
    if (path / LATEST).is_file():
        told = (path / LATEST).read_text(encoding="utf-8").strip()
        if told != "release" and not told.isdigit():
            raise UserError(f"{path / LATEST} says {told!r}, which is no iteration.")
        path = path / (told if told == "release" else f"iter_{int(told):07d}")
    is_dist = (path / "metadata.json").is_file() and dcp.is_one(path)
    is_legacy = path.is_dir() and any(_RANK.fullmatch(p.name) for p in path.iterdir())
    return path if is_dist or is_legacy else None


def read(path: Path, patterns: Patterns | None = None, vocab: int | None = None) -> State:
    folder = folder_of(path)
    if folder is None:
        raise UserError(f"{path} is no checkpoint of Megatron; neither metadata.json nor mp_rank_… is there.")
    if dcp.is_one(folder):
        return _read_dist(folder, vocab)
    return _read_legacy(folder, patterns, vocab)


# torch_dist.


def _read_dist(folder: Path, vocab: int | None) -> State:
    saved = dcp.read_keys(folder)
    state = State()
    masters: dict[str, Stored] = {}
    for key, stored in saved.tensors.items():
        match = _STATE.fullmatch(key)
        for name, one in _by_layer(match[2] if match else key, stored):
            if match is None:
                state.tensors[f"model/{name}"] = one
            elif match[1] in ("fp32_param", "param"):
                masters[name] = one
            else:
                state.tensors[f"optimizer/{name}/{match[1]}"] = one
    for name, one in masters.items():
        state.tensors[f"model/{name}"] = one
    skipped = [key for key in saved.values if "_extra_state" in key]
    if skipped:
        state.notes.append(f"{len(skipped)} extra states of Transformer Engine are left out")
    if (folder / "common.pt").is_file():
        _take_common(state, pickles.load(folder / "common.pt"))
    return _stripped(state, vocab)


def _by_layer(key: str, stored: Stored) -> list[tuple[str, Stored]]:
    """A tensor of all layers as one a layer; any other as it is."""
    if not key.startswith("decoder.layers.") or _LAYER.fullmatch(key):
        return [(key, stored)]
    rest = stored.shape[1:]
    axes = tuple(range(1, len(stored.shape)))
    whole = Box((0,) * len(rest), rest)
    return [
        (
            f"decoder.layers.{i}.{key.removeprefix('decoder.layers.')}",
            Woven(stored.dtype, rest, (Block(whole, stored, (i, *(0,) * len(rest)), axes),)),
        )
        for i in range(stored.shape[0])
    ]


def _take_common(state: State, common: Any) -> None:
    lost: list[str] = []
    args = common.get("args")
    table = args.__dict__["state"] if isinstance(args, pickles.Opaque) else (args or {})
    state.step = int(common.get("iteration") or 0)
    state.meta |= {
        "format": "megatron",
        "megatron_args": plain(table, lost, "args"),
        "scheduler": plain(common.get("opt_param_scheduler"), lost, "opt_param_scheduler"),
    }
    groups = ((common.get("optimizer") or {}).get("optimizer") or {}).get("param_groups")
    if isinstance(groups, list):
        state.meta["megatron_param_groups"] = plain(groups, lost, "param_groups")
    state.notes += [f"{name} is no plain value and is left out" for name in lost]


def _stripped(state: State, vocab: int | None) -> State:
    """Without the rows that pad the vocabulary, if their number is known."""
    if vocab is None:
        return state
    for name, stored in state.tensors.items():
        if (
            re.search(r"(word_embeddings|output_layer)\.weight", name)
            and stored.shape
            and stored.shape[0] > vocab
        ):
            shape = (vocab, *stored.shape[1:])
            box = Box((0,) * len(shape), shape)
            axes = tuple(range(len(shape)))
            state.tensors[name] = Woven(stored.dtype, shape, (Block(box, stored, box.start, axes),))
    return state


def write_dist(path: Path, state: State, progress: Progress = lambda count: None) -> None:
    """Layers stacked, masters as fp32_param; `fully_reshardable`'s keys, so that any shape can load it."""
    folder = path / f"iter_{state.step:07d}"
    keys: dict[str, Any] = {}
    stacks: dict[str, dict[int, Stored]] = {}
    for name, stored in state.tensors.items():
        key = _dist_key(name)
        match = re.fullmatch(r"(.*)decoder\.layers\.(\d+)\.(.+)", key)
        if match:
            stacks.setdefault(f"{match[1]}decoder.layers.{match[3]}", {})[int(match[2])] = stored
        elif not name.endswith("/step"):
            keys[key] = stored
    for key, layers in stacks.items():
        if not key.endswith(".step") and all(stored.shape for stored in layers.values()):
            keys[key] = _stacked(key, layers)
    has_optimizer = any(name.startswith("optimizer/") for name in state.tensors)
    if has_optimizer:
        keys |= {
            f"optimizer.state.fp32_param.{k}": v for k, v in keys.items() if not k.startswith("optimizer.")
        }
    dcp.write_keys(folder, keys, progress)
    torchfile.save(folder / "common.pt", _common(state))
    backend = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / "metadata.json").write_text(json.dumps(backend), encoding="utf-8")
    (path / LATEST).write_text(str(state.step), encoding="utf-8")


def _dist_key(name: str) -> str:
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        parameter, _, key = rest.rpartition("/")
        return f"optimizer.state.{key}.{parameter}"
    return rest


def _stacked(key: str, layers: dict[int, Stored]) -> Stored:
    count = 1 + max(layers)
    if len(layers) != count or len({stored.shape for stored in layers.values()}) != 1:
        raise UserError(f"{key!r} is not in every layer alike; Megatron's stacked keys cannot hold it.")
    rest = layers[0].shape
    axes = tuple(range(len(rest) + 1))
    blocks = tuple(
        Block(Box((i, *(0,) * len(rest)), (1, *rest)), _Lifted(layers[i]), (0,) * (len(rest) + 1), axes)
        for i in range(count)
    )
    return Woven(layers[0].dtype, (count, *rest), blocks)


class _Lifted:
    """A tensor with a first axis of one."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.dtype, self.shape = stored.dtype, (1, *stored.shape)

    def read(self, box: Box, out: Any) -> None:
        self._stored.read(Box(box.start[1:], box.size[1:]), out[0])


def _common(state: State) -> dict[str, Any]:
    args = state.meta.get("megatron_args") or {}
    return {
        "args": Instance(Global("argparse", "Namespace"), dict(args)),
        "checkpoint_version": 3.0,
        "iteration": state.step,
        "opt_param_scheduler": state.meta.get("scheduler"),
    }


# Legacy.


def _read_legacy(folder: Path, patterns: Patterns | None, vocab: int | None) -> State:
    ranks: dict[tuple[int, int], Any] = {}
    for path in sorted(folder.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match:
            ranks[int(match[2] or 0), int(match[1])] = pickles.load(path / "model_optim_rng.pt")
    tp = 1 + max(t for _, t in ranks)
    pp = 1 + max(p for p, _ in ranks)
    if len(ranks) != tp * pp:
        raise UserError(f"{folder} has {len(ranks)} ranks, which are not {pp} stages of {tp}.")
    if any("model" not in held for held in ranks.values()):
        raise UserError(f"{folder} is of a virtual pipeline (model0, model1, …), which is not read.")
    state = State()
    _take_common(state, ranks[0, 0])
    args = state.meta.get("megatron_args") or {}
    rules = Rules(
        patterns or _patterns(bool(args.get("swiglu", True)), ranks[0, 0]["model"], tp), vocab=vocab
    )
    before = 0
    for stage in range(pp):
        shards = [ranks[stage, t]["model"] for t in range(tp)]
        deepest = -1
        for name, first in shards[0].items():
            if not isinstance(first, Pieces):
                continue
            match = _LAYER.fullmatch(name)
            full = f"decoder.layers.{before + int(match[1])}.{match[2]}" if match else name
            deepest = max(deepest, int(match[1]) if match else -1)
            if f"model/{full}" not in state.tensors:
                state.tensors[f"model/{full}"] = rules.whole(name, [shard[name] for shard in shards])
        before += deepest + 1
    state.notes.append("the optimizer's state of a legacy Megatron checkpoint is not read")
    return _stripped(state, vocab)


def _patterns(swiglu: bool, model: Any, tp: int) -> Patterns:
    """The usual ones; with SwiGLU a shard of fc1 is its part of the gate, then its part of up."""
    if not swiglu:
        return PATTERNS
    rows = next((t.shape[0] for n, t in model.items() if n.endswith("linear_fc1.weight")), 0)
    found = []
    for pattern in PATTERNS.patterns:
        if "linear_fc1" in pattern.match:
            half = rows * tp // 2
            pattern = Pattern(match=pattern.match, kind="fragment", dim=0, parts=(half, half))
        found.append(pattern)
    return Patterns(tuple(found))


def write_legacy(
    path: Path,
    state: State,
    *,
    tp: int = 1,
    pp: int = 1,
    swiglu: bool = True,
    progress: Progress = lambda count: None,
) -> None:
    folder = path / f"iter_{state.step:07d}"
    parameters = state.parameters()
    layers = 1 + max((int(m[1]) for n in parameters if (m := _LAYER.fullmatch(n))), default=-1)
    if layers % pp:
        raise UserError(f"{layers} layers do not divide into {pp} pipeline stages.")
    patterns = _patterns(swiglu, parameters, 1)
    for stage in range(pp):
        mine = _stage(parameters, stage, pp, layers // pp)
        for rank in range(tp):
            model = {name: _shard(patterns, name, stored, rank, tp) for name, stored in mine.items()}
            place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            place.mkdir(parents=True, exist_ok=True)
            torchfile.save(place / "model_optim_rng.pt", {**_common(state), "model": model}, progress)
    (path / LATEST).write_text(str(state.step), encoding="utf-8")
    if any(name.startswith("optimizer/") for name in state.tensors):
        state.notes.append("the optimizer's state is not written to a legacy Megatron checkpoint")


def _stage(parameters: dict[str, Stored], stage: int, pp: int, per: int) -> dict[str, Stored]:
    found = {}
    for name, stored in parameters.items():
        match = _LAYER.fullmatch(name)
        if match:
            if int(match[1]) // per == stage:
                found[f"decoder.layers.{int(match[1]) % per}.{match[2]}"] = stored
        elif (stage == 0) if name.startswith("embedding.") else (stage == pp - 1):
            found[name] = stored
    return found


def _shard(patterns: Patterns, name: str, stored: Stored, rank: int, tp: int) -> Stored:
    if tp == 1:
        return stored
    pattern = patterns.of(name)
    tensor = Tensor(name=name, shape=stored.shape, dtype=stored.dtype)
    return cut_for(pattern.shards(tensor, tp)[rank], stored)
