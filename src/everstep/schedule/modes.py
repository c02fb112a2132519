"""The modes of a schedule: one row each.

To add a mode, add a row. A mode is made of four choices: is the backward fused or split, does a stage
continue when its own update is done or wait at a barrier, how much may a worker hold, and is it meant for
survivors or as a reference without failures. A mode that needs another order of ops than list scheduling
finds also needs its generator in `planner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleMode:
    """What a schedule of this mode may do, and what it is judged by."""

    fused: bool  # B = I + W is one op
    staggered: bool  # no barrier between steps: what is minimised is the period, else the makespan
    reference: bool = False  # to compare with, without failures
    tight_stash: bool = False  # at most `stages - s` microbatches at stage s
    label: str  # beside other policies
    about: str


MODES: dict[str, ScheduleMode] = {
    "1f1b": ScheduleMode(
        fused=True,
        staggered=False,
        reference=True,
        tight_stash=True,
        label="1F1B",
        about="one forward, one backward; for comparison",
    ),
    "zero-bubble": ScheduleMode(
        fused=False,
        staggered=True,
        reference=True,
        label="zero bubble",
        about="split backward without bubbles; for comparison",
    ),
    "reroute": ScheduleMode(
        fused=True, staggered=False, label="fused backward", about="fused backward, a barrier between steps"
    ),
    "decoupled": ScheduleMode(
        fused=False, staggered=False, label="decoupled", about="split backward, a barrier between steps"
    ),
    "staggered": ScheduleMode(
        fused=False,
        staggered=True,
        label="staggered",
        about="split backward, each stage continues after its own update",
    ),
}
REFERENCES = tuple(name for name, mode in MODES.items() if mode.reference)
TRAINING, WITH_BARRIER = "staggered", "decoupled"  # what training uses; `optimizer.stagger = "never"`


def training_mode(*, stagger: bool) -> str:
    return TRAINING if stagger else WITH_BARRIER
