"""Everything that is known, to everything that can be said: the order in which the analyses are asked.

A hang comes first: while a job hangs, its past speed is of no interest, and what was slow in its last step is
the hang itself. Links come before ranks: a rank that waits on a slow link is late for its next operation, but
not by work of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.diagnose.case import Case, join
from everstep.diagnose.clocks import offsets_ns
from everstep.diagnose.comm_record import UNKNOWN, Dump
from everstep.diagnose.finding import Diagnosis, Finding, ranks_text
from everstep.diagnose.flight import UnusableFileError
from everstep.diagnose.hang import find_hangs, unrecorded_silence
from everstep.diagnose.message_delays import DelayMatrix, pair_up
from everstep.diagnose.own_work import RoleWork, roles_of
from everstep.diagnose.postmortem import older_dumps
from everstep.diagnose.slow import find_slow
from everstep.diagnose.slow_links import find_slow_links


@dataclass(slots=True, kw_only=True)
class Analysis:
    """A diagnosis with what it rests on, for those who draw it."""

    diagnosis: Diagnosis
    case: Case | None = None
    roles: list[RoleWork] = field(default_factory=list)
    delays: DelayMatrix | None = None
    offsets_ns: dict[int, int] = field(default_factory=dict)


def analyse(
    parts: Sequence[Dump],
    tables: Mapping[str, Mapping[str, NDArray[Any]]] | None = None,
    *,
    now_ns: int = UNKNOWN,
) -> Analysis:
    """`parts` make one job; each table is a job of its own."""
    analysis = Analysis(diagnosis=Diagnosis())
    if parts:
        analyse_case(join(parts), analysis, now_ns=now_ns)
    for name, columns in (tables or {}).items():
        try:
            roles = roles_of_table(columns)
        except UnusableFileError as why:
            analysis.diagnosis.unusable.append((name, str(why)))
            continue
        findings, imbalances = find_slow(roles)
        analysis.roles += roles
        analysis.diagnosis.incidents += findings
        analysis.diagnosis.imbalances += imbalances
    return analysis


def analyse_case(case: Case, analysis: Analysis, *, now_ns: int = UNKNOWN) -> None:
    said = analysis.diagnosis
    analysis.case = case
    said.incidents += find_hangs(case, now_ns=now_ns)
    older = older_dumps(case)
    if older:
        said.notes.append(f"the dump of rank {ranks_text(older)} is older than the others; it was set aside.")
    said.notes += unrecorded_silence(case) if not said.incidents else []
    pairs = pair_up(case)
    analysis.offsets_ns = offsets_ns(case, pairs)
    worst = max((abs(offset) for offset in analysis.offsets_ns.values()), default=0)
    if worst > 1_000_000:
        said.notes.append(f"clocks differ by up to {worst / 1e6:.1f} ms; the difference was taken out.")
    analysis.roles = roles_of(case, analysis.offsets_ns)
    step_s = max((role.step_s for role in analysis.roles), default=0.0)
    slow_links: list[Finding] = []
    if len(pairs.sender):
        slow_links, analysis.delays = find_slow_links(
            pairs, analysis.offsets_ns, step_s=step_s, hosts=case.hosts
        )
    if said.incidents:
        return
    said.incidents += slow_links
    if case.messages_next and not len(pairs.sender):
        said.notes.append(
            "messages are not recorded here: a slow rank cannot be distinguished from one that waits."
        )
    else:
        findings, said.imbalances = find_slow(analysis.roles, case.hosts)
        said.incidents += findings
    unheard = sorted(set(case.world) - set(case.ranks))
    if unheard and len(case.log):
        said.notes.append(f"no records of {len(unheard)} of {len(case.world)} ranks.")


# Tables of operations (one row an op: who, which step, what, when, how long) as roles and messages.
#
# The columns are those of ByteDance's straggler traces: dp_rank, stage, rank, step, optype, start_ts,
# duration, seq_id, in seconds. Compute ops (`forward-compute`, `backward-compute`) are recorded, so own time
# needs no inference, and a role is a stage: the same stage of every replica does the same work.

NEEDED = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration")


def roles_of_table(columns: Mapping[str, NDArray[Any]]) -> list[RoleWork]:
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise UnusableFileError(f"no table of operations: column {missing[0]} is missing")
    kind = columns["optype"].astype(str)
    compute = np.char.endswith(kind, "compute")
    if not compute.any():
        raise UnusableFileError("its table holds no compute operations")
    replica, stage, step = (columns[name].astype(np.int64) for name in ("dp_rank", "stage", "step"))
    begin, length = columns["start_ts"].astype(float), columns["duration"].astype(float)
    steps, row = np.unique(step, return_inverse=True)
    ends = np.zeros(len(steps))
    np.maximum.at(ends, row, begin + length)
    starts = np.full(len(steps), np.inf)
    np.minimum.at(starts, row, begin)
    step_s = float(np.median(ends - starts))
    roles = []
    for one in np.unique(stage).tolist():
        replicas = np.unique(replica[stage == one]).tolist()
        own = np.zeros((len(steps), len(replicas)))
        use = compute & (stage == one)
        np.add.at(own, (row[use], np.searchsorted(replicas, replica[use])), length[use])
        ranks = [int(columns["rank"][(stage == one) & (replica == r)].min()) for r in replicas]
        roles.append(
            RoleWork(
                name=f"stage {one}",
                ranks=tuple(ranks),
                steps=tuple(steps.tolist()),
                own_s=own,
                step_s=step_s,
                labels=tuple(f"replica {r}, stage {one}" for r in replicas),
            )
        )
    return roles
