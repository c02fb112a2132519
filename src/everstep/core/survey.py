"""From the survivors' ledgers to what is still owed.

All arithmetic on sets, no state: given who lives and what each says it has done, find for every step that somebody is
in: which stages have its sum already, which (microbatch, stage) has been run where, who lacks a sum that a peer
holds. Two steps can be open at once, never three: a stage cannot seal a step before its neighbours have entered it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.core.actions import BrokenStep
from everstep.core.messages import Ledger, Place
from everstep.core.ops import Kind, Microbatch, Worker
from everstep.errors import InternalError


@dataclass(frozen=True, slots=True)
class Shape:
    replicas: int
    stages: int
    microbatches: int

    def workers(self) -> list[Worker]:
        return [Worker(k, s) for k in range(self.replicas) for s in range(self.stages)]

    def all_microbatches(self) -> list[Microbatch]:
        return [Microbatch(k, m) for k in range(self.replicas) for m in range(self.microbatches)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    low: int
    high: int
    broken: Mapping[int, BrokenStep]
    give: Mapping[Worker, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)


def survey(shape: Shape, ledgers: Mapping[Worker, Ledger], *, steps: int,
           entering: Mapping[Worker, int]) -> Survey:
    """`ledgers` are the members'; `entering` are joiners and the step from which they are members too."""
    low = min(ledger.step for ledger in ledgers.values())
    high = max(ledger.step for ledger in ledgers.values())
    if high > low + 1:
        raise InternalError(f"workers are in steps {low} to {high}; more than two steps cannot be open")
    broken: dict[int, BrokenStep] = {}
    give: dict[Worker, dict[int, tuple[int, ...]]] = {}
    for step in range(low, min(high, steps) + 1):
        alive = {*ledgers, *(w for w, first in entering.items() if first <= step)}
        dead = frozenset(w for w in shape.workers() if w not in alive)
        done: dict[Place, tuple[int, str]] = {}
        for stage in range(shape.stages):
            peers = {w: ledgers[w] for w in ledgers if w.stage == stage}
            holders = [w for w, ledger in peers.items() if _holds(ledger, step, stage)]
            if holders:
                done |= {(m, stage): (holders[0].replica, "FIW") for m in shape.all_microbatches()}
                lacking = tuple(w.replica for w, ledger in peers.items() if not _holds(ledger, step, stage))
                if lacking:
                    give.setdefault(holders[0], {})[step] = lacking
            else:
                done |= _done_places(peers, step)
        broken[step] = BrokenStep(dead, done)
    return Survey(low=low, high=high, broken=broken, give=give)


def _holds(ledger: Ledger, step: int, stage: int) -> bool:
    return ledger.step > step or (ledger.step == step and any(op.kind is Kind.R for op in ledger.done))


def _done_places(peers: Mapping[Worker, Ledger], step: int) -> dict[Place, tuple[int, str]]:
    done: dict[Place, tuple[int, str]] = {}
    for worker, ledger in peers.items():
        if ledger.step != step:
            continue
        kinds: dict[Place, str] = {}
        for op in ledger.done:
            if op.microbatch is not None:
                place = (op.microbatch, op.stage)
                kinds[place] = kinds.get(place, "") + op.kind
        for place, run in kinds.items():
            if place in done:
                raise InternalError(f"{place[0]} was run by two workers of stage {place[1]} in step {step}")
            done[place] = (worker.replica, "".join(sorted(run, key="FIW".index)))
    return done
