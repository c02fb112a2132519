"""A coordinator with a fleet of virtual agents: thousands of workers, no torch, no sockets, one process.

The machine, its driver, its record, its scheduler and its planner are the real ones. An agent here answers at
once, and a worker says what a coordinator must hear of one: it has started, its ledger (half of its step is
done), it runs again. What is measured is what a daemon's event loop would be busy with:

    one event    its journal entry is packed, it is decided, recorded, learned from, and its orders are queued

Encoding an order is counted apart, because the writer of each connection does it; so are scheduler and
planner, which have threads. Times are CPU seconds of this process: they do not count what others do.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import thaw
from everstep.core.faults.detector import Heartbeats
from everstep.drive.order_lines import FactTexts, OrderLine
from everstep.drive.ports import ClusterDriver, ClusterPorts, HandledEvent
from everstep.drive.thinking import Thinking
from everstep.plan.ask import think
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.server.record import ClusterRecord
from everstep.server.term import collect_new, pack, unpack
from harness.crew import Actor, Crew

TASK = "t"
JOB: dict[str, Any] = {"job": "a job of usual size", "model": {"layers": 8}, "data": {"seed": 1}}


@dataclass(slots=True)
class Busy:
    """What the loop was busy with while something was measured."""

    events: list[tuple[str, float]] = field(default_factory=list)  # its name, CPU seconds
    num_orders: int = 0
    order_bytes: int = 0
    largest_order: int = 0
    encode_s: float = 0.0
    think_s: float = 0.0
    largest_entry: int = 0

    @property
    def slowest(self) -> tuple[str, float]:
        return max(self.events, key=lambda one: one[1])

    def row(self) -> dict[str, Any]:
        name, worst = self.slowest
        return {
            "events": len(self.events),
            "p50_ms": round(1e3 * statistics.median(took for _, took in self.events), 3),
            "max_ms": round(1e3 * worst, 1),
            "slowest": name,
            "total_s": round(sum(took for _, took in self.events), 2),
            "orders": self.num_orders,
            "order_mb": round(self.order_bytes / 1e6, 2),
            "largest_order_kb": round(self.largest_order / 1e3, 1),
            "encode_s": round(self.encode_s, 2),
            "schedule_s": round(self.think_s, 2),
            "largest_entry_kb": round(self.largest_entry / 1e3, 1),
        }


class Fleet:
    def __init__(self, *, planned: bool = True, memory_port: int = 9) -> None:
        self.machine = Coordinator(planned=planned)
        self.memory_port = memory_port
        self.thinking = Thinking()
        self.record = ClusterRecord(say=lambda line: None)
        self.record.begin(self.machine, Heartbeats(patience_s=1.0), 0, None)
        self.now = 1000.0
        self.crew = Crew(self._says, clock=self.time, half_done=True)
        self.cut: set[str] = set()  # nodes that neither hear nor say anything
        self.entries: list[bytes] = []  # the journal
        self.busy = Busy()
        self._numbers: dict[str, int] = {}
        self._lines: dict[str, OrderLine] = {}  # by node
        self._facts = FactTexts()
        self._events: deque[tuple[str, Callable[[], None]]] = deque()
        self._orders: list[msg.Dispatch] = []
        self._ports = ClusterPorts(self, self, self.record)
        self._driver = self._new_driver(0)

    def _new_driver(self, number: int) -> ClusterDriver:
        return ClusterDriver(
            self.machine,
            clock=self,
            store=self,
            port=self._take,
            time_passed=msg.TimePassed(),
            last=Moment(self.now, number),
        )

    # -------------------------------------------------------------- what a script does

    def join(self, nodes: int, slots: int = 8, *, first: int = 0) -> Busy:
        for number in range(first, first + nodes):
            name = f"n{number:05d}"
            self._numbers[name] = 0
            self.hear(
                msg.NodeJoined(
                    node=name, boot="1", slots=slots, host="10.0.0.1", memory_port=self.memory_port
                )
            )
        return self.settle()

    def submit(self, shape: Shape, *, steps: int = 1000, task: str = TASK) -> Busy:
        """Until it trains."""
        self.hear(msg.TaskSubmitted(task=task, job=JOB, shape=shape, steps=steps, secret="s" * 32))
        return self.settle()

    def exits(self, worker: Worker, reason: str = "killed by SIGKILL") -> Busy:
        self.crew.ends(TASK, worker, reason)
        return self.settle()

    def falls_silent(self, names: Iterable[str]) -> Busy:
        for name in names:
            self.cut.add(name)
            self.hear(msg.NodeFellSilent(node=name, silent_s=1.0))
        return self.settle()

    def waits(self, workers: Sequence[Worker], *, seconds: float = 1.5, busy: bool = False) -> Busy:
        """These report that they wait for what they need, or that an op takes long."""
        for worker in workers:
            one = self.crew.actors[TASK, worker]
            overdue = msg.OpOverdue(
                task=TASK,
                worker=worker,
                incarnation=one.incarnation,
                doing=f"{worker.stage}F{worker.replica}.0",
                busy=busy,
                stopped=False,
                elapsed_s=seconds,
                expected_s=0.1,
                step=one.step,
            )
            self.crew.reports(TASK, worker, overdue)
        return self.settle()

    def seal(self) -> Busy:
        """Every stage seals the step it is in; every microbatch has a loss."""
        task = self.machine.tasks[TASK]
        assert task.recovery is not None
        shape, step = task.shape, task.recovery.recorded + 1
        total = shape.replicas * shape.microbatches
        for stage in range(shape.stages):
            worker = next(w for w, one in self.workers.items() if w.stage == stage and not one.joining)
            is_last = stage == shape.stages - 1
            sealed = ev.StepSealed(
                step=step,
                stage=stage,
                attempt=task.recovery.attempt_of(step),
                microbatches=total,
                executed=3 * total,
                losses=tuple((m, 2.5 + m.number / 64) for m in shape.all_microbatches()) if is_last else (),
                sum_of_squares=1.0,
            )
            self.crew.says(TASK, worker, sealed)
        for one in self.workers.values():
            one.step = one.step if one.joining else step + 1
        return self.settle()

    def pass_time(self, seconds: float) -> Busy:
        self.now += seconds
        self._events.append(("look at the clock", self._driver.look_at_clock))
        return self.settle()

    def restart(
        self, *, snapshot: str = "", after: int = 0, upto: int | None = None
    ) -> tuple[Coordinator, Busy]:
        """A new coordinator reads the journal: one event is the decoding and the handling of one entry.
        `snapshot`: of the state after entry `after`, which is where it begins.
        """
        before, self.machine = self.machine, Coordinator(planned=True)
        self.thinking, self.busy = Thinking(), Busy()
        if snapshot:
            began = time.process_time()
            thaw(self.machine, json.loads(snapshot))
            self.busy.events.append(("snapshot", time.process_time() - began))
        self.record.begin(self.machine, Heartbeats(patience_s=1.0), 0, None)
        driver = self._new_driver(after)
        for body in self.entries[after:upto]:
            began = time.process_time()
            at, event = unpack(body)
            driver.replay([(at, event)])
            self.busy.events.append((_name(event), time.process_time() - began))
        began = time.process_time()
        driver.resume()
        self.busy.events.append(("resume", time.process_time() - began))
        self._count_orders()
        found, self.busy, self.machine = self.busy, Busy(), before
        return driver.machine, found  # type: ignore[return-value]

    # -------------------------------------------------------------- the loop

    def hear(self, event: msg.ClusterEvent) -> None:
        self._events.append((_name(event), lambda: self._driver.hear(event)))

    def settle(self) -> Busy:
        """Until nothing happens any more: what the loop was busy with."""
        while self._events or self._orders:
            if self._events:
                name, happen = self._events.popleft()
                thought_s = self.busy.think_s
                began = time.process_time()
                happen()
                took = time.process_time() - began - (self.busy.think_s - thought_s)
                self.busy.events.append((name, took))
            for action in self._count_orders():
                if action.node not in self.cut:
                    self.machine.acknowledged(action.node, action.number)
                    self.crew.obey(action.node, action.order)
        found, self.busy = self.busy, Busy()
        collect_new()  # an idle moment
        return found

    def _count_orders(self) -> list[msg.Dispatch]:
        orders, self._orders = self._orders, []
        busy = self.busy
        began = time.process_time()
        for action in orders:
            line = self._lines.setdefault(action.node, OrderLine({}))
            size = len(line.text(action, self._facts, term=0))
            busy.order_bytes += size
            busy.largest_order = max(busy.largest_order, size)
        busy.encode_s += time.process_time() - began
        busy.num_orders += len(orders)
        return orders

    # -------------------------------------------------------------- the driver's ports

    def time(self) -> float:
        return self.now

    def wake_at(self, when: float) -> None:
        """`pass_time` looks at the clock."""

    def write(self, entries: Sequence[tuple[float, msg.ClusterEvent]], done: Callable[[], None]) -> None:
        for at, event in entries:
            body = pack(event, at)
            self.entries.append(body)
            self.busy.largest_entry = max(self.busy.largest_entry, len(body))
        done()

    def _take(self, one: HandledEvent) -> None:
        self._ports.take(one)
        self.thinking.handled(one, self.machine)
        self.now += 1e-6

    def send(self, action: msg.Dispatch) -> None:
        self._orders.append(action)

    def received(self, node: str, number: int) -> None:
        """Nothing is sent again here."""

    def think(self, action: msg.Think) -> None:
        began = time.process_time()
        events = self.thinking.answer(self.machine, action)
        self.busy.think_s += time.process_time() - began
        for event in events:
            self.hear(event)

    def choose(self, action: msg.ChooseAssignment) -> None:
        """As in a daemon: several changes at once are one question, and a thread thinks about it."""

        def ask() -> None:
            if action.version != self.machine.version:
                return
            asked, thought = self.thinking.question(self.machine, self.now), None
            if asked is not None:
                began = time.process_time()
                thought = think(asked)
                self.busy.think_s += time.process_time() - began

            def answer() -> None:
                if action.version == self.machine.version:
                    self.hear(self.thinking.chosen(self.machine, action, thought, self.now))

            self._events.append(("answer", answer))

        self._events.append(("ask", ask))

    # -------------------------------------------------------------- agents and workers

    @property
    def workers(self) -> dict[Worker, Actor]:
        return {worker: actor for (_, worker), actor in self.crew.actors.items()}

    def _says(self, node: str, report: msg.NodeReport, sender: msg.Sender | None) -> None:
        if node not in self.cut:
            self._numbers[node] += 1
            number = self._numbers[node]
            self.hear(msg.FromNode(node=node, boot="1", number=number, report=report, sender=sender))


def _name(event: object) -> str:
    match event:
        case msg.FromNode(report=msg.TaskEvent(event=inner)):
            return type(inner).__name__
        case msg.FromNode(report=report):
            return type(report).__name__
        case msg.PlanAnswered(event=inner):
            return type(inner).__name__
        case _:
            return type(event).__name__


# ------------------------------------------------------------------ what a task costs, by its size

STAGES = 8
SLOTS = 8  # per node
NUM_SILENT = 16
MOST_BYTES = 3 << 10  # of orders, per worker and death
SCENES = ("submit", "seat", "death", "node", "silent", "restart")


def budget_ms(workers: int) -> float:
    return 100.0 if workers <= 4096 else 500.0


def measure(workers: int, scenes: tuple[str, ...] = SCENES) -> Iterator[dict[str, Any]]:
    """Rows, in the order of the scenes: each one begins where the one before has ended."""
    fleet = Fleet()
    fleet.join(workers // SLOTS + NUM_SILENT + 2, SLOTS)
    submitted = fleet.submit(Shape(workers // STAGES, STAGES, 4))
    seating = [event for event in submitted.events if event[0] == "TaskSubmitted"]
    fleet.seal()
    acts: dict[str, Callable[[], Busy]] = {
        "submit": lambda: submitted,
        "seat": lambda: Busy(events=seating),
        "death": lambda: fleet.exits(Worker(workers // STAGES // 2, 3)),
        "node": lambda: _lose(fleet, 1),
        "silent": lambda: _lose(fleet, min(NUM_SILENT, workers // SLOTS // 4)),
        "restart": lambda: fleet.restart()[1],
    }
    for scene in scenes:
        found = acts[scene]()
        row = found.row()
        yield {
            "workers": workers,
            "scene": scene,
            **{name: row[name] for name in ("events", "p50_ms", "max_ms", "slowest", "total_s", "order_mb")},
            "entry_kb": row["largest_entry_kb"],
            "order_bytes_per_worker": round(found.order_bytes / workers),
            "encode_s": row["encode_s"],
            "schedule_s": row["schedule_s"],
            # A restart is read with pauses in between; what it must not do is take long as a whole.
            "within_budget": scene == "restart" or row["max_ms"] <= budget_ms(workers),
        }
        if scene not in ("submit", "seat", "restart"):
            fleet.seal()


def _lose(fleet: Fleet, number: int) -> Busy:
    """So many nodes fall silent; then a worker of every other node says that it waits."""
    nodes = sorted({one.node for one in fleet.workers.values()})
    lost = set(nodes[:: max(1, len(nodes) // number)][:number])
    busy = fleet.falls_silent(sorted(lost))
    left = [worker for worker, one in fleet.workers.items() if one.node not in lost]
    fleet.crew.lose(*lost)
    _add(busy, fleet.waits(left))
    for _ in range(4):  # those that no peer misses are given up by their timers
        _add(busy, fleet.pass_time(10.0))
    return busy


def _add(busy: Busy, more: Busy) -> None:
    busy.events += more.events
    busy.num_orders += more.num_orders
    busy.order_bytes += more.order_bytes
    busy.largest_order = max(busy.largest_order, more.largest_order)
    busy.largest_entry = max(busy.largest_entry, more.largest_entry)
    busy.encode_s += more.encode_s
    busy.think_s += more.think_s


if __name__ == "__main__":  # python -m tests.core.fleet 64 512 4096
    for size in map(int, sys.argv[1:]):
        for row in measure(size):
            print(row, flush=True)
