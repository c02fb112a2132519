"""NCCL RAS: how many operations of each kind every rank of every communicator has begun.

One snapshot cannot tell a hang from a moment: a count that is one short may be a rank on its way. So one
snapshot tells only who is dead, and two of them also which counts stay behind and do not move. Ranks are
numbered within each communicator; processes (host, pid, device) say who is who, and the largest communicator
numbers them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.ras_json import read_json
from everstep_diagnose.comm_record import Dump, Group, GroupProgress, Log, Record
from everstep_diagnose.flight import UnusableFileError

_KINDS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}


def is_ras(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("communicators"), list)


def read_ras(name: str, text: str, before: str | None = None) -> Dump:
    """One snapshot, and the one before it if there is one."""
    now = _load(text)
    stands = before is not None and _counts(now) == _counts(_load(before))
    who = _who(now)
    groups: list[Group] = []
    records: list[Record] = []
    progress: dict[tuple[int, int], GroupProgress] = {}
    silent: dict[int, str] = {}
    for comm in now["communicators"]:
        members = {int(rank["rank"]): who[_process(rank)] for rank in comm.get("ranks", [])}
        for missing in comm.get("missing_ranks") or []:
            state = "dead" if (missing.get("status") or {}).get("considered_dead") else "not answering"
            place = who.get(_process(missing), int(missing.get("rank", -1)))
            silent[place] = f"is {state} by NCCL's own RAS"
            members[int(missing.get("rank", -1))] = place
        ranks = tuple(members[local] for local in sorted(members))
        for kind in sorted({k for rank in comm.get("ranks", []) for k in rank.get("collective_counts", {})}):
            counts = {
                members[int(rank["rank"])]: int(rank["collective_counts"].get(kind, 0))
                for rank in comm["ranks"]
            }
            most = max(counts.values(), default=0)
            group = len(groups)
            groups.append(Group(name=f"{comm.get('hash', '?')} {kind}", members=ranks))
            is_uneven = stands and min(counts.values(), default=0) < most
            stuck = is_uneven or not silent.keys().isdisjoint(ranks)
            for rank, count in counts.items():
                progress[rank, group] = GroupProgress(enqueued=count)
                if most and count == most:
                    records.append(
                        Record(rank=rank, group=group, seq=most, kind=_KINDS.get(kind, kind), done=not stuck)
                    )
    return Dump(
        source=name,
        form="ras",
        log=Log.of(records),
        groups=groups,
        ranks=tuple(sorted(set(who.values()) - set(silent))),
        progress=progress,
        silent=silent,
        hosts={rank: process[0] for process, rank in who.items() if process[0]},
    )


def _load(text: str) -> dict[str, Any]:
    try:
        value = read_json(text)
    except ValueError:
        raise UnusableFileError("truncated or not JSON") from None
    if not is_ras(value):
        raise UnusableFileError("no NCCL RAS status: communicators are missing")
    return dict(value)


def _process(rank: Mapping[str, Any]) -> tuple[str, int, int, int]:
    if "pid" not in rank:
        return "", 0, 0, int(rank.get("rank", -1))
    return str(rank.get("host", "")), int(rank["pid"]), int(rank.get("cuda_dev", 0)), -1


def _who(status: Mapping[str, Any]) -> dict[tuple[str, int, int, int], int]:
    largest: Mapping[str, Any] = max(
        status["communicators"],
        key=lambda c: len(c.get("ranks", [])) + len(c.get("missing_ranks") or []),
        default={},
    )
    listed = [*largest.get("ranks", []), *(largest.get("missing_ranks") or [])]
    found = {_process(rank): int(rank.get("rank", -1)) for rank in listed}
    for comm in status["communicators"]:
        for rank in comm.get("ranks", []):
            found.setdefault(_process(rank), len(found))
    return found


def _counts(status: Mapping[str, Any]) -> list[Any]:
    return [
        [(r.get("rank"), r.get("collective_counts")) for r in c.get("ranks", [])]
        for c in status["communicators"]
    ]
