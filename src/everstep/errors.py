"""The exceptions of Everstep, and the bound on their texts.

    EverstepError
    ├── UserError       the input is wrong; the message is one sentence that names the field and the fix
    ├── PeerError       the other side of a connection broke the contract
    ├── DeviceError     a device of this process does not do what it was told; a new process may be served
    └── InternalError   our bug: stop and tell the story

A fault of training (a death, a hang, a lost link) is not an exception: it is a value, an event.
"""

from __future__ import annotations

import re

MOST_SENTENCE = 2_000  # characters of an error, a reason, an exit's last words
MOST_TRACEBACK = 16_000
# What a terminal obeys, and what turns the direction of a text; tabs and line ends stay.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class EverstepError(Exception):
    """Anything Everstep raises on purpose."""


class UserError(EverstepError):
    """Something the user can mend; shown as one sentence, exit code 2, no traceback."""


class PeerError(EverstepError):
    """A message or a stream from another process is not what the protocol allows."""


class DeviceError(EverstepError):
    """A device does not do what it was told. The process that uses it must end."""


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


def named(error: BaseException) -> str:
    """An exception with its type, also where its own text cannot be had: code outside writes that, too."""
    try:
        text = str(error)
    except Exception as failed:
        text = f"(its text cannot be shown: {type(failed).__name__})"
    return f"{type(error).__name__}: {text}"


def one_sentence(text: str) -> str:
    """With a full stop at its end, also where it quotes a sentence that has one."""
    return f"{text.rstrip().removesuffix('.')}."


def printable(text: str) -> str:
    """Escapes are written out: names in files and words of other programs must not move a cursor."""
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)
