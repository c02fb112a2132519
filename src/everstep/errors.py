"""The exceptions of Everstep, and the bound on their texts.

    EverstepError
    ├── UserError       the input is wrong; the message is one sentence that names the field and the fix
    ├── PeerError       the other side of a connection broke the contract
    └── InternalError   our bug: stop and tell the story

A fault of training (a death, a hang, a lost link) is not an exception: it is a value, an event.
"""

from __future__ import annotations

MOST_SENTENCE = 2_000  # characters of an error, a reason, an exit's last words
MOST_TRACEBACK = 16_000


class EverstepError(Exception):
    """Anything Everstep raises on purpose."""


class UserError(EverstepError):
    """Something the user can mend; shown as one sentence, exit code 2, no traceback."""


class PeerError(EverstepError):
    """A message or a stream from another process is not what the protocol allows."""


class InternalError(EverstepError):
    """An invariant of ours does not hold."""


def clipped(text: str, most: int = MOST_SENTENCE) -> str:
    """Texts that people and programs outside write are bounded where they come in.

    The text, or its beginning and its end with the number of characters left out between them.
    """
    if len(text) <= most:
        return text
    mark = f" … {len(text) - most} characters left out … "
    head = most // 2
    return text[:head] + mark + text[len(text) - (most - head) :]
