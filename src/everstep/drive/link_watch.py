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
less than `HOT`, and less than the lowest of its recent rates, for `LOOKS` windows in a row; calm again
is more than `CALM`, for `CALM_LOOKS`. What is usual is the median of calm windows, at least `KNOWN`: one
burst changes nothing, and a link that often has slow windows needs slower ones to be found.
It is compared with what others (at most `COMPARED`) carried since its first slow window: their last rates
can be of a time when all was well. So a single link is never found slow: it may be its machine.
A link that was slow before anybody looked has no past: it is compared with the rates of the others, and must
be far below them for longer.

Where a task is on two machines, the cable of one slows all links. If all are found far below what they
had `ALIKE` times, they are suspected (`LinksSuspected`): a third machine can tell a network from a busy core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from everstep.protocol.messages import LinksSuspected, SlowLinkEnded, SlowLinkFound, TimesReported
from everstep.protocol.ops import Worker

WINDOW_S, WINDOW_BYTES = 0.05, 1 << 16  # a window ends when so much was on its way
MOST_BYTES, MOST_S = 1 << 60, 1e6  # no report can be right that says more
HOT, NOISE, LOOKS = 0.4, 0.8, 3  # of the usual rate, of the lowest calm one, windows in a row
CALM, CALM_LOOKS = 0.7, 5
KNOWN, PAST = 5, 32
BESIDE, BESIDE_LOOKS, BESIDE_LINKS = 0.15, 10, 3  # without a past: of the others' median rate
COMPARED = 32
ALIKE = 2  # times in a row that all links were found slow; each takes two windows
SHOWN = 4
Link = tuple[Worker, Worker]


@dataclass(slots=True)
class _Rate:
    """What is known of one direction of one link."""

    total_bytes: int = 0
    total_s: float = 0.0
    open_bytes: int = 0  # totals when the present window began
    open_s: float = 0.0
    rate: float = 0.0  # bytes/s of the last window
    past: deque[float] = field(default_factory=lambda: deque(maxlen=PAST))  # rates of calm windows
    usual: float = 0.0
    hot: _HotWindows | None = None
    alike: int = 0  # times that it was found slow, and the others too
    calm: int = 0
    is_slow: bool = False
    had: float = 0.0  # bytes/s that it should have had, when it was found slow; 0: not known

    def add(self, sent_bytes: int, busy_s: float) -> bool:
        """True: a window has ended."""
        if not (0 <= sent_bytes <= MOST_BYTES and 0 <= busy_s <= MOST_S):  # also not a number
            return False
        self.total_bytes += sent_bytes
        self.total_s += busy_s
        if (rate := self.since(self.open_bytes, self.open_s)) is None:
            return False
        self.rate, self.open_bytes, self.open_s = rate, self.total_bytes, self.total_s
        return True

    def since(self, total_bytes: int, total_s: float) -> float | None:
        """Bytes/s since it had carried so much; None: too little for a window."""
        sent_bytes, busy_s = self.total_bytes - total_bytes, self.total_s - total_s
        return sent_bytes / busy_s if busy_s >= WINDOW_S and sent_bytes >= WINDOW_BYTES else None

    @property
    def is_known(self) -> bool:
        return len(self.past) >= KNOWN

    def now(self) -> _Other:
        return _Other(self, self.total_bytes, self.total_s, self.usual if self.is_known else 0.0)

    def limit(self) -> float:
        """Below it the link is slow, unless all are."""
        return min(HOT * self.usual, NOISE * min(self.past))

    def learn(self) -> None:
        """A calm window. Hot ones before it were too few in a row: this link varies as much."""
        self.past.extend([*(self.hot.rates if self.hot else ()), self.rate])
        self.usual, self.hot, self.alike = median(self.past), None, 0


class _Other(NamedTuple):
    """Another link, at one moment."""

    link: _Rate
    sent: int
    busy_s: float
    usual: float  # 0: not known


@dataclass(slots=True)
class _HotWindows:
    """Slow windows of one link in a row, and what other links had carried when they began."""

    others: Sequence[_Other]
    looks: int = 0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS))

    def beside(self) -> list[tuple[float, float]]:
        """Rates since then of other links that are not slow, each with its usual one."""
        rates = [(other.link.since(other.sent, other.busy_s), other) for other in self.others]
        return [(rate, other.usual) for rate, other in rates if rate is not None and not other.link.is_slow]


@dataclass(slots=True)
class LinkWatch:
    """One task's links between machines."""

    task: str
    _rates: dict[Link, _Rate] = field(default_factory=dict)
    _incarnations: dict[Worker, int] = field(default_factory=dict)
    _slow: set[Link] = field(default_factory=set)
    _looks: bool = False  # one was found slow with the others, so all are looked at

    @classmethod
    def of(cls, task: str, slow: Iterable[Link]) -> LinkWatch:
        """`slow`: links that are known to be slow, as after a restart of the watcher."""
        links = set(slow)
        return cls(task, {link: _Rate(is_slow=True) for link in links}, {}, links)

    def reported(
        self, report: TimesReported, peers: Mapping[str, Worker]
    ) -> list[SlowLinkFound | SlowLinkEnded]:
        """`peers`: the workers of the task by name; what a report says of others is not kept."""
        news: list[SlowLinkFound | SlowLinkEnded] = []
        if self._incarnations.setdefault(report.worker, report.incarnation) != report.incarnation:
            self._incarnations[report.worker] = report.incarnation
            news += self._forget(report.worker, f"worker {report.worker} was started again")
        for gone in {worker for link in self._slow for worker in link if str(worker) not in peers}:
            news += self._forget(gone, f"worker {gone} is gone")
        for name, (sent_bytes, busy_s) in report.sent.items():
            if name not in peers:
                continue
            link = (report.worker, peers[name])
            rate = self._rates.setdefault(link, _Rate())
            if rate.add(sent_bytes, busy_s):
                news += self._judge(link, rate)
        return news

    def suspected(self, are_two: Callable[[], bool]) -> list[LinksSuspected]:
        """All links, once, where all are slow and `are_two` says that they are those of two machines. They
        count as slow until they are calm.
        """
        if not self._looks:
            return []
        self._looks = False
        times = [rate.alike for rate in self._rates.values() if rate.is_known and not rate.is_slow]
        if min(times, default=0) < ALIKE or not are_two():
            return []
        links = tuple(sorted(link for link, rate in self._rates.items() if rate.alike >= ALIKE))
        first = self._rates[links[0]]
        because = f"all links are slow: {_bytes(first.rate)} where {_bytes(first.usual)} are usual"
        for rate in map(self._rates.__getitem__, links):
            rate.is_slow, rate.calm, rate.had, rate.alike = True, 0, rate.usual, 0
        self._slow.update(links)
        return [LinksSuspected(task=self.task, links=links, because=because)]

    def _forget(self, worker: Worker, because: str) -> list[SlowLinkFound | SlowLinkEnded]:
        """Of a new process, maybe elsewhere, links are other links."""
        for link in [link for link in self._rates if worker in link]:
            del self._rates[link]
        return [self._ended(link, because) for link in sorted(self._slow) if worker in link]

    def _judge(self, link: Link, rate: _Rate) -> list[SlowLinkFound | SlowLinkEnded]:
        if rate.is_slow:
            return self._is_over(link, rate)
        if not (rate.rate < rate.limit() if rate.is_known else self._is_far(rate)):
            rate.learn()
            return []
        if rate.hot is None:
            rate.hot = _HotWindows([other.now() for other in self._others(rate)])
        rate.hot.looks += 1
        rate.hot.rates.append(rate.rate)
        beside = rate.hot.beside()
        return self._against_its_past(link, rate, beside) if rate.is_known else self._far(link, rate, beside)

    def _against_its_past(
        self, link: Link, rate: _Rate, beside: Sequence[tuple[float, float]]
    ) -> list[SlowLinkFound | SlowLinkEnded]:
        all_slower = _all_slower(beside)
        if all_slower is None or rate.hot is None:
            return []
        if rate.rate >= rate.limit() * all_slower:
            rate.hot = None  # not learned either: such times pass
            rate.alike += 1
            self._looks = self._looks or rate.alike >= ALIKE
            return []
        return [self._found(link, rate, rate.usual, "usually")] if rate.hot.looks >= LOOKS else []

    def _far(
        self, link: Link, rate: _Rate, beside: Sequence[tuple[float, float]]
    ) -> list[SlowLinkFound | SlowLinkEnded]:
        if rate.hot is None or rate.hot.looks < BESIDE_LOOKS or len(beside) < BESIDE_LINKS:
            return []
        theirs = median(their_rate for their_rate, _ in beside)
        if rate.rate >= BESIDE * theirs:
            rate.hot = None
            return []
        return [self._found(link, rate, theirs, "the other links have")]

    def _is_far(self, rate: _Rate) -> bool:
        rates = [other.rate for other in self._others(rate)]
        return len(rates) >= BESIDE_LINKS and rate.rate < BESIDE * median(rates)

    def _others(self, rate: _Rate) -> list[_Rate]:
        """Of a large task only some: these are looked at for every slow window."""
        rates = list(self._rates.values())
        some = rates[:: 1 + len(rates) // COMPARED]
        return [other for other in some if other is not rate and other.rate and not other.is_slow]

    def _is_over(self, link: Link, rate: _Rate) -> list[SlowLinkFound | SlowLinkEnded]:
        others = self._others(rate)
        if not rate.had and others:
            rate.had = median(other.rate for other in others)
        all_slower = _all_slower([(other.rate, other.now().usual) for other in others]) or 1.0
        rate.calm = rate.calm + 1 if rate.had and rate.rate > CALM * all_slower * rate.had else 0
        if rate.calm < CALM_LOOKS:
            return []
        rate.is_slow, rate.hot = False, None
        return [self._ended(link, f"{_bytes(rate.rate)} again")]

    def _found(self, link: Link, rate: _Rate, had: float, than: str) -> SlowLinkFound:
        rate.is_slow, rate.calm, rate.had = True, 0, had
        self._slow.add(link)
        sender, receiver = link
        than = f"{than} {_bytes(had)}"
        others = [(at, other) for at, other in sorted(self._rates.items(), key=_by_link) if at != link]
        also = [at for at, other in others if other.is_slow or other.hot]
        well = [at for at, other in others if other.rate and not other.is_slow and not other.hot]
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
        self._slow.discard(link)
        sentence = f"the link from worker {link[0]} to worker {link[1]}: {because}"
        return SlowLinkEnded(task=self.task, worker=link[0], peer=link[1], because=sentence)


def _all_slower(rates: Sequence[tuple[float, float]]) -> float | None:
    """The upper quartile of these rates, in parts of the usual ones, at most 1; None: none is known."""
    parts = sorted(rate / usual for rate, usual in rates if usual)
    return min(1.0, parts[3 * len(parts) // 4]) if parts else None


def _by_link(pair: tuple[Link, _Rate]) -> Link:
    return pair[0]


def _named(links: list[Link]) -> str:
    few = ", ".join(f"{sender} to {receiver}" for sender, receiver in links[:SHOWN])
    return few + (" and others" if len(links) > SHOWN else "")


def _bytes(rate: float) -> str:
    return f"{rate / 1e6:.1f} MB/s" if rate >= 1e5 else f"{rate / 1e3:.1f} kB/s"
