"""How a step ends, which says what its schedule minimises. F, I and W are apart in both.

staggered    a stage continues when its own update is done: the period counts
decoupled    updates wait for the norm of all stages, so the next step waits, too: the makespan counts
"""

from __future__ import annotations

STAGGERED, DECOUPLED = "staggered", "decoupled"
MODES = (STAGGERED, DECOUPLED)


def training_mode(*, stagger: bool) -> str:
    return STAGGERED if stagger else DECOUPLED
