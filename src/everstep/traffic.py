"""The one port for what plans the paths of tensors between nodes: a package behind an entry point.

    coordinator   Planner         where workers are, what they send  ──► advice, for every agent
    agent         NodeTraffic     advice ──► settings of its workers; what it has seen ──► its heartbeats
    worker        WorkerTraffic   its settings ──► how each of its connections is opened

Only the package reads a fabric file, advice, and what nodes have seen. Advice is not in the journal, training
never waits for it, and a coordinator that takes over plans again. `everstep_fabric` comes with Everstep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.core.cluster.task import Task
    from everstep.net.links import Links
    from everstep.net.sockets import Way
    from everstep.protocol.messages import Sender, TimesReported

GROUP = "everstep.traffic"
Json = Any


class Planner(Protocol):
    """Of one term of the coordinator."""

    advice: Json  # None: nothing has been planned yet

    def learn(self, report: TimesReported) -> None: ...

    def heard(self, node: str, seen: Json) -> None:
        """What a node's heartbeat says; None: it is gone."""

    def question(self, tasks: Mapping[str, Task]) -> Callable[[], Any] | None:
        """To be thought about in a thread, where tasks have changed; UserError: there is no plan."""

    def took(self, answer: Any) -> str:
        """The answer is the advice now. What is planned, in a sentence."""


class NodeTraffic(Protocol):
    @property
    def seen(self) -> Json: ...

    def settings(self, folder: Path, slots: Sequence[int]) -> Mapping[str, Any]:
        """Of a worker with these slots, one for each of its shards."""

    def take(self, folder: Path, advice: Json) -> None: ...

    def due_look(self, host: str, now: float) -> Callable[[], Any] | None:
        """Asked often. A look takes seconds and is had beside; `looked` gets what it returns."""

    def looked(self, found: Any) -> None: ...


class WorkerTraffic(Protocol):
    def way(self, host: str, port: int) -> Way | None:
        """How a connection to this peer is opened; None: as the kernel likes."""

    def start(self, links: Links) -> None: ...

    def stop(self) -> None: ...


class TrafficPackage(Protocol):
    def planner(self, file: Path) -> Callable[[], Planner]: ...

    def at_node(self, ports: str, slots: int) -> NodeTraffic: ...

    def of_worker(self, settings: Mapping[str, Any], me: Sender, host: str, shard: int) -> WorkerTraffic: ...


def package() -> TrafficPackage:
    found = next(iter(entry_points(group=GROUP)), None)
    if found is None:
        raise UserError("no package that plans traffic is installed; install everstep again, which has one.")
    loaded: TrafficPackage = found.load()
    return loaded
