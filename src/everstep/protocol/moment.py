"""When, and because of what: the time an event was handled at, with the event's number.

Every event of a cluster has a number, that of its journal entry. It travels with the time through all that is
decided about the event, so that every action and every line of an incident can name its cause.
"""

from __future__ import annotations

from typing import NamedTuple


class Moment(NamedTuple):
    at: float  # seconds, as given to `handle`
    event: int
