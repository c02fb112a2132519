"""Scripted faults: `stage=1,replica=0,step=7,op=F3` kills that worker with SIGKILL at that op.

The worker itself sends the signal, at an exact point; nothing is cleaned up, as with any SIGKILL. With
`how=slow,factor=2,until=30` it lives and takes twice as long for every op of steps 7 to 30: it sleeps for as
long as the op has taken. With `how=lag,factor=50` its messages to the stage after it come 50 ms late.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everstep.errors import UserError
from everstep.job.job import Job
from everstep.protocol.ops import Worker

WHENS = ("before", "after", "during", "sending", "gathering", "inside")
LASTING = ("slow", "lag")
_OP = re.compile(r"[FIW](\d+\.)?\d+|R|U")
_FACTOR = re.compile(r"\d{1,4}(\.\d{1,6})?")
_FIELDS = ("stage", "replica", "step", "op", "when", "how", "factor", "until", "shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedFault:
    """`op` None: at the first op of the step. `when`: before or after an op, inside a collective of the
    worker's shards; in R also while sending, summing (during) or gathering its node's parts; in U, with
    optimizer.shard, while sending weights or as a chunk's state arrives (during).
    """

    worker: Worker
    step: int
    op: str | None = None
    when: str = "before"
    how: str = "kill"  # or "raise", "slow", "lag"
    factor: float = 2.0  # slow: how many times longer; lag: by how many milliseconds
    until: int | None = None  # slow, lag: its last step; None: to the end
    shard: int = 0  # of the worker

    def strikes(self, step: int, op: str, when: str) -> bool:
        """Is this the moment?"""
        if step != self.step or when != self.when or self.how in LASTING:
            return False
        wanted = self.op
        if wanted is None:
            return True
        if wanted[0] in "FIW" and "." not in wanted:
            wanted = f"{wanted[0]}{self.worker.replica}.{wanted[1:]}"
        return op == wanted

    def slows(self, step: int) -> bool:
        return self.how == "slow" and self._lasts(step)

    def lag_s(self, step: int, stage: int) -> float:
        """By how much a message of this step to that stage is to come late."""
        late = self.how == "lag" and stage == self.worker.stage + 1 and self._lasts(step)
        return self.factor / 1e3 if late else 0.0

    def _lasts(self, step: int) -> bool:
        return self.step <= step and (self.until is None or step <= self.until)

    def text(self) -> str:
        parts = [f"stage={self.worker.stage}", f"replica={self.worker.replica}", f"step={self.step}"]
        parts += [f"op={self.op}"] if self.op else []
        parts += [f"when={self.when}"] if self.when != "before" else []
        parts += [f"how={self.how}"] if self.how != "kill" else []
        parts += [f"factor={self.factor:g}"] if self.how in LASTING else []
        parts += [f"until={self.until}"] if self.until is not None else []
        parts += [f"shard={self.shard}"] if self.shard else []
        return ",".join(parts)


def parse_fault(text: str) -> PlantedFault:
    """The inverse of `Fault.text`."""
    fields: dict[str, str] = {}
    for item in text.split(","):
        name, sign, value = item.strip().partition("=")
        if not sign or name not in _FIELDS:
            raise UserError(f"--kill {text!r}: {item.strip()!r} is not one of {'=, '.join(_FIELDS)}=.")
        fields[name] = value
    for name in ("stage", "replica", "step"):
        if not fields.get(name, "").isdigit():
            raise UserError(f"--kill {text!r}: give {name} as a number, for example {name}=1.")
    if (op := fields.get("op")) is not None and not _OP.fullmatch(op):
        raise UserError(f"--kill {text!r}: op is F3, I2, W5, F1.3 (of replica 1), R or U, not {op!r}.")
    if (when := fields.get("when", "before")) not in WHENS:
        raise UserError(f"--kill {text!r}: when is one of {', '.join(WHENS)}, not {when!r}.")
    if (how := fields.get("how", "kill")) not in ("kill", "raise", *LASTING):
        raise UserError(f"--kill {text!r}: how is kill, raise, slow or lag, not {how!r}.")
    if not _FACTOR.fullmatch(factor := fields.get("factor", "2")) or not 1 <= float(factor) <= 1000:
        raise UserError(f"--kill {text!r}: factor is a number from 1 to 1000, not {factor!r}.")
    if (until := fields.get("until")) is not None and not until.isdigit():
        raise UserError(f"--kill {text!r}: give until as a number, for example until=30.")
    if not (shard := fields.get("shard", "0")).isdigit():
        raise UserError(f"--kill {text!r}: give shard as a number, for example shard=1.")
    return PlantedFault(
        worker=Worker(int(fields["replica"]), int(fields["stage"])),
        step=int(fields["step"]),
        op=op,
        when=when,
        how=how,
        factor=float(factor),
        until=None if until is None else int(until),
        shard=int(shard),
    )


def check_fault(fault: PlantedFault, job: Job) -> None:
    """A fault that can never strike is a mistake."""
    replicas, stages, microbatches, steps = job.replicas, job.stages, job.microbatches, job.steps
    if fault.shard >= job.shards:
        raise UserError(f"--kill names shard {fault.shard}; the job has shards 0 to {job.shards - 1}.")
    if fault.worker.replica >= replicas or fault.worker.stage >= stages:
        raise UserError(
            f"--kill names worker {fault.worker} (replica:stage); the job has replicas 0 to "
            f"{replicas - 1} and stages 0 to {stages - 1}."
        )
    if not 1 <= fault.step <= steps:
        raise UserError(f"--kill names step {fault.step}; the job has steps 1 to {steps}.")
    if fault.op and fault.op[0] in "FIW" and int(fault.op[1:].split(".")[-1]) >= microbatches:
        raise UserError(f"--kill names {fault.op}; microbatches of a replica are 0 to {microbatches - 1}.")
