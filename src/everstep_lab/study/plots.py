"""Pictures of a study, as small SVG files. Matplotlib is loaded when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from everstep_lab.study.failures import DAY_S, Trace
from everstep_lab.study.life import KINDS
from everstep_lab.study.report import swept
from everstep_lab.study.study import Summary

BINS = 160


def draw_study(path: Path, trace: Trace, summaries: Mapping[str, Summary]) -> None:
    """One strip per policy, so that no line hides another: WAF over time, severe failures marked above; then
    where it was lost.
    """
    plt = _matplotlib()
    count = len(summaries)
    figure, axes = plt.subplots(
        count + 1,
        1,
        figsize=(9, 0.62 * count + 0.3 * count + 1.6),
        gridspec_kw={"height_ratios": [*[1.0] * count, 0.48 * count + 0.4]},
        constrained_layout=True,
    )
    rates = {name: _rates(trace, summary) for name, summary in summaries.items()}
    top = 1.05 * max(1.0, *(float(rate.max()) for _, rate in rates.values()))
    for axis, (name, (days, rate)) in zip(axes, rates.items(), strict=False):
        axis.fill_between(days, rate, step="mid", linewidth=0, color="#4878a8")
        axis.axhline(1.0, color="black", linewidth=0.4)
        axis.set(xlim=(0, trace.horizon_s / DAY_S), ylim=(0, top), yticks=[0, 1])
        axis.tick_params(labelsize=6, labelbottom=axis is axes[count - 1])
        axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        earned = 100 * summaries[name].mean(lambda result: result.share)
        axis.annotate(f"{earned:.1f} %", (1.01, 0.5), xycoords="axes fraction", va="center", fontsize=8)
    severe = [f.at_s / DAY_S for f in trace.failures if f.severity == 1]
    axes[0].set_title(
        f"{trace.name}: WAF over that of a life without failures; right: mean of all seeds. "
        f"Marks: {len(severe)} severe failures",
        fontsize=8,
        pad=10,
    )
    axes[0].plot(
        severe, [1.08] * len(severe), "|", color="black", markersize=5, clip_on=False,
        transform=axes[0].get_xaxis_transform(),
    )  # fmt: skip
    axes[count - 1].set_xlabel("days", fontsize=8)
    _draw_lost(figure, axes[count], summaries)
    _save(figure, path)


def _rates(trace: Trace, summary: Summary) -> tuple[Any, Any]:
    """Days, and the first seed's WAF over the healthy one."""
    edges = np.linspace(0, trace.horizon_s, BINS + 1)
    times, done = zip(*summary.results[0].curve, strict=True)
    healthy = summary.results[0].healthy_waf / trace.horizon_s
    return (edges[:-1] + edges[1:]) / 2 / DAY_S, np.diff(np.interp(edges, times, done)) / np.diff(
        edges
    ) / healthy


def _draw_lost(figure: Any, axis: Any, summaries: Mapping[str, Summary]) -> None:
    names = list(summaries)
    left = np.zeros(len(names))
    for kind in KINDS:
        share = np.array([_lost_share(summary, kind) for summary in summaries.values()])
        axis.barh(names, share, left=left, label=kind)
        left += share
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.set_xlabel("lost, % of a life without failures", fontsize=8)
    figure.legend(*axis.get_legend_handles_labels(), fontsize=8, ncols=len(KINDS), loc="outside lower center")


def _lost_share(summary: Summary, kind: str) -> float:
    return 100 * summary.mean(lambda result: max(0.0, result.lost[kind]) / result.healthy_waf)


def draw_sweep(path: Path, name: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Earned by value: one panel per policy, with the others in grey behind it."""
    plt = _matplotlib()
    values = [float(value) for value in rows]
    policies = swept(name, rows)
    columns = min(3, len(policies))
    lines = -(-len(policies) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(3 * columns, 2.1 * lines + 0.4),
        sharex=True,
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    for axis, policy in zip(axes.flat, policies, strict=False):
        for points in policies.values():
            axis.plot(values, [earned for earned, _ in points], color="#d0d0d0", linewidth=0.8)
        earned, width = zip(*policies[policy], strict=True)
        axis.errorbar(
            values, earned, yerr=width, color="#4878a8", linewidth=1.2, capsize=2, marker="o", markersize=3
        )
        axis.set_title(policy, fontsize=9)
        axis.tick_params(labelsize=7)
        if min(values) > 0 and max(values) / min(values) > 20:
            axis.set_xscale("log")
    for axis in list(axes.flat)[len(policies) :]:
        axis.set_visible(False)
    figure.supxlabel(name, fontsize=9)
    figure.supylabel("earned, % of a life without failures", fontsize=9)
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
