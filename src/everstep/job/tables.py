"""From a table of a TOML or JSON file to a dataclass: types checked, and one sentence per mistake."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from everstep.errors import UserError
from everstep.job.presets import closest, closest_key

T = TypeVar("T")
LARGEST = 2**53  # whole numbers up to here survive any JSON reader
SHOWN = 60  # characters of a wrong value that are repeated in the sentence about it


def read(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    if not isinstance(table, Mapping):
        raise UserError(f"{where} is {shown(table)}; it is a table: write [{where}] and its keys below.")
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    given = dict(table)
    if "options" in known:  # keys we do not know are the arguments of a plugin
        extra = {key: given.pop(key) for key in list(given) if key not in known}
        options = given.get("options", {})
        if not isinstance(options, Mapping):
            raise UserError(f"{_name(where, 'options')} is {shown(options)}; it is a table.")
        given["options"] = {**options, **extra}
    else:
        refuse_unknown(where, given, known)
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name not in given and f.default is MISSING and f.default_factory is MISSING:
            raise UserError(f"{_name(where, f.name)} is missing; the job needs it.")
    return cls(**{key: checked(hints[key], value, _name(where, key)) for key, value in given.items()})


def checked(kind: Any, value: Any, where: str) -> Any:
    """`value` as the type `kind`, or a sentence."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        literals = [word for arg in args if get_origin(arg) is Literal for word in get_args(arg)]
        if bool in args and literals:
            if not isinstance(value, bool) and value not in literals:
                choice = " or ".join(f'"{word}"' for word in literals)
                raise UserError(f"{where} is {shown(value)}; it must be true, false or {choice}.")
            return value
        if value is None or (value is False and bool not in args):
            return None
        return checked(next(arg for arg in args if arg is not NoneType), value, where)
    if is_dataclass(kind):
        return read(kind, value, where)  # type: ignore[arg-type]
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where} is {shown(value)}; {closest(str(value)[:SHOWN], args)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(args):
            raise UserError(f"{where} is {shown(value)}; it is a list of {len(args)} numbers.")
        return tuple(checked(arg, item, where) for arg, item in zip(args, value, strict=True))
    if isinstance(value, int) and abs(value) > LARGEST:
        raise UserError(f"{where} is larger than 2^53; give a smaller number.")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = origin or kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        if callable(value):
            raise UserError(
                f"{where} is a function, and a job travels to its workers as JSON; give a value, or name the "
                'function in a file of its own as "module:function".'
            )
        words = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
        raise UserError(f"{where} is {shown(value)}; it must be {words.get(wanted, 'a table')}.")
    if kind is float and not math.isfinite(value):
        raise UserError(f"{where} is {value}; it must be a finite number.")
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{where} has a null character; remove it.")
    if origin is list:
        return [checked(args[0], item, where) for item in value]
    return value


def shown(value: Any) -> str:
    """A wrong value as it is repeated to the user: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _name(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def refuse_unknown(where: str, given: Mapping[str, Any], known: list[str]) -> None:
    for key in given:
        if key not in known:
            table = f"[{where}]" if where else "a job"
            mine = [name for name in known if name not in ("base", "code")]  # not for users to set
            raise UserError(f"{_name(where, key)} is not a key of {table}; {closest_key(key, mine)}")


def one_of(where: str, **given: str | None) -> None:
    names = [f"{where}.{name}" for name in given]
    there = [f"{where}.{name}" for name, value in given.items() if value is not None]
    if len(there) > 1:
        raise UserError(f"{' and '.join(there)} are both given; give one.")
    if not there:
        raise UserError(f"{', '.join(names[:-1])} or {names[-1]} is missing; give one.")


def at_least(where: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise UserError(f"{where} is {value}; it must be at least {least}.")


def at_most(where: str, value: float | None, most: int) -> None:
    if value is not None and value > most:
        raise UserError(f"{where} is {value}; it must be at most {most:,}.")


def positive(where: str, value: float) -> None:
    if value <= 0:
        raise UserError(f"{where} is {value}; it must be more than 0.")
