"""What all parts of the coordinator work on. The coordinator makes each of them once, and they stay the same
objects for its life: whatever changes is inside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.core.cluster.followups import FollowUps
from everstep.core.cluster.incidents import Incidents
from everstep.core.cluster.orders import Orders
from everstep.core.cluster.policy import CoordinatorPolicy
from everstep.core.cluster.roster import Roster


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterContext:
    roster: Roster
    orders: Orders
    incidents: Incidents
    policy: CoordinatorPolicy
    later: FollowUps
