"""Who has become slow in a running job: reported step by step, found within three.

Workers report the own time of the ops they ran in a step (`engine/telemetry/stopwatch.py`: without the wait
for a core, and a wait for messages is no op). A worker's *pace* is that time over the time the same ops
usually take it; so neither a stage with more work nor a worker that was given less of it stands out. Its
*ratio* is its pace over that of its peers in the same step, if theirs has grown too: longer sequences for
all raise every pace and no ratio.

    calm ──► hot in two looks on end ──► slow ──► as fast as before in several looks on end ──► calm

Hot is a fifth more than usual, a tenth of a step, and far outside the scatter its ratio had while calm: four
times the usual deviation, and half more than the largest; in logarithms, since twice as long and half as long
are equally far from usual. Eight calm looks are needed to know that. Where sequence lengths scatter, a slow
worker cannot be distinguished from chance by its past as soon as that; and a worker that was slow before
anybody looked has no better past. They are compared with their peers, over eight looks or more, until chance
is no explanation.

Nothing flaps: calm again takes five looks, after a relapse ten, then twenty; and a factor that has changed is
reported only if it did for four looks on end, later for eight, then sixteen. While a worker is slow, what is
usual for it is not learned again.

Rejected: comparing step times (all workers of a job have the same), and core seconds (a throttled device, or
a worker that is stopped every other moment, burns none).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from everstep.core.faults.lagging_shard import slow_shard
from everstep.protocol.incidents import OpsTook
from everstep.protocol.messages import SlownessEnded, SlownessFound, TimesReported
from everstep.protocol.ops import Worker

RATIO = 1.2  # hot: so many times as long as usual
WORTH = 0.10  # of a step
CHANCE, FARTHER = 4.0, 1.5  # times the scatter; times the largest deviation
LOOKS = 2  # hot ones on end, for a verdict
KNOWN = 8  # calm looks, before there is one
CALM_RATIO = 1.1
CALM_LOOKS, MOST_CALM_LOOKS = 5, 80
CHANGED, CHANGED_LOOKS = 0.25, 4  # a factor is another one if it is off by this share for so many looks
FIRST_LOOKS = 2  # of a process: it allocates
USUAL_LOOKS = 3  # needed to know what is usual
SMOOTH = 16  # looks: what is usual moves slowly, and for all alike
KEPT = 32
PEER_LOOKS, PEER_RATIO, PEER_CHANCE, MOST = (8, 16, 32), 1.25, 5.0, 0.85  # against peers, without a past
_LEAST_SCATTER = 0.02
_NOT_WORK = ("R",)  # a reduce is summed when its parts come, in pieces: its time says little


@dataclass(slots=True)
class _Usual:
    seconds: float = 0.0
    looks: int = 0

    def learn(self, seconds: float) -> None:
        self.looks = min(self.looks + 1, SMOOTH)
        self.seconds += (seconds - self.seconds) / self.looks


@dataclass(slots=True)
class _Slow:
    factor: float  # as reported
    since: int
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=CHANGED_LOOKS))
    calm: int = 0  # looks on end
    changed: int = 0
    changes: int = 0  # reported


@dataclass(slots=True)
class _Pace:
    """What is known of one worker."""

    incarnation: int
    looks: int = 0
    usual: dict[str, _Usual] = field(default_factory=dict)  # seconds an op, of calm looks
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # of calm looks, as logarithms
    hot: list[tuple[int, float, float, float]] = field(default_factory=list)  # step, ratio, seconds, usual
    beside_peers: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # as logarithms
    slow: _Slow | None = None
    relapses: int = 0
    last_step: int = 0

    def usual_s(self, ops: Mapping[str, tuple[int, float]]) -> float | None:
        """How long these ops usually take it; None if that is not known."""
        total = 0.0
        for kind, (count, _) in ops.items():
            known = self.usual.get(kind)
            if known is None or known.looks < USUAL_LOOKS:
                return None
            total += count * known.seconds
        return total or None

    def learn(self, ops: Mapping[str, tuple[int, float]], factor: float = 1.0) -> None:
        for kind, (count, seconds) in ops.items():
            if count:
                self.usual.setdefault(kind, _Usual()).learn(seconds / count / factor)

    def hot_from(self) -> float:
        if len(self.ratios) < KNOWN:
            return float("inf")
        farthest = max(map(abs, self.ratios))
        return max(RATIO, exp(max(CHANCE * _scatter(self.ratios), FARTHER * farthest)))


@dataclass(frozen=True, slots=True)
class _Look:
    """One worker's step: its ops, and how that compares."""

    report: TimesReported
    ops: dict[str, tuple[int, float]]
    seconds: float
    pace: float | None


class Watch:
    """One task's workers. `reported` takes what one reports, and answers with what follows from it."""

    def __init__(self, task: str, slow: Mapping[Worker, float] | None = None) -> None:
        """`slow`: workers that are known to be slow, as after a restart of the watcher."""
        self.task = task
        self._known_slow = dict(slow or {})
        self._paces: dict[Worker, _Pace] = {}
        self._steps: dict[int, dict[Worker, TimesReported]] = {}
        self._awaited: set[Worker] = set()  # who reported the steps before
        self._judged = 0

    def reported(self, report: TimesReported) -> list[SlownessFound | SlownessEnded]:
        pace = self._paces.get(report.worker)
        if pace is None or pace.incarnation != report.incarnation:
            factor = self._known_slow.pop(report.worker, None) if pace is None else None
            pace = self._paces[report.worker] = _Pace(report.incarnation)
            if factor is not None:
                pace.slow = _Slow(factor=factor, since=report.step)
        if report.step <= pace.last_step:  # a step is done again, maybe from a checkpoint
            self._steps.clear()
            self._judged = report.step - 1
        pace.last_step = report.step
        self._awaited.add(report.worker)
        self._steps.setdefault(report.step, {})[report.worker] = report
        return self._judge_what_is_whole()

    def factors(self) -> dict[Worker, float]:
        """How many times as long each slow worker takes."""
        return {worker: pace.slow.factor for worker, pace in self._paces.items() if pace.slow is not None}

    def _judge_what_is_whole(self) -> list[SlownessFound | SlownessEnded]:
        """A step is judged when all have reported it, or when one worker is two reports ahead."""
        found: list[SlownessFound | SlownessEnded] = []
        for step in sorted(self._steps):
            ahead = sum(later > step for later in self._steps) >= 2
            if not ahead and not self._awaited <= self._steps[step].keys():
                break
            looked = self._steps.pop(step)
            self._awaited &= looked.keys()  # who did not tell it may be gone
            if step > self._judged:
                self._judged = step
                found += self._judge(step, looked)
        return found

    # -------------------------------------------------------------- one step

    def _judge(
        self, step: int, reports: Mapping[Worker, TimesReported]
    ) -> list[SlownessFound | SlownessEnded]:
        looks = {worker: self._look(worker, one) for worker, one in reports.items()}
        found: list[SlownessFound | SlownessEnded] = []
        for worker, look in looks.items():
            pace = self._paces[worker]
            pace.looks += 1
            if pace.looks <= FIRST_LOOKS or look.seconds <= 0:
                continue
            others = self._others(worker, looks)
            if others is None and pace.slow is not None:
                others = 1.0
            if look.pace is None or others is None:
                pace.learn(look.ops, pace.slow.factor if pace.slow is not None else 1.0)
                continue
            verdict: SlownessFound | SlownessEnded | None
            if pace.slow is not None:
                verdict = self._of_slow(worker, pace, pace.slow, look.pace / max(others, 1.0), look)
            else:
                verdict = self._of_calm(worker, pace, others, look, looks)
            found += [] if verdict is None else [verdict]
        return found

    def _look(self, worker: Worker, report: TimesReported) -> _Look:
        ops = {k: (count, s) for k, (count, s) in report.ops.items() if count and k not in _NOT_WORK}
        seconds = sum(s for _, s in ops.values())
        usual = self._paces[worker].usual_s(ops)
        return _Look(report, ops, seconds, seconds / usual if usual and seconds > 0 else None)

    def _others(self, worker: Worker, looks: Mapping[Worker, _Look]) -> float | None:
        """The middle pace of its peers; where it has none, of everybody else; None where there are none."""
        for same_stage in (True, False):
            paces = [
                look.pace
                for other, look in looks.items()
                if other != worker
                and (other.stage == worker.stage) == same_stage
                and look.pace is not None
                and self._paces[other].slow is None
            ]
            if paces:
                return median(paces)
        return None

    def _of_calm(
        self, worker: Worker, pace: _Pace, others: float, look: _Look, looks: Mapping[Worker, _Look]
    ) -> SlownessFound | None:
        assert look.pace is not None
        ratio = look.pace / max(others, 1.0)  # others that got faster make no worker slow
        extra_s = look.seconds * (1 - 1 / ratio)
        if ratio < pace.hot_from() or extra_s < WORTH * look.report.seconds:
            pace.hot.clear()
            pace.ratios.append(log(look.pace / others))
            pace.learn(look.ops)
            return self._beside_peers(worker, pace, look, looks)
        pace.hot.append((look.report.step, ratio, look.seconds, look.seconds / (look.pace or 1.0)))
        if len(pace.hot) < LOOKS:
            return None
        factor = median(ratio for _, ratio, _, _ in pace.hot)
        since = pace.hot[0][0]
        evidence = tuple(
            f"in step {step} the ops of worker {worker} took {seconds * 1e3:.1f} ms of its own time, usually "
            f"{usual * 1e3:.1f} ms: {ratio:.2f} times"
            for step, ratio, seconds, usual in pace.hot
        )
        because = (
            f"worker {worker} takes {factor:.2f} times as long for the same ops as it did before step {since}"
        )
        ops = tuple(OpsTook(step=step, took_s=took, usual_s=usual) for step, _, took, usual in pace.hot)
        return self._becomes_slow(worker, pace, factor, since, because, evidence, looks, ops)

    def _beside_peers(
        self, worker: Worker, pace: _Pace, look: _Look, looks: Mapping[Worker, _Look]
    ) -> SlownessFound | None:
        """It has always been as slow as it is: are its peers faster at the same ops?"""
        theirs = self._peers_seconds(worker, look, looks)
        if theirs is None:
            return None
        pace.beside_peers.append(log(look.seconds / theirs))
        lately = [list(pace.beside_peers)[-n:] for n in PEER_LOOKS if len(pace.beside_peers) >= n]
        scatter = _scatter(pace.ratios)
        ratios = next((few for few in lately if _is_no_chance(few, scatter)), None)
        if ratios is None:
            return None
        factor = exp(median(ratios))
        if look.seconds * (1 - 1 / factor) < WORTH * look.report.seconds:
            return None
        evidence = (
            f"in the last {len(ratios)} looks the ops of worker {worker} took {exp(min(ratios)):.2f} to "
            f"{exp(max(ratios)):.2f} times as long as the same ops on its peers",
        )
        because = f"worker {worker} takes {factor:.2f} times as long as its peers for the same ops"
        for kind, known in pace.usual.items():  # what is usual for its peers should be for it
            known.seconds = median(
                self._paces[peer].usual[kind].seconds
                for peer in self._peers(worker, looks)
                if kind in self._paces[peer].usual
            )
        return self._becomes_slow(worker, pace, factor, look.report.step, because, evidence, looks)

    def _peers_seconds(self, worker: Worker, look: _Look, looks: Mapping[Worker, _Look]) -> float | None:
        """How long its ops would have taken its middle peer in this step."""
        peers = [looks[w] for w in self._peers(worker, looks)]
        total = 0.0
        for kind, (count, _) in look.ops.items():
            each = [p.ops[kind][1] / p.ops[kind][0] for p in peers if kind in p.ops]
            if not each:
                return None
            total += count * median(each)
        return total or None

    def _peers(self, worker: Worker, looks: Mapping[Worker, _Look]) -> list[Worker]:
        return [w for w in looks if w.stage == worker.stage and w != worker and self._paces[w].slow is None]

    def _becomes_slow(
        self,
        worker: Worker,
        pace: _Pace,
        factor: float,
        since: int,
        because: str,
        evidence: tuple[str, ...],
        looks: Mapping[Worker, _Look],
        ops: tuple[OpsTook, ...] = (),
    ) -> SlownessFound:
        pace.slow = _Slow(factor=factor, since=since)
        pace.hot.clear()
        pace.beside_peers.clear()
        if (shard := _slow_shard(looks[worker].report)) is not None:
            because, evidence = f"{because}; its shard {shard[0]} is the slow one", (*evidence, shard[1])
        return SlownessFound(
            task=self.task,
            worker=worker,
            incarnation=pace.incarnation,
            factor=round(factor, 3),
            since_step=since,
            because=because,
            evidence=evidence,
            ruled_out=self._ruled_out(worker, looks),
            ops=ops,
            paces={worker: round(factor, 3), **self._innocent(worker, looks)},
        )

    def _innocent(self, worker: Worker, looks: Mapping[Worker, _Look]) -> dict[Worker, float]:
        """The others that are not slow, and their paces."""
        return {
            other: look.pace
            for other, look in sorted(looks.items())
            if other != worker and look.pace is not None and self._paces[other].slow is None
        }

    def _ruled_out(self, worker: Worker, looks: Mapping[Worker, _Look]) -> tuple[str, ...]:
        paces = self._innocent(worker, looks)
        clear = [f"{other} ({pace:.2f} of its usual time)" for other, pace in paces.items()]
        few = ", ".join(clear[:4]) + (f" and {len(clear) - 4} more" if len(clear) > 4 else "")
        return (
            *((f"worker {few}",) if clear else ()),
            "a link, or waiting for others (only the time inside its ops is counted)",
            "a crowded machine (the wait for a core is taken out)",
            "a stage with more work, or longer sequences (it is compared with its own past and its peers)",
        )

    # -------------------------------------------------------------- while it is slow

    def _of_slow(
        self, worker: Worker, pace: _Pace, slow: _Slow, ratio: float, look: _Look
    ) -> SlownessFound | SlownessEnded | None:
        slow.ratios.append(ratio)
        slow.calm = slow.calm + 1 if ratio < CALM_RATIO else 0
        if slow.calm >= min(CALM_LOOKS * 2**pace.relapses, MOST_CALM_LOOKS):
            pace.slow, pace.relapses = None, pace.relapses + 1
            because = f"worker {worker} has been as fast as before for {slow.calm} looks"
            return SlownessEnded(task=self.task, worker=worker, incarnation=pace.incarnation, because=because)
        now = median(slow.ratios)
        off = abs(now / slow.factor - 1) > CHANGED and ratio >= CALM_RATIO
        slow.changed = slow.changed + 1 if off else 0
        if slow.changed < CHANGED_LOOKS * 2**slow.changes:
            return None
        before, slow.factor = slow.factor, now
        slow.changed, slow.changes = 0, slow.changes + 1
        because = (
            f"worker {worker}, slow since step {slow.since}, takes {now:.2f} times as long as it should, "
            f"no longer {before:.2f} times"
        )
        return SlownessFound(
            task=self.task,
            worker=worker,
            incarnation=pace.incarnation,
            factor=round(now, 3),
            since_step=slow.since,
            because=because,
            evidence=(f"in step {look.report.step} its ops took {ratio:.2f} times their usual time",),
        )


def _is_no_chance(ratios: Sequence[float], scatter: float) -> bool:
    """Longer than the peers by enough, nearly always, and so much that it is no chance; as logarithms.

    `scatter`: of more looks than these few, which may agree by chance.
    """
    middle = median(ratios)
    error = 1.25 * max(scatter, _scatter(ratios)) / len(ratios) ** 0.5
    often = sum(ratio > middle / 3 for ratio in ratios)
    return middle > max(log(PEER_RATIO), PEER_CHANCE * error) and often >= MOST * len(ratios)


def _scatter(values: Sequence[float]) -> float:
    """The standard deviation that the middle of the values suggests."""
    middle = median(values)
    return max(_LEAST_SCATTER, 1.4826 * median(abs(value - middle) for value in values))


def _slow_shard(report: TimesReported) -> tuple[int, str] | None:
    """Which of a worker's shards the others wait for, and how that is known."""
    shard = slow_shard(report.shard_waits, report.seconds)
    if shard is None:
        return None
    waits = ", ".join(f"shard {i} {waited * 1e3:.0f} ms" for i, waited in enumerate(report.shard_waits))
    text = (
        f"of {report.seconds * 1e3:.0f} ms its shards spent in collectives, waiting for each other: {waits}"
    )
    return shard, f"{text}; shard {shard} comes last"
