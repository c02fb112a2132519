"""The traffic of all tasks, from where their workers are, and a path over the fabric for every flow.

    facts of every task's epoch ──► who sends to whom ──► flows ──► routing ──► the routes, for every agent
                                    bytes, as workers report them ──┘   └── the routing before: few flows move

Workers of one task know nothing of the others', so one place plans for all. Routes are advice: they are not
in the journal, training never waits for them, and a coordinator that takes over plans again. Until workers
have reported how much they send, all flows of a task count alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import fmean

from everstep.core.cluster.task import OVER, Task
from everstep.protocol.messages import TimesReported
from everstep.protocol.ops import Worker, parse_worker
from everstep.protocol.routes import Routes
from everstep.protocol.table import Json
from everstep.protocol.work import EpochFacts
from everstep_fabric.allocate import allocate, reallocate
from everstep_fabric.document import routes_document
from everstep_fabric.flows import Endpoint, Flow, connection_name
from everstep_fabric.routing import Routing
from everstep_fabric.topology import Topology

MOST_FLOWS = 10_000  # placing them takes about a second; the smallest of more take the paths of hashes
UNKNOWN = 1.0  # bytes per second of a flow that no worker has reported
Pair = tuple[Worker, Worker]  # sender, receiver


class TrafficPlan:
    """Of all tasks, while one coordinator leads."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology  # with the links that nodes have found dead
        self._described = topology
        self._dead: dict[str, tuple[str, ...]] = {}  # by node
        self.routing: Routing | None = None
        self.advice: Json = None  # the fabric, and every flow with its path
        self._at: dict[str, Endpoint] = {
            port.address: (node.name, port.nic)
            for node in topology.nodes
            for port in node.ports
            if port.address
        }
        self._sent: dict[str, dict[Pair, float]] = {}  # by task: bytes per second
        self._unknown: dict[str, set[Pair]] = {}  # by task: flows whose bytes are not known
        # The epochs it is about, and whether bytes were known; None: it is to be made.
        self._planned: dict[str, tuple[EpochFacts, bool]] | None = None

    def learn(self, report: TimesReported) -> None:
        if report.seconds > 0:
            sent = self._sent.setdefault(report.task, {})
            for peer, (count, _) in report.sent.items():
                pair = report.worker, parse_worker(peer)
                is_steered = report.carriers.get(peer, "tcp") == "tcp"  # lanes of NCCL are not
                sent[pair] = count / report.seconds if is_steered else 0.0
                self._unknown.get(report.task, set()).discard(pair)

    def heard(self, node: str, seen: Json) -> None:
        """Over these links no probe of a node comes. It says so again and again."""
        dead = tuple(map(str, seen)) if isinstance(seen, list) else ()
        if self._dead.get(node, ()) != dead:
            self._dead[node] = dead
            known = {link for links in self._dead.values() for link in links if link in self.topology.index}
            self.topology = self._described.with_condition(dict.fromkeys(known, 0.0))
            self._planned = None

    def question(self, tasks: Mapping[str, Task]) -> Callable[[], Routing] | None:
        """To be thought about in a thread, where flows are others than those planned."""
        flows = self.changed(tasks)
        return None if flows is None else partial(routed, self.topology, self.routing, flows)

    def changed(self, tasks: Mapping[str, Task]) -> tuple[Flow, ...] | None:
        """The flows of all tasks, if they are others than those planned."""
        now: dict[str, tuple[EpochFacts, bool]] = {}
        before = self._planned
        for name, task in tasks.items():
            facts = task.progress.facts
            if facts is not None and task.state not in OVER:
                if before is None or name not in before or before[name][0] is not facts:
                    self._unknown[name] = set(self._crossing(facts)) - self._sent.get(name, {}).keys()
                now[name] = facts, not self._unknown[name]
        if before is not None and _are_the_same(before, now):
            return None
        self._planned = now
        self._sent = {name: sent for name, sent in self._sent.items() if name in now}
        flows = [flow for name, (facts, _) in now.items() for flow in self._flows(tasks[name], facts)]
        flows.sort(key=lambda flow: -flow.bytes)
        return tuple(flows[:MOST_FLOWS])

    def took(self, answer: Routing) -> str:
        self.routing, self.advice = answer, routes_document(answer)
        return answer.because

    def _crossing(self, facts: EpochFacts) -> list[Pair]:
        """Pairs whose flow leaves a node for another one of the fabric."""
        nodes = {worker: self._at.get(host) for worker, (host, _) in facts.book.items()}
        return [
            (one, other)
            for one, other in sorted(pairs_of(facts))
            if (here := nodes.get(one)) and (there := nodes.get(other)) and here[0] != there[0]
        ]

    def _flows(self, task: Task, facts: EpochFacts) -> Iterable[Flow]:
        sent = self._sent.get(task.name, {})
        usual = fmean(sent.values()) if sent else UNKNOWN
        for one, other in self._crossing(facts):
            host, port = facts.book[other]
            for shard in range(task.shape.shards):
                name = connection_name(task.name, str(one), host, port + shard)
                yield Flow(
                    name=name,
                    task=task.name,
                    phase="reduce" if one.stage == other.stage else "pipeline",
                    group=name,
                    source=self._at[facts.book[one][0]],
                    target=self._at[host],
                    bytes=max(sent.get((one, other), usual), UNKNOWN) / task.shape.shards,
                    weight=task.weight,
                )


def _are_the_same(
    before: Mapping[str, tuple[EpochFacts, bool]], now: Mapping[str, tuple[EpochFacts, bool]]
) -> bool:
    """Facts by identity: they are large, and never changed."""
    return before.keys() == now.keys() and all(
        now[name][0] is facts and now[name][1] == had for name, (facts, had) in before.items()
    )


def routed(topology: Topology, before: Routing | None, flows: tuple[Flow, ...]) -> Routing:
    return allocate(topology, flows) if before is None else reallocate(topology, before, flows)


def pairs_of(facts: EpochFacts) -> set[Pair]:
    """Who sends tensors to whom in the steady steps of an epoch: the replicas of a stage to each other, once
    per node (`Routes`), and the hosts of neighbouring stages of each microbatch.
    """
    live = facts.members[-1].live if facts.members else ()
    found = {
        (Worker(one, stage), Worker(other, stage))
        for stage, replicas in enumerate(live)
        for one in replicas
        for other in Routes.of(Worker(one, stage), replicas, facts.book).partners
    }
    ways = [(k, s, k) for s in range(len(live) - 1) for k in set(live[s]) & set(live[s + 1])]
    for (microbatch, stage), replica in facts.steady_hosts.items():
        before = facts.steady_hosts.get((microbatch, stage - 1), microbatch.home)
        after = facts.steady_hosts.get((microbatch, stage + 1), microbatch.home)
        ways += [(before, stage - 1, replica)] if stage > 0 else []
        ways += [(replica, stage, after)] if stage + 1 < len(live) else []
    for one, stage, other in ways:
        this, following = Worker(one, stage), Worker(other, stage + 1)
        found |= {(this, following), (following, this)}
    return found
