"""core's values as JSON and back: for the journal, its snapshots, and between agents and the coordinator.

The types are the schema. A dataclass becomes an object of its fields; where a field may be one of several
dataclasses, the object says which in "is". Ops, workers and microbatches are their own text. A mapping with
keys that are not text becomes a list of pairs. A field of type Any is JSON already and is left alone.
Decoding checks every value against its type, so a message that is not what it claims to be is refused by name
before it reaches a decision.

Written by hand because core is standard library only; the libraries that do this (msgspec, cattrs) would earn
their place the day this file needs a second page.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from everstep.core.words.ops import Microbatch, Op, Worker, parse_microbatch, parse_op, parse_worker
from everstep.errors import PeerError, UserError

_AS_TEXT: dict[type, Any] = {Op: parse_op, Worker: parse_worker, Microbatch: parse_microbatch}


def encode(value: Any) -> Any:
    """A value of core in JSON's terms. Dataclasses say what they are, everywhere: it costs little."""
    if value is None or (isinstance(value, bool | int | float) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return value
    if type(value) in _AS_TEXT:
        return str(value)
    if is_dataclass(value):
        return {"is": type(value).__name__} | {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {key: encode(item) for key, item in value.items()}
        return [[encode(key), encode(item)] for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return [encode(item) for item in sorted(value)]
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    raise TypeError(f"{type(value).__name__} is not one of core's types")


def decode(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `data` describes; PeerError names what does not fit."""
    try:
        return _decode(kind, data)
    except (TypeError, ValueError, KeyError, UserError) as error:
        raise PeerError(f"not a {_name(kind)}: {error}") from error


def _decode(kind: Any, data: Any) -> Any:
    if kind is Any:
        return data
    if kind in _AS_TEXT:
        return _AS_TEXT[kind](_of(str, data))
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _one_of(get_args(kind), data)
    if origin is Literal:
        if data not in get_args(kind):
            raise ValueError(f"{data!r} is not one of {get_args(kind)}")
        return data
    if origin in (list, set, frozenset):
        (item,) = get_args(kind)
        return origin(_decode(item, x) for x in _of(list, data))
    if origin is tuple:
        return _tuple(kind, get_args(kind), _of(list, data))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = get_args(kind)
        pairs = data.items() if isinstance(data, dict) else _of(list, data)
        return {_decode(key, k): _decode(item, v) for k, v in pairs}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if is_dataclass(kind):
        return _dataclass(kind, _of(dict, data))
    if hasattr(kind, "_fields"):  # a NamedTuple
        hints = list(_hints(kind).values())
        return kind(*(_decode(hint, x) for hint, x in zip(hints, _of(list, data), strict=True)))
    if kind is float:
        return float(_of((int, float), data))
    return _of(type(None) if kind is None else kind, data)


def _of(kind: Any, data: Any) -> Any:
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise TypeError(f"{data!r:.60} is not {_name(kind)}")
    return data


def _one_of(kinds: Iterable[Any], data: Any) -> Any:
    kinds = list(kinds)
    if data is None and type(None) in kinds:
        return None
    if isinstance(data, dict):
        for kind in kinds:
            if is_dataclass(kind) and kind.__name__ == data.get("is"):  # type: ignore[union-attr]
                return _dataclass(kind, data)
        raise TypeError(f"{data.get('is')!r:.40} is not one of {', '.join(map(_name, kinds))}")
    for kind in kinds:
        try:
            return _decode(kind, data)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"{data!r:.60} is not one of {', '.join(map(_name, kinds))}")


def _tuple(kind: Any, items: tuple[Any, ...], data: list[Any]) -> Any:
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_decode(items[0], x) for x in data)
    if len(items) != len(data):
        raise ValueError(f"{len(data)} items where {kind} has {len(items)}")
    return tuple(_decode(item, x) for item, x in zip(items, data, strict=True))


def _dataclass(kind: Any, data: dict[str, Any]) -> Any:
    hints = _hints(kind)
    given = {name: value for name, value in data.items() if name != "is"}
    if unknown := given.keys() - hints.keys():
        raise TypeError(f"{kind.__name__} has no {sorted(unknown)[0]!r}")
    for field in fields(kind):
        if field.name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise TypeError(f"{kind.__name__} lacks {field.name!r}")
    return kind(**{name: _decode(hints[name], value) for name, value in given.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)
