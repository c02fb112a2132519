"""PyTorch's Flight Recorder: dumps of versions 2.0 to 2.10, as pickle or JSON, of NCCL and gloo.

A pickle is a program. Real dumps need none of its instructions for names (measured: no GLOBAL, no REDUCE), so
every one of them is refused (`bounded_pickle.plain`); the stock tool runs whatever a dump says.

What differs between dumps, and what is made of it:

    state             NCCL: scheduled, started, completed. gloo: always scheduled; `retired` says completed
    pg_config         NCCL: name -> ranks as text. gloo: one nameless group, mostly without ranks (`case.py`)
    pg_status         by pg_id, not by name. Entries tell which id is which name; where a rank has no entries
                      (the one that matters most: a stuck host), ids and names are both in order of creation,
                      so they are paired in order if there are equally many and no entry contradicts
    last_enqueued     NCCL: the number of the last collective or of the last message, whichever was last.
                      gloo: collectives and messages counted together (`py`)
    JSON              numbers of pg_status as text, times 0 for none, no `entries` where there are none
    messages          "nccl:send 0->3", ranks of the group, also where `is_p2p` says no; gloo records none
    rank              not in the dump at all: from the file's name, or the one rank all its groups share
    completed at      the moment a watchdog looked, not the end: good for order, not for lengths
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from everstep import bounded_pickle
from everstep.bounded_pickle import BadPickleError
from everstep.errors import UserError
from everstep_diagnose.comm_record import (
    FLIGHT_RECORDER,
    RECV,
    SEND,
    UNKNOWN,
    Dump,
    Group,
    GroupProgress,
    Log,
    Record,
)

_MESSAGE = re.compile(r"(?:\w+:)?(send|recv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")
_LARGEST = 1 << 28  # bytes of a dump; a real one has some hundred kilobytes
_SIZES = {
    "Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Float": 4, "Int": 4, "Half": 2,
    "BFloat16": 2, "Short": 2, "Bool": 1, "Byte": 1, "Char": 1,
}  # fmt: skip
_KINDS = (  # the first word found in a profiling name
    "all_reduce", "allreduce", "reduce_scatter", "all_gather", "allgather", "all_to_all", "alltoall",
    "broadcast", "barrier", "scatter", "gather", "reduce", "coalesced",
)  # fmt: skip
_SPELLING = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


class UnusableFileError(UserError):
    """A file that cannot be used; the message says why, in a few words, without the file's name."""


def unpickle(content: bytes) -> Any:
    if len(content) > _LARGEST:
        raise UnusableFileError(f"{len(content) >> 20} MiB is too large for a dump")
    try:
        return bounded_pickle.plain(content)
    except BadPickleError as error:
        raise UnusableFileError(f"its pickle is not read: {error}") from None


def read_pickle(name: str, content: bytes) -> Dump:
    return part_of(name, unpickle(content))


def is_dump(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and "version" in value
        and bool({"pg_config", "pg_status", "entries"} & set(value))
    )


def part_of(name: str, dump: Any) -> Dump:
    """One dump, whichever file format it came in."""
    if not is_dump(dump):
        raise UnusableFileError("no Flight Recorder dump: version, pg_config and entries are missing")
    version = str(dump["version"])
    if not version.startswith("2."):
        raise UnusableFileError(f"Flight Recorder version {version} is not known here; 2.0 to 2.10 are")
    entries = [entry for entry in dump.get("entries") or [] if isinstance(entry, Mapping)]
    configured = _configured(dump.get("pg_config") or {})
    rank = rank_of(name, [members for members, _ in configured.values()])
    gloo = is_of_gloo(dump, entries)
    groups: list[Group] = []
    index: dict[str, int] = {}
    for group, (members, about) in configured.items():
        if members:
            index[group] = len(groups)
            groups.append(Group(name=group, members=members, about=about, pairwise=len(members) == 2))
    records = []
    for place, entry in enumerate(entries):
        group, about = _group_of(entry)
        if group not in index:
            index[group] = len(groups)
            groups.append(Group(name=group, about=about))
        try:
            records.append(_record(entry, rank, index[group], groups[index[group]], place))
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise UnusableFileError(
                f"entry {place} cannot be read ({type(error).__name__}: {error})"
            ) from None
    return Dump(
        source=name,
        log=Log.of(records),
        groups=groups,
        ranks=(rank,),
        progress=_progress(dump, entries, index, rank),
        form=FLIGHT_RECORDER,
        has_device=not gloo,
        world_size=len(members_of_world(dump)) if gloo else 0,
        misses_messages=gloo and misses_messages(entries),
    )


def rank_of(name: str, memberships: list[tuple[int, ...]]) -> int:
    """The rank a dump is of: its file's name says it, and the groups it lists must agree."""
    shared: set[int] = set()
    for members in memberships:
        if members:
            shared = shared & set(members) if shared else set(members)
    stem = name.rsplit("/", 1)[-1]
    found = re.findall(r"rank[_\-.]?(\d+)", stem) or re.findall(r"(\d+)", stem)
    if found and (not shared or int(found[-1]) in shared):
        return int(found[-1])
    if len(shared) == 1:
        return shared.pop()
    said = f"its name says rank {found[-1]}, its groups do not" if found else "its name holds no rank"
    raise UnusableFileError(f"{said}; name it like trace_rank_3")


def _configured(config: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    groups = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and str(name):
            members = tuple(int(word) for word in re.findall(r"\d+", str(value.get("ranks", ""))))
            groups[str(name)] = (members, str(value.get("desc", "")))
    return groups


def _group_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    group = entry.get("process_group")
    if isinstance(group, (tuple, list)) and group:
        return str(group[0]), str(group[1]) if len(group) > 1 else ""
    return str(group if group is not None else entry.get("pg_id", 0)), ""


def _record(entry: Mapping[str, Any], rank: int, at: int, group: Group, place: int) -> Record:
    name = str(entry.get("profiling_name", ""))
    message = _MESSAGE.search(name)
    peer, kind = UNKNOWN, _kind(name)
    if message:
        kind = message[1]
        peer = _rank_in(group, int(message[3]))
    is_message = kind in (SEND, RECV)
    number = entry.get("p2p_seq_id") if is_message else entry.get("collective_seq_id", entry.get("seq_id"))
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    if kind == RECV and entry.get("output_sizes"):
        sizes, dtypes = entry["output_sizes"], entry.get("output_dtypes") or dtypes
    state = entry.get("state")
    done = (
        bool(entry.get("retired")) or state == "completed" or bool(entry.get("time_discovered_completed_ns"))
    )
    length = entry.get("duration_ms")
    return Record(
        rank=rank,
        group=at,
        seq=int(number or 0),
        kind=kind,
        bytes=_bytes(sizes, dtypes),
        peer=peer,
        enqueued_ns=int(entry.get("time_created_ns") or UNKNOWN),
        started_ns=int(entry.get("time_discovered_started_ns") or UNKNOWN)
        if state != "scheduled" or done
        else UNKNOWN,
        took_ns=int(float(length) * 1e6) if length else UNKNOWN,
        done=done,
        order=int(entry.get("time_created_ns") or entry.get("record_id", place)),
    )


def _rank_in(group: Group, local: int) -> int:
    """Messages name ranks of their group. Of a group that is not listed only the first one's are known."""
    if not group.members:
        return local if group.is_first else UNKNOWN
    return group.members[local] if local < len(group.members) else UNKNOWN


def _kind(name: str) -> str:
    plain = name.rsplit(":", 1)[-1].lower()
    for word in _KINDS:
        if word in plain:
            return _SPELLING.get(word, word)
    return plain.split(" ")[0].strip("_") or "other"


def _bytes(sizes: Any, dtypes: Any) -> int:
    total = 0
    for at, shape in enumerate(sizes):
        count = 1
        for size in shape if isinstance(shape, (list, tuple)) else [shape]:
            count *= int(size)
        total += count * _SIZES.get(str(dtypes[at]) if at < len(dtypes) else "", 1)
    return total if sizes else UNKNOWN


def _progress(
    dump: Mapping[str, Any], entries: list[Mapping[str, Any]], index: dict[str, int], rank: int
) -> dict[tuple[int, int], GroupProgress]:
    status = {int(k): v for k, v in (dump.get("pg_status") or {}).items() if isinstance(v, Mapping)}
    names = {int(entry.get("pg_id", -1)): _group_of(entry)[0] for entry in entries}
    numbered = sorted(int(name) for name in index if name.isdigit())
    if len(numbered) == len(index) == len(status):
        paired = {pg: str(number) for pg, number in zip(sorted(status), numbered, strict=True)}
        if all(paired.get(pg) == name for pg, name in names.items()):
            names = paired
    if any(is_gloo(entry) for entry in entries):  # its counters mix messages in, and entries say it better
        return {}
    return {
        (rank, index[names[pg]]): GroupProgress(
            enqueued=int(value.get("last_enqueued_collective", UNKNOWN)),
            completed=int(value.get("last_completed_collective", UNKNOWN)),
        )
        for pg, value in status.items()
        if pg in names
    }


# gloo's dumps: `pg_config` is one entry with an empty name, which lists the ranks while a job has only its
# first group; `op_id` counts collectives and messages together, `collective_seq_id` collectives alone.

Entries = Sequence[Mapping[str, Any]]


def is_gloo(entry: Mapping[str, Any]) -> bool:
    return str(entry.get("profiling_name", "")).startswith("gloo:")


def is_of_gloo(dump: Mapping[str, Any], entries: Entries) -> bool:
    """NCCL names its groups, also where it has no entries."""
    return any(map(is_gloo, entries)) or (not entries and set(dump.get("pg_config") or {}) == {""})


def members_of_world(dump: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks under the empty name, where they are those of the world."""
    nameless = (dump.get("pg_config") or {}).get("")
    if not isinstance(nameless, Mapping):
        return ()
    ranks = tuple(int(word) for word in re.findall(r"\d+", str(nameless.get("ranks", ""))))
    return ranks if ranks == tuple(range(len(ranks))) else ()


def misses_messages(entries: Entries) -> bool:
    """Has the rank issued messages, of which gloo's recorder has no entries?"""
    counts = [(entry.get("op_id", 0), entry.get("collective_seq_id", 0)) for entry in entries]
    return any(isinstance(a, int) and isinstance(b, int) and a > b for a, b in counts)
