"""An agent's look into its workers' rings: is a link between them slow?

A worker tells the time of its ops itself; what messages take only shows when both ends are compared, and they
are in the rings of two workers. An agent sees those of its own node; a link to another node has its other end
elsewhere and is not judged. A look reads some hundred kilobytes and thinks for milliseconds, so there is one
every few seconds, and what two in a row agree on is reported (`diagnose.live_diagnosis`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from everstep.diagnose import Syndrome, UnusableFileError
from everstep.diagnose.finding import Finding, Where
from everstep.diagnose.live_diagnosis import DiagnosisStream
from everstep.node.rings import ring_at
from everstep.protocol.messages import SlowLinkEnded, SlowLinkFound
from everstep.protocol.ops import Worker

LOOK_EVERY_S = 4.0
ENDED_LOOKS = 3  # without it, on end
Link = tuple[Worker, Worker]


class RingWatch:
    """One task's workers on this node."""

    def __init__(self, task: str, replicas: int) -> None:
        self._task, self.replicas = task, replicas
        self._stream = DiagnosisStream()
        self._fed: set[Worker] = set()
        self._reported: dict[Link, int] = {}  # looks since it was last seen
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        return now >= self._next

    def look(self, rings: Mapping[Worker, Path], now: float) -> list[SlowLinkFound | SlowLinkEnded]:
        if not self.is_due(now):
            return []
        self._next = now + LOOK_EVERY_S
        for gone in self._fed - rings.keys():
            self._stream.forget(gone.stage * self.replicas + gone.replica)
        self._fed = set()
        for worker, path in rings.items():
            try:
                self._stream.feed(ring_at(path))
                self._fed.add(worker)
            except (OSError, UnusableFileError):  # it is being created, or removed
                continue
        slow = [f for f in self._stream.verdicts() if f.syndrome is Syndrome.COMMUNICATION_SLOW]
        return self._news({link: finding for finding in slow for link in self._links(finding)})

    def _links(self, finding: Finding) -> list[Link]:
        if finding.where is not Where.LINK:  # a side of a worker: nothing here tells it from a busy process
            return []
        return [
            (self._worker(suspect.rank), self._worker(suspect.peer))
            for suspect in finding.suspects
            if suspect.peer is not None
        ]

    def _news(self, slow: Mapping[Link, Finding]) -> list[SlowLinkFound | SlowLinkEnded]:
        news: list[SlowLinkFound | SlowLinkEnded] = []
        for link, finding in slow.items():
            if link not in self._reported:
                news.append(
                    SlowLinkFound(
                        task=self._task,
                        worker=link[0],
                        peer=link[1],
                        because=f"messages from worker {link[0]} to worker {link[1]} take too long",
                        evidence=tuple(self._named(suspect.evidence) for suspect in finding.suspects),
                        ruled_out=tuple(
                            self._named(f"{out.what} ({out.because})") for out in finding.ruled_out
                        ),
                    )
                )
            self._reported[link] = 0
        for link in [link for link in self._reported if link not in slow]:
            self._reported[link] += 1
            if self._reported[link] >= ENDED_LOOKS:
                del self._reported[link]
                because = f"messages from worker {link[0]} to worker {link[1]} take their usual time again"
                news.append(SlowLinkEnded(task=self._task, worker=link[0], peer=link[1], because=because))
        return news

    def _named(self, text: str) -> str:
        """A diagnosis speaks of ranks; here they are workers."""

        def workers(match: re.Match[str]) -> str:
            found: list[Worker] = []
            for run in match[1].split(", "):
                first, _, last = run.partition("-")
                found += map(self._worker, range(int(first), int(last or first) + 1))
            return f"worker {', '.join(map(str, found))}"

        return re.sub(r"\brank (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", workers, text)

    def _worker(self, rank: int) -> Worker:
        return Worker(rank % self.replicas, rank // self.replicas)
