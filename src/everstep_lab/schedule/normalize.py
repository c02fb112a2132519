"""Failure normalization: where would these failures hurt least, and which live workers would change stage
for it?

A stage with fewer live workers is a slower stage, and the slowest stage sets the step. A live worker of a
stage with room can become a worker of the worst-hit stage by copying that stage's state; the failure
"moves" to the stage it left. So: spread F failures over the stages, f_0 + ... + f_{P-1} = F, to minimise
the slowest stage's time

    cost_s(j)       time of stage s with j of its workers gone (infinite when none is left)
    best[n][moves]  over the stages so far: least maximum with n failures placed and `moves` workers moved

a dynamic program over stages, O(P F^2) for each number of moves. It keeps the number of moves apart,
because copying state costs time and bytes: the answer is the whole frontier (no move, one move, ...), and
the caller decides how far along it pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from everstep.errors import UserError
from everstep.protocol.ops import Worker
from everstep.schedule.bounds import lower_bound, stage_costs, stash_of_mode
from everstep.schedule.instance import Instance

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Move:
    """A live worker leaves its place and takes over a dead one's."""

    worker: Worker
    becomes: Worker
    state_bytes: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One point of the frontier: after `moves`, no step is shorter than `bound`."""

    failures: tuple[int, ...]  # per stage
    moves: tuple[Move, ...]
    bound: float
    dead: frozenset[Worker]

    @property
    def state_bytes(self) -> float:
        return sum(move.state_bytes for move in self.moves)


def normalize(instance: Instance, mode: str, state_bytes: Sequence[float] = ()) -> list[Choice]:
    """The frontier, fewest moves first: each choice has a smaller bound than the one before it.

    The first choice moves none; its bound is the present one. What a move earns is the ratio of bounds (as
    in `relative_throughput`); what it costs is `state_bytes` over the links. From then on the dead are
    `choice.dead`, and `plan(replace(instance, dead=choice.dead), mode)` is the schedule. Takes milliseconds
    for a few dead, under a second for a hundred among a thousand workers. What is `done` of a broken step is
    ignored: workers change stage between steps.
    """
    if state_bytes and len(state_bytes) != instance.stages:
        raise UserError(f"state_bytes must give one number per stage ({instance.stages}).")
    state = tuple(state_bytes) or (0.0,) * instance.stages
    now = [sum(w.stage == s for w in instance.dead) for s in range(instance.stages)]
    costs = stage_costs(instance, mode, sum(now))
    frontier: list[Choice] = []
    least = INFINITE
    for spread in _best_spreads(costs, now):
        slowest = INFINITE if spread is None else max(costs[s][j] for s, j in enumerate(spread))
        if spread is None or slowest >= least:
            continue
        least = slowest
        steps = _moves(instance, now, spread, state)
        dead = instance.dead - {m.becomes for m in steps} | {m.worker for m in steps}
        bound = steady_bound(replace(instance, dead=dead, done={}), mode)
        if not frontier or bound < frontier[-1].bound - 1e-9 * frontier[-1].bound:
            frontier.append(Choice(tuple(spread), steps, bound, dead))
    return frontier


def _best_spreads(costs: list[list[float]], now: list[int]) -> list[list[int] | None]:
    """For each number of moves, the spread of the failures with the least slowest stage."""
    total = sum(now)
    best = np.full((total + 1, total + 1), INFINITE)  # [failures placed][moves used], over the stages so far
    best[0, 0] = 0.0
    chosen = []
    for cost, here in zip(costs, now, strict=True):
        after = np.full_like(best, INFINITE)
        choice = np.full(best.shape, -1)
        for j in range(total + 1):
            if cost[j] == INFINITE:
                break
            used = max(0, j - here)
            value = np.maximum(best[: total + 1 - j, : total + 1 - used], cost[j])
            better = value < after[j:, used:]
            after[j:, used:][better] = value[better]
            choice[j:, used:][better] = j
        best = after
        chosen.append(choice)
    return [
        _spread(chosen, now, moves) if best[total, moves] < INFINITE else None for moves in range(total + 1)
    ]


def _spread(chosen: list[NDArray[np.int_]], now: list[int], moves: int) -> list[int]:
    """Walk the choices back from the last stage."""
    placed, spread = sum(now), []
    for choice, here in zip(reversed(chosen), reversed(now), strict=True):
        j = int(choice[placed, moves])
        spread.append(j)
        placed, moves = placed - j, moves - max(0, j - here)
    return spread[::-1]


def _moves(
    instance: Instance, now: list[int], spread: list[int], state: tuple[float, ...]
) -> tuple[Move, ...]:
    """Who moves: from stages that take a failure to stages that lose one, out of broken replicas first.

    A worker of a replica that is broken anyway costs no whole pipeline; best is the dead one's own replica.
    """
    dead = set(instance.dead)
    broken = {w.replica for w in dead}
    moves = []
    for stage in range(instance.stages):
        for _ in range(now[stage] - spread[stage]):
            gone = min(w for w in dead if w.stage == stage)
            donors = [s for s in range(instance.stages) if sum(w.stage == s for w in dead) < spread[s]]
            worker = min(
                (Worker(k, s) for s in donors for k in range(instance.replicas) if Worker(k, s) not in dead),
                key=lambda w: (w.replica != gone.replica, w.replica not in broken, w),
            )
            dead.discard(gone)
            dead.add(worker)
            moves.append(Move(worker, gone, state[stage]))
    return tuple(moves)


def relative_throughput(instance: Instance, mode: str) -> float:
    """Steps per second with the instance's dead, over those without dead workers: 1.0 loses nothing.

    From bounds alone, no schedule is built: about a millisecond for a thousand workers, for planners and
    simulators that ask it of many shapes. Both sides are lower bounds of the same mode, so what the answer
    is off by is the difference of their gaps (see docs/schedules.md). It is about steady steps: what is
    `done` of a broken one is ignored. Build the question with `replace(healthy, dead=...)`; a stage without
    a live worker is no instance and raises there.
    """
    return steady_bound(instance.fault_free(), mode) / steady_bound(replace(instance, done={}), mode)


def steady_bound(instance: Instance, mode: str) -> float:
    """`lower_bound` with the stash that the mode itself prescribes."""
    return lower_bound(instance, mode, stash_of_mode(instance, mode))
