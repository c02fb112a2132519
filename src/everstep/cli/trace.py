"""`everstep trace`: some steps as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    process = node      thread = worker: its ops        thread below it: what it sent and got
    arrows: a parcel from where it was sent to where it came

Clocks are those of the nodes: between two nodes that are not synchronised an arrow can point backwards.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli import render
from everstep.cli.client import DEFAULT_ADDRESS, Address, Ca, Client, Token
from everstep.cli.render import AsJson
from everstep.errors import UserError
from everstep.launch.client import in_path
from everstep.protocol.parcels import ParcelKind, parts_of
from everstep.server.words import OPS, PARCELS

_KINDS = list(ParcelKind)
_NETWORK = 1_000_000  # added to a worker's thread number for what it sends and gets
WAIT_S = 0.5
_LEAST_US = 1.0  # of a parcel's mark, so that it can be clicked


def trace_command(
    task: Annotated[str, typer.Argument(help="Name of the task.")],
    steps: Annotated[
        str, typer.Option(help="First and last step, such as 100:103.", show_default="the last 3 whole steps")
    ] = "",
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("trace.json"),
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Write a trace of some steps: every op of every worker, and what they sent each other.

    Open the file at ui.perfetto.dev or chrome://tracing. Steps that are still to come are waited for. Workers
    keep their last 4,096 ops and parcels each, so older steps are gone.

    [bold]Examples[/bold]

      everstep trace llama-8b

      everstep trace llama-8b --steps 100:103 -o trace.json
    """
    client = Client(address=address, token=token, ca=ca)
    first, last = _steps(client, task, steps)
    document: dict[str, Any] = client.get(f"/v1/tasks/{in_path(task)}/trace?first={first}&last={last}")
    if not any(worker["ops"] for worker in document["workers"]):
        kept = [worker["steps"] for worker in document["workers"] if worker["steps"]]
        if not kept:
            raise UserError(f"task {task} has no workers now; everstep status shows its state.")
        known = f"steps {min(s[0] for s in kept)} to {max(s[1] for s in kept)} are"
        raise UserError(f"no op of steps {first} to {last} is kept any more; {known}. Give other --steps.")
    made = chrome_trace(document)
    try:
        out.write_text(json.dumps(made, separators=(",", ":")))
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}.") from None
    counts = {
        "ops": sum(len(worker["ops"]) for worker in document["workers"]),
        "arrows": sum(event["ph"] == "s" for event in made["traceEvents"]),
        "workers": len(document["workers"]),
    }
    words = f"{counts['ops']} ops and {counts['arrows']} parcels of {counts['workers']} workers"
    render.note(f"{out}: steps {first} to {last} of {task}, {words}; open it at ui.perfetto.dev")
    if as_json:
        render.emit({"task": task, "first": first, "last": last, "file": str(out), **counts})
    return 0


def _steps(client: Client, task: str, text: str) -> tuple[int, int]:
    row = client.get(f"/v1/tasks/{in_path(task)}?rows=0")
    if not text:
        return max(1, row["step"] - 2), max(1, row["step"])
    match = re.fullmatch(r"(\d{1,12})(?::(\d{1,12}))?", text.strip())
    if match is None:
        raise UserError(f"--steps is {text!r}; give first and last, such as 100:103.")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if not 1 <= first <= last or last > row["steps"]:
        raise UserError(f"--steps is {text!r}; give steps from 1 to {row['steps']}, the first one first.")
    if last > row["step"]:
        render.note(f"task {task} is at step {row['step']}; waiting for step {last}")
    while row["step"] < last and row["state"] not in ("finished", "failed", "cancelled"):
        time.sleep(WAIT_S)
        row = client.get(f"/v1/tasks/{in_path(task)}?rows=0")
    return first, last


def chrome_trace(document: Mapping[str, Any]) -> dict[str, Any]:
    """`document`: of GET /v1/tasks/TASK/trace."""
    workers = document["workers"]
    nodes = {name: number for number, name in enumerate(sorted({w["node"] for w in workers}), 1)}
    starts = [op[2] for worker in workers for op in worker["ops"]]
    parcels = [one[0] for worker in workers for one in (*worker["sent"], *worker["got"])]
    zero = min((*starts, *parcels), default=0)
    events: list[dict[str, Any]] = []
    for name, pid in nodes.items():
        events += _named(pid, None, "process_name", f"node {name}")
    for worker in workers:
        events += _of_worker(worker, nodes[worker["node"]], zero)
    events += _arrows(workers, nodes, zero)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "task": document["task"],
            "first_step": document["first"],
            "last_step": document["last"],
            "began_ns": zero,
        },
    }


def _named(pid: int, tid: int | None, what: str, name: str) -> Iterator[dict[str, Any]]:
    where = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    yield {"ph": "M", "name": what, **where, "args": {"name": name}}
    if tid is not None:
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": 2 * (tid % _NETWORK)}}


def _of_worker(worker: Mapping[str, Any], pid: int, zero: int) -> Iterator[dict[str, Any]]:
    tid = worker["rank"] + 1
    yield from _named(pid, tid, "thread_name", f"worker {worker['worker']}")
    yield from _named(pid, tid + _NETWORK, "thread_name", f"worker {worker['worker']} parcels")
    for step, name, begun, ended in worker["ops"]:
        words = OPS.get(_letter(name), {}).get("words", "op")
        yield {
            "ph": "X",
            "name": name or "op",
            "cat": words,
            "pid": pid,
            "tid": tid,
            "ts": (begun - zero) / 1e3,
            "dur": max(0.0, (ended - begun) / 1e3),
            "args": {"step": step, "op": words},
        }
    for verb, rows in (("send", worker["sent"]), ("get", worker["got"])):
        for at, peer, size, number in rows:
            yield {
                "ph": "X",
                "name": f"{verb} {_parcel(number)}",
                "cat": "parcel",
                "pid": pid,
                "tid": tid + _NETWORK,
                "ts": (at - zero) / 1e3,
                "dur": _LEAST_US,
                "args": {"step": parts_of(number)[0], "bytes": size, "peer_rank": peer},
            }


def _letter(name: str) -> str:
    """Of an op: 2F0.1 is F."""
    return next((letter for letter in name if letter.isalpha()), "")


def _parcel(number: int) -> str:
    _, what, home, microbatch = parts_of(number)
    words = PARCELS.get(_KINDS[what], "parcel") if what < len(_KINDS) else "parcel"
    return f"{words} {home}.{microbatch}"


def _arrows(workers: list[Any], nodes: Mapping[str, int], zero: int) -> Iterator[dict[str, Any]]:
    """From a parcel that was sent to the same one where it came; a parcel is sent to several, or twice."""
    came: dict[tuple[int, int], tuple[int, int, int]] = {}
    for worker in workers:
        for at, _, _, number in worker["got"]:
            came[worker["rank"], number] = nodes[worker["node"]], worker["rank"] + 1 + _NETWORK, at
    count = 0
    for worker in workers:
        for at, peer, _, number in worker["sent"]:
            if (there := came.pop((peer, number), None)) is None:
                continue
            count += 1
            same = {"cat": "parcel", "name": _parcel(number), "id": count}
            here = {"pid": nodes[worker["node"]], "tid": worker["rank"] + 1 + _NETWORK}
            yield {"ph": "s", **same, **here, "ts": (at - zero) / 1e3}
            pid, tid, landed = there
            yield {"ph": "f", "bp": "e", **same, "pid": pid, "tid": tid, "ts": (landed - zero) / 1e3}
