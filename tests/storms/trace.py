"""What happened, as one number that two runs can compare, and, when asked for, as lines that people read."""

from __future__ import annotations

_MASK = (1 << 64) - 1


class StormTrace:
    def __init__(self, *, record: bool = False) -> None:
        self.value = 0xCBF29CE484222325
        self.lines: list[str] | None = [] if record else None

    def mix(self, time_us: int, code: int, detail: int = 0) -> None:
        """Take one event in. Whole numbers only: the same on every machine."""
        self.value = ((self.value ^ (time_us * 4_093 + code * 131_101 + detail)) * 0x100000001B3) & _MASK

    def hash(self) -> str:
        return f"{self.value:016x}"

    def tell(self, time_us: int, text: str) -> None:
        if self.lines is not None:
            self.lines.append(f"{time_us / 1e3:10.3f} ms  {text}"[:400])
