"""A run of ranks in words: a line for every decision, a summary, and the JSON document."""

from __future__ import annotations

import os
import time
from typing import Any

from everstep.ranks import words
from everstep.ranks.run import Ran, ScriptLaunch


def run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def line(action: words.Action, at_s: float) -> str:
    match action:
        case words.StartRanks(life=0):
            return f"everstep: {at_s:.3f} s  all ranks started"
        case words.StartRanks():
            return f"everstep: {at_s:.3f} s  all ranks restarted: {action.because}"
        case words.SignalRanks():
            return f"everstep: {at_s:.3f} s  {action.signal} to {_names(action.ranks)}: {action.because}"
        case words.EndRun():
            return f"everstep: {at_s:.3f} s  ended with code {action.code}: {action.because}"
        case _:
            return f"everstep: {at_s:.3f} s  {action.because}"


def summary(launch: ScriptLaunch, ran: Ran) -> str:
    counts = {"restart": ran.restarts, "incident": len(ran.incidents)}
    parts = [f"{ran.seconds:.1f} s", *(f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items())]
    return f"everstep: {', '.join(parts)}; logs in {launch.log_dir / launch.run_id}"


def document(launch: ScriptLaunch, ran: Ran) -> dict[str, Any]:
    return {
        "command": list(launch.command),
        "ranks": [
            {"rank": rank, "pid": ran.pids[-1][rank], "exit_code": ran.exit_codes.get(rank)}
            for rank in range(launch.policy.ranks)
        ],
        "restarts": ran.restarts,
        "max_restarts": launch.policy.max_restarts,
        "incidents": [_incident(each, ran) for each in ran.incidents],
        "exit_code": ran.code,
        "because": ran.because,
        "seconds": round(ran.seconds, 3),
        "run_id": launch.run_id,
        "logs": str(launch.log_dir / launch.run_id),
    }


def _incident(incident: words.ScriptIncident, ran: Ran) -> dict[str, Any]:
    restarted = incident.restarted_at
    return {
        "number": incident.number,
        "what": incident.what,
        "rank": incident.rank,
        "life": incident.life,
        "at_s": round(incident.at - ran.started, 3),
        "evidence": incident.evidence,
        "traceback": incident.traceback or None,
        "verdict": incident.verdict,
        "severity": incident.severity,
        "remedy": incident.remedy,
        "because": incident.because,
        "noticed_ms": incident.noticed_ms,
        "noticed_at": incident.at,
        "restarted_ms": None if restarted is None else round((restarted - incident.at) * 1e3, 3),
    }


def _names(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
