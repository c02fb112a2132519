"""How the coordinator is set: one object, shared by all who decide, changed by the event `PolicySet` only."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.faults.detector import DetectorLimits
from everstep.protocol.messages import Patience


@dataclass(slots=True)
class CoordinatorPolicy:
    patience: Patience = field(default_factory=Patience)
    limits: DetectorLimits = field(default_factory=DetectorLimits)
    planned: bool = False  # ask a planner how many workers each task gets; else first come, first served
