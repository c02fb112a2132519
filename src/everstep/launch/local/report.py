"""A run in words and in JSON: the sentences of a step and an incident, and the document of `--json`.

The times of an incident, all in milliseconds:

    killed ──────────► evidence ──────────► plan ──────────► first op of the new epoch
           noticed                replanned
    └───────────────────────── resumed ─────────────────────┘

`noticed` and `resumed` need the moment of the kill, which only a scripted fault or our own kill can tell; for
an unplanned death, noticed is unknown and resumed counts from the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from everstep.core.cluster.checkpoints import UNSAVED
from everstep.drive.step_rows import StepRow
from everstep.job.job import Job
from everstep.launch.local.outcome import Outcome
from everstep.protocol.incidents import Incident


def healthy_step_s(outcome: Outcome) -> float:
    """The median step that no incident touched; the first is left out, for it warms up."""
    touched = {step for incident in outcome.incidents for step in incident.disturbed}
    quiet = [row.seconds for row in outcome.rows[1:] if row.step not in touched]
    return median(quiet) if quiet else 0.0


def steps_lost(incident: Incident, outcome: Outcome, healthy_s: float) -> float:
    """How much longer the disturbed step took than a healthy one, in healthy steps.

    After a restore from a checkpoint the steps done again are part of it: the time runs from the last record
    before the evidence to the record of the disturbed step that counts.
    """
    before = [row.at for row in outcome.rows if row.at <= incident.evidence_at]
    first = incident.disturbed.start
    after = [row.at for row in outcome.rows if row.at > incident.evidence_at and row.step >= first]
    if not before or not after or healthy_s <= 0:
        return 0.0
    return max(0.0, (after[0] - before[-1]) / healthy_s - 1)


def incident_document(incident: Incident, outcome: Outcome, healthy_s: float) -> dict[str, Any]:
    start = incident.evidence_at if incident.killed_at is None else incident.killed_at
    return {
        "number": incident.number,
        "worker": str(incident.workers[0]) if incident.workers else "",
        "workers": [str(worker) for worker in incident.workers],
        "what": incident.what,
        "step": incident.step,
        "noticed_ms": None if incident.killed_at is None else _ms(incident.evidence_at, start),
        "replanned_ms": _ms(incident.planned_at, incident.evidence_at),
        "resumed_ms": _ms(incident.resumed_at, start),
        "replayed_ops": incident.replayed_ops,
        "replayed_ops_elsewhere": incident.replayed_elsewhere,
        "kept_outputs": incident.kept_outputs,
        "steps_lost": round(steps_lost(incident, outcome, healthy_s), 3),
        "restored_from": incident.restored_from,
        "restored_where": incident.restored_where,
    }


def document(outcome: Outcome, *, steps: int, healthy_s: float | None = None) -> dict[str, Any]:
    """The whole run."""
    healthy = healthy_step_s(outcome) if healthy_s is None else healthy_s
    losses = outcome.all_losses()
    return {
        "steps": steps,
        "resumed_from": outcome.resumed_from,
        "refused_checkpoints": outcome.refused_checkpoints,
        "failure": outcome.failure,
        "stopped": outcome.stopped,
        "ended": outcome.ended,
        "saved": not outcome.unsaved,
        "losses": {str(step): loss for step, loss in losses.items()},
        "skipped": sum(not math.isfinite(row.grad_norm) for row in outcome.by_step().values()),
        "evaluations": {str(step): values for step, values in sorted(outcome.evaluations.items())},
        "microbatches": {"issued": outcome.issued, "committed": outcome.committed},
        "healthy_step_ms": round(healthy * 1e3, 3),
        "incidents": [incident_document(incident, outcome, healthy) for incident in outcome.incidents],
    }


def step_line(row: StepRow, steps: int) -> str:
    width = len(str(steps))
    time = f"{row.seconds * 1e3:6.0f} ms" if row.seconds else "        -"
    return f"step {row.step:{width}d}/{steps}  loss {row.loss:.6f}  grad norm {row.grad_norm:#.4g}  {time}"


def evaluation_line(step: int, values: Mapping[str, float]) -> str:
    return f"evaluation after step {step}: " + ", ".join(
        f"{name} {value:.6f}" for name, value in values.items()
    )


def incident_line(incident: Incident) -> str:
    """Printed when the incident closes; its cost in steps is known one step later."""
    if not incident.stops_training:
        why = f" ({incident.verdict.because})" if incident.verdict is not None else ""
        what = f"{death(incident)}{why}"
        return f"incident {incident.number} since step {incident.step}: {what}; {tried(incident)}"
    parts = f"{death(incident)}; {', '.join(times(incident))}"
    return f"incident {incident.number} in step {incident.step}: {parts}"


def tried(incident: Incident) -> str:
    """What was done about it, and what came of that."""
    return "; ".join(f"{each.what}: {each.outcome or each.because}" for each in incident.remedies)


def death(incident: Incident) -> str:
    what = incident.what.removesuffix(".")  # a sentence that a worker raised: a clause of ours follows
    if not incident.workers:
        return what
    return f"worker {' and '.join(str(worker) for worker in incident.workers)} {what}"


def times(incident: Incident) -> list[str]:
    """The duration of each part of the recovery, in words; last, what is done again."""
    start = incident.evidence_at if incident.killed_at is None else incident.killed_at
    planned = _ms(incident.planned_at, incident.evidence_at)
    parts = [] if planned is None else [f"replanned in {_shown(planned)}"]
    parts.append(f"resumed after {_shown(_ms(incident.resumed_at, start))}")
    if incident.killed_at is not None:
        parts.insert(0, f"noticed in {_shown(_ms(incident.evidence_at, start))}")
    if incident.restored_from is not None:
        parts.append(
            "back at the initial state"
            if incident.restored_from == 0
            else f"back at step {incident.restored_from}, from {incident.restored_where}"
        )
    else:
        ops = "1 op" if incident.replayed_ops == 1 else f"{incident.replayed_ops} ops"
        kept = f" ({incident.kept_outputs} of its outputs kept)" if incident.kept_outputs else ""
        parts.append(f"{ops} to replay{kept}")
    return parts


def resume_line(outcome: Outcome, folder: str) -> str | None:
    if outcome.resumed_from == 0:
        return None
    return f"resumes after step {outcome.resumed_from}, from the checkpoint in {folder!r}"


def stopped_line(outcome: Outcome, last: int, job: Job) -> str:
    """A run that was interrupted after this step: is it saved?"""
    if not last:
        return "stopped before a step was complete; the next start begins where this one did"
    if job.checkpoint is None:
        return f"stopped after step {last}; nothing is saved, for the job has no [checkpoint]"
    if outcome.saved >= last:
        return f"stopped after step {last}, whose state is saved; the next start goes on from there"
    steps = f"step {last} is" if last == outcome.saved + 1 else f"steps {outcome.saved + 1} to {last} are"
    onwards = f"goes on after step {outcome.saved}" if outcome.saved else "begins at step 1"
    return f"stopped after step {last}; {steps} not saved, and the next start {onwards}"


def summary_line(run: Mapping[str, Any]) -> str:
    """The last line of a run, from its document."""
    if run["resumed_from"] >= run["steps"] or not run["losses"]:
        return f"nothing left to do: the checkpoint of step {run['resumed_from']} is the job's last"
    step, loss = list(run["losses"].items())[-1]
    count = len(run["incidents"])
    unsaved = run["ended"][run["ended"].find(UNSAVED) :] if UNSAVED in run["ended"] else ""
    incidents = {0: "no incident", 1: "1 incident"}.get(count, f"{count} incidents")
    healed = " healed" if count and not unsaved else ""
    batches = run["microbatches"]
    stopped = f"; {run['stopped']}" if run.get("stopped") and int(step) < run["steps"] else ""
    skipped = {0: "", 1: ", 1 step skipped (its gradient was not finite)"}.get(
        run.get("skipped", 0), f", {run.get('skipped')} steps skipped (their gradients were not finite)"
    )
    return (
        f"{step} of {run['steps']} steps, loss {loss:.6f}{skipped}, {incidents}{healed}; "
        f"microbatches: {batches['issued']} issued, {batches['committed']} committed once"
        f"{stopped}{'; ' * bool(unsaved)}{unsaved}"
    )


def _ms(later: float | None, earlier: float) -> float | None:
    return None if later is None else round((later - earlier) * 1e3, 3)


def _shown(ms: float | None) -> str:
    return "?" if ms is None else f"{ms:.0f} ms"
