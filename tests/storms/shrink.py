"""From a failing storm to a small one: drop faults while it still fails (ddmin, down to single faults)."""

from __future__ import annotations

from tests.storms.run import run_storm
from tests.storms.spec import Spec

MOST_TRIES = 200


def shrink(spec: Spec, *, cluster: bool = False) -> tuple[int, ...]:
    """The indices of a smallest set of faults found that still breaks something; all of them if none less."""
    kept = tuple(range(len(spec.faults)))
    tries, size = 0, max(1, len(kept) // 2)
    while size >= 1:
        dropped = False
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            tries += 1
            if tries > MOST_TRIES:
                return kept
            if run_storm(spec.keep(rest), cluster=cluster).violation is not None:
                kept, dropped = rest, True
                break
        if not dropped:
            size //= 2
    return kept
