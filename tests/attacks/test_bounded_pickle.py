"""Pickles that nobody honest wrote: whatever they say, little memory and time is used, and nothing is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import bounded_pickle
from everstep.bounded_pickle import HARMLESS, BadPickleError, load, plain
from everstep_convert.formats import pickles

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.text(), st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner)
        | st.frozensets(KEYS)
        | st.sets(KEYS)
    ),
    max_leaves=30,
)


def known(data: bytes) -> Any:
    """With the constructors that converters allow."""

    def find(module: str, name: str) -> Any:
        if (module, name) not in HARMLESS:
            raise BadPickleError(f"no {module}.{name}")
        return HARMLESS[module, name]

    def persistent(pid: Any) -> Any:
        raise BadPickleError("no storage")

    return load(data, find=find, persistent=persistent)


@given(VALUES, st.integers(0, 5))
def test_what_python_writes_is_read_as_it_was(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert known(data) == value
    if protocol >= 4:  # before, sets and bytes were calls
        assert plain(data) == value


def test_what_frameworks_write_is_read_as_it_was() -> None:
    shared = {"lr": 1e-3}
    ordered = OrderedDict(a=1, b=[shared, shared])
    ordered._metadata = {"version": 2}  # type: ignore[attr-defined]
    value = [
        ordered,
        Counter("aab"),
        defaultdict(list, x=[1]),
        complex(1, 2),
        2**70,
        -(2**70),
        bytearray(b"x"),
    ]
    for protocol in range(6):
        found = known(pickle.dumps(value, protocol))
        assert found == value
        assert type(found[0]) is OrderedDict
        assert found[0]._metadata == {"version": 2}
        assert found[0]["b"][0] is found[0]["b"][1]


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"no {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("no storage")


@settings(max_examples=400)
@given(VALUES, st.integers(0, 5), st.data())
def test_a_torn_one_is_refused_or_read_as_python_does(value: Any, protocol: int, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps(value, protocol))
    for _ in range(data.draw(st.integers(1, 3))):
        if whole:
            at = data.draw(st.integers(0, len(whole) - 1))
            whole[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        ours = plain(bytes(whole))
    except BadPickleError:
        return
    assert repr(ours) == repr(_Plain(io.BytesIO(whole)).load())


@pytest.mark.parametrize(
    "frame", [6, 1 << 40, (1 << 64) - 1], ids=["a byte more", "a terabyte", "more than a number holds"]
)
def test_a_frame_longer_than_the_file_is_a_torn_file(frame: int) -> None:
    with pytest.raises(BadPickleError, match="ends too early"):
        plain(b"\x80\x04\x95" + struct.pack("<Q", frame) + b"]\x94Na.")
    assert plain(b"\x80\x04\x95" + struct.pack("<Q", 5) + b"]\x94Na.") == [None]


def test_true_and_false_of_the_first_version_are_read_as_python_reads_them() -> None:
    for line in (b"I01\n.", b"I00\n.", b"I\t1\n.", b"I 0\n.", b"I1\n.", b"I+1\n."):
        assert repr(plain(line)) == repr(_Plain(io.BytesIO(line)).load())


def laughs(levels: int, make: Any = lambda x: [x] * 10) -> Any:
    found: Any = "lol"
    for _ in range(levels):
        found = make(found)
    return found


def long_note(number: int) -> bytes:
    return b"\x80\x02}r" + struct.pack("<I", number) + b"."


def called(module: str, name: str, *args: Any) -> bytes:
    return f"c{module}\n{name}\n".encode() + pickle.dumps(args, 2)[2:-1] + b"R."


def deep_tuple_as_key(levels: int) -> bytes:
    return b"\x80\x02})" + b"\x85" * levels + b"Ns."


def keys_of_keys(levels: int) -> bytes:
    """A tuple of the one before it, twice, as the key of a table."""
    return b"\x80\x02})" + b"\x86q\x00h\x00".join([b"q\x01h\x01"] * levels) + b"\x86Ns."


def same_key_again_and_again(times: int) -> bytes:
    """A tuple of 9,000 numbers, as the key of a table."""
    key = b"(" + b"K\x01" * 9000 + b"tq\x00"
    return b"\x80\x02" + key + b"0}" + b"h\x00Ns" * times + b"."


def copied(times: int) -> bytes:
    """A list of 100,000 items, copied by a constructor again and again; the copies are kept."""
    held = b"\x80\x02](" + b"N" * 100_000 + b"eq\x00" + b"cbuiltins\nlist\nq\x01"
    return held + b"](" + b"h\x01h\x00\x85R" * times + b"e."


def states(times: int) -> bytes:
    """Objects that are given a state of two tables with many keys, which are merged."""
    table = pickle.dumps(({str(i): 0 for i in range(50_000)}, {"a": 1}), 2)[2:-1]
    return b"\x80\x02" + table + b"q\xff0cfoo\nBar\nq\xfe0](" + b"h\xfe)\x81h\xffb" * times + b"e."


BOMBS = {
    "a note with a large number": (long_note(1 << 27), None),
    "a note with the largest number": (long_note((1 << 31) - 1), None),
    "lists of lists": (pickle.dumps(laughs(30)), "over and over"),
    "tables of tables": (pickle.dumps(laughs(40, lambda x: {"a": x, "b": x})), "over and over"),
    "one long text many times": (pickle.dumps([x := "x" * 10_000] + [x] * 100_000), "over and over"),
    "a list of itself": (b"\x80\x02]q\x00h\x00a.", "nested more than"),
    "lists 100,000 deep": (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "nested more than"),
    "tuples 100,000 deep": (b"\x80\x02)" + b"\x85" * 100_000 + b".", "nested more than"),
    "a deep key": (deep_tuple_as_key(1_000_000), "a key is nested"),
    "keys of keys": (keys_of_keys(60), "a key has more than"),
    "a heavy key again and again": (same_key_again_and_again(1_000_000), "objects"),
    "sets and nothing else": (b"\x80\x04(" + b"\x8f" * 8_000_000 + b"l.", "objects"),
    "tables and nothing else": (b"\x80\x02(" + b"}" * 18_000_000 + b"l.", "objects"),
    "marks and nothing else": (b"\x80\x02" + b"(" * 1_000_000 + b".", "open at once"),
    "notes and nothing else": (b"\x80\x04N" + b"\x94" * 18_000_000 + b".", "objects"),
    "a text that is not there": (b"\x80\x02X\xff\xff\xff\x7fabc.", "in the middle"),
    "bytes that are not there": (b"\x80\x04\x96" + struct.pack("<Q", 1 << 40) + b"abc.", "too early"),
    "a number of 5,000 digits": (b"I" + b"9" * 5000 + b"\n.", "truncated or not"),
    "a program": (called("os", "system", "touch /tmp/never"), "asks for os.system"),
    "an extension": (b"\x80\x02\x82\x01.", "outside the file"),
}  # fmt: skip


LIMITED = """
import json, pathlib, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
data = pathlib.Path(sys.argv[2]).read_bytes()
if sys.argv[1] == "plain":
    from everstep.bounded_pickle import plain as read
else:
    from everstep_convert.formats.pickles import load_plain as read
began = time.process_time()
try:
    said = f"read: {read(data)!r:.80}"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps([said, time.process_time() - began]))
"""


def said_of(data: bytes, how: str, folder: Path) -> str:
    """In a process of its own, with 3 GiB of memory; within the time that is allowed."""
    (folder / "bomb").write_bytes(data)
    command = [sys.executable, "-c", LIMITED, how, str(folder / "bomb")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    said, took_s = json.loads(ran.stdout)
    assert took_s < 2 * (bounded_pickle.MOST_S + len(data) / bounded_pickle.BYTES_PER_S)
    return str(said)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_little(name: str, tmp_path: Path) -> None:
    data, because = BOMBS[name]
    said = said_of(data, "plain", tmp_path)
    assert said.startswith("read: " if because is None else "BadPickleError: ")
    assert (because or "{}") in said


CALLS = {
    "a terabyte of zeros": called("builtins", "bytes", 10**12),
    "the same, to be changed": called("builtins", "bytearray", 10**12),
    "a text of lists": called("builtins", "str", laughs(30)),
    "a set of heavy keys": called("builtins", "frozenset", [laughs(30, lambda x: (x, x))]),
    "a table of heavy keys": called("collections", "OrderedDict", [(laughs(30, lambda x: (x, x)), 1)]),
    "a program": called("builtins", "eval", "1"),
    "a dtype of lists": b"cnumpy\ndtype\n" + pickle.dumps((laughs(30),), 2)[2:-1] + b"R.",
    "a list copied again and again": copied(10_000),
    "states merged again and again": states(10_000),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_constructor_costs_no_more_than_what_it_is_given(name: str, tmp_path: Path) -> None:
    said = said_of(CALLS[name], "known", tmp_path)
    harmless = ("a program", "a dtype of lists")  # objects of no known class, or of no known kind
    assert said.startswith("read: " if name in harmless else "Refused: its pickle is broken: ")


def test_nothing_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'pwned'}",)

    for protocol in range(6):
        data = pickle.dumps(Evil(), protocol)
        with pytest.raises(BadPickleError, match=r"posix\.system"):
            plain(data)
        assert pickles.load_plain(data).name == "system"
    assert not (tmp_path / "pwned").exists()


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever keys collide: their hashes can be chosen by who writes them."""
    monkeypatch.setattr(bounded_pickle, "MOST_S", 0.5)
    monkeypatch.setattr(bounded_pickle, "BYTES_PER_S", 1e9)
    alike = (k * (2**61 - 1) for k in range(1, 200_000))
    collide = b"".join(b"\x8a\x0b" + number.to_bytes(11, "little") + b"Ns" for number in alike)
    began = time.process_time()
    with pytest.raises(BadPickleError, match="takes too long"):
        plain(b"\x80\x02}" + collide + b".")
    assert time.process_time() - began < 20
