"""Which link between machines is slow in a running job: C4D's matrix, of rates instead of delays.

Every worker reports how many bytes each peer on another machine has acknowledged, and for how long some were
on their way; the quotient is the link's rate while it had something to carry, so a trainer that computes for
a while has no slow links. A delay matrix needs both ends of every message and their clocks; a rate is known
at one end, and a cable with little bandwidth, with loss or with delay shows in it alike.

              to 0:0  0:1  1:0  1:1        one cell is hot     that link
    from 0:0    .     1.0  0.9  0.1        a row               what its machine sends
         0:1   1.1     .   1.0  0.1        a column            what its machine receives
         1:0   0.9    1.0   .   0.2
         1:1   0.1    0.1  0.1   .         both                its cable (here that of 1:1's machine)

A cell is a rate in parts of what is usual for the link, over the upper quartile of the other cells: a machine
without a free core slows all of them, and one bad cable of three machines slows four links of six. Hot is
less than `HOT`, `LOOKS` windows on end; calm again is more than `CALM`, for `CALM_LOOKS`. What
is usual is learned while a link is calm, and needs `KNOWN` windows.
A link that was slow before anybody looked has no past: it is compared with the rates of the others, and must
be far below them for longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from everstep.core.words.cluster_messages import SlowLinkEnded, SlowLinkFound, TimesReported
from everstep.core.words.ops import Worker

WINDOW_S, WINDOW_BYTES = 0.05, 1 << 16  # a window ends when so much was on its way
HOT, LOOKS = 0.4, 3
CALM, CALM_LOOKS = 0.7, 5
KNOWN, SMOOTH = 5, 16
BESIDE, BESIDE_LOOKS, BESIDE_LINKS = 0.15, 10, 3  # without a past: of the others' median rate
SHOWN = 4
Link = tuple[Worker, Worker]


@dataclass(slots=True)
class _Rate:
    """What is known of one direction of one link."""

    sent_bytes: int = 0  # in the window that is open
    busy_s: float = 0.0
    rate: float = 0.0  # bytes/s of the last window
    usual: float = 0.0
    windows: int = 0  # calm ones
    hot: int = 0  # on end
    behind: int = 0  # on end: far below the others' rates
    calm: int = 0
    is_slow: bool = False
    had: float = 0.0  # bytes/s that it should have had, when it was found slow

    def close(self) -> bool:
        """True: a window has ended."""
        if self.busy_s < WINDOW_S or self.sent_bytes < WINDOW_BYTES:
            return False
        self.rate = self.sent_bytes / self.busy_s
        self.sent_bytes, self.busy_s = 0, 0.0
        return True

    def part(self) -> float | None:
        """Of what is usual; None: that is not known."""
        return self.rate / self.usual if self.windows >= KNOWN else None

    def learn(self) -> None:
        self.windows = min(self.windows + 1, SMOOTH)
        self.usual += (self.rate - self.usual) / self.windows


@dataclass(slots=True)
class LinkWatch:
    """One task's links between machines."""

    task: str
    _rates: dict[Link, _Rate] = field(default_factory=dict)
    _incarnations: dict[Worker, int] = field(default_factory=dict)

    def reported(
        self, report: TimesReported, peers: Mapping[str, Worker]
    ) -> list[SlowLinkFound | SlowLinkEnded]:
        """`peers`: the workers of the task by name; what a report says of others is not kept."""
        news: list[SlowLinkFound | SlowLinkEnded] = []
        if self._incarnations.setdefault(report.worker, report.incarnation) != report.incarnation:
            self._incarnations[report.worker] = report.incarnation
            news += self._forget(report.worker)
        for name, (sent_bytes, busy_s) in report.sent.items():
            if name not in peers:
                continue
            link = (report.worker, peers[name])
            rate = self._rates.setdefault(link, _Rate())
            rate.sent_bytes += sent_bytes
            rate.busy_s += busy_s
            if rate.close():
                news += self._judge(link, rate)
        return news

    def _forget(self, worker: Worker) -> list[SlowLinkFound | SlowLinkEnded]:
        """A new process, maybe elsewhere: its links are other links."""
        links = [link for link in self._rates if worker in link]
        slow = [link for link in links if self._rates.pop(link).is_slow]
        return [self._ended(link, f"worker {worker} was started again") for link in slow]

    def _judge(self, link: Link, rate: _Rate) -> list[SlowLinkFound | SlowLinkEnded]:
        others = [
            other for at, other in self._rates.items() if at != link and other.rate and not other.is_slow
        ]
        parts = [part for other in others if (part := other.part()) is not None]
        all_slower = min(1.0, sorted(parts)[3 * len(parts) // 4]) if parts else 1.0
        part = rate.part()
        low = part is not None and part < HOT * all_slower
        rate.hot = rate.hot + 1 if low else 0
        far = len(others) >= BESIDE_LINKS and rate.rate < BESIDE * median(other.rate for other in others)
        rate.behind = rate.behind + 1 if far else 0
        if rate.is_slow:
            return self._is_over(link, rate, all_slower)
        if rate.hot >= LOOKS or rate.behind >= BESIDE_LOOKS:
            rate.is_slow, rate.calm = True, 0
            rate.had = rate.usual if low else median(other.rate for other in others)
            return [self._found(link, rate, low=low)]
        if not low and not far:
            rate.learn()
        return []

    def _is_over(self, link: Link, rate: _Rate, all_slower: float) -> list[SlowLinkFound | SlowLinkEnded]:
        rate.calm = rate.calm + 1 if rate.rate > CALM * all_slower * rate.had else 0
        if rate.calm < CALM_LOOKS:
            return []
        rate.is_slow, rate.hot, rate.behind = False, 0, 0
        return [self._ended(link, f"{_bytes(rate.rate)} again")]

    def _found(self, link: Link, rate: _Rate, *, low: bool) -> SlowLinkFound:
        sender, receiver = link
        than = f"usually {_bytes(rate.had)}" if low else f"the other links have {_bytes(rate.had)}"
        also = sorted(at for at, other in self._rates.items() if at != link and (other.is_slow or other.hot))
        well = sorted(at for at, other in self._rates.items() if at != link and other.rate and at not in also)
        return SlowLinkFound(
            task=self.task,
            worker=sender,
            peer=receiver,
            because=f"what worker {sender} sends to worker {receiver} goes at {_bytes(rate.rate)}, {than}",
            evidence=(
                f"{_bytes(rate.rate)} acknowledged while something was on its way, {than}",
                *([f"slow too: {_named(also)}"] if also else []),
            ),
            ruled_out=(
                f"the other {len(well)} links between machines ({_named(well)} have their usual rate)",
            )
            if well
            else (),
        )

    def _ended(self, link: Link, because: str) -> SlowLinkEnded:
        sentence = f"the link from worker {link[0]} to worker {link[1]}: {because}"
        return SlowLinkEnded(task=self.task, worker=link[0], peer=link[1], because=sentence)


def _named(links: list[Link]) -> str:
    few = ", ".join(f"{sender} to {receiver}" for sender, receiver in links[:SHOWN])
    return few + (" and others" if len(links) > SHOWN else "")


def _bytes(rate: float) -> str:
    return f"{rate / 1e6:.1f} MB/s" if rate >= 1e5 else f"{rate / 1e3:.1f} kB/s"
