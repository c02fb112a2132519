"""A worker's process: an engine body, its links, and a line to the agent that started it."""

from __future__ import annotations

import os
import queue
import resource
import socket
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from everstep.core.words.ops import Worker, parse_worker
from everstep.core.worker.worker_state import WorkerState
from everstep.engine import device as devices
from everstep.engine.beacon import Beacon
from everstep.engine.courier import Courier, identity_of
from everstep.engine.faults import parse_fault
from everstep.engine.frames import Incoming
from everstep.engine.job import Job
from everstep.engine.links import Address, Links
from everstep.engine.program import Program
from everstep.engine.recorder import WorkerRecorder
from everstep.engine.worker_loop import Order, Ports, WorkerLoop
from everstep.node import wire
from everstep.node.lifeline import Lifeline
from everstep.node.state_keeper import States
from everstep.node.steer import steering_from, watch_links


def main(spec: dict[str, Any]) -> int:
    """Run the worker that `spec` describes; the process's exit code."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection each way with every peer
    if spec["lifeline"] is not None:
        lifeline = Lifeline(Path(spec["lifeline"]))
        lifeline.hold()  # until the end
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(spec["agent"])
    line = _Line(agent)
    line.tell("hello", {"task": spec["task"], "worker": spec["worker"], "pid": os.getpid()})
    try:
        if spec.get("script"):
            from everstep.node import script

            script.run(spec, lambda program: train(spec, program, line))
        else:
            train(spec, Program.of(Job.from_dict(spec["job"])), line)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        line.tell(
            "raised",
            {
                "error": f"{type(error).__name__}: {error}",
                "where": line.doing(),
                "traceback": traceback.format_exc(limit=50),
            },
        )
        traceback.print_exc()
        return 1
    return 0


def train(spec: dict[str, Any], program: Program, line: _Line) -> None:
    me = parse_worker(spec["worker"])
    job = program.job
    torch.set_num_threads(job.threads)
    inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
    device = devices.pick(job.device, me.stage * job.replicas + me.replica)
    if job.accumulate == "fp64":
        devices.exact(device)
    steering = steering_from(spec["fabric"]) if spec.get("fabric") else None
    recorder = None
    if spec["beacon"] is not None:
        recorder = WorkerRecorder.beside(spec["beacon"], me, replicas=job.replicas, stages=job.stages)

    def deliver(frame: Incoming) -> None:
        if recorder is not None and frame.parcel is not None and frame.tensors:
            recorder.got(frame.parcel, frame.nbytes)  # now: this worker may be busy for long
        inbox.put(("frame", frame))

    identity = identity_of(device, job.transport)
    links = Links(
        token=bytes.fromhex(spec["token"]),
        host=spec["host"],
        deliver=deliver,
        broken=lambda address: inbox.put(("broken", address)),
        failed=lambda error: inbox.put(("failed", error)),
        empty=lambda shape, dtype: devices.host_empty(shape, dtype, device),
        source_port=None if steering is None else steering.ports,
        identity=identity.encode(),
    )
    courier = Courier.of(links, identity, device, lambda error: inbox.put(("failed", error)))
    beacon = None if spec["beacon"] is None else Beacon(Path(spec["beacon"]))
    states = States(
        me,
        job,
        task=spec["task"],
        incarnation=spec["incarnation"],
        node=spec["node"],
        shelf=Path(spec["shelf"]),
        secret=spec["token"],
        tell=line.tell,
    )
    body = WorkerLoop(
        me,
        WorkerState(me, program.rules()),
        lambda: program.build(me.stage, device=device, empty=courier.empty),
        ports=Ports(
            report=line.report,
            save=states.save,
            load=states.load,
            shelve=states.shelve,
            directed=states.obey,
        ),
        courier=courier,
        inbox=inbox,
        beacon=beacon,
        recorder=recorder,
        faults=tuple(parse_fault(text) for text in spec.get("faults", ())),
    )
    line.doing = lambda: (
        f"step {body.walker.now.step} {body.walker.now.todo[-1] if body.walker.now.todo else ''}"
    )
    links.start()
    flows = None if steering is None else watch_links(steering, links, line.tell)
    line.listen(inbox)
    line.tell("started", {"address": links.address})
    body.run()
    states.finish()
    courier.stop()
    if flows is not None:
        flows.stop()
    links.stop()


class _Line:
    """To and from the agent."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self.doing: Callable[[], str] = lambda: "starting"

    def tell(self, kind: str, table: dict[str, Any]) -> None:
        with self._lock:
            self._socket.sendall(wire.pack({"kind": kind, **table}))

    def report(self, kind: str, table: Any) -> None:
        """What a body reports, in JSON's terms."""
        match kind:
            case "ledger":
                self.tell(kind, {"epoch": table["epoch"], "ledger": wire.ledger_out(table["ledger"])})
            case "sealed":
                self.tell(kind, wire.sealed_out(table["sealed"]))
            case _:
                self.tell(kind, dict(table))

    def listen(self, inbox: queue.SimpleQueue[Order]) -> None:
        threading.Thread(target=self._listen, args=(inbox,), name="agent", daemon=True).start()

    def _listen(self, inbox: queue.SimpleQueue[Order]) -> None:
        for message in wire.receive(self._socket):
            match message["kind"]:
                case "interrupt":
                    inbox.put(("interrupt", message["epoch"]))
                case "resume":
                    book = {Worker(k, s): Address(host, port) for k, s, host, port in message["book"]}
                    inbox.put(("resume", (wire.resume_in(message["order"]), book, message["states"])))
                case "copy":
                    inbox.put(("copy", (message["joiner"], Address(*message["address"]))))
                case "stop_feeding":
                    inbox.put(("stop_feeding", message["joiner"]))
                case "faults":
                    inbox.put(("faults", tuple(map(parse_fault, message["faults"]))))
                case "finish" | "stop":
                    inbox.put((message["kind"], None))
        inbox.put(("stop", None))  # the agent is gone
