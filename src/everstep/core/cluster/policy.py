"""How the coordinator is set: one object, shared by all who decide, changed by `PolicySet` and
`JournalBegun` only."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.faults.detector import DetectorLimits
from everstep.protocol.messages import Patience


@dataclass(slots=True)
class CoordinatorPolicy:
    patience: Patience = field(default_factory=Patience)
    limits: DetectorLimits = field(default_factory=DetectorLimits)
    planned: bool = False  # ask a planner how many workers each task gets; else first come, first served
    journal: str = ""  # its id, by the event `JournalBegun`; empty: it has none yet
    version: str = ""  # of Everstep, which decided last
