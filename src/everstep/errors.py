"""The exceptions of Everstep.

    EverstepError
    ├── UserError       the input is wrong; the message is one sentence that names the field and the fix
    ├── PeerError       the other side of a connection broke the contract
    └── InternalError   our bug: stop and tell the story

A fault of training (a death, a hang, a lost link) is not an exception: it is a value, an event.
"""

from __future__ import annotations


class EverstepError(Exception):
    """Anything Everstep raises on purpose."""


class UserError(EverstepError):
    """Something the user can mend; shown as one sentence, exit code 2, no traceback."""


class PeerError(EverstepError):
    """A message or a stream from another process is not what the protocol allows."""


class InternalError(EverstepError):
    """An invariant of ours does not hold."""
