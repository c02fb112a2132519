"""Failure normalization: where would these failures hurt least, and which live workers would change stage
for it?

A stage with fewer live workers is a slower stage, and the slowest stage sets the step. A live worker of a
stage with room can become a worker of the worst-hit stage by copying that stage's state; the failure
"moves" to the stage it left. So: spread F failures over the stages, f_0 + ... + f_{P-1} = F, to minimise
the slowest stage's time

    cost_s(j)       time of stage s with j of its workers gone (infinite when none is left)
    best[n][moves]  over the stages so far: least maximum with n failures placed and `moves` workers moved

a dynamic program over stages, O(P F^2 moves). It keeps the number of moves apart, because copying state
costs time and bytes: the answer is the whole frontier (no move, one move, ...), and the caller decides how
far along it pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep.core.ops import Worker
from everstep.errors import UserError
from everstep.schedule.bounds import lower_bound
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
    """The frontier, fewest moves first: each choice has a lower bound than the one before it."""
    if state_bytes and len(state_bytes) != instance.stages:
        raise UserError(f"state_bytes must give one number per stage ({instance.stages}).")
    state = tuple(state_bytes) or (0.0,) * instance.stages
    now = [sum(w.stage == s for w in instance.dead) for s in range(instance.stages)]
    costs = _stage_costs(instance, mode, sum(now))
    frontier: list[Choice] = []
    for moves in range(sum(now) + 1):
        spread = _best_spread(costs, now, moves)
        if spread is None:
            continue
        steps = _moves(instance, now, spread, state)
        dead = instance.dead - {m.becomes for m in steps} | {m.worker for m in steps}
        bound = lower_bound(replace(instance, dead=dead, done={}), mode)
        if not frontier or bound < frontier[-1].bound - 1e-9 * frontier[-1].bound:
            frontier.append(Choice(tuple(spread), steps, bound, dead))
    return frontier


def _stage_costs(instance: Instance, mode: str, most: int) -> list[list[float]]:
    """cost_s(j): the bound of the step if only stage s had losses, j of them. The bound is a maximum over
    stages, so the bound with losses in many stages is the maximum of these."""
    costs = []
    for s in range(instance.stages):
        alone = [frozenset(Worker(k, s) for k in range(j)) for j in range(min(most + 1, instance.replicas))]
        row = [lower_bound(replace(instance, dead=dead, done={}), mode) for dead in alone]
        costs.append(row + [INFINITE] * (most + 1 - len(row)))
    return costs


def _best_spread(costs: list[list[float]], now: list[int], moves: int) -> list[int] | None:
    """The spread of the failures with the least slowest stage, using exactly `moves` moves."""
    total = sum(now)
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [])}
    for cost, here in zip(costs, now, strict=True):
        after: dict[tuple[int, int], tuple[float, list[int]]] = {}
        for (placed, moved), (slowest, spread) in best.items():
            for j in range(total - placed + 1):
                key = (placed + j, moved + max(0, j - here))
                value = max(slowest, cost[j])
                if key[1] <= moves and value < after.get(key, (INFINITE, []))[0]:
                    after[key] = value, [*spread, j]
        best = after
    found = best.get((total, moves))
    return found[1] if found else None


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
