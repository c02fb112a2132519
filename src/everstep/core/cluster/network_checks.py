"""Is it this node's network? Nodes measure each other in pairs, each with at least two others (C4's way).

A pair that is bad does not tell which of its two nodes is to blame. Another pairing does: a node that is bad
with every peer, one of which is good with others, is the one that all bad pairs have in common.

    a ── b  bad        a ── c  bad        c ── d  good        a is named; b is bad with nobody else

    checking    gets no workers until two pairs are measured, or `MOST_S` are over; it takes `GATHER_S` at
                least, so that nodes that join at the same time are compared with each other
    up          serves as a peer, one pair at a time; where that pair is bad it is paired again
    compared    a link between two nodes is slow: both are measured with a third one, beside their workers

Bad: no connection, other bytes, less than a quarter of the usual rate (a tenth, if one of them has workers),
or answers that take four times as long. What is usual is the median over the nodes, where `LEAST_KNOWN` are
known. Bad with one peer only is written down and keeps no node out.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from everstep.core.cluster.node import Node, NodePair
from everstep.core.cluster.node_states import NodeAdmin, NodeLiveness
from everstep.core.cluster.orders import Actions, Orders
from everstep.core.cluster.policy import CoordinatorPolicy
from everstep.core.cluster.roster import Roster
from everstep.core.faults.fitness import Fitness
from everstep.protocol import messages as msg
from everstep.protocol.moment import Moment

GATHER_S = 2.0
PAIR_S = 8.0  # for the answer of the node that measures
MOST_S = 16.0
PAIRS, MOST_PAIRS = 2, 4
SLOW, SLOW_BESIDE_WORKERS = 0.25, 0.1  # of the usual rate
LATE, LATE_MS = 4.0, 10.0  # times as long as usual, and so much longer
RESENT = 0.02  # of all packets
CLOCK_S = 1.0
LEAST_KNOWN = 4
_THERE = (NodeLiveness.HEARD, NodeLiveness.SILENT)
RATE, ANSWER = "network: MB per second", "network: answers per second"  # larger is better


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFound:
    """What was found of a node: is it fit, and its figures, if no workers were beside them."""

    node: Node
    fitness: Fitness
    figures: dict[str, float]
    pairs: tuple[str, ...]  # all of them, in words


class Usual(NamedTuple):
    rate: float  # MB per second; 0: not known
    answer_ms: float


class NetworkChecks:
    """Changes `pairs`, `pairs_at` and `rates` of nodes, and nothing else."""

    def __init__(self, *, roster: Roster, orders: Orders, policy: CoordinatorPolicy) -> None:
        self._roster, self._orders, self._policy = roster, orders, policy

    def is_possible(self, node: Node) -> bool:
        return bool(node.pair_port) and node.liveness is NodeLiveness.HEARD

    def begin(self, node: Node, now: Moment) -> None:
        """Its state is "checking" already."""
        node.pairs, node.pairs_at = [], now.at
        self._roster.node_changed(node)

    def compare(self, ends: Sequence[Node], now: Moment) -> Actions:
        """All of them with one other node, whose share is then in each figure. Nothing where none is free."""
        for node in ends:
            node.rates = {}
        others = [node for node in self._peers() if node not in ends and not _is_open(node)]
        if not others or not all(_is_peer(node) and not _is_open(node) for node in ends):
            return []
        return [action for node in ends for action in self._open(node, others[0], now)]

    def measured(self, node: Node, report: msg.PairMeasured) -> None:
        """By `node`. An answer that came too late is of no use: its pair was given up."""
        for one, other in ((node, report.peer), (self._roster.nodes.get(report.peer), node.name)):
            if one is not None:
                one.pairs = [
                    replace(pair, found=report) if (pair.peer, pair.key) == (other, report.key) else pair
                    for pair in one.pairs
                ]

    def settle(self, now: Moment) -> tuple[Actions, list[NetworkFound]]:
        """Open the pairs that are wanted, and judge the nodes whose pairs are complete."""
        looked = [node for node in self._roster.timed_nodes() if node.pairs_at is not None]
        if not looked:
            return [], []
        for node in looked:
            self._give_up_late(node, now)
        usual = self._usual()
        actions = self._open_pairs([node for node in looked if self._wants(node, usual, now)], now)
        looked = [node for node in self._roster.timed_nodes() if node.pairs_at is not None]
        are_open = any(map(_is_open, looked))
        done = [node for node in looked if self._is_done(node, now, are_open=are_open)]
        found = [self._judged(node, usual) for node in done]
        for node in done:
            node.rates = {pair.peer: _rate(pair) for pair in node.pairs}
            node.pairs, node.pairs_at = [], None
        for node in looked:
            if node.pairs_at is not None:
                node.pairs_at = self._next_look(node, now)
            self._roster.node_changed(node)
        return actions, found

    # -------------------------------------------------------------- pairs

    def _give_up_late(self, node: Node, now: Moment) -> None:
        for pair in node.pairs:
            if pair.found is None and now.at >= pair.asked_at + PAIR_S:
                error = f"no answer within {PAIR_S:.0f} s"
                peer = pair.peer if pair.measures else node.name
                late = msg.PairMeasured(peer=peer, key=pair.key, error=error)
                measures = node if pair.measures else self._roster.nodes.get(pair.peer)
                if measures is not None:
                    self.measured(measures, late)

    def _wants(self, node: Node, usual: Usual, now: Moment) -> bool:
        """Two pairs, or as many as it takes until one is good. A peer wants one more if its pair was bad."""
        if _is_open(node) or len(node.pairs) >= MOST_PAIRS or node.liveness is not NodeLiveness.HEARD:
            return False
        if now.at >= self._ends_at(node):
            return False
        counted = self._counted(node)
        has_good = any(not why_bad(pair, usual) for pair in counted)
        if node.admin is not NodeAdmin.CHECKING:
            return bool(counted) and not has_good
        return len(counted) < PAIRS or not has_good

    def _counted(self, node: Node) -> list[NodePair]:
        """Not those with a peer that is gone: why nothing was measured is known."""
        nodes = self._roster.nodes
        there = {n.peer for n in node.pairs if n.peer in nodes and nodes[n.peer].liveness in _THERE}
        return [pair for pair in node.pairs if pair.peer in there]

    def _ends_at(self, node: Node) -> float:
        first = min((pair.asked_at for pair in node.pairs), default=node.admin_since)
        return (node.admin_since if node.admin is NodeAdmin.CHECKING else first) + MOST_S

    def _open_pairs(self, wanting: Sequence[Node], now: Moment) -> Actions:
        """One at a time for each node; without workers first."""
        if not wanting:
            return []
        ready = self._peers()
        actions: Actions = []
        for node in wanting:
            if _is_open(node):
                continue  # another one has just taken it
            known = {pair.peer for pair in node.pairs}
            free = (one for one in ready if one is not node and one.name not in known and not _is_open(one))
            if (peer := next(free, None)) is not None:
                actions += self._open(node, peer, now)
        return actions

    def _peers(self) -> list[Node]:
        ready = [node for node in self._roster.nodes.values() if _is_peer(node)]
        return sorted(ready, key=lambda node: (self._is_busy(node), node.admin is not NodeAdmin.UP))

    def _open(self, node: Node, peer: Node, now: Moment) -> Actions:
        text = f"{self._policy.journal} {node.boot} {peer.boot} {now.event}"  # boots are drawn at random
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        busy = self._is_busy(node) or self._is_busy(peer)
        for one, other in ((node, peer), (peer, node)):
            pair = NodePair(
                peer=other.name, key=key, asked_at=now.at, measures=one is node, beside_workers=busy
            )
            one.pairs = [*one.pairs, pair]
            one.pairs_at = now.at + PAIR_S if one.pairs_at is None else one.pairs_at
            self._roster.node_changed(one)
        because = f"the network of {node.name} is checked"
        answer = msg.AnswerPair(peer=node.name, key=key)
        measure = msg.MeasurePair(peer=peer.name, host=peer.host, port=peer.pair_port, key=key)
        return [
            *self._orders.send(peer.name, answer, because, now),
            *self._orders.send(node.name, measure, because, now),
        ]

    def _is_busy(self, node: Node) -> bool:
        return bool(self._roster.tasks_on_node(node.name))

    def _is_done(self, node: Node, now: Moment, *, are_open: bool) -> bool:
        """All together: each is compared with all of them."""
        if now.at >= self._ends_at(node):
            return True
        if _is_open(node):
            return False
        if node.admin is NodeAdmin.CHECKING and now.at < node.admin_since + GATHER_S:
            return False  # others may come
        return not are_open

    def _next_look(self, node: Node, now: Moment) -> float:
        times = [pair.asked_at + PAIR_S for pair in node.pairs if pair.found is None]
        times += [node.admin_since + GATHER_S, self._ends_at(node)]
        return min((at for at in times if at > now.at), default=now.at + PAIR_S)

    # -------------------------------------------------------------- judgement

    def _usual(self) -> Usual:
        """Each node counts once, with its best pair: a good node has one good peer at least."""
        rates, answers = [], []
        for node in self._roster.nodes.values():
            mine = _figures([pair for pair in node.pairs if not pair.beside_workers])
            kept = node.checked[-1].figures if node.checked else {}
            known = mine or kept
            if RATE in known and ANSWER in known:
                rates.append(known[RATE])
                answers.append(1e3 / known[ANSWER])
        if len(rates) < LEAST_KNOWN:
            return Usual(0.0, 0.0)
        return Usual(statistics.median(rates), statistics.median(answers))

    def _judged(self, node: Node, usual: Usual) -> NetworkFound:
        pairs = self._counted(node) if node.liveness is NodeLiveness.HEARD else []
        bad = {pair.peer: why for pair in pairs if (why := why_bad(pair, usual))}
        good = [pair for pair in pairs if pair.peer not in bad]
        marked = _clock(pairs)
        unfit: list[str] = []
        texts = [f"network to {peer}: {why}" for peer, why in bad.items()]
        if not good and len(bad) >= PAIRS and any(self._is_proven(peer, node, usual) for peer in bad):
            unfit = texts
        elif bad and not good:
            marked += [f"{text}; no other pair tells which node it is" for text in texts]
        elif bad and any(self._is_proven(peer, node, usual) for peer in bad):
            marked += [f"{text}; both are good with others" for text in texts]
        figures = _figures([pair for pair in good if not pair.beside_workers])
        said = tuple(_words(pair, bad.get(pair.peer, "")) for pair in pairs)
        fitness = Fitness(unfit=tuple(unfit), marked=tuple(marked))
        return NetworkFound(node=node, fitness=fitness, figures=figures, pairs=said)

    def _is_proven(self, name: str, but: Node, usual: Usual) -> bool:
        """Is this peer good with another node? One that was admitted before counts as good."""
        peer = self._roster.nodes.get(name)
        if peer is None:
            return False
        others = [pair for pair in peer.pairs if pair.peer != but.name and pair.found is not None]
        if not others:
            return peer.admin is NodeAdmin.UP
        return any(not why_bad(pair, usual) for pair in others)


def why_bad(pair: NodePair, usual: Usual) -> str:
    found = pair.found
    if found is None:
        return "not measured"
    if found.error:
        return found.error
    if usual.rate:
        limit = SLOW_BESIDE_WORKERS if pair.beside_workers else SLOW
        rate = _rate(pair)
        if rate < limit * usual.rate:
            return f"{rate:.4g} MB/s; usual are {usual.rate:.4g}"
        if found.answer_ms > LATE * usual.answer_ms + LATE_MS:
            return f"answers take {found.answer_ms:.4g} ms; usual are {usual.answer_ms:.4g}"
    return f"{100 * found.resent:.1f} % of packets were sent again" if found.resent > RESENT else ""


def _clock(pairs: Iterable[NodePair]) -> list[str]:
    """The same difference to two peers or more is this node's own."""
    off = [
        pair.found.clock_off_s if pair.measures else -pair.found.clock_off_s
        for pair in pairs
        if pair.found is not None and not pair.found.error
    ]
    if len(off) < PAIRS or min(map(abs, off)) < CLOCK_S or max(off) - min(off) > CLOCK_S:
        return []
    middle = statistics.median(off)
    return [f"clock: it is {abs(middle):.3g} s {'ahead of' if middle > 0 else 'behind'} {len(off)} peers"]


def _figures(pairs: Iterable[NodePair]) -> dict[str, float]:
    found = [pair.found for pair in pairs if pair.found is not None and not pair.found.error]
    if not found:
        return {}
    rate = max(min(one.out_mb_s, one.in_mb_s) for one in found)
    return {RATE: rate, ANSWER: 1e3 / max(1e-3, min(one.answer_ms for one in found))}


def _words(pair: NodePair, why: str) -> str:
    if why or pair.found is None:
        return f"{pair.peer}: {why}"
    return f"{pair.peer}: {_rate(pair):.4g} MB/s, answers in {pair.found.answer_ms:.3g} ms"


def _rate(pair: NodePair) -> float:
    """MB per second in the slower direction; 0 where nothing could be measured."""
    found = pair.found
    return 0.0 if found is None or found.error else min(found.out_mb_s, found.in_mb_s)


def _is_open(node: Node) -> bool:
    return any(pair.found is None for pair in node.pairs)


def _is_peer(node: Node) -> bool:
    is_there = node.liveness is NodeLiveness.HEARD and node.pair_port > 0
    return is_there and node.admin in (NodeAdmin.UP, NodeAdmin.CHECKING) and len(node.pairs) < MOST_PAIRS
