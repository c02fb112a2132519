"""Times as people write and read them."""

from __future__ import annotations

import re

from everstep.errors import UserError

UNITS_S = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}


def duration(text: object, field: str) -> float:
    """Seconds, from a number or from `90s`, `20min`, `2h`, `3d`."""
    if isinstance(text, int | float) and not isinstance(text, bool) and text >= 0:
        return float(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)\s*", str(text))
    if match is None:
        raise UserError(f"{field} is {text!r}; write seconds, or a time such as 90s, 20min, 2h or 3d.")
    return float(match[1]) * UNITS_S[match[2]]


def span(seconds: float) -> str:
    """A time for people: 45 s, 3.2 h, 6 d."""
    for size, word in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {word}"
    return f"{seconds:.3g} s"
