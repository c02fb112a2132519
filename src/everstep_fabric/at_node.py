"""What the workers of a node must know to follow the plan of a fabric: `everstep agent --fabric-ports`.

A coordinator with a fabric file plans the paths of all tasks (`plan`) and sends them to every agent,
which writes them down here for its workers (`steer`). Each of them has a range of source ports that no
other worker of the node uses. When it joins, and every minute, the agent looks which links of the fabric are
dead, and its heartbeats tell the coordinator.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.log import say, warn
from everstep_fabric.document import topology_from
from everstep_fabric.probe import Budget, Prober, dead_links
from everstep_fabric.topology import Topology

LEAST_PORTS = 64  # per worker: enough to find every path among a few dozen
LOOK_EVERY_S = 60.0  # at the links: those that died, and those that were repaired
LOOK_PACKETS, LOOK_S = 65_536, 30.0


class FabricSettings:
    def __init__(self, *, ports: range, slots: int) -> None:
        self.seen: tuple[str, ...] = ()  # links that no probe from here comes over
        self._topology: Topology | None = None
        self._looked_at: float | None = None
        self._ports, self._each = ports, len(ports) // slots
        if self._each < LEAST_PORTS:
            raise UserError(
                f"--fabric-ports has {len(ports)} ports for {slots} slots; give at least {LEAST_PORTS} each."
            )

    def settings(self, folder: Path, slots: Sequence[int]) -> dict[str, Any]:
        """For `Steering.of`; a worker has a slot for each of its shards."""
        firsts = [self._ports[slot * self._each] for slot in slots]
        return {
            "routes": str(_file(folder)),
            "ports": [[first, first + self._each - 1] for first in firsts],
        }

    def take(self, folder: Path, routes: Any) -> None:
        """Of the coordinator. Workers see the old ones or the new ones, whole."""
        try:
            self._topology = topology_from({**routes["fabric"], "condition": {}})
        except (UserError, KeyError, TypeError) as error:  # of another version
            warn(f"the routes are not followed: {type(error).__name__}: {error}")
            return
        fresh = _file(folder).with_suffix(".new")
        try:
            fresh.write_text(json.dumps(routes, separators=(",", ":")))
            os.replace(fresh, _file(folder))
        except OSError as error:  # training needs no routes
            warn(f"the routes cannot be written down for workers: {error}")

    def due_look(self, host: str, now: float) -> Callable[[], tuple[str, ...]] | None:
        is_due = self._looked_at is None or now - self._looked_at > LOOK_EVERY_S
        if self._topology is None or not is_due:
            return None
        self._looked_at = now
        return partial(self.look, host)

    def look(self, host: str) -> tuple[str, ...]:
        """Which links are dead, as far as this node can tell."""
        assert self._topology is not None
        ports = next((n.ports for n in self._topology.nodes if host in {p.address for p in n.ports}), ())
        found: dict[str, None] = {}
        for source in [port.address for port in ports if port.address] or [host]:
            budget = Budget(packets=LOOK_PACKETS, seconds=LOOK_S)
            prober = Prober(topology=self._topology, ports=self._ports, budget=budget)
            found |= dict.fromkeys(dead_links(prober, source))
        return tuple(found)

    def looked(self, found: Any) -> None:
        if isinstance(found, tuple) and found != self.seen:  # else the look has failed, and was told
            self.seen = found
            say(f"links of the fabric that carry nothing: {', '.join(found) or 'none any more'}")


def _file(folder: Path) -> Path:
    return folder / "routes.json"
