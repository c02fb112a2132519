"""What a live pull of a job's ranks writes beside their dumps: who answered, who did not, and when.

A rank that answers for its recorder and not for its interpreter is stuck with the interpreter's lock held:
the recorder is C++ and needs none. One that does not answer at all is stopped or dead, and others' records
say it.
"""

from __future__ import annotations

import json
from typing import Any

from everstep.diagnose.comm_record import PULLED, Dump, Log
from everstep.diagnose.flight import UnusableFileError

MARK = "everstep_pull"
STUCK = "its recorder answers and its interpreter does not: something holds the interpreter's lock"


def document(world_size: int, ranks: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """`ranks`: taken_ns, and answered, why, stuck, stack where known."""
    return {MARK: 1, "world_size": world_size, "ranks": {str(rank): said for rank, said in ranks.items()}}


def is_pull(value: Any) -> bool:
    return isinstance(value, dict) and MARK in value


def read_pull(name: str, text: str) -> Dump:
    value = json.loads(text)
    size = int(value.get("world_size", 0))
    part = Dump(source=name, form=PULLED, log=Log.of([]), groups=[], world_size=size)
    try:
        for key, said in value["ranks"].items():
            rank = int(key)
            if "taken_ns" in said:
                part.taken_ns[rank] = int(said["taken_ns"])
            if not said.get("answered", True):
                part.silent[rank] = str(said.get("why", "does not answer"))
            if said.get("stuck"):
                part.stuck_hosts[rank] = STUCK
            if said.get("stack"):
                part.stacks[rank] = str(said["stack"])
            if said.get("host"):
                part.hosts[rank] = str(said["host"])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UnusableFileError(f"a pull's answers that cannot be read ({error})") from None
    return part
