"""Pictures of a study, as small SVG files. Matplotlib is loaded here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from everstep.sim.study.failures import DAY_S, Trace
from everstep.sim.study.life import KINDS
from everstep.sim.study.report import swept
from everstep.sim.study.study import Summary

BINS = 160


def draw_study(path: Path, trace: Trace, summaries: Mapping[str, Summary]) -> None:
    """WAF over time with severe failures marked; where it was lost; how much of the time tasks worked."""
    plt = _matplotlib()
    figure, (over_time, lost) = plt.subplots(
        2, 1, figsize=(8, 6.4), gridspec_kw={"height_ratios": [3, 2]}, constrained_layout=True
    )
    edges = np.linspace(0, trace.horizon_s, BINS + 1)
    for name, summary in summaries.items():
        times, done = zip(*summary.results[0].curve, strict=True)
        healthy = summary.results[0].healthy_waf / trace.horizon_s
        rate = np.diff(np.interp(edges, times, done)) / np.diff(edges) / healthy
        over_time.plot((edges[:-1] + edges[1:]) / 2 / DAY_S, rate, label=name, linewidth=0.9)
    severe = [f.at_s / DAY_S for f in trace.failures if f.severity == 1]
    over_time.plot(severe, [-0.03] * len(severe), "|", color="black", markersize=6, label="severe failure")
    over_time.set(xlabel="days", ylabel="WAF over healthy WAF", xlim=(0, trace.horizon_s / DAY_S))
    over_time.legend(fontsize=6, ncols=4, loc="lower left")
    names = list(summaries)
    left = np.zeros(len(names))
    for kind in KINDS:
        share = np.array([_lost_share(summary, kind) for summary in summaries.values()])
        lost.barh(names, share, left=left, label=kind)
        left += share
    lost.invert_yaxis()
    lost.set_xlabel("lost, % of a life without faults")
    lost.legend(fontsize=7)
    _save(figure, path)


def _lost_share(summary: Summary, kind: str) -> float:
    return 100 * summary.mean(lambda result: max(0.0, result.lost[kind]) / result.healthy_waf)


def draw_sweep(path: Path, name: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Earned by value, one line per policy."""
    plt = _matplotlib()
    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    values = [float(value) for value in rows]
    for (policy, points), marker in zip(swept(name, rows).items(), cycle("osv^D<>pPX"), strict=False):
        earned, width = zip(*points, strict=True)
        axes.errorbar(
            values, earned, yerr=width, label=policy, linewidth=1, capsize=2, marker=marker, markersize=4
        )
    if min(values) > 0 and max(values) / min(values) > 20:
        axes.set_xscale("log")
    axes.set(xlabel=name, ylabel="earned, % of a life without faults")
    axes.legend(fontsize=7)
    _save(figure, path)


def _matplotlib() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "everstep"  # the same picture is the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: a fifth of the bytes
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
