"""Buffers for reuse that a send may still be reading from.

A send does not copy: it *borrows* a buffer until its last byte is on the wire, which can be much later.

1. A buffer that is borrowed is never written to.
2. One that is wanted for writing while it is borrowed is left to its borrower, and another one is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_SPARE = 2


class Buffers(Generic[T]):
    """`borrowed`: is a send still reading from it? `new` and `copy` make one."""

    def __init__(
        self, *, borrowed: Callable[[T], bool], new: Callable[[], T], copy: Callable[[T], T]
    ) -> None:
        self.is_borrowed = borrowed
        self._new, self._copy = new, copy
        self._spare: list[T] = []

    def take(self) -> T:
        """One to write to."""
        return self._spare.pop() if self._spare else self._new()

    def give_back(self, buffer: T) -> None:
        """Its contents are not needed any more."""
        if not self.is_borrowed(buffer) and len(self._spare) < MOST_SPARE:
            self._spare.append(buffer)

    def writable(self, buffer: T) -> T:
        """The same contents, where they may be changed."""
        return self._copy(buffer) if self.is_borrowed(buffer) else buffer

    def clear(self) -> None:
        self._spare.clear()
