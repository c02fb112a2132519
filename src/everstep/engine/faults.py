"""Scripted faults: `stage=1,replica=0,step=7,op=F3` kills that worker with SIGKILL at that op.

The worker itself sends the signal, at an exact point; nothing is cleaned up, as with any SIGKILL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everstep.core.ops import Worker
from everstep.errors import UserError

WHENS = ("before", "after", "during", "sending")
_OP = re.compile(r"[FIW](\d+\.)?\d+|R|U")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`op` None: at the first op of the step. `when`: before or after an op; in R also while sending or
    summing.
    """

    worker: Worker
    step: int
    op: str | None = None
    when: str = "before"
    how: str = "kill"  # or "raise"

    def strikes(self, step: int, op: str, when: str) -> bool:
        """Is this the moment? A fused backward is hit by the name of either half."""
        if step != self.step or when != self.when:
            return False
        wanted = self.op
        if wanted is None:
            return True
        if wanted[0] in "FIW" and "." not in wanted:
            wanted = f"{wanted[0]}{self.worker.replica}.{wanted[1:]}"
        return op == wanted or (op[0] == "B" and wanted[0] in "IW" and op[1:] == wanted[1:])

    def text(self) -> str:
        parts = [f"stage={self.worker.stage}", f"replica={self.worker.replica}", f"step={self.step}"]
        parts += [f"op={self.op}"] if self.op else []
        parts += [f"when={self.when}"] if self.when != "before" else []
        parts += [f"how={self.how}"] if self.how != "kill" else []
        return ",".join(parts)


def parse_fault(text: str) -> Fault:
    """The inverse of `Fault.text`."""
    fields: dict[str, str] = {}
    for item in text.split(","):
        name, sign, value = item.strip().partition("=")
        if not sign or name not in ("stage", "replica", "step", "op", "when", "how"):
            raise UserError(
                f"--kill {text!r}: {item.strip()!r} is not one of stage=, replica=, step=, op=, when=, how=."
            )
        fields[name] = value
    for name in ("stage", "replica", "step"):
        if not fields.get(name, "").isdigit():
            raise UserError(f"--kill {text!r}: give {name} as a number, for example {name}=1.")
    if (op := fields.get("op")) is not None and not _OP.fullmatch(op):
        raise UserError(f"--kill {text!r}: op is F3, I2, W5, F1.3 (of replica 1), R or U, not {op!r}.")
    if (when := fields.get("when", "before")) not in WHENS:
        raise UserError(f"--kill {text!r}: when is one of {', '.join(WHENS)}, not {when!r}.")
    if (how := fields.get("how", "kill")) not in ("kill", "raise"):
        raise UserError(f"--kill {text!r}: how is kill or raise, not {how!r}.")
    return Fault(
        worker=Worker(int(fields["replica"]), int(fields["stage"])),
        step=int(fields["step"]),
        op=op,
        when=when,
        how=how,
    )


def check_fault(fault: Fault, *, replicas: int, stages: int, microbatches: int, steps: int) -> None:
    """A fault that can never strike is a mistake."""
    if fault.worker.replica >= replicas or fault.worker.stage >= stages:
        raise UserError(
            f"--kill names worker {fault.worker} (replica:stage); the job has replicas 0 to "
            f"{replicas - 1} and stages 0 to {stages - 1}."
        )
    if not 1 <= fault.step <= steps:
        raise UserError(f"--kill names step {fault.step}; the job has steps 1 to {steps}.")
    if fault.op and fault.op[0] in "FIW" and int(fault.op[1:].split(".")[-1]) >= microbatches:
        raise UserError(f"--kill names {fault.op}; microbatches of a replica are 0 to {microbatches - 1}.")
