"""Pickles of others, read without running anything in them, in bounded memory and time.

A pickle is a program for a small machine with a stack and numbered notes. Python's own reader runs it as it
stands, also where `find_class` allows nothing:

    ten bytes           a note with a large number: memory for all numbers before it
    two kilobytes       a list of the same list ten times, and so on, thirty levels deep: harmless, until
                        somebody makes a text of it
    the same in tuples  as a key of a table: a hash that takes for ever; a deep one overflows the C stack
    `bytes`, 10**12     where plain constructors may be called

Here notes are a table, keys are looked at before they are hashed, what is made is counted, and the clock is
looked at. `plain` is for who needs no names at all: it also refuses values that refer to the same parts so
often that a text of the whole could not be held. Three to ten times slower than C: a dump of 2,000 entries
(4 MB) takes 0.3 s.

Rejected: looking over the program first and then running it in C. The stack has to be followed to know what
a key is, which is all the work; and two readers would have to agree about every instruction.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from struct import Struct
from typing import Any, TypeAlias

MOST_BYTES = 1 << 30
# Lists, tables and the like, and notes: about 100 bytes each. A small file makes fewer.
MOST_MADE, FEWEST_MADE, MADE_PER_BYTE = 1 << 24, 1 << 20, 4
MOST_S, BYTES_PER_S = 10.0, 500_000.0  # of a CPU's time, and more for long ones
MOST_IN_KEY, MOST_DEPTH = 10_000, 64  # of a key; real ones are names, numbers and pairs
MOST_TEXT, MOST_TEXT_PER_BYTE = 16 << 20, 64  # of a plain value as a text
MOST_MARKS = 10_000
_LOOK = 1 << 12  # made things between two looks at the clock

Find: TypeAlias = Callable[[str, str], Any]
Persistent: TypeAlias = Callable[[Any], Any]


class BadPickleError(ValueError):
    """Why it is not read, in a few words."""


def load(data: bytes, *, find: Find, persistent: Persistent) -> Any:
    """The value of a pickle. `find` says what stands for a name: something to call that takes no more time
    and memory than its arguments have, or a class of the caller's own.
    """
    if len(data) > MOST_BYTES:
        raise BadPickleError(f"{len(data) >> 20} MiB are more than the {MOST_BYTES >> 20} that are read")
    try:
        return _Reader(data, find, persistent).read()
    except BadPickleError:
        raise
    except _TORN as error:
        raise BadPickleError(f"truncated or not a pickle ({type(error).__name__})") from error


def plain(data: bytes) -> Any:
    """The value of a pickle that holds dicts, lists, tuples, sets, texts and numbers, and nothing else."""
    value = load(data, find=_no_name, persistent=_no_persistent)
    _require_tree(value, MOST_TEXT + MOST_TEXT_PER_BYTE * len(data))
    return value


def _no_name(module: str, name: str) -> Any:
    raise BadPickleError(f"it asks for {module}.{name}; plain data only is read here")


def _no_persistent(pid: Any) -> Any:
    raise BadPickleError("it refers to objects outside the file")


_TORN = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error)
_U16, _I32, _U32, _U64, _F64 = Struct("<H"), Struct("<i"), Struct("<I"), Struct("<Q"), Struct(">d")
_END = object()
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_CONTAINERS = frozenset((list, tuple, dict, set, frozenset))
_STRINGS = frozenset((str,))
_TEXTS = frozenset((str, bytes, bytearray))


class _Reader:
    def __init__(self, data: bytes, find: Find, persistent: Persistent) -> None:
        self._data, self._at = data, 0
        self._find, self._persistent = find, persistent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks under a mark
        self._notes: dict[int, Any] = {}
        self._made, self._look_at = 0, _LOOK
        self._most_made = min(MOST_MADE, FEWEST_MADE + MADE_PER_BYTE * len(data))
        self._ends = time.thread_time() + MOST_S + len(data) / BYTES_PER_S

    def read(self) -> Any:
        """The loop. What nine of ten instructions of real files are is done here, the rest by `_DO`."""
        data, notes, below, at = self._data, self._notes, self._below, 0
        stack, u32 = self._stack, _U32.unpack_from
        while True:
            op = data[at]
            at += 1
            if op == 0x68:  # h: what a note has
                stack.append(notes[data[at]])
                at += 1
            elif op == 0x94:  # the next note
                number = len(notes)
                notes[number] = stack[-1]
                if not number & 0xFFFF:
                    self._look()
            elif op == 0x8C or op == 0x58:  # a short text, and X, a long one
                if op == 0x8C:
                    first = at + 1
                    at = first + data[at]
                else:
                    first = at + 4
                    at = first + u32(data, at)[0]
                text = data[first:at]
                if len(text) != at - first:
                    raise BadPickleError("it ends in the middle of a text")
                stack.append(text.decode("utf-8", "surrogatepass"))
            elif op == 0x4B:  # K: a small number
                stack.append(data[at])
                at += 1
            elif op == 0x71:  # q: a note
                notes[data[at]] = stack[-1]
                at += 1
            elif op == 0x72:  # r
                notes[u32(data, at)[0]] = stack[-1]
                at += 4
            elif op == 0x28:  # (: a mark
                below.append(stack)
                self._stack = stack = []
                if len(below) > MOST_MARKS:
                    raise BadPickleError(f"more than {MOST_MARKS} values are open at once")
            elif op == 0x7D:  # }
                stack.append({})
                self._made = made = self._made + 1
                if made >= self._look_at:
                    self._look()
            elif op == 0x75 and type(below[-1][-1]) is dict and _STRINGS.issuperset(map(type, stack[::2])):
                # u: keys and values since the mark, here where all keys are texts
                if len(stack) & 1:
                    raise BadPickleError("a key has no value")
                items, self._stack = stack, below.pop()
                stack = self._stack
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            else:
                self._at = at
                if (do := _DO.get(op)) is None:
                    raise BadPickleError(f"it has an instruction that is not known here ({op:#04x})")
                if do(self) is _END:
                    (value,) = self._stack
                    return value
                at, stack = self._at, self._stack

    # -------------------------------------------------------------- bounds

    def _count(self, made: int) -> None:
        self._made += made
        if self._made >= self._look_at:
            self._look()

    def _look(self) -> None:
        self._look_at = self._made + _LOOK
        if self._made + len(self._notes) > self._most_made:
            raise BadPickleError(f"it makes more than {self._most_made} objects")
        if time.thread_time() > self._ends:
            raise BadPickleError("it takes too long")

    def _require_keys(self, keys: Iterable[Any]) -> None:
        """All can be hashed in bounded time."""
        for key in keys:
            kind = type(key)
            if kind is not str and kind is not bytes:
                self._count(2)
                if kind is tuple or kind is frozenset or kind is int:
                    self._count(_weight_of_key(key))

    # -------------------------------------------------------------- reading

    def _take(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) != size:
            raise BadPickleError("it ends too early")
        self._at += size
        return found

    def _number(self, form: Struct) -> Any:
        (number,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return number

    def _line(self) -> bytes:
        end = self._data.index(b"\n", self._at)
        found = self._data[self._at : end]
        self._at = end + 1
        return found

    def _text(self) -> str:
        return self._line().decode("utf-8")

    def _since_mark(self) -> list[Any]:
        found, self._stack = self._stack, self._below.pop()
        return found

    def _push(self, value: Any, made: int = 0) -> None:
        self._stack.append(value)
        if made:
            self._count(made)

    # -------------------------------------------------------------- instructions

    def _stop(self) -> object:
        if self._below or len(self._stack) != 1:
            raise BadPickleError("it ends with more than one value, or none")
        return _END

    def _protocol(self) -> None:
        if (version := self._take(1)[0]) > pickle.HIGHEST_PROTOCOL:
            raise BadPickleError(f"it is of version {version}")

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._stack = self._below.pop()

    def _decimal(self) -> None:
        line = self._line()
        number = {b"00": 0, b"01": 1}[line] if line in (b"00", b"01") else int(line, 0)
        is_flag = len(line) == 2 and number in (0, 1)  # so Python's own reader tells True from 1
        self._push(bool(number) if is_flag else number)

    def _frame(self) -> None:
        """Nothing is read ahead here; but all of it must be there, as for Python's own reader."""
        if self._number(_U64) > len(self._data) - self._at:
            raise BadPickleError("it ends too early")

    def _long(self, size: int) -> None:
        if size < 0:
            raise BadPickleError("it has a number of negative length")
        self._push(int.from_bytes(self._take(size), "little", signed=True))

    def _string(self) -> None:
        line = self._line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in b"'\"":
            raise BadPickleError("a text has no quotes")
        self._push(line[1:-1].decode("unicode_escape").encode("latin-1").decode("ascii"))

    def _append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def _appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list) and not callable(getattr(type(target), "extend", None)):
            raise BadPickleError(f"it appends to a {type(target).__name__}")
        target.extend(values)

    def _set_item(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self._fill([key], [value])

    def _set_items(self) -> None:
        items = self._since_mark()
        self._fill(items[::2], items[1::2])

    def _fill(self, keys: list[Any], values: list[Any]) -> None:
        target = self._stack[-1]
        if len(keys) != len(values):
            raise BadPickleError("a key has no value")
        self._require_keys(keys)
        if isinstance(target, dict):
            target.update(zip(keys, values, strict=True))
            return
        if isinstance(target, list | bytearray) or not hasattr(type(target), "__setitem__"):
            raise BadPickleError(f"it sets keys of a {type(target).__name__}")
        for key, value in zip(keys, values, strict=True):
            target[key] = value

    def _add_items(self) -> None:
        items, target = self._since_mark(), self._stack[-1]
        if type(target) is not set:
            raise BadPickleError(f"it adds to a {type(target).__name__}")
        self._require_keys(items)
        target.update(items)

    def _dict(self) -> None:
        items = self._since_mark()
        self._push({}, 1)
        self._fill(items[::2], items[1::2])

    def _frozen(self) -> None:
        items = self._since_mark()
        self._require_keys(items)
        self._push(frozenset(items), 3)

    def _tuple(self, count: int) -> None:
        stack = self._stack
        if len(stack) < count:
            raise BadPickleError("it makes a tuple of nothing")
        values = tuple(stack[-count:])
        stack[-count:] = [values]
        self._count(1)

    def _note(self, number: int) -> None:
        if number < 0:
            raise BadPickleError("a note has a negative number")
        self._notes[number] = self._stack[-1]

    def _global(self, module: str, name: str) -> None:
        self._push(self._find(module, name))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise BadPickleError("a name is not a text")
        self._global(module, name)

    def _reduce(self) -> None:
        args = self._stack.pop()
        self._make(self._stack.pop(), args)

    def _inst(self) -> None:
        module, name = self._text(), self._text()
        args = self._since_mark()
        self._make(self._find(module, name), tuple(args))

    def _obj(self) -> None:
        maker, *args = self._since_mark()
        self._make(maker, tuple(args))

    def _new(self) -> None:
        args = self._stack.pop()
        self._make(self._stack.pop(), args)

    def _new_with_names(self) -> None:
        named, args = self._stack.pop(), self._stack.pop()
        if type(named) is not dict:
            raise BadPickleError("named arguments are no dict")
        self._make(self._stack.pop(), args, named)

    def _make(self, maker: Any, args: Any, named: Mapping[str, Any] | None = None) -> None:
        """`maker` came from `find`: nothing else on the stack can be called."""
        if type(args) is not tuple or not callable(maker):
            raise BadPickleError("it calls what cannot be called")
        self._count(2 + _num_within(args))
        self._push(maker(*args, **(named or {})))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        self._count(1 + _num_within(state))
        if not isinstance(target, type) and hasattr(type(target), "__setstate__"):
            target.__setstate__(state)
        elif isinstance(target, OrderedDict) and type(state) is dict:
            vars(target).update(state)
        else:
            raise BadPickleError(f"it gives a state to a {type(target).__name__}")

    def _persist(self, pid: Any) -> None:
        self._push(self._persistent(pid), 1)


def _outside(reader: _Reader) -> None:
    raise BadPickleError("it refers to objects outside the file")


def _instructions() -> dict[int, Callable[[_Reader], Any]]:
    found: dict[bytes, Callable[[_Reader], Any]] = {
        b".": _Reader._stop,
        b"\x80": _Reader._protocol,
        b"\x95": _Reader._frame,
        b"0": _Reader._pop,
        b"1": lambda r: r._since_mark(),
        b"2": lambda r: r._push(r._stack[-1]),
        b"N": lambda r: r._push(None),
        b"\x88": lambda r: r._push(True),
        b"\x89": lambda r: r._push(False),
        b"I": _Reader._decimal,
        b"L": lambda r: r._push(int(r._line().rstrip(b"L"), 0)),
        b"J": lambda r: r._push(r._number(_I32)),
        b"j": lambda r: r._push(r._notes[r._number(_U32)]),
        b"M": lambda r: r._push(r._number(_U16)),
        b"\x8a": lambda r: r._long(r._take(1)[0]),
        b"\x8b": lambda r: r._long(r._number(_I32)),
        b"F": lambda r: r._push(float(r._line())),
        b"G": lambda r: r._push(r._number(_F64)),
        b"S": _Reader._string,
        b"T": lambda r: r._push(r._take(_length(r._number(_I32))).decode("ascii")),
        b"U": lambda r: r._push(r._take(r._take(1)[0]).decode("ascii")),
        b"V": lambda r: r._push(r._line().decode("raw_unicode_escape")),
        b"\x8d": lambda r: r._push(r._take(r._number(_U64)).decode("utf-8", "surrogatepass")),
        b"C": lambda r: r._push(r._take(r._take(1)[0])),
        b"B": lambda r: r._push(r._take(r._number(_U32))),
        b"\x8e": lambda r: r._push(r._take(r._number(_U64))),
        b"\x96": lambda r: r._push(bytearray(r._take(r._number(_U64)))),
        b"]": lambda r: r._push([], 1),
        b"a": _Reader._append,
        b"e": _Reader._appends,
        b"l": lambda r: r._push(r._since_mark(), 1),
        b")": lambda r: r._push(()),
        b"t": lambda r: r._push(tuple(r._since_mark()), 1),
        b"\x85": lambda r: r._tuple(1),
        b"\x86": lambda r: r._tuple(2),
        b"\x87": lambda r: r._tuple(3),
        b"}": lambda r: r._push({}, 1),
        b"d": _Reader._dict,
        b"s": _Reader._set_item,
        b"u": _Reader._set_items,
        b"\x8f": lambda r: r._push(set(), 3),
        b"\x90": _Reader._add_items,
        b"\x91": _Reader._frozen,
        b"g": lambda r: r._push(r._notes[int(r._line())]),
        b"p": lambda r: r._note(int(r._line())),
        b"c": lambda r: r._global(r._text(), r._text()),
        b"\x93": _Reader._stack_global,
        b"R": _Reader._reduce,
        b"b": _Reader._build,
        b"i": _Reader._inst,
        b"o": _Reader._obj,
        b"\x81": _Reader._new,
        b"\x92": _Reader._new_with_names,
        b"P": lambda r: r._persist(r._line().decode("ascii")),
        b"Q": lambda r: r._persist(r._stack.pop()),
        **dict.fromkeys((b"\x82", b"\x83", b"\x84", b"\x97", b"\x98"), _outside),
    }
    return {code[0]: do for code, do in found.items()}


def _length(size: int) -> int:
    if size < 0:
        raise BadPickleError("a text has a negative length")
    return size


_DO = _instructions()


def _num_within(values: Any) -> int:
    """What a constructor may copy of its arguments: their parts, and what these have."""
    if not isinstance(values, _SIZED):
        return 0
    parts = values if isinstance(values, tuple) else ()
    return len(values) + sum(len(part) for part in parts if isinstance(part, _SIZED))


def _weight_of_key(key: Any) -> int:
    """How much there is to hash; Python does not keep the hash of a tuple."""
    weight, level = 0, [key]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, tuple | frozenset):
                weight += len(one)
                if weight > MOST_IN_KEY:
                    raise BadPickleError(f"a key has more than {MOST_IN_KEY} parts")
                below.extend(one)
            elif type(one) is int:
                weight += one.bit_length() >> 8
            elif isinstance(one, str | bytes):
                weight += len(one) >> 4
        if not below:
            return weight
        level = below
    raise BadPickleError(f"a key is nested more than {MOST_DEPTH} levels deep")


def _require_tree(value: Any, most_text: int) -> None:
    """Written out, it is no longer than this and not very deep. Level by level, as a text would repeat it."""
    text, level = 0, [value] if type(value) in _CONTAINERS else []
    for _ in range(MOST_DEPTH):
        text += 8 * sum(map(len, level))
        parts: list[Any] = []
        for one in level if text <= most_text else ():
            parts += one
            if type(one) is dict:
                parts += one.values()
        text += sum([len(part) for part in parts if type(part) in _TEXTS])
        if text > most_text:
            raise BadPickleError("its values refer to the same parts over and over")
        level = [part for part in parts if type(part) in _CONTAINERS]
        if not level:
            return
    raise BadPickleError(f"a value is nested more than {MOST_DEPTH} levels deep")


# ------------------------------------------------------------------ what may be called


def _of_one(kind: Callable[..., Any], *allowed: type) -> Callable[..., Any]:
    """A constructor of one argument, of these types, or none; it must not make a text of a list, say."""

    def make(*args: Any) -> Any:
        if len(args) > 1 or not all(isinstance(one, allowed) for one in args):
            raise BadPickleError(f"it makes a {getattr(kind, '__name__', kind)} of something else")
        return kind(*args)

    return make


def _keyed(kind: Callable[..., Any]) -> Callable[..., Any]:
    """A set, or a table of pairs or of another table."""

    def make(values: Any = ()) -> Any:
        if type(values) not in (*_CONTAINERS, OrderedDict):
            raise BadPickleError("it makes a table or a set of something else")
        is_pairs = kind in (dict, OrderedDict) and not isinstance(values, dict)
        if is_pairs and not all(isinstance(one, list | tuple) and len(one) == 2 for one in values):
            raise BadPickleError("it makes a table of something else than pairs")
        keys = [one[0] for one in values] if is_pairs else values
        if sum(_weight_of_key(key) for key in keys) > MOST_IN_KEY + 8 * len(values):
            raise BadPickleError("its keys have too many parts")
        return kind(values)

    return make


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "utf-8", "ascii"):
        raise BadPickleError("it encodes something that is not text")
    return text.encode(encoding)


def _default_dict(*factory: Any) -> dict[Any, Any]:
    return {}


def _complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    if not isinstance(real, int | float) or not isinstance(imaginary, int | float):
        raise BadPickleError("it makes a number of something else")
    return complex(real, imaginary)


_NUMBERS = (int, float, str)
_BUILTINS: Mapping[str, Any] = {
    "set": _keyed(set),
    "frozenset": _keyed(frozenset),
    "dict": _keyed(dict),
    "list": _of_one(list, list, tuple, set, frozenset),
    "tuple": _of_one(tuple, list, tuple),
    "int": _of_one(int, *_NUMBERS),
    "float": _of_one(float, *_NUMBERS),
    "bool": _of_one(bool, *_NUMBERS),
    "str": _of_one(str, *_NUMBERS),
    "bytes": _of_one(bytes, bytes, bytearray, list, tuple),
    "bytearray": _of_one(bytearray, bytes, bytearray, list, tuple),
    "object": _of_one(object),
    "complex": _complex,
}
HARMLESS: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _keyed(OrderedDict),
    ("collections", "defaultdict"): _default_dict,
    ("collections", "Counter"): _keyed(Counter),
    ("_codecs", "encode"): _encoded,
    ("_io", "BytesIO"): _of_one(BytesIO, bytes, bytearray),
    **{(module, name): made for module in ("builtins", "__builtin__") for name, made in _BUILTINS.items()},
}
