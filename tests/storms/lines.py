"""The lines between agents and the coordinator: cut, held, refused, opened again; who is missed, and when.

A line that is cut for a short while delivers everything later; after a longer cut it is closed, and another
one is opened. A coordinator that is deposed may not know it: for a while it answers agents that know better.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from everstep.core.agent.agent import LineOpened, OrderHeard
from everstep.core.cluster.coordinator import Coordinator
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from tests.storms.scene import Scene
from tests.storms.virtual_agent import VirtualAgent
from tests.storms.virtual_coordinator import VirtualCoordinator

SHORT_CUT_US = 8_000  # a line cut for longer is closed, and another one opened


class LineEnds(Protocol):
    """What lines connect."""

    scene: Scene
    nodes: list[VirtualAgent]
    head: VirtualCoordinator[msg.ClusterEvent, msg.ClusterAction]

    @property
    def coordinator(self) -> Coordinator: ...

    def hear(self, event: msg.ClusterEvent) -> None: ...


class Lines:
    def __init__(self, world: LineEnds) -> None:
        self.world, self.scene, self.weather = world, world.scene, world.scene.spec.weather
        self.all_back_us = 0  # when the last line that was cut or refused is back

    # -------------------------------------------------------------- opened

    def connect(self, agent: VirtualAgent) -> None:
        """When it next can."""
        if self.world.head.up and agent.is_reachable():
            delay = self.scene.weather.spread(self.weather.order_us)
            delay = max(delay, agent.refused_until - self.scene.agenda.now_us)
            self.scene.agenda.after(delay, self._reconnect, agent, agent.boot)

    def _reconnect(self, agent: VirtualAgent, boot: int) -> None:
        """If it is not connected, and can be."""
        if not agent.is_reachable() or agent.boot != boot or agent.line is not None or not self.world.head.up:
            return
        if self.scene.agenda.now_us < agent.refused_until:
            self.connect(agent)
        else:
            agent.open_line()

    def coordinator_turned(self) -> None:
        """Connections die with the coordinator; each agent opens another one when there is one again."""
        for agent in self.world.nodes:
            if agent.is_reachable():
                agent.close_line()
            elif agent.line is not None:
                agent.line.is_known = False

    # -------------------------------------------------------------- broken

    def cut_together(self, numbers: Iterable[int], span_us: int) -> None:
        """A coordinator looks at all nodes with one patience: those that are cut off at one moment are found
        silent within a heartbeat, however long that takes.
        """
        silence = self.scene.weather.spread(self.weather.silence_us)
        for number in numbers:
            heartbeat = self.scene.weather.spread(self.weather.silence_us // 10)
            self.cut(number, span_us, silence_us=silence + min(heartbeat, self.weather.silence_us // 2))

    def cut(
        self,
        number: int,
        span_us: int,
        *,
        frozen: bool = False,
        replaced: bool = False,
        silence_us: int | None = None,
    ) -> None:
        """The line is cut, or, `frozen`, the agent's process is stopped; workers keep training. `replaced`:
        it is killed instead, and another one comes. `silence_us`: until that is noticed.
        """
        agent = self.world.nodes[number]
        if not agent.is_reachable():
            return
        agent.struck = True
        agent.frozen, agent.heard = frozen, frozen
        what = f"the agent of {agent.name} is stopped" if frozen else f"the line to {agent.name} is cut"
        what = f"the agent of {agent.name} is gone" if replaced else what
        self.scene.note("mute", Worker(number, 0), f"{what} for {span_us / 1e3:g} ms")
        agent.hold_line()
        self.watch_silence(agent, span_us, silence_us)
        self.all_back_us = max(self.all_back_us, self.scene.agenda.now_us + span_us)
        self.scene.agenda.after(span_us, self._returns, agent, agent.boot, span_us, replaced)

    def _returns(self, agent: VirtualAgent, boot: int, span_us: int, replaced: bool = False) -> None:
        if agent.boot != boot or not agent.up:
            return
        frozen, agent.heard = agent.frozen, True
        held = agent.line is not None and agent.line.is_known and (frozen or span_us < SHORT_CUT_US)
        if replaced:
            held = False
            agent.be_replaced()
        if held:
            agent.release_line()
        if frozen:
            agent.thaw()
        if not held:
            agent.close_line()

    def refuse(self, number: int, span_us: int) -> None:
        """The coordinator does not let this agent in: a wrong token, another agent of its name."""
        agent = self.world.nodes[number]
        self.scene.note("refuse", Worker(number, 0), f"{agent.name} is refused for {span_us / 1e3:g} ms")
        agent.refused_until = self.scene.agenda.now_us + span_us
        self.all_back_us = max(self.all_back_us, agent.refused_until)
        if agent.is_reachable():
            agent.struck = True
            agent.close_line()
            self.watch_silence(agent, span_us)

    def watch_silence(self, agent: VirtualAgent, span_us: int, silence_us: int | None = None) -> None:
        silence = self.scene.weather.spread(self.weather.silence_us) if silence_us is None else silence_us
        if silence < span_us:
            self.scene.agenda.after(silence, self._fell_silent, agent, agent.boot, silence)

    def _fell_silent(self, agent: VirtualAgent, boot: int, silence_us: int) -> None:
        if agent.boot == boot and agent.is_cut_off():
            agent.is_silent = True
            self.world.hear(msg.NodeFellSilent(node=agent.name, silent_s=silence_us / 1e6))

    # -------------------------------------------------------------- two coordinators

    def elect(self, span_us: int) -> None:
        """Another coordinator takes over. The old one does not know it; after a while agents reach it once
        more, and it repeats the orders that it has no answer to.
        """
        head = self.world.head
        if not head.up:
            return
        term = head.life
        known = {
            agent.number: (agent.boot, node.heard, tuple(node.pending))
            for agent in self.world.nodes
            if (node := self.world.coordinator.nodes.get(agent.name)) is not None
        }
        head.elect(span_us)
        for number, (boot, heard, orders) in known.items():
            agent = self.world.nodes[number]
            self.scene.soon(2 * self.weather.order_us, self._reach_the_old, agent, boot, term, heard, orders)

    def _reach_the_old(
        self, agent: VirtualAgent, boot: int, term: int, heard: int, orders: tuple[msg.Dispatch, ...]
    ) -> None:
        """Only an agent that has heard the new one: to the others this is still their coordinator's line."""
        if agent.is_reachable() and agent.boot == boot and agent.newest_term > term:
            agent.happens(LineOpened(term, heard))
            for order in orders:
                agent.happens(OrderHeard(order.number, order.order, term))
