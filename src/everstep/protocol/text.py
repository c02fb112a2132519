"""Texts that people and programs outside write are bounded where they come in."""

from __future__ import annotations

MOST_SENTENCE = 2_000  # characters of an error, a reason, an exit's last words
MOST_TRACEBACK = 16_000


def clipped(text: str, most: int = MOST_SENTENCE) -> str:
    """The text, or its beginning and its end with the number of characters left out between them."""
    if len(text) <= most:
        return text
    mark = f" … {len(text) - most} characters left out … "
    head = most // 2
    return text[:head] + mark + text[len(text) - (most - head) :]
