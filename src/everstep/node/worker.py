"""A worker's process: the engine's loop, its links, and a line to the agent that started it."""

from __future__ import annotations

import os
import queue
import signal
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from everstep import log
from everstep.core.worker.control import WorkerControl, raised
from everstep.core.worker.worker_state import WorkerState
from everstep.engine import device as devices
from everstep.engine.datasets.loading import Loader, stand_by
from everstep.engine.layers import regions
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.layers.software import computes_with
from everstep.engine.prepare.fitting import room, take_share
from everstep.engine.prepare.program import Program
from everstep.engine.shards.collectives import GroupCollectives
from everstep.engine.shards.marks import GroupWaits, ShardMark
from everstep.engine.sums import kernels
from everstep.engine.sums.sum_units import units_of
from everstep.engine.telemetry.beacon import Beacon
from everstep.engine.telemetry.faults import parse_fault
from everstep.engine.telemetry.recorder import WorkerRecorder
from everstep.engine.worker.follower import Follower
from everstep.engine.worker.leader import FollowerSays, ShardLeader
from everstep.engine.worker.ports import Ports
from everstep.engine.worker.worker_loop import WorkerLoop
from everstep.errors import MOST_TRACEBACK, UserError, clipped
from everstep.job.job import Job
from everstep.job.worker_spec import WorkerSpec
from everstep.log import warn
from everstep.net import host_memory, nccl
from everstep.net.courier import Courier, identity_of
from everstep.net.frames import Incoming
from everstep.net.links import Address, Links
from everstep.net.sockets import allow_many_files
from everstep.node import slot_devices
from everstep.node.agent_line import AgentLine
from everstep.node.lifeline import Lifeline
from everstep.node.shard_group import ShardGroup, fork
from everstep.node.steer import steering_from, watch_links
from everstep.protocol import shard_messages as sh
from everstep.protocol.messages import (
    PartWritten,
    SaveFailed,
    Sender,
    ShardEnded,
    StateFetched,
    TimesReported,
    WorkerHello,
    WorkerReport,
)
from everstep.protocol.work import LinkBroke, LinkOpened
from everstep.store.state_keeper import States

ECHO_S = 0.5  # after a shard has ended, the others' collectives fail within this time


def main(given: Mapping[str, Any]) -> int:
    """Run the worker that a `WorkerSpec` describes; the process's exit code."""
    spec = WorkerSpec.from_dict(given)
    allow_many_files()  # a connection each way with every peer
    try:
        job = Job.from_dict(spec.job)
    except UserError as error:  # the job was submitted to another version
        _call_agent(spec).say(raised(spec.sender, f"UserError: {error}", where="starting", traceback=""))
        return 1
    folder = None if spec.beacon_path is None else spec.beacon_path.parent
    group = fork(job.shards, spec.host, folder) if job.shards > 1 else None
    if job.device.startswith("cuda"):
        _take_device(spec, job, 0 if group is None else group.index)
    if group is not None and group.index:
        return _follow(spec, job, group)
    if spec.lifeline is not None:
        lifeline = Lifeline(spec.lifeline)
        lifeline.hold()  # until the end
    line = _call_agent(spec)
    try:
        _run(spec, job, line, group)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        if group is not None and group.first_dead(ECHO_S) is not None:
            group.wait()  # a collective failed because a shard has ended: its watcher says so, and ends all
        text = f"{type(error).__name__}: {error}"
        line.say(raised(spec.sender, text, where=line.where(), traceback=traceback.format_exc(limit=50)))
        warn(traceback.format_exc())
        return 1
    return 0


def _take_device(spec: WorkerSpec, job: Job, shard: int) -> None:
    """Before CUDA is touched."""
    there = tuple(slot_devices.SlotDevice(*device) for device in spec.devices)
    device = slot_devices.take(spec.slots[shard % len(spec.slots)], there)
    shared = slot_devices.sharers(len(there), slots=spec.slots_on_node) > 1
    forced = job.transport == "nccl" or job.shards > 1
    nccl.prepare(spec.host, alone=device is not None and (device.is_instance or (forced and shared)))


def _call_agent(spec: WorkerSpec) -> AgentLine:
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(spec.agent)
    line = AgentLine(agent)
    task, worker, incarnation = spec.sender
    line.say(WorkerHello(task=task, worker=worker, incarnation=incarnation, pid=os.getpid()))
    return line


def _follow(spec: WorkerSpec, job: Job, group: ShardGroup) -> int:
    """The whole life of a shard that does not lead."""
    try:
        _run(spec, job, _Pipe(group), group)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        text = clipped(f"{type(error).__name__}: {error}")
        group.tell(
            sh.ShardRaised(error=text, traceback=clipped(traceback.format_exc(limit=50), MOST_TRACEBACK))
        )
        warn(traceback.format_exc())
        return 1
    return 0


def _run(spec: WorkerSpec, job: Job, line: AgentLine | _Pipe, group: ShardGroup | None) -> None:
    """Train what the job says, or what the user's script makes."""
    if not spec.script:
        train(spec, Program.of(job), line, group)
        return
    from everstep.node import script

    script.run(spec.script, job, lambda program: train(spec, program, line, group))


def train(spec: WorkerSpec, program: Program, line: AgentLine | _Pipe, group: ShardGroup | None) -> None:
    sender, beacon_path = spec.sender, spec.beacon_path
    me = sender.worker
    job = program.job
    loader = None
    if me.stage in (0, job.stages - 1):  # forked, if at all, before there are threads and devices
        loader = Loader(program.data, ahead=job.load_ahead)
        program = replace(program, data=loader)
        if program.evaluation is not None:
            stand_by(program.evaluation.data)
    torch.set_num_threads(job.threads)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    is_leader = group is None or group.index == 0
    device = devices.pick(job.device)
    job = take_share(job, device, slot_devices.sharers(len(spec.devices), slots=spec.slots_on_node))
    program = replace(program, job=job)
    if loader is not None:
        loader.device = device
    if job.compile:
        regions.enable()
    if job.accumulate != "fp32":
        devices.exact(device)
    steering = steering_from(spec.fabric) if spec.fabric else None
    recorder = None
    if beacon_path is not None and is_leader:
        recorder = WorkerRecorder.beside(str(beacon_path), me, replicas=job.replicas, stages=job.stages)

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

    computes = ""
    if job.accumulate != "fp32":
        units = units_of(job.accumulate, late=True)
        computes = computes_with(device, has_kernels=units is None or kernels.usable(device, units.dtype))
    identity = identity_of(device, job.transport, computes=computes)
    links = Links(
        token=bytes.fromhex(spec.secret),
        host=spec.host,
        deliver=arrived,
        broken=broke,
        opened=lambda address: inbox.put(LinkOpened(address)),
        failed=inbox.put,
        empty=lambda shape, dtype: host_memory.host_empty(shape, dtype, device),
        source_port=None if steering is None else steering.ports,
        identity=identity.encode(),
        listener=None if group is None else group.listener,
    )
    waits = job.transport in ("nccl", "pipe") and sender.incarnation == 1
    courier = Courier.of(links, identity, device, deliver=deliver, failed=inbox.put, waits=waits)
    beacon = Beacon(beacon_path) if beacon_path is not None and is_leader else None
    leader = None if group is None or not is_leader else ShardLeader(group.count, group.tell, line.say)
    shards = None
    if group is not None:  # watched before it meets: a shard that ends on its way would be waited for
        _watch(group, inbox, sender, line, leader)
        mark = None if beacon_path is None else ShardMark(beacon_path, group.index)
        shards = GroupCollectives(
            group.store,
            group.index,
            group.count,
            device,
            splits_sequence=job.sequence_parallel,
            ordered=job.accumulate != "fp32" and device.type == "cuda",
            entered=lambda: entering(mark),
            left=_nothing if mark is None else mark.leaving,
        )
    states = States(
        sender,
        job,
        node=spec.node,
        memory_root=Path(spec.memory),
        secret=spec.secret,
        say=line.say if leader is None else partial(leader.report, 0),
        cut=Cut(program.model.shard_plan, 0 if group is None else group.index, job.shards),
    )
    control = WorkerControl(sender, WorkerState(me, program.rules(), incarnation=sender.incarnation))
    loop = WorkerLoop(
        control,
        lambda: program.build(me.stage, device=device, empty=courier.empty, shards=shards),
        ports=Ports(
            report=line.say if leader is None else _with_waits(line.say, beacon_path, job.shards),
            save=states.save,
            load=states.load,
            save_chunks=states.save_chunks,
            copy_chunks=states.copy_chunks,
            copy_to_memory=states.copy_to_memory,
            room=partial(room, job),
        ),
        courier=courier,
        inbox=inbox,
        beacon=beacon,
        recorder=recorder,
        loader=loader,
        faults=tuple(parse_fault(text) for text in spec.faults),
        shard=0 if group is None else group.index,
        leader=leader,
    )

    def entering(mark: ShardMark | None) -> None:
        if mark is not None:
            mark.entering()
        loop.signs.entering()

    line.where = control.where
    links.start()
    if isinstance(line, _Pipe):
        assert group is not None
        Follower(loop, inbox, group.tell).run()
        states.finish(lambda: None)
        if loader is not None:
            loader.close()
        courier.stop()
        links.stop()
        return
    flows = None if steering is None else watch_links(steering, links, lambda kind, row: None)
    line.listen(inbox)
    line.say(control.started(links.address).report)
    loop.run()
    line.over = True
    states.finish(loop.show_saving)
    if loader is not None:
        loader.close()
    if group is not None:
        group.wait()
    courier.stop()
    if flows is not None:
        flows.stop()
    links.stop()


def _nothing() -> None:
    """Nobody looks."""


def _with_waits(
    say: Callable[[WorkerReport], None], beacon: Path | None, shards: int
) -> Callable[[WorkerReport], None]:
    """What a worker reports of its times, with how long each of its shards has waited for the others."""
    if beacon is None:
        return say
    waits = GroupWaits(beacon, shards)

    def report(report: WorkerReport) -> None:
        if isinstance(report, TimesReported):
            report = replace(report, shard_waits=waits.since_the_last())
        say(report)

    return report


def _watch(
    group: ShardGroup,
    inbox: queue.SimpleQueue[Any],
    me: Sender,
    line: AgentLine | _Pipe,
    leader: ShardLeader | None,
) -> None:
    """From now on the end of any shard is the end of all."""
    if leader is None or isinstance(line, _Pipe):
        group.follow(inbox.put)
        return
    group.watch(
        partial(_heard, inbox, line, me, leader, group),
        lambda shard, how: _shard_ended(line, me, shard, how),
    )


def _heard(
    inbox: queue.SimpleQueue[Any],
    line: AgentLine,
    me: Sender,
    leader: ShardLeader,
    group: ShardGroup,
    shard: int,
    message: sh.FromShard,
) -> None:
    if isinstance(message, sh.ShardReports):
        leader.report(shard, message.report)
        return
    if not isinstance(message, sh.ShardRaised):
        inbox.put(FollowerSays(shard, message))
        return
    dead = group.first_dead(ECHO_S, but=shard)
    if dead is not None:
        return  # what was raised is the echo of another shard's end, of which its watcher tells
    line.say(raised(me, f"shard {shard}: {message.error}", where=line.where(), traceback=message.traceback))
    log.flush()
    os._exit(1)


def _shard_ended(line: AgentLine, me: Sender, shard: int, how: str) -> None:
    """A worker is all of its shards or none."""
    if line.over:
        return
    line.say(ShardEnded(task=me.task, worker=me.worker, incarnation=me.incarnation, shard=shard, how=how))
    warn(f"shard {shard} of worker {me.worker} {how}: the worker ends")
    log.flush()
    os.kill(os.getpid(), signal.SIGKILL)


class _Pipe:
    """What a shard that follows has instead of a line to the agent: its reports go through the leader."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self.where: Callable[[], str] = lambda: "starting"

    def say(self, report: WorkerReport) -> None:
        if isinstance(report, PartWritten | SaveFailed | StateFetched):
            self._group.tell(sh.ShardReports(report=report))
