"""Fake agents (`harness.fake_agents`) in several processes: one process of Python is not fast enough to be
thousands of nodes, and what it is late with would be counted against the coordinator.

    parent ── Seal, Kill, Copied ──► crowd of some nodes ── real lines ──► the daemon
           ◄── News, Copied ───────

The monotonic clock of Linux is one for all processes, so that times of different crowds are compared.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from everstep.protocol import actions as act
from everstep.protocol.ops import Worker
from harness.fake_agents import Crowd, FakeAgent

NEWS_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """What one process plays."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    token: str
    microbatches: int
    beat_s: float


@dataclass(frozen=True, slots=True)
class Seal:
    step: int
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    worker: Worker


@dataclass(frozen=True, slots=True)
class Copied:
    task: str
    words: act.CopyState
    step: int


@dataclass(frozen=True, slots=True)
class News:
    """Of one crowd. `complete` as there; `epoch`: the last of which a node has orders; `died_at`: the last
    worker that was killed.
    """

    epoch: int
    complete: dict[int, float]
    standing: tuple[int | None, tuple[int, ...]]
    num_members: int
    died_at: float


def allow_many_lines() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _play(lines: Lines, parent: Connection) -> None:
    allow_many_lines()
    asyncio.run(_Player(lines, parent).play())


class _Player:
    def __init__(self, lines: Lines, parent: Connection) -> None:
        self._parent = parent
        headers = {"Authorization": f"Bearer {lines.token}"}
        self._crowd = Crowd(addresses=lines.addresses, headers=headers, beat_s=lines.beat_s)
        self._crowd.microbatches = lines.microbatches
        self._crowd.agents = {name: FakeAgent(name, self._crowd) for name in lines.names}
        self._crowd.crew.elsewhere = lambda task, words, step: parent.send(Copied(task, words, step))
        self._died_at = 0.0

    async def play(self) -> None:
        """Until the parent is gone, or has heard enough."""
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._parent.fileno(), self._obey, over)
        living = [asyncio.create_task(self._crowd.live()), asyncio.create_task(self._tell())]
        ends = asyncio.create_task(over.wait())
        await asyncio.wait([ends, *living], return_when=asyncio.FIRST_COMPLETED)
        loop.remove_reader(self._parent.fileno())
        for task in living:
            task.cancel()
        await asyncio.gather(*living, return_exceptions=True)

    def _obey(self, over: asyncio.Event) -> None:
        try:
            said = self._parent.recv()
        except EOFError:
            over.set()
            return
        match said:
            case Seal():
                self._crowd.seal(said.step, said.stages)
            case Copied():
                self._crowd.crew.copied(said.task, said.words, said.step)
            case Kill() if any(worker == said.worker for _, worker in self._crowd.crew.actors):
                self._died_at = self._crowd.kill(said.worker)

    async def _tell(self) -> None:
        told = None
        while True:
            crowd = self._crowd
            news = News(
                crowd.epoch(), dict(crowd.complete), crowd.standing(), crowd.num_members(), self._died_at
            )
            if news != told:
                self._parent.send(news)
                told = news
            await asyncio.sleep(NEWS_S)


class Crowds:
    """`with` starts and ends the processes."""

    def __init__(self, parts: Sequence[Lines]) -> None:
        self._parts = parts
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._news: dict[Connection, News] = {}

    def __enter__(self) -> Crowds:
        start = multiprocessing.get_context("spawn")
        for part in self._parts:
            ours, theirs = start.Pipe()
            process = start.Process(target=_play, args=(part, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            process.kill()

    def hear(self, until: Callable[[], bool], within_s: float) -> bool:
        """Take what crowds say until this is true; False: not in time."""
        deadline = time.monotonic() + within_s
        while not until():
            if (left := deadline - time.monotonic()) <= 0:
                return False
            for pipe in wait(self._pipes, min(left, 0.1)):
                assert isinstance(pipe, Connection)
                said = pipe.recv()
                if isinstance(said, Copied):
                    self._say(said)
                else:
                    self._news[pipe] = said
        return True

    def _say(self, words: Seal | Kill | Copied) -> None:
        for pipe in self._pipes:
            pipe.send(words)

    def is_settled(self, workers: int) -> bool:
        """So many take part, and no epoch is on its way."""
        newest = max((news.epoch for news in self._news.values()), default=0)
        return self.num_members == workers and self.epoch() == newest

    @property
    def num_members(self) -> int:
        return sum(news.num_members for news in self._news.values())

    def epoch(self) -> int:
        """The last one whose orders are with all nodes."""
        return max(self._complete(), default=0)

    def _complete(self) -> dict[int, float]:
        """By epoch: when its orders were with the nodes of all crowds."""
        if len(self._news) < len(self._pipes):
            return {}
        all_news = list(self._news.values())
        common = set.intersection(*(set(news.complete) for news in all_news))
        return {epoch: max(news.complete[epoch] for news in all_news) for epoch in common}

    def all_resumed(self, after: int, within_s: float) -> float | None:
        """When the orders of the first epoch after this one were with all nodes; None: not in time."""
        if not self.hear(lambda: self.epoch() > after, within_s):
            return None
        return min((epoch, at) for epoch, at in self._complete().items() if epoch > after)[1]

    def kill(self, worker: Worker) -> float:
        """A worker dies; the time at which its agent says so."""
        before = self._died_at()
        self._say(Kill(worker))
        if not self.hear(lambda: self._died_at() > before, 10.0):
            raise RuntimeError(f"no crowd has worker {worker}")
        return self._died_at()

    def _died_at(self) -> float:
        return max((news.died_at for news in self._news.values()), default=0.0)

    def seal(self) -> None:
        """Every stage seals the earliest step, by a worker of the first crowd that has one in it."""
        standing = {pipe: news.standing for pipe, news in self._news.items()}
        step = min(first for first, _ in standing.values() if first is not None)
        sealed: set[int] = set()
        for pipe, (first, stages) in standing.items():
            mine = tuple(stage for stage in stages if first == step and stage not in sealed)
            sealed.update(mine)
            pipe.send(Seal(step, mine))


def parts(number: int, processes: int, **more: object) -> list[Lines]:
    """Nodes n0 to n`number - 1`, in as many parts."""
    names = [f"n{node}" for node in range(number)]
    return [Lines(names=tuple(names[k::processes]), **more) for k in range(processes)]  # type: ignore[arg-type]
