"""The same model under other names: Hugging Face's Llama, Megatron's fused layers, our own GPT.

A dialect is a table: every tensor of it is rows of tensors of the Llama naming, one after the other. Renaming
is one stretch of rows; gate|up are two; Megatron's QKV takes turns between q, k and v, a group of heads at
a time. The table runs both ways, and what holds for a weight holds for its moments.

    megatron qkv, group g     q q q q  k  v     (heads / groups) q heads, one k, one v
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from everstep.errors import UserError
from everstep.layout.box import Box
from everstep.store.stored import Stored
from everstep_convert.state import TrainingState
from everstep_convert.woven import Woven, WovenBlock, copies, one_type

Dialect = Literal["llama", "everstep", "megatron"]
DIALECTS: tuple[Dialect, ...] = ("llama", "everstep", "megatron")
_EVERSTEP = {
    "embed.tokens.weight": "model.embed_tokens.weight",
    "blocks.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blocks.{i}.attention.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blocks.{i}.attention.k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blocks.{i}.attention.v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blocks.{i}.attention.out.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blocks.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blocks.{i}.mlp.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "blocks.{i}.mlp.up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "blocks.{i}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.logits.weight": "lm_head.weight",
}
_QKV_NORM = "decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight"
_MEGATRON = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    _QKV_NORM: "model.layers.{i}.input_layernorm.weight",
    "decoder.layers.{i}.self_attention.linear_proj.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight": "model.layers.{i}.post_attention_layernorm.weight",
    "decoder.layers.{i}.mlp.linear_fc2.weight": "model.layers.{i}.mlp.down_proj.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LOCAL_SPEC = {  # Megatron without Transformer Engine names its norms apart
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_LAYER = {
    "llama": re.compile(r"model\.layers\.(\d+)\."),
    "everstep": re.compile(r"blocks\.(\d+)\."),
    "megatron": re.compile(r"decoder\.layers\.(\d+)\."),
}


@dataclass(frozen=True, slots=True)
class RowSplit:
    """`count` rows of `source` from `source_row` on are the target's from `target_row` on."""

    source: str
    source_row: int
    target_row: int
    count: int


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    groups: int


def dialect_of(state: TrainingState) -> Dialect | None:
    """Which names these are, if it is one of ours."""
    names = state.parameters()
    for dialect, pattern in _LAYER.items():
        if any(pattern.match(name) for name in names):
            return dialect  # type: ignore[return-value]
    return None


def is_our_gpt(state: TrainingState) -> bool:
    """Every parameter of our GPT is there, and no other: names may begin alike by accident."""
    names = set(state.parameters())
    layers = {int(match[1]) for name in names if (match := _LAYER["everstep"].match(name))}
    return bool(layers) and names == {
        ours.replace("{i}", str(i)) for ours in _EVERSTEP for i in range(1 + max(layers))
    }


def translated(state: TrainingState, to: Dialect, heads: Heads | None = None) -> TrainingState:
    """The state under other names; names that no table knows are refused."""
    given = dialect_of(state)
    if given is None:
        some = next(iter(state.parameters()), "none")
        raise UserError(
            f"the names of this checkpoint (such as {some!r}) are none of {', '.join(DIALECTS)}; use --names "
            "keep."
        )
    if given == to:
        return state
    if given == "megatron":
        state = _with_transformer_engine_names(state)
    if given != "llama":
        state = _rewoven(state, _inverse(_table(state, given, heads), state))
    return state if to == "llama" else _rewoven(state, _table(state, to, heads))


def heads_of(state: TrainingState) -> Heads | None:
    """From a Hugging Face config, Megatron's arguments or our own shape, whichever the state carries."""
    config = state.meta.get("hf_config") or {}
    if "num_attention_heads" in config:
        query = int(config["num_attention_heads"])
        return Heads(query, int(config.get("num_key_value_heads") or query))
    args = (state.meta.get("megatron") or {}).get("args") or {}
    if "num_attention_heads" in args:
        query = int(args["num_attention_heads"])
        groups = args.get("num_query_groups") if args.get("group_query_attention") else None
        return Heads(query, int(groups or query))
    model = state.meta.get("model") or {}
    if "heads" in model:
        return Heads(int(model["heads"]), int(model.get("kv_heads") or model["heads"]))
    return None


# Tables.


def _table(state: TrainingState, dialect: Dialect, heads: Heads | None) -> dict[str, list[RowSplit]]:
    """Every tensor of a dialect as rows of Llama's. Sizes come from whichever of the two is there."""
    sizes = {name: stored.shape[0] for name, stored in state.parameters().items() if stored.shape}
    layers = 1 + max((int(m[1]) for n in sizes for p in _LAYER.values() if (m := p.match(n))), default=-1)
    names = _EVERSTEP if dialect == "everstep" else _MEGATRON
    found: dict[str, list[RowSplit]] = {}
    for theirs, llama in names.items():
        for i in range(layers) if "{i}" in theirs else (0,):
            target, source = theirs.replace("{i}", str(i)), llama.replace("{i}", str(i))
            size = sizes.get(source, sizes.get(target))
            if size is not None:
                found[target] = [RowSplit(source, 0, 0, size)]
    if dialect == "megatron":
        heads = heads or heads_of(state)
        for i in range(layers):
            found |= _fused(i, sizes, heads)
    return found


def _fused(i: int, sizes: Mapping[str, int], heads: Heads | None) -> dict[str, list[RowSplit]]:
    """Megatron's qkv and fc1 of a layer."""
    mine, theirs = f"model.layers.{i}.", f"decoder.layers.{i}."
    qkv, fc1 = f"{theirs}self_attention.linear_qkv.weight", f"{theirs}mlp.linear_fc1.weight"
    if heads is None:
        raise UserError("Megatron's qkv needs the number of heads; give --heads and --kv-heads.")
    per = heads.query // heads.groups
    if qkv in sizes:
        size = sizes[qkv] // ((per + 2) * heads.groups)
    else:
        size = sizes[f"{mine}self_attn.q_proj.weight"] // heads.query
    if size * (per + 2) * heads.groups != sizes.get(qkv, size * (per + 2) * heads.groups):
        raise UserError(
            f"{qkv!r} has {sizes[qkv]} rows, which are not {heads.query} heads in {heads.groups}."
        )
    rows = []
    for g in range(heads.groups):
        at = g * (per + 2) * size
        rows.append(RowSplit(f"{mine}self_attn.q_proj.weight", g * per * size, at, per * size))
        rows.append(RowSplit(f"{mine}self_attn.k_proj.weight", g * size, at + per * size, size))
        rows.append(RowSplit(f"{mine}self_attn.v_proj.weight", g * size, at + (per + 1) * size, size))
    half = sizes[fc1] // 2 if fc1 in sizes else sizes[f"{mine}mlp.gate_proj.weight"]
    gate, up = f"{mine}mlp.gate_proj.weight", f"{mine}mlp.up_proj.weight"
    return {qkv: rows, fc1: [RowSplit(gate, 0, 0, half), RowSplit(up, 0, half, half)]}


def _inverse(table: dict[str, list[RowSplit]], state: TrainingState) -> dict[str, list[RowSplit]]:
    there = state.parameters()
    found: dict[str, list[RowSplit]] = {}
    for target, rows in table.items():
        if target in there:
            for row in rows:
                back = RowSplit(target, row.target_row, row.source_row, row.count)
                found.setdefault(row.source, []).append(back)
    return found


# Reweaving.


def _rewoven(state: TrainingState, table: dict[str, list[RowSplit]]) -> TrainingState:
    names = state.parameters()
    table = {target: rows for target, rows in table.items() if all(row.source in names for row in rows)}
    used = {row.source for rows in table.values() for row in rows}
    unknown = next((name for name in names if name not in used), None)
    if unknown is not None:
        raise UserError(f"parameter {unknown!r} has no name in the other naming; use --names keep.")
    optimizer = state.optimizer()
    tensors = {n: s for n, s in state.tensors.items() if not n.startswith(("model/", "optimizer/"))}
    for target, rows in table.items():
        weights = [names[row.source] for row in rows]
        tensors[f"model/{target}"] = _rows(repr(target), weights, rows)
        for key in dict.fromkeys(key for row in rows for key in optimizer.get(row.source, {})):
            held = [stored for row in rows if (stored := optimizer[row.source].get(key)) is not None]
            what = f"{key} of {target!r}"
            if len(held) < len(rows):
                raise UserError(f"{what} is there for some of what is fused into it only; use --names keep.")
            if any(one.shape not in ((), weight.shape) for one, weight in zip(held, weights, strict=True)):
                raise UserError(f"{what} does not have the shape of its parameter; use --names keep.")
            if held[0].shape:
                tensors[f"optimizer/{target}/{key}"] = _rows(what, held, rows)
            else:
                places = [repr(row.source) for row in rows]
                tensors[f"optimizer/{target}/{key}"] = copies(what, places, held, "use --names keep")
    owner = {row.source: target for target, rows in table.items() for row in rows}
    first = {rows[0].source: target for target, rows in table.items()}
    split: dict[str, list[str]] = {}
    for target, rows in table.items():
        for row in rows:
            split.setdefault(row.source, []).append(target)
    groups = [{**group, "params": _renamed(group["params"], split)} for group in state.groups]
    frozen = _renamed(state.frozen, split)
    lists = [name for names in (frozen, *(group["params"] for group in groups)) for name in names]
    twice = next((name for name, count in Counter(lists).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"{twice!r} would be fused of parameters of two optimizer groups; use --names keep.")
    tied = {first.get(a, owner.get(a, a)): owner.get(b, b) for a, b in state.tied.items()}
    return replace(state, tensors=tensors, groups=groups, frozen=frozen, tied=tied)


def _renamed(names: Iterable[str], split: Mapping[str, list[str]]) -> list[str]:
    return list(dict.fromkeys(target for name in names for target in split.get(name, [])))


def _rows(what: str, sources: list[Stored], rows: list[RowSplit]) -> Stored:
    one_type(what, sources)
    if len(rows) == 1 and rows[0].source_row == 0 and rows[0].count == sources[0].shape[0]:
        return sources[0]
    rest = sources[0].shape[1:]
    blocks = tuple(
        WovenBlock(
            Box((row.target_row, *(0,) * len(rest)), (row.count, *rest)),
            source,
            (row.source_row, *(0,) * len(rest)),
            tuple(range(len(rest) + 1)),
        )
        for source, row in zip(sources, rows, strict=True)
    )
    return Woven(sources[0].dtype, (sum(row.count for row in rows), *rest), blocks)


def _with_transformer_engine_names(state: TrainingState) -> TrainingState:
    def renamed(name: str) -> str:
        for local, fused in _LOCAL_SPEC.items():
            if name.endswith("." + local):
                return name[: -len(local)] + fused
        return name

    def full(name: str) -> str:
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition("/")
            return f"optimizer/{renamed(parameter)}/{key}"
        return f"{kind}/{renamed(rest)}"

    groups: list[dict[str, Any]] = [
        {**group, "params": [renamed(name) for name in group["params"]]} for group in state.groups
    ]
    return replace(
        state, tensors={full(name): stored for name, stored in state.tensors.items()}, groups=groups
    )
