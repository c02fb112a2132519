"""Who is slow: ranks against ranks of the same role, and against their own past.

A rank is accused only on one of two grounds, and only if it costs the job something:

    peers   ranks of its role need clearly less time of their own, step after step
    past    it needed clearly less itself before some step, and the ranks around it did not change then

Everything else that is uneven is not a fault and is reported as an imbalance: a stage with more work than
the others (all ranks of a role alike), work that moves from rank to rank (sequence lengths), single pauses
(garbage collection, data loading, checkpoints). The first steps are never looked at: they allocate and
compile.

Thresholds are of this job, not of a machine: a tenth of a step (as FALCON asks of a slowdown worth acting
on), a fifth more than the peers, and so far outside the scatter of the differences that chance is no
explanation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from everstep_diagnose.change import change_point, spread
from everstep_diagnose.finding import Finding, Imbalance, RuledOut, Suspect, Syndrome, Where, ranks_text
from everstep_diagnose.own_work import RoleWork

Floats = NDArray[np.float64]
WORTH = 0.10  # of a step
_RATIO = 1.2
_CHANCE = 6.0  # times the error of the median
_MOST_STEPS = 0.85  # of the steps show it
_LEAST_STEPS = 5
_STAGE_RATIO = 1.2
_PAUSE = 5.0


def find_slow(
    roles: list[RoleWork], hosts: dict[int, str] | None = None
) -> tuple[list[Finding], list[Imbalance]]:
    roles = [_settled(role) for role in roles]
    roles = [role for role in roles if len(role.steps) >= _LEAST_STEPS and role.step_s > 0]
    accused: dict[int, tuple[Suspect, int | None]] = {}
    for role in roles:
        accused |= _against_peers(role, hosts or {}) if len(role.ranks) > 1 else {}
    alone = [role for role in roles if len(role.ranks) == 1]
    accused |= _against_past(alone, roles, hosts or {})
    imbalances = _stages(roles, set(accused)) + _uneven(roles, set(accused))
    if not accused:
        return [], imbalances
    everyone = {rank for role in roles for rank in role.ranks}
    ranks = sorted(accused)
    return [
        Finding(
            syndrome=Syndrome.NON_COMMUNICATION_SLOW,
            where=Where.WORKER,
            suspects=tuple(accused[rank][0] for rank in ranks),
            victims=tuple(sorted(everyone - set(ranks))),
            ruled_out=_ruled_out(roles, set(ranks)),
            because=f"rank {ranks_text(ranks)} needs more time of its own than it should; "
            "the others wait for it.",
            since_step=min((since for _, since in accused.values() if since is not None), default=None),
        )
    ], imbalances


def _settled(role: RoleWork) -> RoleWork:
    """Without the first steps."""
    skip = min(3, len(role.steps) // 5)
    return RoleWork(
        name=role.name,
        ranks=role.ranks,
        steps=role.steps[skip:],
        own_s=role.own_s[skip:],
        step_s=role.step_s,
    )


# ------------------------------------------------------------------ against peers


def _against_peers(role: RoleWork, hosts: dict[int, str]) -> dict[int, tuple[Suspect, int | None]]:
    accused = {}
    own = role.own_s
    usual = _of_the_others(own)
    lately = np.median((own - usual)[-_LEAST_STEPS:], axis=0)
    for at in np.flatnonzero(lately > WORTH / 2 * role.step_s).tolist():
        rank, excess = role.ranks[at], own[:, at] - usual[:, at]
        # Wild first steps can hide a change: then the later half is looked at by itself.
        for since in (change_point(excess), len(excess) // 2):
            tail = excess[since:]
            extra = float(np.median(tail))
            mine, theirs = float(np.median(own[since:, at])), float(np.median(usual[since:, at]))
            if _is_steady(tail, extra) and extra >= WORTH * role.step_s and mine >= _RATIO * theirs:
                break
        else:
            continue
        strength = extra / max(spread(tail), 0.02 * role.step_s)
        evidence = (
            f"its own work takes {mine * 1e3:.1f} ms a step, that of its {len(role.ranks) - 1} peers in "
            f"{role.name} {theirs * 1e3:.1f} ms ({mine / max(theirs, 1e-9):.2f} times), in "
            f"{int(np.sum(tail > extra / 2))} of {len(tail)} steps"
        )
        if since:
            evidence += f", since step {role.steps[since]}"
        suspect = Suspect(
            rank=rank, confidence=_confidence(strength), evidence=evidence, node=hosts.get(rank, "")
        )
        accused[rank] = (suspect, role.steps[since] if since else None)
    return accused if len(accused) * 2 <= len(role.ranks) else {}


def _of_the_others(own: Floats) -> Floats:
    """For each rank and step the median of the other ranks, without a sort for each rank."""
    count = own.shape[1]
    order = np.sort(own, axis=1)
    place = np.argsort(np.argsort(own, axis=1, kind="stable"), axis=1, kind="stable")
    low, high = (count - 2) // 2, (count - 1) // 2  # of the count - 1 others
    take = np.arange(own.shape[0])[:, None]
    lower = order[take, np.where(place <= low, low + 1, low)]
    upper = order[take, np.where(place <= high, np.minimum(high + 1, count - 1), high)]
    return np.asarray((lower + upper) / 2)


def _is_steady(values: Floats, middle: float) -> bool:
    """A difference that is there in most steps, and is none of chance."""
    if middle <= 0 or len(values) < _LEAST_STEPS:
        return False
    error = 1.25 * spread(values) / np.sqrt(len(values))
    return middle > _CHANCE * error and float(np.mean(values > middle / 3)) >= _MOST_STEPS


def _confidence(strength: float) -> float:
    return float(min(0.97, 0.7 + 0.03 * strength))


# ------------------------------------------------------------------ against its own past


def _against_past(
    alone: list[RoleWork], roles: list[RoleWork], hosts: dict[int, str]
) -> dict[int, tuple[Suspect, int | None]]:
    changes: dict[int, tuple[float, float, int, RoleWork]] = {}
    for role in alone:
        series = role.own_s[:, 0]
        since = change_point(series)
        if since:
            before, after = float(np.median(series[:since])), float(np.median(series[since:]))
            if after > _RATIO * before and after - before > WORTH * role.step_s:
                changes[role.ranks[0]] = before, after, since, role
    if not changes or len(changes) * 2 > sum(len(role.ranks) for role in roles):
        return {}  # everyone at once: another phase of the job, not a fault
    most = max(after - before for before, after, _, _ in changes.values())
    return {
        rank: (
            Suspect(
                rank=rank,
                confidence=0.85,
                evidence=f"its own work took {before * 1e3:.1f} ms a step until step {role.steps[since]}, "
                f"{after * 1e3:.1f} ms from then on; it has no peer of its role to be compared with",
                node=hosts.get(rank, ""),
            ),
            role.steps[since],
        )
        for rank, (before, after, since, role) in changes.items()
        if after - before > most / 2
    }


# ------------------------------------------------------------------ not a fault


def _stages(roles: list[RoleWork], accused: set[int]) -> list[Imbalance]:
    """Roles that need more time than the other roles."""
    work = {}
    for role in roles:
        fine = [at for at, rank in enumerate(role.ranks) if rank not in accused]
        if fine:
            work[role.name] = float(np.median(role.own_s[:, fine])), role
    if len(work) < 2:
        return []
    found = []
    for name, (mine, role) in work.items():
        others = float(np.median([value for other, (value, _) in work.items() if other != name]))
        if mine > _STAGE_RATIO * others and mine - others > WORTH * role.step_s:
            found.append(
                Imbalance(
                    kind="stage",
                    ranks=role.ranks,
                    ratio=mine / max(others, 1e-9),
                    because=f"{name} (rank {ranks_text(role.ranks)}) has {mine * 1e3:.1f} ms of work a step, "
                    f"the other roles {others * 1e3:.1f} ms; all its ranks alike: the division of work.",
                )
            )
    return found


def _uneven(roles: list[RoleWork], accused: set[int]) -> list[Imbalance]:
    found = []
    for role in roles:
        fine = [at for at, rank in enumerate(role.ranks) if rank not in accused]
        if len(fine) < 2:
            continue
        own = role.own_s[:, fine]
        worst = own.max(axis=1) - np.median(own, axis=1)
        if float(np.median(worst)) > WORTH * role.step_s:
            found.append(
                Imbalance(
                    kind="work per step",
                    ranks=tuple(role.ranks[at] for at in fine),
                    ratio=float(np.median(own.max(axis=1) / np.maximum(np.median(own, axis=1), 1e-9))),
                    because=f"in {role.name} the longest rank of a step works "
                    f"{np.median(worst) * 1e3:.1f} ms longer than the middle one, and it is not always "
                    "the same rank: uneven work, such as sequence lengths.",
                )
            )
        paused = worst > max(_PAUSE * float(np.median(worst)), 0.5 * role.step_s)
        if 0 < int(paused.sum()) <= 0.2 * len(worst):
            who = {role.ranks[fine[int(at)]] for at in np.argmax(own[paused], axis=1)}
            found.append(
                Imbalance(
                    kind="pauses",
                    ranks=tuple(sorted(who)),
                    ratio=float(np.max(worst[paused]) / role.step_s),
                    because=f"{int(paused.sum())} of {len(worst)} steps have one rank that pauses (up to "
                    f"{np.max(worst[paused]) * 1e3:.0f} ms): garbage collection, data or a checkpoint, "
                    "not a slow rank.",
                )
            )
    return found


def _ruled_out(roles: list[RoleWork], accused: set[int]) -> tuple[RuledOut, ...]:
    out = []
    for role in roles:
        clear = [rank for rank in role.ranks if rank not in accused]
        if clear and len(clear) < len(role.ranks):
            out.append(
                RuledOut(what=f"rank {ranks_text(clear)}", because=f"works like its peers in {role.name}")
            )
        elif clear:
            out.append(
                RuledOut(what=f"rank {ranks_text(clear)}", because="no slower than its peers or its past")
            )
    out.append(RuledOut(what="link", because="the time is lost between communications, not in them"))
    return tuple(out)
