"""The tables of docs/planner.md: the throughput model against published rows, and six tasks on 128 GPUs."""

from __future__ import annotations

import statistics
from typing import Any

from everstep_lab.plan.mixes import MIXES, share
from everstep_lab.plan.published import ROWS

Table = list[dict[str, Any]]


def errors() -> Table:
    rows = []
    for row in ROWS:
        predicted, cut, parts = row.predict()
        step = float(parts.total[0])
        rows.append(
            {
                "source": row.source,
                "model": row.model.name + (" 128K" if row.context > 1 else ""),
                "GPUs": f"{row.gpus} {row.gpu.name}",
                "shape": f"{row.replicas} x {row.stages} x {row.shards}"
                + (f" x {row.context}" if row.context > 1 else ""),
                "recompute": row.recompute,
                "published": round(row.published, 1),
                "predicted": round(predicted, 1),
                "error": f"{row.error():+.1%}",
                "microbatch": cut.microbatch,
                "bubble": f"{float(parts.bubble[0]) / step:.0%}",
                "wires": f"{float((parts.shards + parts.hops + parts.reduce)[0]) / step:.0%}",
            }
        )
    return rows


def summary_of_errors() -> str:
    found = [abs(row.error()) for row in ROWS]
    return f"{len(found)} rows, median error {statistics.median(found):.1%}, worst {max(found):.1%}"


def mixes() -> Table:
    rows: Table = []
    for mix in MIXES:
        shared = share(mix)
        best_rule = max(x.waf for x in shared[:3])
        for x in shared:
            rows.append(
                {
                    "mix": mix,
                    "rule": x.rule,
                    "workers": " ".join(map(str, x.workers)),
                    "WAF, PFLOP/s": f"{x.waf / 1e15:.2f}",
                    "vs best rule": f"{x.waf / best_rule:.2f}",
                }
            )
    return rows


def dimensions() -> Table:
    """What a search over replicas x stages x shards gains over one of replicas x stages."""
    rows: Table = []
    for mix in MIXES:
        found = {most: {x.rule: x for x in share(mix, most_shards=most)} for most in (1, None)}
        for rule in ("planned", "planned, all run"):
            two, three = found[1][rule], found[None][rule]
            rows.append(
                {
                    "mix": mix,
                    "rule": rule,
                    "two dimensions, PFLOP/s": f"{two.waf / 1e15:.2f}",
                    "three dimensions, PFLOP/s": f"{three.waf / 1e15:.2f}",
                    "gain": f"{three.waf / two.waf - 1:+.1%}",
                    "workers": " ".join(map(str, three.workers)),
                }
            )
    return rows


def show(rows: Table, *, markdown: bool = True) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines)
