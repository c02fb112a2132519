"""PyTorch's distributed checkpoints as training states. The files are in `dcp_files`; here is what keys mean:

    model.<parameter>                          model/<parameter>, or buffer/<name>: the format does not say
    optimizer.state.<parameter>.<key>          optimizer/<parameter>/<key>
    optimizer.param_groups.<parameter>.<n>     the parameter's group (flattened, as pipelines need it)
    optimizer.param_groups.<i>.<n>             the groups by number (not flattened)
    everstep.state, everstep.tensors.<name>    ours: see `sidecar`
    any other                                  extra/dcp/<key>, or a value of meta["extra"]

Both forms of the groups are written, and every name of a tied parameter: torch finds what it asks for. A
script may call `model` and `optimizer` otherwise, and keeps its count of steps under a key of its own: these
names (`Names`) are kept as meta["source"], also by a run that resumes from the checkpoint, for the way back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.store import dtypes
from everstep.store.index import Refused
from everstep.store.parts import Progress
from everstep.store.stored import Held
from everstep_convert.formats import sidecar
from everstep_convert.formats.dcp_files import SavedKeys, is_one, read_keys, write_keys
from everstep_convert.formats.format import Format, Reading, Target
from everstep_convert.state import (
    TrainingState,
    encoded_group,
    group_numbers,
    keyed_value,
    number_of,
    value_of_key,
)
from everstep_convert.values import Encoder, decode, is_stored, tensors_in

_MODEL, _OPTIMIZER = ("model", "module"), ("optimizer", "optim")
_OURS, _OUR_TENSORS = "everstep.state", "everstep.tensors."
_STEPS = ("step", "global_step", "iteration")  # the last word of a key that counts training steps
_MOST_OTHERS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a script calls the parts of its checkpoint."""

    model: str = "model."  # its keys begin with this
    optimizer: str = "optimizer."
    steps: Mapping[str, list[Any] | None] = field(default_factory=dict)  # None, or a tensor's dtype and shape
    others: tuple[str, ...] = ()  # what else it holds, which no run keeps up to date

    def table(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "steps": dict(self.steps),
            "others": list(self.others),
        }

    @staticmethod
    def of(meta: Mapping[str, Any]) -> Names | None:
        """As a checkpoint says; None: it says nothing."""
        try:
            table = meta["source"]["dcp"]
        except (KeyError, TypeError):
            return None
        try:
            steps = {
                str(key): kind and [str(kind[0]), [int(n) for n in kind[1]]]
                for key, kind in table["steps"].items()
            }
            others = tuple(map(str, table["others"]))
            return Names(
                model=str(table["model"]), optimizer=str(table["optimizer"]), steps=steps, others=others
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"meta source.dcp of the checkpoint is damaged: {error!r}.") from error


def read(path: str | Path, reading: Reading) -> TrainingState:
    saved = read_keys(Path(path))
    state = TrainingState()
    ours = _our_table(path, saved)
    told = None if ours is None else Names.of(ours.get("meta", {})) or Names()
    given = dict(reading.keys)
    if told is not None:
        model, optimizer = told.model, told.optimizer
    else:
        every = (*saved.tensors, *saved.values)
        model = _prefix(saved.tensors, saved, _MODEL, given.get("model"))
        optimizer = _prefix(every, saved, _OPTIMIZER, given.get("optim"))
    of_optimizer: dict[str, Any] = {}
    for key, stored in saved.tensors.items():
        if key.startswith(_OUR_TENSORS):
            state.tensors[key.removeprefix(_OUR_TENSORS)] = stored
        elif optimizer and key.startswith(optimizer):
            of_optimizer[key] = stored
        elif key.startswith(model):
            state.tensors[f"model/{key.removeprefix(model)}"] = stored
        else:
            state.tensors[f"extra/dcp/{key}"] = stored
    others: dict[str, Any] = {}
    for key, value in saved.values.items():
        (of_optimizer if optimizer and key.startswith(optimizer) else others)[key] = value
    groups = _take_optimizer(state, of_optimizer, optimizer, saved)
    if ours is None:
        state.groups = groups.found()
        state.take(groups.encoder)
    _take_values(state, others)
    if ours is not None:
        try:
            sidecar.apply(state, ours)
        except Refused as error:
            raise UserError(f"{path} cannot be read: {error}.") from error
        for alias in state.tied:
            state.tensors.pop(f"model/{alias}", None)
    else:
        state.step, steps = _step(state, saved, (model, optimizer), given.get("step"))
        names = Names(
            model=model,
            optimizer=optimizer or Names().optimizer,
            steps=steps,
            others=_other_names(state, steps),
        )
        if names != Names():
            state.meta["source"] = {"dcp": names.table()}
        sidecar.find_ties(state, reading)
        sidecar.guess_roles(state, reading)
    return state


def _our_table(path: str | Path, saved: SavedKeys) -> dict[str, Any] | None:
    """What we have written beside the keys of others, if we have."""
    text = saved.values.pop(_OURS, None)
    if not isinstance(text, str):
        return None
    try:
        table = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    if not isinstance(table, dict) or not isinstance(table.get("meta", {}), dict):
        raise UserError(f"{path} cannot be read: its Everstep table is damaged.")
    return table


def _other_names(state: TrainingState, steps: Iterable[str]) -> tuple[str, ...]:
    keys = {*state.meta.get("extra", {}), *(name.removeprefix("extra/dcp/") for name in state.others())}
    return tuple(sorted({key.partition(".")[0] for key in keys - {*steps}})[:_MOST_OTHERS])


def _prefix(keys: Iterable[str], saved: SavedKeys, words: tuple[str, ...], given: str | None) -> str:
    """What the keys of the model, or of the optimizer, begin with; empty if none do. `given`: by the user."""
    if given is not None:
        prefix = f"{given}." if given else ""
        if not any(key.startswith(prefix) for key in keys):
            raise UserError(f"--keys names {given!r}, and no key of the checkpoint begins with it.")
        return prefix
    for key in keys:
        for word in words:
            path = saved.paths[key]
            if path[0] == word if path else key.startswith(f"{word}."):
                return f"{word}."
    return ""


@dataclass(slots=True)
class _Groups:
    """The optimizer's groups as they were saved: a list, or numbers of every parameter."""

    listed: dict[int, dict[str, Any]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    encoder: Encoder = field(default_factory=Encoder)

    def found(self) -> list[dict[str, Any]]:
        if not self.numbers:
            return [self._encoded(self.listed[i], f"param_groups.{i}") for i in sorted(self.listed)]
        found: dict[str, dict[str, Any]] = {}
        for name, table in self.numbers.items():  # parameters with the same numbers are a group
            group = self._encoded(table, f"param_groups.{name}")
            group.pop("params")
            same = json.dumps(group, sort_keys=True)
            found.setdefault(same, {"params": [], **group})["params"].append(name)
        return list(found.values())

    def _encoded(self, table: dict[str, Any], path: str) -> dict[str, Any]:
        names = table.get("params")
        return encoded_group(
            self.encoder, map(str, names) if isinstance(names, list) else (), table, f"dcp/{path}"
        )


def _take_optimizer(state: TrainingState, found: dict[str, Any], prefix: str, saved: SavedKeys) -> _Groups:
    """States of parameters go to the state. Names have dots: parameters are known by now."""
    groups, encoder = _Groups(), Encoder()
    known = state.parameters()
    for key, value in found.items():
        bare, path = key.removeprefix(prefix), saved.paths[key]
        if len(path) == 4 and path[1] == "state":
            _add_state(state, encoder, str(path[2]), str(path[3]), value)
        elif (split := _split(bare, "state.", known)) is not None:
            _add_state(state, encoder, *split, value)
        elif bare == "param_groups" and isinstance(value, list):
            groups.listed |= {i: group for i, group in enumerate(value) if isinstance(group, dict)}
        elif (match := re.fullmatch(r"param_groups\.(\d+)\.(\w+)", bare)) is not None:
            groups.listed.setdefault(int(match[1]), {})[match[2]] = value
        elif (split := _split(bare, "param_groups.", known)) is not None:
            groups.numbers.setdefault(split[0], {})[split[1]] = value
        else:
            state.meta.setdefault("extra", {})[key] = encoder.encode(value, f"dcp/{key}")
    state.take(encoder)
    return groups


def _add_state(state: TrainingState, encoder: Encoder, parameter: str, key: str, value: Any) -> None:
    found = keyed_value(key, value)
    if found is None:
        encoder.lost.append(f"optimizer/{parameter}/{key}")
    else:
        state.tensors[f"optimizer/{parameter}/{found[0]}"] = found[1]


def _split(key: str, prefix: str, parameters: Any) -> tuple[str, str] | None:
    if not key.startswith(prefix):
        return None
    rest = key[len(prefix) :]
    at = rest.rfind(".")
    while at > 0:
        if rest[:at] in parameters:
            return rest[:at], rest[at + 1 :]
        at = rest.rfind(".", 0, at)
    name, _, last = rest.rpartition(".")
    return (name, last) if name else None


def _take_values(state: TrainingState, values: dict[str, Any]) -> None:
    encoder = Encoder()
    extra = {key: encoder.encode(value, f"dcp/{key}") for key, value in values.items()}
    encoder.lost = [name.removeprefix("dcp/") for name in encoder.lost]
    state.take(encoder)
    if extra:
        state.meta["extra"] = {**state.meta.get("extra", {}), **extra}


def _step(
    state: TrainingState, saved: SavedKeys, known: tuple[str, str], given: str | None
) -> tuple[int, dict[str, list[Any] | None]]:
    """The count of training steps, and the keys that hold it: by their usual names, a number or a tensor of
    one; the shortest key wins. Without one it is the optimizer's count, if all parameters agree. Schedulers
    count calls of their own. `given`: the key, by the user.
    """
    found: list[tuple[int, int, int, str]] = []
    kinds: dict[str, list[Any] | None] = {}
    for key, value in {**saved.tensors, **saved.values}.items():
        path, _, word = key.rpartition(".")
        ours = path.startswith("everstep") or any(prefix and key.startswith(prefix) for prefix in known)
        if given is not None and key != given:
            continue
        if given is None and (word not in _STEPS or ours or "scheduler" in path or (path and not known[0])):
            continue
        number, kind = value, None
        if is_stored(value) and prod(value.shape) == 1 and not dtypes.is_trainable(value.dtype):
            number, kind = number_of(value), [value.dtype, list(value.shape)]
        if type(number) is int and number >= 0:
            found.append((key.count("."), 0 if given else _STEPS.index(word), number, key))
            kinds[key] = kind
    if found:
        step = min(found)[2]
        return step, {key: kinds[key] for _, _, number, key in sorted(found) if number == step}
    if given is not None:
        raise UserError(f"--keys names {given!r} as the step, and the checkpoint has no count of that name.")
    states = state.optimizer().values()
    counts = {number_of(held[key]) for held in states for key in held if key.partition("#")[0] == "step"}
    if len(counts) == 1 and (count := counts.pop()) >= 0:
        state.notes.append(f"the checkpoint does not name its step; the optimizer has counted {count:g}")
        return int(count), {}
    state.notes.append("the checkpoint does not name its step; it is taken for step 0")
    return 0, {}


# Writing.


def completed(state: TrainingState, target: Target) -> TrainingState:
    """With what the script that will load it asks for by its own names."""
    names = Names.of(state.meta) or Names()
    for what, name in target.keys:
        if what == "step":
            kinds = {name: names.steps.get(name)}
            names = replace(names, steps=kinds)
        else:
            prefix = f"{name}." if name else ""
            names = replace(names, model=prefix) if what == "model" else replace(names, optimizer=prefix)
    meta, tensors = dict(state.meta), dict(state.tensors)
    extra = dict(meta.get("extra") or {})
    for key, kind in names.steps.items():
        if kind is None:
            extra[key] = state.step
        else:
            count = dtypes.scalar(state.step, kind[0]).reshape(kind[1])
            tensors[f"extra/dcp/{key}"] = Held(kind[0], count)
    if extra:
        meta["extra"] = extra
    if names != Names():
        meta["source"] = {"dcp": names.table()}
    made = replace(state, meta=meta, tensors=tensors)
    if missing := sorted({*names.others} - {*_other_names(made, names.steps)}):
        listed = ", ".join(missing)
        state.notes.append(f"training has not kept {listed} of the checkpoint that it began with")
    return made


def write(path: Path, state: TrainingState, target: Target, progress: Progress) -> None:
    names = Names.of(state.meta) or Names()
    model, optimizer = names.model, names.optimizer
    extra = state.meta.get("extra") or {}
    inside = tensors_in(extra)
    keys: dict[str, Any] = {}
    for name, stored in state.tensors.items():
        if name not in inside:
            keys[_key(name, model, optimizer)] = value_of_key(name, stored)
    keys |= _group_keys(state, optimizer)
    keys |= {key: decode(value, state.tensors) for key, value in extra.items()}
    keys[_OURS] = json.dumps(sidecar.table_of(state, without=["extra"]))
    aliases = {f"{model}{alias}": f"{model}{name}" for alias, name in state.tied.items()}
    write_keys(path, keys, progress, aliases=aliases)


def _key(name: str, model: str, optimizer: str) -> str:
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        parameter, _, key = rest.rpartition("/")
        return f"{optimizer}state.{parameter}.{key.partition('#')[0]}"
    if kind in ("model", "buffer"):
        return f"{model}{rest}"
    return rest.removeprefix("dcp/") if name.startswith("extra/dcp/") else f"{_OUR_TENSORS}{name}"


def _group_keys(state: TrainingState, optimizer: str) -> dict[str, Any]:
    groups = [{**group_numbers(group, state.tensors), "params": group["params"]} for group in state.groups]
    keys: dict[str, Any] = {}
    for group in groups:
        for name in group["params"]:
            keys |= {f"{optimizer}param_groups.{name}.{k}": v for k, v in group.items() if k != "params"}
    return keys | {f"{optimizer}param_groups.{i}.{k}": v for i, g in enumerate(groups) for k, v in g.items()}


FORMAT = Format(
    name="dcp",
    title="PyTorch DCP",
    reads="yes, DTensors of any mesh",
    writes="yes, for flattened and plain optimizer states",
    optimizer="yes",
    detects=is_one,
    read=read,
    completed=completed,
    write=write,
)
