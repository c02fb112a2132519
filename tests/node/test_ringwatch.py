"""Slow links, seen from the rings of the workers of a node: reported after two looks, and ended."""

from __future__ import annotations

from pathlib import Path

from everstep.engine.telemetry import recorder as recording
from everstep.engine.telemetry.recorder import WorkerRecorder
from everstep.node.ring_watch import ENDED_LOOKS, LOOK_EVERY_S, RingWatch
from everstep.protocol.messages import SlowLinkEnded, SlowLinkFound
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.parcels import Parcel, ParcelKind

MS = 1_000_000
STEP_MS = 200


class Job:
    """Two replicas of two stages whose rings are written by the real recorder, on a clock of ours."""

    def __init__(self, folder: Path, monkeypatch: object) -> None:
        self.now_ns, self.step, self.looks = 10**12, 0, 0
        monkeypatch.setattr(recording, "_clock", lambda: self.now_ns)  # type: ignore[attr-defined]
        monkeypatch.setattr(recording, "_wall", lambda: 10**18 + self.now_ns)  # type: ignore[attr-defined]
        self.rings = {Worker(k, s): folder / f"{k}-{s}.ring" for k in range(2) for s in range(2)}
        self.recorders = {
            worker: WorkerRecorder(path, worker, replicas=2, stages=2) for worker, path in self.rings.items()
        }
        self.watch = RingWatch("t", 2)

    def train(self, steps: int, *, delay_ms: dict[int, float] | None = None) -> None:
        """`delay_ms`: by replica, what its messages between stages take."""
        for _ in range(steps):
            self.step += 1
            begin = self.now_ns
            for number in range(4):
                for k in range(2):
                    self._message(begin + number * 40 * MS, k, number, (delay_ms or {}).get(k, 1.0))
                    for s in range(2):
                        self.now_ns = begin + number * 40 * MS
                        self.recorders[Worker(k, s)].op(
                            self.step, self.now_ns, self.now_ns + 20 * MS, 20 * MS
                        )
            self.now_ns = begin + STEP_MS * MS

    def _message(self, at_ns: int, replica: int, number: int, delay_ms: float) -> None:
        for what, source, target in ((ParcelKind.ACTIVATION, 0, 1), (ParcelKind.GRADIENT, 1, 0)):
            parcel = Parcel(what, 0, self.step, target, Microbatch(replica, number))
            self.now_ns = at_ns
            self.recorders[Worker(replica, source)].sent(parcel, replica, target, 4096)
            self.now_ns = at_ns + int((delay_ms if source == 0 else 1.0) * MS)
            self.recorders[Worker(replica, target)].got(parcel, 4096)

    def look(self) -> list[SlowLinkFound | SlowLinkEnded]:
        self.looks += 1
        return self.watch.look(self.rings, self.looks * LOOK_EVERY_S)


def test_a_slow_link_is_reported_once_by_its_workers_names_and_ends(
    tmp_path: Path, monkeypatch: object
) -> None:
    job = Job(tmp_path, monkeypatch)
    job.train(20, delay_ms={1: 30.0})
    assert job.look() == []  # one look can be wrong
    job.train(2, delay_ms={1: 30.0})
    (found,) = job.look()
    assert isinstance(found, SlowLinkFound)
    assert (found.worker, found.peer) == (Worker(1, 0), Worker(1, 1))
    assert "worker 1:0 to worker 1:1" in found.evidence[0]
    assert job.look() == []
    job.train(40)
    news = [news for _ in range(ENDED_LOOKS) for news in job.look()]
    assert [type(each) for each in news] == [SlowLinkEnded]


def test_even_links_are_not_reported(tmp_path: Path, monkeypatch: object) -> None:
    job = Job(tmp_path, monkeypatch)
    job.train(20)
    assert [news for _ in range(3) for news in job.look()] == []


def test_a_ring_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    watch = RingWatch("t", 2)
    assert watch.look({Worker(0, 0): tmp_path / "none", Worker(0, 1): tmp_path / "nor this"}, 0.0) == []


def test_a_process_that_lost_its_core_between_two_clocks_has_the_same_offset(monkeypatch: object) -> None:
    """Else its messages would seem to take as long as it was away."""
    now = iter(range(10**9, 10**12, 10**3))
    pauses = iter([80 * MS, 80 * MS, 0, 80 * MS, *[0] * 100])
    away = 0

    def clock() -> int:
        return next(now) + away

    def wall() -> int:
        nonlocal away
        away += next(pauses)
        return 10**18 + next(now) + away

    monkeypatch.setattr(recording, "_clock", clock)  # type: ignore[attr-defined]
    monkeypatch.setattr(recording, "_wall", wall)  # type: ignore[attr-defined]
    assert abs(recording._wall_minus_monotonic() - 10**18) < MS // 100
