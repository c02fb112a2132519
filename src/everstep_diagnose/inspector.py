"""NCCL Inspector: one JSON object a completed operation, one file a process.

A rank is numbered within each communicator, so the communicator with the most ranks gives the global number.
Only completed operations are written: no hang can be read off these files, and none is. An operation's length
includes the wait for the last rank, so within one operation the last to arrive has the shortest.
"""

from __future__ import annotations

import json
from typing import Any

from everstep_diagnose.comm_record import UNKNOWN, Dump, Group, Log, Record
from everstep_diagnose.flight import UnusableFileError

_KINDS = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "AlltoAll": "all_to_all", "AllToAll": "all_to_all", "Broadcast": "broadcast", "Reduce": "reduce",
    "Send": "send", "Recv": "recv",
}  # fmt: skip


def is_inspector(line: str) -> bool:
    return '"header"' in line and any(f'"{name}"' in line for name in ("coll_perf", "p2p_perf", "dump_stats"))


def read_inspector(name: str, text: str) -> Dump:
    """Lines that do not parse (the last one of a killed process) are left out; a file of none is refused."""
    rows = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("header"), dict):
            rows.append(value)
    if not rows:
        raise UnusableFileError("no line of it is an NCCL Inspector record")
    widest = max((row["header"] for row in rows), key=lambda header: int(header.get("n_ranks", 0)))
    rank = int(widest["rank"])
    index: dict[str, int] = {}
    groups: list[Group] = []
    records = []
    for place, row in enumerate(rows):
        said = _said(row)
        key = f"{row['header'].get('id', '')} {said.get('coll', 'messages')}"  # each kind has its own numbers
        if said and key not in index:
            index[key] = len(groups)
            groups.append(Group(name=key, about=str(row["header"].get("comm_name", ""))))
        if said:
            records.append(_record(row, said, rank, index[key], place))
    host = str(rows[0].get("metadata", {}).get("hostname", ""))
    return Dump(
        source=name,
        form="inspector",
        log=Log.of(records),
        groups=groups,
        ranks=(rank,),
        hosts={rank: host} if host else {},
        world_size=int(widest.get("n_ranks", 0)),
    )


def _record(row: dict[str, Any], said: dict[str, Any], rank: int, group: int, place: int) -> Record:
    prefix = "coll" if "coll_perf" in row else "p2p"
    length = said.get(f"{prefix}_exec_time_us")
    times = said.get("event_trace_ts") or {}
    started = times.get(f"{prefix}_start_ts")
    kind = str(said.get(prefix, "other"))
    return Record(
        rank=rank,
        group=group,
        seq=int(said.get(f"{prefix}_sn", UNKNOWN)),
        kind=_KINDS.get(kind, kind.lower()),
        bytes=int(said.get(f"{prefix}_msg_size_bytes", UNKNOWN)),
        peer=int(said.get("p2p_peer", UNKNOWN)),
        enqueued_ns=int(started) * 1000 if started else UNKNOWN,
        took_ns=int(float(length) * 1000) if length is not None else UNKNOWN,
        done=True,
        order=int(started) * 1000 if started else place,
    )


def _said(row: dict[str, Any]) -> dict[str, Any]:
    said = row.get("coll_perf") or row.get("p2p_perf")
    return said if isinstance(said, dict) else {}
