"""core's values as JSON and back: the one codec of the journal, its snapshots, and every line between
coordinator, agents and workers.

The types are the schema, and what a wire may carry is in the table of messages. A dataclass becomes an object
of its fields, and "is" names its class. Ops, workers and microbatches are their own text, several ops one
text. A mapping with keys that are not text becomes a list of pairs. A field of type Json is JSON already and
is left alone. A field that is not given to `__init__` is derived from the others, and is left out.

Nothing is listed by hand, so no field can be forgotten. Decoding checks every value against its type: a
message that is not what it claims to be is refused by name before it reaches a decision. A field that this
version does not know is ignored and one that is missing takes its default, so two versions understand each
other as long as new fields have defaults.

For every type one function is made, once, and kept: an order to resume a large task holds thousands of ops.
Written by hand because core is standard library only.
"""

from __future__ import annotations

import json
import struct
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from everstep.errors import PeerError, UserError
from everstep.protocol.ops import (
    Microbatch,
    Op,
    Replicas,
    Worker,
    op_text,
    parse_microbatch,
    parse_op,
    parse_replicas,
    parse_worker,
)
from everstep.protocol.table import Json, is_wire, rows

Kind = Any  # a type, or what `typing` makes of types
Value = TypeVar("Value")
Coder = Callable[[Json], Json]  # to or from a value of core
_PLAIN = frozenset({int, float, bool, str, type(None)})
_FROM_TEXT: dict[Kind, Coder] = {
    Op: lru_cache(maxsize=1 << 16)(parse_op),
    Worker: lru_cache(maxsize=1 << 15)(parse_worker),
    Microbatch: lru_cache(maxsize=1 << 12)(parse_microbatch),
    Replicas: parse_replicas,
}

# ------------------------------------------------------------------ out


def encode(value: object) -> Json:
    """A value of core in JSON's terms."""
    kind: Kind = type(value)
    return value if kind in _PLAIN else _encoder(kind)(value)


@cache
def _encoder(kind: type) -> Coder:
    if kind in _FROM_TEXT:
        return str
    if issubclass(kind, Enum):
        return lambda value: value.value
    if is_dataclass(kind):
        return _object_encoder(kind)
    if issubclass(kind, Mapping):
        return _encode_mapping
    if issubclass(kind, set | frozenset):
        return lambda value: _encode_items(sorted(value))
    if issubclass(kind, list | tuple):
        return _encode_items
    raise TypeError(f"{kind.__name__} is not one of core's types")


def _object_encoder(kind: Kind) -> Coder:
    name = kind.__name__
    getters = [(field.name, attrgetter(field.name)) for field in fields(kind) if field.init]

    def of(value: object) -> Json:
        made = {"is": name}
        for field, get in getters:
            item = get(value)
            made[field] = item if type(item) in _PLAIN else encode(item)
        return made

    return of


def _encode_items(value: Sequence[object]) -> Json:
    if value and type(value[0]) is Op:
        return " ".join(map(op_text, value))
    return [item if type(item) in _PLAIN else encode(item) for item in value]


def _encode_mapping(value: Mapping[object, object]) -> Json:
    if all(type(key) is str for key in value):
        return {key: encode(item) for key, item in value.items()}
    return [[encode(key), encode(item)] for key, item in value.items()]


# ------------------------------------------------------------------ in


@overload
def decode(kind: type[Value], data: Json) -> Value: ...
@overload
def decode(kind: Kind, data: Json) -> Any: ...
def decode(kind: Kind, data: Json) -> Any:
    """The value of type `kind` that `data` describes; PeerError names what does not fit."""
    try:
        return _decoder(kind)(data)
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError, UserError) as error:
        raise PeerError(f"not a {_name(kind)}: {error}") from error


@cache
def _decoder(kind: Kind) -> Coder:
    if kind is Any:
        return lambda data: data
    if kind in _FROM_TEXT:
        return _text_decoder(kind, _FROM_TEXT[kind])
    origin: Kind = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _union_decoder(get_args(kind))
    if origin is Literal:
        return lambda data: _literal(get_args(kind), data)
    if origin in (list, set, frozenset):
        item = _decoder(get_args(kind)[0])
        return lambda data: origin(map(item, _of(list, data)))
    if origin is tuple:
        return _tuple_decoder(kind, get_args(kind))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_decoder(*map(_decoder, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if is_wire(kind):
        return _union_decoder((kind,))
    if is_dataclass(kind):
        return _object_decoder(kind)
    if hasattr(kind, "_fields"):  # a NamedTuple
        return _named_tuple_decoder(kind)
    if kind is float:
        return lambda data: float(_of((int, float), data))
    plain = type(None) if kind is None else kind
    return lambda data: _of(plain, data)


def _text_decoder(kind: Kind, parse: Coder) -> Coder:
    return lambda data: parse(data if type(data) is str else _of(str, data))


def _of(kind: Kind, data: Json) -> Json:
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise TypeError(f"{data!r:.60} is not {_name(kind)}")
    return data


def _literal(values: tuple[object, ...], data: Json) -> Json:
    if data not in values:
        raise ValueError(f"{data!r} is not one of {values}")
    return data


def _union_decoder(kinds: tuple[Kind, ...]) -> Coder:
    spread = [each for kind in kinds for each in _messages(kind)]
    objects = {_name(kind): kind for kind in spread if is_dataclass(kind)}
    others = [kind for kind in spread if kind is not type(None) and not is_dataclass(kind)]
    names = ", ".join(map(_name, kinds))
    optional = type(None) in kinds

    def one_of(data: Json) -> Json:
        if data is None and optional:
            return None
        if isinstance(data, dict) and objects:
            kind: Kind = objects.get(data.get("is", ""))
            if kind is None:
                raise TypeError(f"{data.get('is')!r:.40} is not one of {names}")
            return _decoder(kind)(data)
        for kind in others:
            try:
                return _decoder(kind)(data)
            except (TypeError, ValueError, UserError):
                continue
        raise TypeError(f"{data!r:.60} is not one of {names}")

    return one_of


def _messages(kind: Kind) -> list[Kind]:
    """The messages of a wire; any other type is itself."""
    return [row.kind for row in rows(kind)] if is_wire(kind) else [kind]


def _tuple_decoder(kind: Kind, items: tuple[Kind, ...]) -> Coder:
    if len(items) == 2 and items[1] is Ellipsis:
        item = _decoder(items[0])
        if items[0] is not Op:
            return lambda data: tuple(map(item, _of(list, data)))
        return lambda data: tuple(map(item, data.split() if type(data) is str else _of(list, data)))
    coders = list(map(_decoder, items))

    def whole(data: Json) -> tuple[object, ...]:
        if len(_of(list, data)) != len(coders):
            raise ValueError(f"{len(data)} items where {kind} has {len(coders)}")
        return tuple([coder(x) for coder, x in zip(coders, data, strict=True)])

    return whole


def _mapping_decoder(key: Coder, item: Coder) -> Coder:
    def mapping(data: Json) -> dict[object, object]:
        pairs = data.items() if isinstance(data, dict) else _of(list, data)
        return {key(k): item(v) for k, v in pairs}

    return mapping


def _named_tuple_decoder(kind: Kind) -> Coder:
    coders = [_decoder(hint) for hint in get_type_hints(kind).values()]

    def named(data: Json) -> Json:
        return kind(*(coder(x) for coder, x in zip(coders, _of(list, data), strict=True)))

    return named


def _object_decoder(kind: Kind) -> Coder:
    hints = get_type_hints(kind)
    given = [field for field in fields(kind) if field.init]
    coders = {field.name: (hints[field.name], _decoder(hints[field.name])) for field in given}
    needed = [field.name for field in given if field.default is MISSING and field.default_factory is MISSING]

    def whole(data: Json) -> Json:
        _of(dict, data)
        for name in needed:
            if name not in data:
                raise TypeError(f"{kind.__name__} lacks {name!r}")
        made = {}
        for name, value in data.items():
            if name in coders:
                plain, coder = coders[name]
                made[name] = value if type(value) is plain else coder(value)
        return kind(**made)

    return whole


def _name(kind: Kind) -> str:
    return getattr(kind, "__name__", None) or str(kind)


# ------------------------------------------------------------------ on a stream of bytes

MAX_MESSAGE = 64 << 20
_LENGTH = struct.Struct("<I")


def pack(message: object) -> bytes:
    body = json.dumps(encode(message), separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE:
        raise PeerError(f"a {type(message).__name__} of {len(body)} bytes is more than {MAX_MESSAGE}")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Bytes in, messages of one type out; PeerError for what is none."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._bytes = bytearray()

    @property
    def num_waiting(self) -> int:
        """Bytes of a message that is not whole."""
        return len(self._bytes)

    def feed(self, data: bytes) -> Iterator[Any]:
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_MESSAGE:
                raise PeerError(f"a message of {length} bytes is more than the {MAX_MESSAGE} allowed")
            if len(self._bytes) < _LENGTH.size + length:
                return
            body = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
            del self._bytes[: _LENGTH.size + length]
            yield decode(self._kind, _parsed(body))


def _parsed(body: bytes) -> Json:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"a message is not JSON: {error}") from error
