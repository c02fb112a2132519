"""What a study says: one document for machines, a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep_lab.study.failures import DAY_S, Trace
from everstep_lab.study.life import KINDS
from everstep_lab.study.study import Setup, StudyResult, Summary

MORE_THAN_ALL = (
    "More than 100 %: the reference is the first allocation, in whole nodes, kept without failures. A policy "
    "that divides nodes among tasks better, or is given more nodes than at the start, earns more than that."
)


def document(trace: Trace, setup: Setup, summaries: Mapping[str, Summary]) -> dict[str, Any]:
    first = next(iter(summaries))
    base = summaries[first].mean(_accumulated)
    return {
        "trace": {
            "name": trace.name,
            "days": round(trace.horizon_s / DAY_S, 3),
            "nodes": trace.nodes,
            "failures": len(trace.failures),
            "per_1000_node_days": round(trace.per_1000_node_days, 2),
        },
        "tasks": [{"name": t.name, "weight": t.weight} for t in setup.tasks],
        "slots_per_node": setup.slots,
        "spares": setup.spares,
        "seeds": len(summaries[first].results),
        "relative_to": first,
        "policies": {name: _row(summary, base) for name, summary in summaries.items()},
    }


def _row(summary: Summary, base: float) -> dict[str, Any]:
    mean = summary.mean(_accumulated)
    healthy = summary.mean(lambda r: r.healthy_waf)
    return {
        "accumulated_waf": mean,
        "accumulated_waf_half_width": summary.half_width(_accumulated),
        "relative": mean / base if base else None,
        "share_of_healthy": summary.mean(lambda r: r.share),
        "share_half_width": summary.half_width(lambda r: r.share),
        "healthy_waf": healthy,
        "availability": summary.mean(lambda r: r.availability),
        "lost_share": {kind: _lost(summary, kind) / healthy for kind in KINDS},
    }


def _lost(summary: Summary, kind: str) -> float:
    return summary.mean(lambda result: result.lost[kind])


def _accumulated(result: StudyResult) -> float:
    return result.accumulated_waf


def table_lines(found: Mapping[str, Any]) -> list[str]:
    """Shares in per cent of a life without faults."""
    trace = found["trace"]
    title = (
        f"{trace['name']}: {trace['failures']} failures in {trace['days']:g} days on {trace['nodes']} nodes, "
        f"{len(found['tasks'])} tasks, {found['seeds']} seed(s)"
    )
    width = max(len(name) for name in found["policies"])
    head = f"{'':{width}}   earned %    +/-   x {found['relative_to'][:9]:9} working %   lost %:"
    lines = [title, head + "".join(f"{kind:>12}" for kind in KINDS)]
    for name, row in found["policies"].items():
        lost = "".join(f"{100 * row['lost_share'][kind]:12.2f}" for kind in KINDS)
        relative = "-" if row["relative"] is None else f"{row['relative']:.3f}"
        lines.append(
            f"{name:{width}} {100 * row['share_of_healthy']:10.2f} {100 * row['share_half_width']:6.2f} "
            f"{relative:>11} {100 * row['availability']:11.2f}          {lost}"
        )
    if any(row["share_of_healthy"] > 1 for row in found["policies"].values()):
        lines.append(MORE_THAN_ALL)
    return lines


def swept(name: str, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By policy and value: earned, and half of its 95 % interval, in per cent of a life without faults.

    A spare earns nothing while nothing fails, so the life that is compared with is the first row's.
    """
    first = next(iter(rows.values()))["policies"]

    def earned(row: Mapping[str, Any], policy: str) -> tuple[float, float]:
        if name != "spares":
            return 100 * float(row["share_of_healthy"]), 100 * float(row["share_half_width"])
        healthy = first[policy]["healthy_waf"]
        return 100 * row["accumulated_waf"] / healthy, 100 * row["accumulated_waf_half_width"] / healthy

    return {
        policy: [earned(found["policies"][policy], policy) for found in rows.values()] for policy in first
    }


def sweep_lines(name: str, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One row per value, one column per policy."""
    policies = swept(name, rows)
    width = max(len(name), *(len(value) for value in rows))
    lines = [f"earned, % of a life without faults, by {name}"]
    lines.append(f"{name:>{width}} " + " ".join(f"{p:>{max(8, len(p))}}" for p in policies))
    for number, value in enumerate(rows):
        cells = (f"{policies[p][number][0]:{max(8, len(p))}.2f}" for p in policies)
        lines.append(f"{value:>{width}} " + " ".join(cells))
    return lines
