"""A worker's process: the engine's loop, its links, and a line to the agent that started it."""

from __future__ import annotations

import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from everstep import log
from everstep.core.worker.control import WorkerControl, raised, raised_for
from everstep.core.worker.worker_state import WorkerState
from everstep.engine import device as devices
from everstep.engine.datasets.loading import Loader, stand_by
from everstep.engine.layers import regions
from everstep.engine.layers.linear import groups_trusted
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.layers.software import computes_with
from everstep.engine.layers.trusted import rounds_without
from everstep.engine.prepare.fitting import room, take_share
from everstep.engine.prepare.program import Program
from everstep.engine.shards.collectives import Collectives, GroupCollectives
from everstep.engine.shards.marks import GroupWaits, ShardMark
from everstep.engine.sums import kernels
from everstep.engine.sums.sum_units import kept_as
from everstep.engine.telemetry.beacon import Beacon
from everstep.engine.telemetry.faults import parse_fault
from everstep.engine.telemetry.recorder import WorkerRecorder
from everstep.engine.telemetry.signs import WorkerSigns
from everstep.engine.worker.follower import Follower
from everstep.engine.worker.leader import FollowerSays, ShardLeader
from everstep.engine.worker.ports import Ports
from everstep.engine.worker.worker_loop import WorkerLoop
from everstep.errors import MOST_TRACEBACK, DeviceError, UserError, clipped, named
from everstep.forked import name_process
from everstep.job.compiling import refusal, why_unable
from everstep.job.job import Job
from everstep.job.worker_spec import WorkerSpec
from everstep.log import warn
from everstep.net import nccl
from everstep.net.plane import DataPlane, PlaneSettings
from everstep.net.sockets import allow_many_files
from everstep.node import slot_devices
from everstep.node.lifeline import Lifeline
from everstep.node.line_to_agent import AgentLine, call_agent
from everstep.node.shard_group import ShardGroup, fork
from everstep.node.stacks import answer_to_signal
from everstep.protocol import shard_messages as sh
from everstep.protocol.events import UsesKernels
from everstep.protocol.messages import (
    PartWritten,
    SaveFailed,
    Sender,
    ShardEnded,
    StateFetched,
    TimesReported,
    WorkerReport,
)
from everstep.store.state_keeper import StateKeeper
from everstep.traffic import package

# By kind of sums, where the version before sums in another way: a name, a new one with each change. The
# coordinator lets no two workers of one stage add up sums that have different names.
NEW_SUMS = {"strict40": "40 bits"}
ECHO_S = 0.5  # after a shard has ended, the others' collectives fail within this time


def main(given: Mapping[str, Any]) -> int:
    """Run the worker that a `WorkerSpec` describes; the process's exit code."""
    spec = WorkerSpec.from_dict(given)
    name_process(f"worker {spec.sender.worker}")
    allow_many_files()  # a connection each way with every peer
    try:
        job = _surrounded(Job.from_dict(spec.job))
    except UserError as error:  # the job was submitted to another version, or its folder is not here
        line = call_agent(spec)
        said = raised(spec.sender, named(error), where="starting", traceback="", raised_for=raised_for(error))
        line.say(said)
        line.finish()
        return 1
    folder = None if spec.beacon_path is None else spec.beacon_path.parent
    group = fork(job.shards, spec.bind or spec.host, folder) if job.shards > 1 else None
    if job.device.startswith("cuda"):
        _take_device(spec, job, 0 if group is None else group.index)
    if group is not None and group.index:
        return _follow(spec, job, group)
    if spec.beacon_path is not None:
        answer_to_signal(spec.beacon_path)
    if spec.lifeline is not None:
        lifeline = Lifeline(spec.lifeline)
        lifeline.hold()  # until the end
    line = call_agent(spec)
    try:
        _run(spec, job, line, group)
    except SystemExit as ended:
        line.finish()
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        if group is not None and group.first_dead(ECHO_S) is not None:
            group.wait()  # a collective failed because a shard has ended: its watcher says so, and ends all
        line.say(
            raised(
                spec.sender,
                named(error),
                where=line.where(),
                traceback=traceback.format_exc(limit=50),
                raised_for=raised_for(error),
            )
        )
        warn(traceback.format_exc())
        line.finish()
        return 1
    line.finish()
    return 0


def _surrounded(job: Job) -> Job:
    """In the job's environment and folder, from here on."""
    os.environ.update(job.environment)
    if job.workdir is None:
        return job
    job = replace(job, base=str(Path(job.base).resolve()))  # seen from where it was until now
    try:
        os.chdir(job.path(job.workdir or ""))
    except OSError as error:
        raise UserError(f"workdir {job.workdir!r} cannot be used on this node: {error.strerror}.") from None
    return job


def _take_device(spec: WorkerSpec, job: Job, shard: int) -> None:
    """Before CUDA is touched."""
    there = tuple(slot_devices.SlotDevice(*device) for device in spec.devices)
    device = slot_devices.take(spec.slots[shard % len(spec.slots)], there)
    shared = slot_devices.sharers(len(there), slots=spec.slots_on_node) > 1
    forced = job.transport == "nccl" or job.shards > 1
    nccl.prepare(
        spec.bind or spec.host, alone=device is not None and (device.is_instance or (forced and shared))
    )


def _follow(spec: WorkerSpec, job: Job, group: ShardGroup) -> int:
    """The whole life of a shard that does not lead."""
    try:
        _run(spec, job, _Pipe(group), group)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        text = clipped(named(error))
        group.tell(
            sh.ShardRaised(
                error=text,
                traceback=clipped(traceback.format_exc(limit=50), MOST_TRACEBACK),
                raised_for=raised_for(error),
            )
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
    sender, job = spec.sender, program.job
    loader = None
    if sender.worker.stage in (0, job.stages - 1):  # forked, if at all, before there are threads and devices
        loader = Loader(program.data, ahead=job.load_ahead)
        program = replace(program, data=loader)
        if program.evaluation is not None:
            stand_by(program.evaluation.data)
    device = _device_of(job)
    job = take_share(job, device, slot_devices.sharers(len(spec.devices), slots=spec.slots_on_node))
    program = replace(program, job=job)
    if loader is not None:
        loader.device = device
    shard = 0 if group is None else group.index
    traffic = None if spec.traffic is None else package().of_worker(spec.traffic, sender, spec.host, shard)
    seen = spec.beacon_path if shard == 0 else None
    recorder = None
    if seen is not None:
        recorder = WorkerRecorder.beside(str(seen), sender.worker, replicas=job.replicas, stages=job.stages)
    plane = DataPlane(
        PlaneSettings(
            secret=bytes.fromhex(spec.secret),
            host=spec.host,
            bind=spec.bind,
            device=device,
            transport=job.transport,
            net=job.net,
            computes=_computes_with(job, device),
            waits=sender.incarnation == 1,
            listener=None if group is None else group.listener,
            way=None if traffic is None else traffic.way,
        ),
        _nothing if recorder is None else recorder.got,
    )
    control = WorkerControl(
        sender, WorkerState(sender.worker, program.rules(), incarnation=sender.incarnation)
    )
    faults = tuple(map(parse_fault, spec.faults))
    beacon = None if seen is None else Beacon(seen)
    signs = WorkerSigns(control, beacon, time.monotonic_ns, faults, shard)
    leader, shards = None, None
    if group is not None:  # watched before it meets: a shard that ends on its way would be waited for
        leader = ShardLeader(group.count, group.tell, line.say) if shard == 0 else None
        _watch(group, plane.inbox, sender, line, leader)
        shards = _meet(group, spec, job, signs, device)
        refuse_other_kernels(_tried_kernels(job, device), shards, device)
    states = StateKeeper(
        sender,
        job,
        node=spec.node,
        memory_root=Path(spec.memory),
        secret=spec.secret,
        say=line.say if leader is None else partial(leader.report, 0),
        cut=Cut(program.model.shard_plan, shard, job.shards),
        slots=spec.slots_on_node,
    )
    control.state.votes.computes = plane.identity.computes
    loop = WorkerLoop(
        control,
        lambda: program.build(
            sender.worker.stage, device=device, empty=plane.empty, shards=shards, at_rest=plane.at_rest
        ),
        ports=Ports(
            report=line.say if leader is None else _with_waits(line.say, spec.beacon_path, job.shards),
            states=states,
            room=partial(room, job),
        ),
        plane=plane,
        signs=signs,
        recorder=recorder,
        loader=loader,
        leader=leader,
    )
    line.where = control.where
    plane.start()
    if traffic is not None:
        traffic.start(plane.links)
    if isinstance(line, _Pipe):
        assert group is not None
        Follower(loop, plane.inbox, group.tell).run()
        states.finish(lambda: None)
    else:
        line.listen(plane.inbox)
        uses = UsesKernels(device=devices.name_of(device), without=_tried_kernels(job, device))
        line.say(control.started(plane.links.address, NEW_SUMS.get(job.sums, ""), uses).report)
        loop.run()
        line.over = True
        states.finish(loop.show_saving)
    if traffic is not None:
        traffic.stop()
    if loader is not None:
        loader.close()
    if group is not None and shard == 0:
        group.wait()
    plane.stop()


def _device_of(job: Job) -> torch.device:
    torch.set_num_threads(job.threads)
    device = devices.pick(job.device)
    if job.compiles:
        if unable := why_unable(device.type):
            raise UserError(refusal(unable))
        if device.type == "cpu":  # the compiler would ask each GPU what it is: half a GiB of its memory
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        regions.enable()
    if job.accumulate != "fp32":
        devices.exact(device)
    return device


def _computes_with(job: Job, device: torch.device) -> str:
    """What the worker's bits depend on; empty: on the order of its sums as well."""
    if job.accumulate == "fp32":
        return ""
    found = computes_with(device, without=_tried_kernels(job, device))
    return f"{found}, sums of 40 bits" if job.sums == "strict40" else found  # not so before version 0.2


def _tried_kernels(job: Job, device: torch.device) -> tuple[str, ...]:
    """Those that round in their own way and are not trusted here. All are tried before any peer hears of this
    worker.
    """
    if job.accumulate == "fp32" or device.type != "cuda":
        return ()
    if (kept := kept_as(job.sums, late=True)) is not None:
        kernels.usable(device, *kept)
    if job.precision == "bf16":
        groups_trusted(device)
    return rounds_without(device)


def refuse_other_kernels(without: tuple[str, ...], shards: Collectives, device: torch.device) -> None:
    """Of a worker's shards only the first one says what it uses."""
    mine = torch.tensor([crc32(repr(without).encode())], device=device)
    if any(not torch.equal(mine, other) for other in shards.gather(mine)):
        said = f"does not use {' and '.join(without)}" if without else "uses all"
        raise DeviceError(
            f"the shards of this worker do not use the same fast kernels: shard {shards.index} {said}"
        )


def _meet(
    group: ShardGroup, spec: WorkerSpec, job: Job, signs: WorkerSigns, device: torch.device
) -> GroupCollectives:
    """All shards of the worker are here."""
    mark = None if spec.beacon_path is None else ShardMark(spec.beacon_path, group.index)

    def inside(is_inside: bool) -> None:
        if mark is not None:
            (mark.entering if is_inside else mark.leaving)()
        if is_inside:
            signs.entering()

    return GroupCollectives(
        group.store,
        group.index,
        group.count,
        device,
        ordered=job.accumulate != "fp32" and device.type == "cuda",
        inside=inside,
    )


def _nothing(*args: object) -> None:
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
    line.say(
        raised(
            me,
            f"shard {shard}: {message.error}",
            where=line.where(),
            traceback=message.traceback,
            raised_for=message.raised_for,
        )
    )
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
