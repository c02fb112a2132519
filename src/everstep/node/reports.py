"""A worker's words to its agent, as reports for the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.ops import Worker, parse_worker
from everstep.node import wire

MAX_TRACEBACK = 16_384


def report_of(task: str, worker: Worker, incarnation: int, said: Mapping[str, Any]) -> msg.NodeReport | None:
    """None: nothing the coordinator needs to know."""
    match said["kind"]:
        case "saved":
            index, count = said["share"]
            return msg.PartWritten(
                task=task,
                step=said["step"],
                stage=worker.stage,
                attempt=said["attempt"],
                part=said["part"],
                share=(index, count),
            )
        case "shelved":
            return msg.PartWritten(
                task=task,
                step=said["step"],
                stage=worker.stage,
                attempt=said["attempt"],
                part=said["part"],
                shelf=said["node"],
            )
        case "fetched":
            return msg.StateFetched(
                task=task,
                worker=worker,
                step=said["step"],
                bytes_here=said["here"],
                bytes_elsewhere=said["elsewhere"],
                seconds=said["seconds"],
            )
        case "times":
            return msg.TimesReported(
                task=task,
                worker=worker,
                times=said["times"],
                incarnation=incarnation,
                step=said["step"],
                ops={kind: (count, seconds) for kind, (count, seconds) in said["ops"].items()},
                seconds=said["seconds"],
            )
        case "mended":
            return msg.LinkMended(task=task, worker=worker, peer=parse_worker(said["peer"]))
        case _:
            event = _event(worker, incarnation, said)
            return None if event is None else msg.TaskEvent(task=task, event=event)


def _event(worker: Worker, incarnation: int, said: Mapping[str, Any]) -> ev.Event | None:
    match said["kind"]:
        case "started":
            host, port = said["address"]
            return ev.WorkerStarted(worker=worker, incarnation=incarnation, address=(host, port))
        case "ledger":
            return ev.LedgerReported(
                worker=worker, epoch=said["epoch"], ledger=wire.ledger_in(said["ledger"])
            )
        case "sealed":
            return ev.StepSealed(
                step=said["step"],
                stage=worker.stage,
                attempt=said["attempt"],
                microbatches=said["microbatches"],
                executed=said["executed"],
                losses=wire.losses_in(said["losses"]),
                sum_of_squares=said["sum_of_squares"],
            )
        case "invalid":
            return ev.UpdateInvalidated(
                worker=worker, step=said["step"], norm=said["norm"], attempt=said["attempt"]
            )
        case "copied":
            return ev.StateCopied(worker=worker, incarnation=incarnation, state_step=said["state_step"])
        case "unrestored":
            return ev.RestoreFailed(worker=worker, incarnation=incarnation, step=said["state_step"])
        case "resumed":
            return ev.WorkerResumed(worker=worker, epoch=said["epoch"], at=said["at_ns"] / 1e9)
        case "raised":
            return ev.WorkerRaised(
                worker=worker,
                incarnation=incarnation,
                error=said["error"],
                where=said["where"],
                traceback=said["traceback"][-MAX_TRACEBACK:],
            )
        case _:
            return None
