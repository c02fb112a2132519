"""Whom a launcher blames for a fault, by what it has written on all machines (`bench.script_faults`)."""

from __future__ import annotations

import re
from collections.abc import Mapping


def incident_names(logs: Mapping[str, str], victim: str, rank: int, name: str) -> bool:
    """Is the rank in the logs of the machines, or, where a machine is lost, its name?"""
    told = re.findall(r"incident \d+: (.*)", "\n".join(logs.values()))
    return any(re.search(rf"\b{name or f'rank {rank}'}\b", line) for line in told)


def torchelastic_names(logs: Mapping[str, str], victim: str, rank: int, name: str) -> bool:
    """It says which local rank of its machine has ended; of machines, and of ranks that have not, nothing."""
    return not name and "failed (exitcode" in logs.get(victim, "")
