"""From the survivors' ledgers to what is still owed.

Arithmetic on sets, without state. The live workers report what each has done. For every step that a worker
is in, this finds: which stages have its sum already, where each (microbatch, stage) has been run, which
workers lack a sum that a peer holds. Two steps can be open at once, never three: a stage cannot seal a step
before its neighbours have entered it.

A stage that holds its sum owes nothing for it. But the boundary tensors a dead worker had made live only in
its outbox, and a neighbour stage that must redo a microbatch may ask for them. Then a live peer runs that
microbatch once more as a *ghost*: for its outputs only, its gradients are in the sum already. That needs the
weights from before the update; they are still known, because no update is final before every stage has sealed
(see `rewind` below).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace

from everstep.errors import InternalError
from everstep.protocol.actions import BrokenStep
from everstep.protocol.ops import Kind, Microbatch, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.shape import Shape
from everstep.protocol.work import Ledger, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Owed:
    low: int
    high: int
    broken: Mapping[int, BrokenStep]
    owing: frozenset[int]  # the stages with ops still to run in a broken step
    give: Mapping[Worker, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    ghosts: Mapping[Worker, frozenset[tuple[int, Microbatch]]] = field(default_factory=dict)
    settled: Mapping[int, int] = field(
        default_factory=dict
    )  # sharded: by stage, the last step it holds whole
    kept_outputs: int = 0  # of dead workers: live ones have received them, and use them as they are
    rewind: int | None = None  # a ghost's host has updated this step eagerly: that must be undone first

    def broken_if_undone(self, rewind: int | None) -> dict[int, BrokenStep]:
        """The broken steps, if the update of step `rewind` is undone: nothing done after it counts."""
        return {
            step: rest if rewind is None or step <= rewind else BrokenStep(rest.dead, {})
            for step, rest in self.broken.items()
        }


def what_is_owed(
    shape: Shape, ledgers: Mapping[Worker, Ledger], *, steps: int, entering: Mapping[Worker, int]
) -> Owed:
    """`ledgers` are the members'; `entering` are joiners and the step from which they are members too."""
    low = min(ledger.step for ledger in ledgers.values())
    high = max(ledger.step for ledger in ledgers.values())
    if high > low + 1:
        raise InternalError(f"workers are in steps {low} to {high}; more than two steps cannot be open")
    broken: dict[int, BrokenStep] = {}
    give: dict[Worker, dict[int, tuple[int, ...]]] = {}
    ghosts: dict[Worker, set[tuple[int, Microbatch]]] = {}
    owing: set[int] = set()
    kept_outputs = 0
    settled = dict.fromkeys(range(shape.stages), low - 1) if shape.chunks else {}
    peers: list[list[Worker]] = [[] for _ in range(shape.stages)]
    for worker in ledgers:
        peers[worker.stage].append(worker)
    for step in range(low, min(high, steps) + 1):
        view = _StepView(shape, ledgers, peers, step)
        kept_outputs += view.kept_outputs()
        alive = {*ledgers, *(w for w, first in entering.items() if first <= step)}
        for stage in range(shape.stages):
            if shape.chunks:
                if view.is_complete(stage):
                    settled[stage] = step
                    for worker, behind in view.ahead_and_behind(stage).items():
                        give.setdefault(worker, {})[step] = behind
                else:
                    owing.add(stage)  # its reduce starts over in any case
                continue
            holders = frozenset(view.holders[stage])
            lacking = tuple(w.replica for w in peers[stage] if w not in holders) if holders else ()
            if lacking:
                give.setdefault(view.giver(stage), {})[step] = lacking
        if not shape.chunks:
            owing |= {stage for stage in view.owing() if not view.holders[stage]}
        for (microbatch, stage), (host, kinds) in view.ghosts().items():
            ghosts.setdefault(Worker(host, stage), set()).add((step, microbatch))
            view.done[microbatch, stage] = (host, kinds)
        broken[step] = BrokenStep(frozenset(w for w in shape.workers() if w not in alive), view.done)
    hosts_ahead = [w for w in ghosts if ledgers[w].step > low]
    return Owed(
        low=low,
        high=high,
        broken=broken,
        owing=frozenset(owing),
        give=give,
        ghosts={w: frozenset(which) for w, which in ghosts.items()},
        settled=settled,
        kept_outputs=kept_outputs,
        rewind=low if hosts_ahead else None,
    )


class _StepView:
    """One step as the ledgers show it."""

    def __init__(
        self, shape: Shape, ledgers: Mapping[Worker, Ledger], peers: Sequence[Sequence[Worker]], step: int
    ) -> None:
        """`peers`: the workers of each stage that have reported."""
        self.shape = shape
        self.ledgers = ledgers
        self.step = step
        self.peers = peers
        self.holders = [[w for w in workers if self._holds_sum(w)] for workers in peers]
        self.complete = [self.is_complete(stage) for stage in range(shape.stages)]
        self.run = self._run_by_the_living()
        self.done = self.run if not any(self.complete) else self._done()

    def _holds_sum(self, worker: Worker) -> bool:
        ledger = self.ledgers[worker]
        return ledger.step > self.step or (ledger.step == self.step and ledger.has_sum)

    def is_complete(self, stage: int) -> bool:
        """Does the stage owe nothing for its sum? Where states are sharded no worker has all of it, so every
        live one must have its chunks. If one lacks them, no worker can have sealed the step, or updated it.
        """
        holders = self.holders[stage]
        return len(holders) == len(self.peers[stage]) if self.shape.chunks else bool(holders)

    def _done(self) -> dict[Place, tuple[int, str]]:
        """What is run, and all of a stage that holds its sum."""
        done = {place: by for place, by in self.run.items() if not self.complete[place[1]]}
        whole = [(replica, "FIW") for replica in range(self.shape.replicas)]
        for stage in (stage for stage, complete in enumerate(self.complete) if complete):
            by_anyone = whole[self.holders[stage][0].replica]
            for microbatch in self.shape.all_microbatches():
                place = (microbatch, stage)
                by = self.run.get(place)
                done[place] = by_anyone if by is None else whole[by[0]]
        return done

    def ahead_and_behind(self, stage: int) -> dict[Worker, tuple[int, ...]]:
        """Sharded: those who have updated the step, and the replicas that may lack their weights."""
        behind = tuple(w.replica for w in self.peers[stage] if self.ledgers[w].step == self.step)
        return {w: behind for w in self.peers[stage] if behind and self.ledgers[w].step > self.step}

    def giver(self, stage: int) -> Worker:
        """A holder that has reduced the step itself: one that entered after it has the state, not the sum."""
        return next((w for w in self.holders[stage] if self._has_reduced(w)), self.holders[stage][0])

    def _has_reduced(self, worker: Worker) -> bool:
        ledger = self.ledgers[worker]
        ops = ledger.done if ledger.step == self.step else ledger.done_before
        return any(op.kind is Kind.R for op in ops)

    def owing(self) -> set[int]:
        """The stages of which a microbatch is not run to its end."""
        left = [self.shape.replicas * self.shape.microbatches] * self.shape.stages
        for (_, stage), (_, kinds) in self.run.items():
            left[stage] -= kinds == "FIW"
        return {stage for stage, count in enumerate(left) if count}

    def ghosts(self) -> dict[Place, tuple[int, str]]:
        """What must be run again at complete stages, as (host, kinds that need not be)."""
        wanted: dict[Place, set[str]] = {}

        def want_activation(microbatch: Microbatch, stage: int) -> None:
            """A worker will run F of (microbatch, stage): does its input still exist?"""
            if stage > 0 and self.complete[stage - 1] and "F" not in self._kinds(microbatch, stage - 1):
                want(microbatch, stage - 1, "F")

        def want_gradient(microbatch: Microbatch, stage: int) -> None:
            last = stage == self.shape.stages - 1
            if not last and self.complete[stage + 1] and "I" not in self._kinds(microbatch, stage + 1):
                want(microbatch, stage + 1, "F")
                want(microbatch, stage + 1, "I")

        def want(microbatch: Microbatch, stage: int, kind: str) -> None:
            kinds = wanted.setdefault((microbatch, stage), set())
            if kind in kinds or kind in self._kinds(microbatch, stage):
                return
            kinds.add(kind)
            if kind == "F":
                want_activation(microbatch, stage)
            else:
                want_gradient(microbatch, stage)

        for stage in range(self.shape.stages):
            if self.complete[stage] or not any(self.complete[max(0, stage - 1) : stage + 2]):
                continue  # what it needs is made by stages that owe it anyway
            for microbatch in self.shape.all_microbatches():
                kinds = self._kinds(microbatch, stage)
                if "F" not in kinds:
                    want_activation(microbatch, stage)
                if "I" not in kinds and not self._has_gradient(microbatch, stage):
                    want_gradient(microbatch, stage)
        return self._give_hosts({place: kinds for place, kinds in wanted.items() if kinds})

    def kept_outputs(self) -> int:
        """What no live worker has made, and a live one has received and not used yet."""
        held = {
            parcel for ledger in self.ledgers.values() for parcel in ledger.holding
        }  # some twice, for votes
        return sum(
            parcel.step == self.step
            and not self.complete[parcel.stage]
            and (Kind.F if parcel.what is ParcelKind.ACTIVATION else Kind.I)
            not in self._kinds(parcel.microbatch, parcel.maker)
            for parcel in held
            if parcel.microbatch is not None
        )

    def _give_hosts(self, wanted: Mapping[Place, set[str]]) -> dict[Place, tuple[int, str]]:
        """The worker with the stash, else one that has not updated yet, else any; the least burdened of
        them.
        """
        load: dict[Worker, int] = {}
        free: dict[int, list[tuple[int, int, Worker]]] = {}  # by stage, a heap: step, load once, worker
        hosted = {}
        for (microbatch, stage), kinds in sorted(wanted.items()):
            if (microbatch, stage) in self.run:
                host = Worker(self.run[microbatch, stage][0], stage)
            else:
                if stage not in free:
                    free[stage] = sorted((self.ledgers[w].step, load.get(w, 0), w) for w in self.peers[stage])
                host = _least_burdened(free[stage], load)
            load[host] = load.get(host, 0) + 1
            hosted[microbatch, stage] = (host.replica, "".join(k for k in "FIW" if k not in kinds))
        return hosted

    def _run_by_the_living(self) -> dict[Place, tuple[int, str]]:
        run: dict[Place, tuple[int, str]] = {}
        count = 0
        for worker, ledger in self.ledgers.items():
            kinds = self._kinds_of(ledger)
            replica, count = worker.replica, count + len(kinds)
            for place, done in kinds.items():
                run[place] = (replica, done)
        if len(run) != count:
            raise InternalError(self._run_twice())
        return run

    def _kinds_of(self, ledger: Ledger) -> Mapping[Place, str]:
        if ledger.step == self.step:
            return ledger.kinds
        return ledger.kinds_before if ledger.step == self.step + 1 else {}

    def _run_twice(self) -> str:
        seen: set[Place] = set()
        for ledger in self.ledgers.values():
            for microbatch, stage in self._kinds_of(ledger):
                if (microbatch, stage) in seen:
                    return f"{microbatch} was run by two workers of stage {stage} in step {self.step}"
                seen.add((microbatch, stage))
        return ""

    def _kinds(self, microbatch: Microbatch, stage: int) -> str:
        return self.run.get((microbatch, stage), (0, ""))[1]

    def _has_gradient(self, microbatch: Microbatch, stage: int) -> bool:
        """Has the worker with the stash received the gradient already?"""
        if (microbatch, stage) not in self.run:
            return False
        ledger = self.ledgers[Worker(self.run[microbatch, stage][0], stage)]
        return any(_is(parcel, self.step, microbatch, stage) for parcel in ledger.holding)


def _is(parcel: Parcel, step: int, microbatch: Microbatch, stage: int) -> bool:
    return (
        parcel.what is ParcelKind.GRADIENT
        and parcel.step == step
        and parcel.stage == stage
        and parcel.microbatch == microbatch
    )


def _least_burdened(heap: list[tuple[int, int, Worker]], load: Mapping[Worker, int]) -> Worker:
    """Loads only rise, so the first whose load is up to date is the least of all."""
    while True:
        step, known, worker = heap[0]
        if (now := load.get(worker, 0)) == known:
            return worker
        heapreplace(heap, (step, now, worker))
