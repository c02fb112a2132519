"""Carries faults out: resolves a target when its moment has come, and undoes what ends after a while."""

from __future__ import annotations

from everstep.protocol.ops import Worker
from everstep.protocol.work import PeerAddress
from tests.storms.cluster_world import ClusterWorld
from tests.storms.connections import ShardEnd, ends
from tests.storms.faults import HERE, WHO_WORKERS, FaultKind, StormFault
from tests.storms.network import VirtualLink
from tests.storms.virtual_agent import VirtualAgent
from tests.storms.virtual_worker import VirtualWorker
from tests.storms.world import World

BREAKS_AFTER_US = 30_000  # a connection held longer than this is broken when the partition ends


class Strikes:
    def __init__(self, world: World | ClusterWorld, faults: tuple[StormFault, ...]) -> None:
        self.world, self.scene, self.processes = world, world.scene, world.processes
        self.healed = False
        self.struck: list[StormFault] = []
        self.aimed: dict[tuple[str, int], list[StormFault]] = {}
        for fault in faults:
            if fault.after:
                self.aimed.setdefault((fault.after, fault.nth), []).append(fault)
            else:
                self.scene.agenda.at(fault.at_us, self._strike, fault, None)
        if self.aimed:
            self.scene.on_trigger = self._trigger

    def heal(self) -> None:
        """From now on nothing new goes wrong; what is broken ends by its span, or now."""
        self.healed = True
        self.scene.on_trigger = None
        self.processes.slow.clear()
        for node in self.world.nodes:
            node.lemon = 0
            node.slowness = 1
            if isinstance(node, VirtualAgent):
                node.stuck_starts = 0
        self.scene.stuck_disks.clear()
        self.processes.connections.cut_nodes.clear()
        self.scene.memory.unmute_all()

    def _trigger(self, what: str, count: int, worker: Worker) -> None:
        for fault in self.aimed.pop((what, count), ()):
            self.scene.agenda.after(fault.at_us, self._strike, fault, worker)

    def _strike(self, fault: StormFault, here: Worker | None) -> None:
        if self.healed or self.scene.outcome is not None:
            return
        self.struck.append(fault)
        if self.scene.trace.lines is not None:
            self.scene.trace.tell(self.scene.agenda.now_us, f"FAULT {fault}")
        if fault.what is FaultKind.HEAD:
            self.world.head.crash(fault.span_us, before_acting=fault.target % 2 == 1)
        elif fault.what is FaultKind.ELECT:
            assert isinstance(self.world, ClusterWorld)
            self.world.lines.elect(fault.span_us)
        elif fault.what is FaultKind.DEAF:
            assert isinstance(self.world, ClusterWorld)
            self.world.deafen(fault.span_us, to_all=fault.is_of_all)
        elif fault.what in WHO_WORKERS:
            worker = self._worker(fault.target, here)
            if worker is not None:
                self._strike_worker(fault, worker)
        else:
            number = fault.target % len(self.world.nodes)
            bad = {process.node for process in self.world.workers.values() if self._is_bad(process)}
            if not bad.intersection(self._rack(number)):
                self._strike_node(fault, number)

    def _is_bad(self, process: VirtualWorker) -> bool:
        """A machine that computes wrong numbers must live, or no vote could find it."""
        return self.scene.checkers.bad is not None and process.is_flipped and process.incarnation == 1

    def _worker(self, target: int, here: Worker | None) -> Worker | None:
        living = sorted(
            worker
            for worker, process in self.world.workers.items()
            if process.alive and not self._is_bad(process)
        )
        if target == HERE:
            return here if here in living else None
        return living[target % len(living)] if living else None

    def _strike_worker(self, fault: StormFault, worker: Worker) -> None:
        world, process = self.world, self.world.workers[worker]
        match fault.what:
            case FaultKind.KILL:
                world.kill(worker, "killed")
            case FaultKind.SHARD:
                assert isinstance(world, ClusterWorld), "shards need agents"
                world.kill_shard(worker, fault.target)
            case FaultKind.RAISE:
                world.kill(worker, "raised", raised=True)
            case FaultKind.SLOW:
                self._slow(worker, fault.factor, fault.span_us)
            case FaultKind.FLAP:
                for i in range(4):
                    self.scene.agenda.after(
                        2 * i * (fault.span_us // 8), self._slow, worker, fault.factor, fault.span_us // 8
                    )
            case FaultKind.HANG:
                world.hang(worker, asleep=False)
            case FaultKind.SLEEP:
                world.hang(worker, asleep=True)
            case _:
                self._break_one(process, fault)

    def _strike_node(self, fault: StormFault, number: int) -> None:
        world = self.world
        match fault.what:
            case FaultKind.NODE:
                world.lose_node(number, fault.span_us)
            case FaultKind.RACK:
                for n in self._rack(number):
                    world.lose_node(n, fault.span_us)
            case FaultKind.STAGE:
                stage = fault.target % self.world.spec.rules.stages
                living = [p for w, p in sorted(world.workers.items()) if w.stage == stage and p.alive]
                for process in living[1:]:
                    world.lose_node(process.node, fault.span_us)
            case FaultKind.LEMON:
                world.nodes[number].lemon = 2
                world.lose_node(number, fault.span_us)
            case FaultKind.LAG:
                world.nodes[number].slowness = fault.factor
                self.scene.agenda.after(fault.span_us, self._end_lag, number)
            case FaultKind.MUTE:
                world.mute_node(number, fault.span_us)
            case FaultKind.PART | FaultKind.ONE_WAY:
                self._partition(fault, number)
            case _:
                assert isinstance(world, ClusterWorld), f"{fault.what} needs agents"
                self._strike_agent(world, fault, number)

    def _rack(self, number: int) -> range:
        """The nodes beside this one."""
        size = self.world.spec.nodes_per_rack
        first = number // size * size
        return range(first, min(first + size, len(self.world.nodes)))

    def _strike_agent(self, world: ClusterWorld, fault: StormFault, number: int) -> None:
        match fault.what:
            case FaultKind.DRAIN:
                world.drain_node(number, fault.span_us)
            case FaultKind.FREEZE:
                world.lines.cut(number, fault.span_us, frozen=True)
            case FaultKind.REPLACE:
                world.lines.cut(number, fault.span_us, frozen=True, replaced=True)
            case FaultKind.SERVER:
                world.kill_fork_server(number)
            case FaultKind.REFUSE:
                world.lines.refuse(number, fault.span_us)
            case FaultKind.START:
                world.nodes[number].stuck_starts += 1
            case FaultKind.DISK:
                self.scene.stuck_disks.add(number)
                self.scene.num_stuck_disks += 1
                self.scene.agenda.after(fault.span_us, self.scene.stuck_disks.discard, number)
            case FaultKind.NOTICE:
                for n in self._rack(number):
                    world.announce(n, fault.span_us)
            case FaultKind.DATA:
                world.nodes[number].struck = True
                self.processes.connections.cut_node(number)
            case FaultKind.UNREAD:
                self.scene.memory.mute(f"n{number}")
                self.scene.agenda.after(fault.span_us, self.scene.memory.unmute, f"n{number}")

    # -------------------------------------------------------------- what lasts

    def _slow(self, worker: Worker, factor: int, span_us: int) -> None:
        if not self.healed:
            self.processes.slow[worker] = factor
            self.scene.agenda.after(span_us, self.processes.slow.pop, worker, None)  # type: ignore[arg-type]

    def _end_lag(self, number: int) -> None:
        self.world.nodes[number].slowness = 1

    def _break_one(self, process: VirtualWorker, fault: StormFault) -> None:
        """One of its connections breaks, or swallows what is sent on it."""
        links = [(address, end) for end in ends(process) for address in sorted(end.links)]
        if not links:
            return
        address, end = links[fault.target % len(links)]
        self._suspect(end.node, end.links[address].node)
        if fault.what is FaultKind.HOLE:
            self.processes.connections.swallow(end, address)
        else:
            self.processes.connections.break_link(end, address, fault.span_us)

    def _partition(self, fault: StormFault, number: int) -> None:
        """Connections between this node and the others: held, then released; broken if that took too long."""
        network = self.scene.network
        held: list[tuple[ShardEnd, PeerAddress, VirtualLink]] = []
        one_way = fault.what is FaultKind.ONE_WAY

        def hold(process: ShardEnd, there: VirtualWorker, link: VirtualLink) -> None:
            into = link.node == number and process.node != number
            out_of = process.node == number and link.node != number
            if into or (out_of and not one_way):
                network.hold(link)
                held.append((process, there.address, link))

        for process in [end for one in self.processes.living.values() for end in ends(one)]:
            for address, link in process.links.items():
                if address in self.processes.living:
                    hold(process, self.processes.living[address], link)
        self._suspect(*range(len(self.world.nodes)))
        self.processes.connections.partitions.append(hold)
        self.scene.agenda.after(fault.span_us, self._reunite, hold, held, fault.span_us > BREAKS_AFTER_US)

    def _reunite(
        self, hold: object, held: list[tuple[ShardEnd, PeerAddress, VirtualLink]], broken: bool
    ) -> None:
        self.processes.connections.partitions.remove(hold)  # type: ignore[arg-type]
        for process, address, link in held:
            if broken and process.alive and process.links.get(address) is link:
                self.processes.connections.break_link(process, address, 0)
            self.scene.network.release(link)

    def _suspect(self, *numbers: int) -> None:
        """Links of these nodes are broken on purpose: who is isolated for that is no false alarm."""
        if isinstance(self.world, ClusterWorld):
            for number in numbers:
                self.world.nodes[number].struck = True
