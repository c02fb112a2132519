"""Everything that is known, to everything that can be said: the order in which the analyses are asked.

A hang comes first: while a job hangs, its past speed is of no interest, and what was slow in its last step is
the hang itself. Links come before ranks: a rank that waits on a slow link is late for its next operation, but
not by work of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep_diagnose.case import join
from everstep_diagnose.clocks import offsets_ns
from everstep_diagnose.comm_record import UNKNOWN, Dump
from everstep_diagnose.finding import Diagnosis
from everstep_diagnose.hang import find_hangs
from everstep_diagnose.message_delays import pair_up
from everstep_diagnose.own_work import roles_of
from everstep_diagnose.slow import find_slow
from everstep_diagnose.slow_links import find_slow_links

AFTER_A_FAILURE = (
    "gloo's Flight Recorder marks operations that failed as completed: dumps written after a failure do not "
    "show which rank stopped first. Dumps of a job that still hangs do, and everstep run says it."
)


def analyse(parts: Sequence[Dump], *, now_ns: int = UNKNOWN) -> Diagnosis:
    """`parts` make one job."""
    said = Diagnosis()
    if not parts:
        return said
    case = join(parts)
    said.incidents += find_hangs(case, now_ns=now_ns)
    pairs = pair_up(case)
    offsets = offsets_ns(case, pairs)
    worst = max((abs(offset) for offset in offsets.values()), default=0)
    if worst > 1_000_000:
        said.notes.append(f"clocks differ by up to {worst / 1e6:.1f} ms; the difference was taken out.")
    if said.incidents:
        return said
    if not case.has_device:
        said.notes.append(AFTER_A_FAILURE)
    roles = roles_of(case, offsets)
    if len(pairs.sender):
        step_s = max((role.step_s for role in roles), default=0.0)
        said.incidents += find_slow_links(pairs, offsets, step_s=step_s, hosts=case.hosts)
    if case.misses_messages and not len(pairs.sender):
        said.notes.append(
            "messages are not recorded here: a slow rank cannot be distinguished from one that waits."
        )
    else:
        findings, said.imbalances = find_slow(roles, case.hosts)
        said.incidents += findings
    unheard = sorted(set(case.world) - set(case.ranks))
    if unheard and len(case.log):
        said.notes.append(f"no records of {len(unheard)} of {len(case.world)} ranks.")
    return said
