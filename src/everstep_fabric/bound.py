"""What no routing can beat: seconds that the worst link must take, for any choice of paths.

`lower_bound_s` counts: all that leaves a leaf must go over its uplinks, all that leaves a NIC over its
ports; and n equal flows over K equal links put ⌈n / K⌉ on one of them. For tasks of weight 1; of each task
its heaviest phase counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep_fabric.flows import Endpoint, Flow
from everstep_fabric.routing import BITS
from everstep_fabric.topology import Topology

Cut = tuple[str, Endpoint | str]  # what a flow crosses on any path: NIC out, leaf out, leaf in, NIC in


def lower_bound_s(topology: Topology, flows: Sequence[Flow]) -> float:
    """By counting; 0 if a cut is dead (then there is no routing to bound)."""
    rooms = _Rooms(topology)
    crossed: dict[tuple[Endpoint, Endpoint], list[Cut]] = {}
    sums: dict[Cut, dict[str, dict[str, list[float]]]] = {}
    for flow in flows:
        ends = flow.source, flow.target
        if ends not in crossed:
            crossed[ends] = _cuts(topology, flow)
        for cut in crossed[ends]:
            sums.setdefault(cut, {}).setdefault(flow.task, {}).setdefault(flow.phase, []).append(flow.bytes)
    worst = 0.0
    for cut, tasks in sums.items():
        room = rooms[cut]
        if not room:
            continue
        heaviest = [max(phases.values(), key=sum) for phases in tasks.values()]
        sizes = [size * BITS for sizes in heaviest for size in sizes]
        worst = max(worst, sum(sizes) / sum(room), _whole_flows(sizes, room))
    return worst


def _whole_flows(sizes: list[float], room: list[float]) -> float:
    """Of the k largest flows on m links, one link gets ⌈k/m⌉ at least; each no smaller than the k-th."""
    sizes = sorted(sizes, reverse=True)
    links, fastest = len(room), max(room)
    worst = sizes[0] / fastest
    for k in range(links, len(sizes), links):
        worst = max(worst, (k // links + 1) * sizes[k] / fastest)
    return worst


def _cuts(topology: Topology, flow: Flow) -> list[Cut]:
    cuts: list[Cut] = [("nic out", flow.source), ("nic in", flow.target)]
    pairs = list(topology.port_pairs(flow.source, flow.target))
    if len({(one.leaf, other.leaf) for one, other in pairs}) == 1 and pairs[0][0].leaf != pairs[0][1].leaf:
        return [*cuts, ("leaf out", pairs[0][0].leaf), ("leaf in", pairs[0][1].leaf)]
    if pairs and all(one.leaf != other.leaf for one, other in pairs):  # dual-homed: the leaves together
        sources = " ".join(sorted({one.leaf for one, _ in pairs}))
        targets = " ".join(sorted({other.leaf for _, other in pairs}))
        return [*cuts, ("leaf out", sources), ("leaf in", targets)]
    return cuts


class _Rooms:
    """The live capacities behind a cut."""

    def __init__(self, topology: Topology) -> None:
        leaves = {leaf.name for leaf in topology.leaves}
        spines = {spine.name for spine in topology.spines}
        self._behind: dict[Cut, list[float]] = {}
        for link, gbps in zip(topology.links, topology.capacity.tolist(), strict=True):
            for way, here, far in (("out", link.sender, link.receiver), ("in", link.receiver, link.sender)):
                if gbps <= 0 or here in spines:
                    continue
                if here not in leaves:
                    node, nic, _ = here.rsplit(".", 2)
                    self._behind.setdefault((f"nic {way}", (node, int(nic))), []).append(gbps)
                elif far in spines:
                    self._behind.setdefault((f"leaf {way}", here), []).append(gbps)

    def __getitem__(self, cut: Cut) -> list[float]:
        kind, where = cut
        if isinstance(where, tuple):
            return self._behind.get((kind, where), [])
        return [gbps for leaf in where.split(" ") for gbps in self._behind.get((kind, leaf), [])]
