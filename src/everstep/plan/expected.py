"""When the next failure is to be expected, from what is published and from what was seen here.

The published rate is a floor. Above it every order of magnitude is as likely as any other, until failures are
seen. With n of them in t seconds the expected time to the next is then

    n = 0    what is published
    n = 1    t (ln(published / t) - 0.577): one failure says little
    n >= 2   t / (n - 1)

Rejected: to add those seen to the published rate as if that were one observation. It stands for years of
exposure, and eighty failures in six minutes did not outweigh it: the planner expected days of calm. Only the
last few count, so that calm after a bad hour is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RECENT = 8
EULER = 0.5772156649  # E1(x) is about -EULER - ln x, for small x


def next_event_s(usual_s: float, seen: Sequence[float], began: float, now: float) -> float:
    """`seen`: moments of failures, oldest first; `began`: since when they count. Once there are some, in
    powers of two: time that passes must not make another question of the same one.
    """
    recent = seen[-RECENT:]
    since = recent[0] if len(seen) > RECENT else began
    number = len(recent) - (len(seen) > RECENT)  # the oldest one begins the time
    elapsed = max(1.0, now - since)
    if not number:
        return usual_s
    if number == 1:
        expected_s = elapsed * max(1.0, math.log(usual_s / elapsed) - EULER)
    else:
        expected_s = elapsed / (number - 1)
    return min(usual_s, 2.0 ** round(math.log2(expected_s)))
