"""A node of the virtual cluster: the real `core.agent` with virtual processes, a fork server and a line.

    processes ──► AgentState ──(numbered reports, kept until acknowledged)──► line ──► coordinator
        ▲             │  ▲                                                      │
        └─ spawn, kill┘  └───────────(numbered orders, heard once)──────────────┘

The line is one connection at a time. What was under way on it is lost when it is cut; then the agent opens
another one, and both sides say up to where they have heard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from everstep.core.agent import agent_messages as ag
from everstep.core.agent.agent import (
    AgentEvent,
    AgentSaid,
    AgentState,
    LeaveLine,
    LineClosed,
    LineEvent,
    LineOpened,
    OrderHeard,
    ReportsKept,
)
from everstep.core.agent.process import AgentLimits
from everstep.core.faults.detector import DetectorLimits, Glance
from everstep.drive.order_lines import OrderLine
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.messages import Sender, ShardEnded
from tests.storms.checkers import Violation
from tests.storms.network import VirtualLink
from tests.storms.others import OtherTasks, OtherWorker
from tests.storms.processes import Processes, short
from tests.storms.scene import Scene
from tests.storms.virtual_worker import VirtualWorker

LOOK_US = 8_000
# The defaults are for ops of a tenth of a second; here an op takes a millisecond.
LIMITS = DetectorLimits(
    overdue_floor_s=0.03,
    hang_floor_s=0.06,
    hang_alone_s=0.5,
    wait_floor_s=0.03,
    stall_floor_s=0.12,
    first_op_s=0.3,
    deaf_s=0.2,
    stopped_s=0.04,
)
AGENT_LIMITS = AgentLimits(finish_s=0.06, save_s=1.0, leave_s=0.06, kill_s=0.08)
TIMES_S = {"F": 0.001, "I": 0.0011, "W": 0.0009, "R": 0.0003, "U": 0.0003}


class AgentWorld(Protocol):
    """What an agent needs of the world around it."""

    def hear(self, event: msg.ClusterEvent) -> None: ...

    def connect(self, agent: VirtualAgent) -> None:
        """When it next can."""

    def acknowledged(self, agent: VirtualAgent) -> None: ...

    def started(self, agent: VirtualAgent, process: VirtualWorker) -> None: ...

    @property
    def others(self) -> OtherTasks: ...


class VirtualLine:
    """One connection. The coordinator sends on it once it knows of it."""

    def __init__(
        self, to_coordinator: Callable[[Any], None], to_agent: Callable[[Any], None], known: dict[str, int]
    ) -> None:
        """`known`: what the agent says in its hello: by task, the epoch whose facts it knows."""
        self.orders = OrderLine(known)
        self.up = VirtualLink(to_coordinator)
        self.down = VirtualLink(to_agent)
        self.is_known = False
        self.sent = 0  # the last report sent on it

    def close(self) -> None:
        self.up.close()
        self.down.close()


class VirtualAgent:
    def __init__(
        self, number: int, slots: int, world: AgentWorld, scene: Scene, processes: Processes
    ) -> None:
        self.number, self.slots, self.world, self.scene, self.processes = (
            number,
            slots,
            world,
            scene,
            processes,
        )
        self.name = f"n{number}"
        self.limits = AGENT_LIMITS
        self.boot = 1  # changes with every power cycle, and with it the numbers start again
        self.up = True
        self.heard = True  # by the coordinator, and the other way round
        self.is_silent = False  # the coordinator has noticed that it is not
        self.refused_until = 0
        self.frozen = False  # the agent's process is stopped; its workers are not
        self.lemon = 0
        self.slowness = 1
        self.struck = False  # something has gone wrong here: it may be suspected
        self._begin()

    def _begin(self) -> None:
        self.state = AgentState(detector=LIMITS, limits=self.limits)
        self.newest_term = 0  # of the coordinators heard
        self.line: VirtualLine | None = None
        self.workers: dict[Sender, VirtualWorker] = {}
        self.others: dict[Sender, OtherWorker] = {}  # of other tasks
        self._backlog: list[AgentEvent] = []
        self._alarm_us: int | None = None
        self.has_server = True
        self.misses_server = False  # the agent has heard that it is dead
        self.stuck_starts = 0  # so many processes from now on hang before they report

    @property
    def tasks(self) -> OtherTasks:
        return self.world.others

    @property
    def boot_name(self) -> str:
        return f"{self.name}-{self.boot}"

    def joined(self) -> msg.NodeJoined:
        return msg.NodeJoined(
            node=self.name, boot=self.boot_name, slots=self.slots, host=self.name, memory_port=1
        )

    def lose_power(self) -> None:
        self.up = False
        for process in list(self.workers.values()):
            if process.alive:
                self._bury(process, "its node lost power", silently=True)
        for other in self.others.values():
            other.alive = False
        if self.line is not None:
            self.line.close()

    def get_power(self) -> None:
        self.boot += 1
        self.up = self.heard = True
        self.frozen = self.is_silent = False
        self._begin()

    # -------------------------------------------------------------- the line

    def open_line(self) -> None:
        if self.line is not None:
            self.line.close()
        known = {task: facts.epoch for task, facts in self.state.processes.facts.items()}
        line = self.line = VirtualLine(self._said, self.happens, known)
        self.scene.network.send(line.up, self.joined(), self.scene.spec.weather.order_us)

    def close_line(self) -> None:
        """Both ends notice; another one is opened when that can be."""
        self.is_silent = False
        if self.line is not None:
            self.line.close()
            self.line = None
            self.happens(LineClosed())
        self.world.connect(self)

    def is_reachable(self) -> bool:
        return self.up and self.heard and not self.frozen

    def is_cut_off(self) -> bool:
        return not self.is_reachable() or self.line is None

    def hold_line(self) -> None:
        if self.line is not None:
            self.scene.network.hold(self.line.up)
            self.scene.network.hold(self.line.down)

    def release_line(self) -> None:
        """If it was declared silent: its first word makes it known again."""
        if self.is_silent:
            self.is_silent = False
            self.world.hear(self.joined())
        if self.line is not None:
            self.scene.network.release(self.line.up)
            self.scene.network.release(self.line.down)

    def send(self, message: LineEvent) -> None:
        """From the coordinator."""
        if self.line is not None and self.line.is_known:
            if isinstance(message, OrderHeard):
                message = replace(message, order=self.line.orders.shortened(message.order))
            self.scene.network.send(self.line.down, message, self.scene.spec.weather.order_us)

    def _said(self, event: msg.ClusterEvent) -> None:
        self.scene.mix(3, None)
        self.world.hear(event)

    def _speak(self) -> None:
        line = self.line
        if line is None or not self.state.reports.connected:
            return
        for kept in self.state.reports.after(line.sent):
            line.sent = kept.number
            if type(kept.report) is msg.TimesReported:
                continue  # the daemon learns from it and does not journal it
            event = msg.FromNode(
                node=self.name,
                boot=self.boot_name,
                number=kept.number,
                report=kept.report,
                sender=kept.sender,
            )
            self.scene.network.send(line.up, event, self.scene.spec.weather.order_us * self.slowness)

    # -------------------------------------------------------------- decisions

    def happens(self, event: AgentEvent, boot: int | None = None) -> None:
        if not self.up or (boot is not None and boot != self.boot):
            return
        if self.frozen:
            self._backlog.append(event)
            return
        if isinstance(event, ag.SpawnFailed):
            self.misses_server = self.misses_server or event.server_died
        actions = self.state.handle(event, self.scene.now())
        self.state.validate()
        if isinstance(event, LineOpened | LineClosed | OrderHeard | ReportsKept):
            self._check_line(event, actions)
        for action in actions:
            self._do(action)
        if self.line is not None:
            if isinstance(event, LineOpened):
                self.line.sent = event.heard
            elif isinstance(event, OrderHeard):
                self.world.acknowledged(self)
            self._speak()
        self._set_alarm()

    def _check_line(self, event: LineEvent, actions: Sequence[ag.AgentAction | LeaveLine]) -> None:
        """What a line may bring about."""
        term = self.newest_term if isinstance(event, LineClosed | AgentSaid) else event.term
        if term < self.newest_term and [type(action) for action in actions] != [LeaveLine]:
            raise Violation(
                f"one leader: {self.name} has heard term {self.newest_term} and obeys term {term}"
            )
        self.newest_term = max(self.newest_term, term)
        ordered = isinstance(event, OrderHeard)
        if not ordered and any(isinstance(action, ag.Kill | ag.PassOn) for action in actions):
            raise Violation(f"only orders end workers: the agent of {self.name} ends them at {event}")

    def be_replaced(self) -> None:
        """While it is stopped: the next agent has the record, and hears from its workers what they have said
        meanwhile. What was under way on the line to the coordinator is lost.
        """
        old, self.state = self.state, AgentState(detector=LIMITS, limits=self.limits)
        self.state.restore(json.loads(json.dumps(old.image())), self.scene.now())
        self.state.reports.restore(old.reports.after(0, at_most=1 << 30), old.reports.number)
        self.has_server, self.misses_server = True, False
        kept = (ag.ProcessSpawned, ag.SpawnFailed, ag.ProcessGreeted, ag.ProcessSpoke, ag.ProcessDied)
        self._backlog = [
            each for each in self._backlog if isinstance(each, (*kept, ag.ProcessGone, AgentSaid))
        ]

    def thaw(self) -> None:
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self.happens(event)

    def _do(self, action: ag.AgentAction | LeaveLine) -> None:
        match action:
            case ag.Spawn():
                self._check_slot(action.order)
                self._check_server(action)
                self.scene.soon(self.scene.spec.weather.start_us, self._made, action, self.boot)
            case ag.Kill(sender=sender) if sender in self.others:
                self.tasks.ends(self.others[sender], "killed by SIGKILL")
            case ag.PassOn(sender=sender, order=order) if sender in self.others:
                if (other := self.others[sender]).alive:
                    self.tasks.take(other, order)
            case ag.Kill(sender=sender):
                self.kill(self.workers[sender], "killed by SIGKILL")
            case ag.PassOn(sender=sender, order=order):
                process = self.workers.get(sender)
                if process is not None and process.alive:
                    self.processes.take(process, order)
            case ag.UseMemory(order=msg.DropCopies(before=before)):
                self.scene.memory.drop(self.name, before)
            case ag.RunChecks(order=wanted):
                found = msg.NodeChecked(results=(), because=wanted.because)
                self.scene.soon(self.scene.spec.weather.sync_us, self.happens, AgentSaid(found), self.boot)
            case ag.CheckPair(order=msg.MeasurePair() as pair):
                told = msg.PairMeasured(
                    peer=pair.peer, key=pair.key, out_mb_s=1e3, in_mb_s=1e3, answer_ms=0.1
                )
                self.scene.soon(self.scene.spec.weather.sync_us, self.happens, AgentSaid(told), self.boot)
            case ag.CheckPair():
                pass
            case ag.WorkOnDisk(order=ag.CommitWhole() as ours):  # orders to commit are never lost here
                self.happens(ag.PartialsLooked(ours.task))
            case ag.WorkOnDisk(order=asked):
                self.scene.soon(self.scene.spec.weather.sync_us, self._work_on_disk, asked, self.boot)
            case ag.ProbeFromHere(order=wanted):
                self.scene.soon(self.scene.spec.weather.hop_us, self._probed, wanted, self.boot)
            case LeaveLine():
                self.scene.agenda.after(1, self.close_line)

    def _set_alarm(self) -> None:
        due = self.state.due_at()
        if due is not None:
            at_us = max(self.scene.agenda.now_us + 1, int(due * 1e6) + 1)
            if self._alarm_us is None or at_us < self._alarm_us:
                self._alarm_us = at_us
                self.scene.agenda.at(at_us, self._alarm, at_us, self.boot)

    def _alarm(self, at_us: int, boot: int) -> None:
        if self._alarm_us == at_us and boot == self.boot:
            self._alarm_us = None
            self.happens(msg.TimePassed())

    def _work_on_disk(
        self, order: msg.FindCheckpoint | msg.CommitCheckpoint | msg.DiscardPartial, boot: int
    ) -> None:
        disk = self.scene.disk
        if self.number in self.scene.stuck_disks:
            return
        if isinstance(order, msg.FindCheckpoint) and order.live:
            looked = ev.CheckpointsLooked(search=order.search, step=disk.committed)
            self.happens(AgentSaid(msg.TaskEvent(task=order.task, event=looked)), boot)
        elif isinstance(order, msg.FindCheckpoint):
            found = msg.CheckpointFound(task=order.task, step=disk.committed, search=order.search)
            self.happens(AgentSaid(found), boot)
        elif isinstance(order, msg.CommitCheckpoint) and self.up and boot == self.boot:
            disk.committed = max(disk.committed, order.step)
            committed = ev.CheckpointCommitted(step=order.step)
            self.happens(AgentSaid(msg.TaskEvent(task=order.task, event=committed)), boot)

    def _probed(self, order: msg.ProbeLinks, boot: int) -> None:
        connections = self.processes.connections
        unreached = tuple(
            node for node in order.addresses if connections.is_cut(self.number, int(node[1:]))
        )  # where the process is gone, its machine says so
        reached = tuple(node for node in order.addresses if node not in unreached)
        said = msg.LinksProbed(task=order.task, reached=reached, unreached=unreached)
        self.happens(AgentSaid(said), boot)

    # -------------------------------------------------------------- processes

    def _check_slot(self, order: msg.StartProcess) -> None:
        """The worker that held the slot is gone, and its memory is free."""
        here: list[VirtualWorker | OtherWorker] = [*self.workers.values(), *self.others.values()]
        for process in here:
            if process.slots & slots_of(order) or process.sender[:2] == (order.task, order.worker):
                state = "lives" if process.alive else "holds its memory"
                where = f"{self.name}:{order.slot}"
                raise Violation(
                    f"one owner: {order.worker} starts in {where}, where {process.me} still {state}"
                )

    def _check_server(self, action: ag.Spawn) -> None:
        if action.fresh_server:
            self.misses_server = False
        elif self.misses_server:
            raise Violation(f"a fork server: {self.name} asks one that it knows to be dead")

    def _made(self, action: ag.Spawn, boot: int) -> None:
        if not self.up or boot != self.boot:
            return
        order = action.order
        sender = Sender(order.task, order.worker, order.incarnation)
        self.has_server = self.has_server or action.fresh_server
        if not self.has_server:
            failed = ag.SpawnFailed(sender, "the fork server was killed by SIGKILL", server_died=True)
            self.happens(failed)
            return
        if order.task in self.tasks.open:
            self.tasks.start(self, sender, slots_of(order))
            return
        process = self.workers[sender] = self.processes.start(sender, self.number)
        process.slots = slots_of(order)
        self.happens(ag.ProcessSpawned(sender))
        if not process.alive:
            return  # it was given up meanwhile
        if self.stuck_starts:
            self.stuck_starts -= 1
            self.struck = process.is_stuck = True
            self.scene.note("stuck", order.worker, f"{order.worker} hangs before it has started")
            return
        self.world.started(self, process)
        self.happens(ag.ProcessGreeted(sender))
        times = msg.TimesReported(
            task=order.task, worker=order.worker, incarnation=order.incarnation, times=TIMES_S
        )
        self.happens(ag.ProcessSpoke(sender, times))
        self.happens(ag.ProcessSpoke(sender, process.started()))
        self.scene.trigger("start", order.worker)

    def kill(self, process: VirtualWorker, reason: str) -> None:
        """SIGKILL; a process that sleeps in the kernel dies when it wakes."""
        if process.asleep:
            process.doomed = True
        elif process.alive:
            self._bury(process, reason)
            self.died(process, reason)

    def end_shard(self, process: VirtualWorker, shard: int) -> None:
        """The first shard notices, says so, and ends: a worker is all of its shards or none."""
        if process.alive and not process.leaving:
            ended = ShardEnded(
                task=process.sender.task,
                worker=process.me,
                incarnation=process.incarnation,
                shard=shard,
                how="killed by SIGKILL",
            )
            self.happens(ag.ProcessSpoke(process.sender, ended))
            process.lost_shard = 0 if process.asleep else shard
            self.kill(process, "killed by SIGKILL")

    def died(self, process: VirtualWorker | OtherWorker, reason: str) -> None:
        """It is dead; its agent notices, and later there is nothing left of it."""
        delay = self.scene.weather.spread(self.scene.spec.weather.exit_us)
        noticed = ag.ProcessDied(process.sender, reason)
        self.scene.agenda.after(delay, self.happens, noticed, self.boot)
        cleared = delay + self.scene.weather.spread(self.scene.spec.weather.clear_us)
        self.scene.agenda.after(cleared, self._gone, process, self.boot)

    def _gone(self, process: VirtualWorker | OtherWorker, boot: int) -> None:
        if boot == self.boot:
            self.workers.pop(process.sender, None)
            self.others.pop(process.sender, None)
            self.happens(ag.ProcessGone(process.sender))

    def _bury(self, process: VirtualWorker, reason: str, *, silently: bool = False) -> None:
        self.scene.num_deaths += 1
        self.scene.checkers.bad_ended |= process.is_flipped and process.incarnation == 1
        self.scene.note(
            "death", process.me, f"KILL {process.me} on {self.name} ({reason}) in {short(process.task)}"
        )
        self.processes.drop(process, silently=silently)

    def wake(self, process: VirtualWorker) -> None:
        if process.alive and process.doomed:
            process.asleep = False
            self.kill(process, "killed by SIGKILL")
        elif process.alive:
            self.processes.wake_up(process)

    def look(self, boot: int) -> None:
        """A glance at its workers, a few times in an op's patience."""
        if not self.up or boot != self.boot:
            return
        now_us = self.scene.agenda.now_us
        for process in list(self.workers.values()):
            if process.alive and not process.is_stuck:
                glance = Glance(
                    moment=process.moment,
                    step=process.worker_state.now.step,
                    busy=process.busy,
                    doing=process.doing,
                    age_s=(now_us - process.moved_us) / 1e6,
                )
                self.happens(ag.Glanced(process.sender, glance))
        self.scene.agenda.after(LOOK_US, self.look, boot)


def slots_of(order: msg.StartProcess) -> frozenset[int]:
    return frozenset((order.slot, *order.more_slots))
