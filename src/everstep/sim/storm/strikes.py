"""Carries faults out: resolves a target when its moment has come, and undoes what ends after a while."""

from __future__ import annotations

from everstep.core.words.ops import Worker
from everstep.sim.storm.faults import HERE, FaultKind, StormFault
from everstep.sim.storm.network import VirtualLink
from everstep.sim.storm.virtual_worker import VirtualWorker
from everstep.sim.storm.world import World

BREAKS_AFTER_US = 30_000  # a connection held longer than this is broken when the partition ends


class Strikes:
    def __init__(self, world: World, faults: tuple[StormFault, ...]) -> None:
        self.world = world
        self.healed = False
        self.struck: list[StormFault] = []
        self.aimed: dict[tuple[str, int], list[StormFault]] = {}
        for fault in faults:
            if fault.after:
                self.aimed.setdefault((fault.after, fault.nth), []).append(fault)
            else:
                world.agenda.at(fault.at_us, self._strike, fault, None)
        if self.aimed:
            world.on_trigger = self._trigger

    def heal(self) -> None:
        """From now on nothing new goes wrong; what is broken ends by its span, or now."""
        self.healed = True
        self.world.on_trigger = None
        self.world.slow.clear()
        for node in self.world.nodes:
            node.lemon = 0
            node.slowness = 1

    def _trigger(self, what: str, count: int, worker: Worker) -> None:
        for fault in self.aimed.pop((what, count), ()):
            self.world.agenda.after(fault.at_us, self._strike, fault, worker)

    def _strike(self, fault: StormFault, here: Worker | None) -> None:
        if self.healed or self.world.outcome is not None:
            return
        self.struck.append(fault)
        world = self.world
        world.trace.tell(world.agenda.now_us, f"FAULT {fault}")
        if fault.what is FaultKind.HEAD:
            world.head.crash(fault.span_us, before_acting=fault.target % 2 == 1)
        elif fault.what in (
            FaultKind.NODE,
            FaultKind.RACK,
            FaultKind.LEMON,
            FaultKind.LAG,
            FaultKind.PART,
            FaultKind.ONE_WAY,
            FaultKind.MUTE,
            FaultKind.DRAIN,
        ):
            self._strike_node(fault, fault.target % len(world.nodes))
        else:
            worker = self._worker(fault.target, here)
            if worker is not None:
                self._strike_worker(fault, worker)

    def _worker(self, target: int, here: Worker | None) -> Worker | None:
        if target == HERE:
            return here if here in self.world.bodies else None
        living = sorted(self.world.bodies)
        return living[target % len(living)] if living else None

    def _strike_worker(self, fault: StormFault, worker: Worker) -> None:
        world = self.world
        match fault.what:
            case FaultKind.KILL:
                world.kill(worker, "killed")
            case FaultKind.RAISE:
                world.kill(worker, "raised", raised=True)
            case FaultKind.SLOW:
                self._slow(worker, fault.factor, fault.span_us)
            case FaultKind.FLAP:
                for i in range(4):
                    world.agenda.after(
                        2 * i * (fault.span_us // 8), self._slow, worker, fault.factor, fault.span_us // 8
                    )
            case FaultKind.HANG:
                body = world.bodies[worker]
                body.hung = True
                world.agenda.after(world.spec.weather.overdue_us, self._end_hang, body)
            case _:
                self._cut(world.bodies[worker], fault)

    def _strike_node(self, fault: StormFault, number: int) -> None:
        world = self.world
        match fault.what:
            case FaultKind.NODE:
                world.lose_node(number, fault.span_us)
            case FaultKind.RACK:
                size = world.spec.nodes_per_rack
                first = number // size * size
                for n in range(first, min(first + size, len(world.nodes))):
                    world.lose_node(n, fault.span_us)
            case FaultKind.LEMON:
                world.nodes[number].lemon = 2
                world.lose_node(number, fault.span_us)
            case FaultKind.LAG:
                world.nodes[number].slowness = fault.factor
                world.agenda.after(fault.span_us, self._end_lag, number)
            case FaultKind.MUTE:
                world.mute_node(number, fault.span_us)
            case FaultKind.DRAIN:
                world.drain_node(number, fault.span_us)
            case _:
                self._partition(fault, number)

    # -------------------------------------------------------------- what lasts

    def _slow(self, worker: Worker, factor: int, span_us: int) -> None:
        if not self.healed:
            self.world.slow[worker] = factor
            self.world.agenda.after(span_us, self.world.slow.pop, worker, None)  # type: ignore[arg-type]

    def _end_lag(self, number: int) -> None:
        self.world.nodes[number].slowness = 1

    def _end_hang(self, body: VirtualWorker) -> None:
        if self.world.bodies.get(body.me) is body:
            self.world.kill(body.me, "an op was overdue")

    def _cut(self, body: VirtualWorker, fault: StormFault) -> None:
        """One of its connections breaks; the sender notices, and sends again once it is mended."""
        links = sorted(body.links)
        if links:
            peer = links[fault.target % len(links)]
            self._break(body, peer, fault.span_us)

    def _break(self, body: VirtualWorker, peer: tuple[Worker, int], mend_us: int) -> None:
        self.world.network.lose_tail(body.links[peer])
        self.world.agenda.after(mend_us, self.world._take, body, ("mend", peer))

    def _partition(self, fault: StormFault, number: int) -> None:
        """Links between this node and the others: held, then released; broken if that took too long."""
        network = self.world.network
        held: list[tuple[VirtualWorker, tuple[Worker, int], VirtualLink]] = []
        for body in [*self.world.bodies.values(), *self.world.zombies]:
            for peer, link in body.links.items():
                into = self.world.home[peer[0]] == number and body.node != number
                out_of = body.node == number and self.world.home[peer[0]] != number
                if into or (out_of and fault.what is FaultKind.PART):
                    network.hold(link)
                    held.append((body, peer, link))
        self.world.agenda.after(fault.span_us, self._reunite, held, fault.span_us > BREAKS_AFTER_US)

    def _reunite(
        self, held: list[tuple[VirtualWorker, tuple[Worker, int], VirtualLink]], broken: bool
    ) -> None:
        for body, peer, link in held:
            if broken and body.alive and peer in body.links:
                self._break(body, peer, 500)
            self.world.network.release(link)
