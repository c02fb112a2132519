"""Load per link, before and after, as text and as SVG.

Text: one row a leaf, one column a spine, one mark a link, its height the link's load in eighths of the worst
link of both pictures, so that they can be compared by eye. `x` is a dead link, `·` an idle one.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.fabric.routing import Routing
from everstep.fabric.topology import Topology

_BARS = "▁▂▃▄▅▆▇█"
_MOST_COLUMNS = 64
_MOST_ROWS = 40


def text(pictures: Sequence[tuple[str, Routing]]) -> str:
    """Each routing under its title, uplinks left, downlinks right, on one scale."""
    scale = max((_worst_live(routing) for _, routing in pictures), default=0.0)
    blocks = []
    for title, routing in pictures:
        head = f"{title}: worst link {_worst_live(routing):.4g} s"
        blocks.append("\n".join([head, *_rows(routing, scale)]))
    return "\n\n".join(blocks) + "\n"


def _worst_live(routing: Routing) -> float:
    fabric = [routing.topology.index[link.name] for link in routing.topology.fabric_links]
    alive = [n for n in fabric if routing.topology.capacity[n] > 0]
    return max((float(routing.load[n]) for n in alive), default=0.0)


def _rows(routing: Routing, scale: float) -> list[str]:
    topology = routing.topology
    rows = []
    for plane in sorted({leaf.plane for leaf in topology.leaves}):
        leaves = [leaf for leaf in topology.leaves if leaf.plane == plane]
        spines = [
            spine
            for spine in topology.spines
            if any(f"{leaf.name}>{spine.name}" in topology.index for leaf in leaves)
        ][:_MOST_COLUMNS]
        width = max([len(leaf.name) for leaf in leaves], default=0)
        rows.append(f"{'':{width}} {'to spines':{len(spines)}}  from spines")
        for leaf in leaves[:_MOST_ROWS]:
            up = "".join(_mark(routing, f"{leaf.name}>{s.name}", scale) for s in spines)
            down = "".join(_mark(routing, f"{s.name}>{leaf.name}", scale) for s in spines)
            rows.append(f"{leaf.name:{width}} {up:{max(9, len(spines))}}  {down}")
        if len(leaves) > _MOST_ROWS:
            rows.append(f"{'':{width}} … {len(leaves) - _MOST_ROWS} more leaves")
    return rows


def _mark(routing: Routing, name: str, scale: float) -> str:
    number = routing.topology.index.get(name)
    if number is None:
        return " "
    if routing.topology.capacity[number] <= 0:
        return "x"
    load = float(routing.load[number])
    if load <= 0 or scale <= 0:
        return "·"
    return _BARS[min(7, int(load / scale * 8 - 1e-9))]


def svg(pictures: Sequence[tuple[str, Routing]], *, width: int = 520, height: int = 260) -> str:
    """Side by side: spines above, leaves below, a line a cable, thicker and redder the busier it is."""
    scale = max((_worst_live(routing) for _, routing in pictures), default=0.0) or 1.0
    total = width * len(pictures)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for number, (title, routing) in enumerate(pictures):
        parts.append(f'<g transform="translate({number * width},0)">')
        parts += _panel(title, routing, scale, width, height)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, routing: Routing, scale: float, width: int, height: int) -> list[str]:
    topology = routing.topology
    place = {
        **_spread([s.name for s in topology.spines], width, 60),
        **_spread([leaf.name for leaf in topology.leaves], width, height - 50),
    }
    parts = [f'<text x="12" y="20">{_escape(title)}: worst link {_worst_live(routing):.4g} s</text>']
    for one, other, load, dead in _cables(topology, routing):
        (x1, y1), (x2, y2) = place[one], place[other]
        share = min(1.0, load / scale)
        colour = "#999" if dead else f"rgb({int(60 + 180 * share)},{int(140 - 100 * share)},80)"
        dash = ' stroke-dasharray="4 4"' if dead else ""
        parts.append(
            f'<line x1="{x1:.0f}" y1="{y1}" x2="{x2:.0f}" y2="{y2}" stroke="{colour}" '
            f'stroke-width="{0.5 + 5 * share:.1f}"{dash}/>'
        )
    for name, (x, y) in place.items():
        if len(place) <= 40:
            shift = -8 if y < height / 2 else 18
            parts.append(f'<text x="{x:.0f}" y="{y + shift}" text-anchor="middle">{_escape(name)}</text>')
        parts.append(f'<circle cx="{x:.0f}" cy="{y}" r="4" fill="#333"/>')
    return parts


def _cables(topology: Topology, routing: Routing) -> list[tuple[str, str, float, bool]]:
    found: dict[tuple[str, str], tuple[float, bool]] = {}
    for link in topology.fabric_links:
        number = topology.index[link.name]
        ends = (min(link.sender, link.receiver), max(link.sender, link.receiver))
        dead = bool(topology.capacity[number] <= 0)
        load, was_dead = found.get(ends, (0.0, False))
        found[ends] = max(load, 0.0 if dead else float(routing.load[number])), dead or was_dead
    return [(one, other, load, dead) for (one, other), (load, dead) in found.items()]


def _spread(names: Sequence[str], width: int, y: int) -> dict[str, tuple[float, int]]:
    return {name: ((n + 0.5) * width / len(names), y) for n, name in enumerate(names)}


def _escape(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
