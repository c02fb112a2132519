"""A worker's process: the engine's loop, its links, and a line to the agent that started it."""

from __future__ import annotations

import os
import queue
import resource
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from everstep.core.words.agent_messages import EndWorker, WorkerHello, WorkerOrder, WorkerReport
from everstep.core.words.cluster_messages import Sender
from everstep.core.words.framing import Unpacker, pack
from everstep.core.words.ops import parse_worker
from everstep.core.worker.control import LinkBroke, LinkOpened, WorkerControl, raised
from everstep.core.worker.worker_state import WorkerState
from everstep.engine import device as devices
from everstep.engine import nccl, regions
from everstep.engine.beacon import Beacon
from everstep.engine.courier import Courier, identity_of
from everstep.engine.faults import parse_fault
from everstep.engine.fitting import room
from everstep.engine.frames import Incoming
from everstep.engine.job import Job
from everstep.engine.links import Address, Links
from everstep.engine.loading import Loader
from everstep.engine.ports import Ports
from everstep.engine.program import Program
from everstep.engine.recorder import WorkerRecorder
from everstep.engine.worker_loop import InboxItem, WorkerLoop
from everstep.node import slot_devices
from everstep.node.lifeline import Lifeline
from everstep.node.state_keeper import States
from everstep.node.steer import steering_from, watch_links


def main(spec: dict[str, Any]) -> int:
    """Run the worker that `spec` describes; the process's exit code."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection each way with every peer
    if str(spec["job"]["device"]).startswith("cuda"):
        there = slot_devices.found()
        device = slot_devices.take(spec["slot"], there)
        shared = slot_devices.is_shared(device, there, slots=spec["slots"])
        forced = spec["job"].get("transport") == "nccl"
        nccl.prepare(spec["host"], alone=device is not None and (device.is_instance or (forced and shared)))
    if spec["lifeline"] is not None:
        lifeline = Lifeline(Path(spec["lifeline"]))
        lifeline.hold()  # until the end
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(spec["agent"])
    line = _Line(agent)
    me = Sender(spec["task"], parse_worker(spec["worker"]), spec["incarnation"])
    line.say(WorkerHello(task=me.task, worker=me.worker, incarnation=me.incarnation, pid=os.getpid()))
    try:
        if spec.get("script"):
            from everstep.node import script

            script.run(spec, lambda program: train(me, spec, program, line))
        else:
            train(me, spec, Program.of(Job.from_dict(spec["job"])), line)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        line.say(raised(me, text, where=line.where(), traceback=traceback.format_exc(limit=50)))
        traceback.print_exc()
        return 1
    return 0


def train(sender: Sender, spec: dict[str, Any], program: Program, line: _Line) -> None:
    me = sender.worker
    job = program.job
    loader = None
    if me.stage in (0, job.stages - 1):  # forked, if at all, before there are threads and devices
        loader = Loader(program.data, ahead=job.load_ahead)
        program = replace(program, data=loader)
    torch.set_num_threads(job.threads)
    inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
    device = devices.pick(job.device)
    if job.compile:
        regions.enable()
    if job.accumulate != "fp32":
        devices.exact(device)
    steering = steering_from(spec["fabric"]) if spec.get("fabric") else None
    recorder = None
    if spec["beacon"] is not None:
        recorder = WorkerRecorder.beside(spec["beacon"], me, replicas=job.replicas, stages=job.stages)

    def arrived(frame: Incoming) -> None:
        if not courier.takes(frame):
            deliver(frame)

    def broke(address: Address) -> None:
        courier.link_broke(address)
        inbox.put(LinkBroke(address))

    def deliver(frame: Incoming) -> None:
        if recorder is not None and frame.parcel is not None and frame.tensors:
            recorder.got(frame.parcel, frame.nbytes)  # now: this worker may be busy for long
        inbox.put(frame)

    identity = identity_of(device, job.transport)
    links = Links(
        token=bytes.fromhex(spec["token"]),
        host=spec["host"],
        deliver=arrived,
        broken=broke,
        opened=lambda address: inbox.put(LinkOpened(address)),
        failed=inbox.put,
        empty=lambda shape, dtype: devices.host_empty(shape, dtype, device),
        source_port=None if steering is None else steering.ports,
        identity=identity.encode(),
    )
    waits = job.transport in ("nccl", "pipe") and sender.incarnation == 1
    courier = Courier.of(links, identity, device, deliver=deliver, failed=inbox.put, waits=waits)
    beacon = None if spec["beacon"] is None else Beacon(Path(spec["beacon"]))
    states = States(
        sender, job, node=spec["node"], memory_root=Path(spec["memory"]), secret=spec["token"], say=line.say
    )
    control = WorkerControl(sender, WorkerState(me, program.rules(), incarnation=sender.incarnation))
    loop = WorkerLoop(
        control,
        lambda: program.build(me.stage, device=device, empty=courier.empty),
        ports=Ports(
            report=line.say,
            save=states.save,
            load=states.load,
            copy_to_memory=states.copy_to_memory,
            room=partial(room, job),
        ),
        courier=courier,
        inbox=inbox,
        beacon=beacon,
        recorder=recorder,
        loader=loader,
        faults=tuple(parse_fault(text) for text in spec.get("faults", ())),
    )
    line.where = control.where
    links.start()
    flows = None if steering is None else watch_links(steering, links, lambda kind, row: None)
    line.listen(inbox)
    line.say(control.started(links.address).report)
    loop.run()
    states.finish(loop.show_saving)
    if loader is not None:
        loader.close()
    courier.stop()
    if flows is not None:
        flows.stop()
    links.stop()


class _Line:
    """To and from the agent."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self.where: Callable[[], str] = lambda: "starting"

    def say(self, message: WorkerHello | WorkerReport) -> None:
        data = pack(message)
        with self._lock:
            self._socket.sendall(data)

    def listen(self, inbox: queue.SimpleQueue[InboxItem]) -> None:
        threading.Thread(target=self._listen, args=(inbox,), name="agent", daemon=True).start()

    def _listen(self, inbox: queue.SimpleQueue[InboxItem]) -> None:
        unpacker = Unpacker(WorkerOrder)
        while data := self._socket.recv(1 << 16):
            for order in unpacker.feed(data):
                inbox.put(order)
        inbox.put(EndWorker(gently=False))  # the agent is gone
