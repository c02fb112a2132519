"""Where the time of the tasks went: one document, for `everstep report` and the page."""

from __future__ import annotations

from typing import Any

from everstep.core.cluster.node_states import NodeState
from everstep.drive.goodput import HOUR_S, PRODUCTIVE, STEPS, Cause
from everstep.server.record import ClusterRecord


def document(record: ClusterRecord, since_s: int, now: float) -> dict[str, Any]:
    """Of the last `since_s` seconds; time is kept by the hour, so the first hour counts as a whole."""
    since = now - since_s
    rows = []
    for name, account in record.accounts.tasks.items():
        account_until = account.until
        found = account.between(since, now)
        if not found and account_until < since:
            continue
        wall = sum(amount for what, amount in found.items() if what != STEPS)
        lost = {cause: found.get(cause, 0.0) for cause in Cause}
        rows.append(
            {
                "task": name,
                "owner": account.owner,
                "state": account.state,
                "wall_s": wall,
                "undivided_s": account.undivided_s,
                "productive_s": found.get(PRODUCTIVE, 0.0),
                "goodput": found.get(PRODUCTIVE, 0.0) / wall if wall > 0 else None,
                "lost_s": {cause: seconds for cause, seconds in lost.items() if seconds},
                "steps": int(found.get(STEPS, 0.0)),
            }
        )
    return {
        "since": since,
        "until": now,
        "tasks": rows,
        "total": _total(rows),
        "incidents": _incidents(record, since),
        "nodes": _nodes(record),
        "hours": _hours(record, since, now),
    }


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    wall = sum(row["wall_s"] for row in rows)
    good = sum(row["productive_s"] for row in rows)
    lost: dict[str, float] = {}
    for row in rows:
        for cause, seconds in row["lost_s"].items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    return {
        "wall_s": wall,
        "productive_s": good,
        "goodput": good / wall if wall > 0 else None,
        "lost_s": lost,
        "steps": sum(row["steps"] for row in rows),
    }


def _incidents(record: ClusterRecord, since: float) -> list[dict[str, Any]]:
    """By verdict, the most frequent first; of those that are still kept."""
    found: dict[str, dict[str, Any]] = {}
    for one in record.machine.log.incidents:
        if one.evidence_at + record.ahead_s < since:
            continue
        row = found.setdefault(one.label, {"count": 0, "recovery_s": 0.0, "longest_s": 0.0, "open": 0})
        row["count"] += 1
        if one.resumed_at is None:
            row["open"] += 1
        else:
            took = one.resumed_at - one.evidence_at
            row["recovery_s"] += took
            row["longest_s"] = max(row["longest_s"], took)
    rows = []
    for label, row in found.items():
        severity, kind = label.split(" ", 1)
        rows.append({"severity": severity, "kind": kind, **row})
    return sorted(rows, key=lambda row: -row["count"])


def _nodes(record: ClusterRecord) -> list[dict[str, Any]]:
    """Those that are kept out, or were isolated lately."""
    out = (NodeState.LEMON, NodeState.ISOLATED)
    return [
        {"node": node.name, "state": node.state, "isolations": len(node.isolations), "because": node.because}
        for node in record.machine.nodes.values()
        if node.state in out or node.isolations
    ]


def _hours(record: ClusterRecord, since: float, now: float) -> list[dict[str, Any]]:
    """Of all tasks together, for a picture."""
    found: dict[int, dict[str, float]] = {}
    first = int(since // HOUR_S)
    for account in record.accounts.tasks.values():
        for hour, amounts in account.hours.items():
            if hour >= first:
                into = found.setdefault(hour, {})
                for what, amount in amounts.items():
                    into[what] = into.get(what, 0.0) + amount
    return [{"at": hour * HOUR_S, **amounts} for hour, amounts in sorted(found.items())]
