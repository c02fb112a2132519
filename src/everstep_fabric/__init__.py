"""Traffic planned over the fabric: a leaf-spine network's paths, flows, and which flow takes which.

    topology  what is connected to what, and how well      watch      a slow or dead path becomes moves
    flows     who sends how much to whom, and when         catalogue  which source port takes which path
    allocate  flows onto paths, whole or by few moves      fairness   the rates that paths then give (max-min)
    bound     what no routing can beat                     plan       the flows of all tasks, and their paths

Those are pure: no sockets, no clock, no randomness. `probe`, `steer`, `at_node` and the command touch the
world; `port` is what `everstep.traffic` asks for.
"""

from everstep_fabric.allocate import allocate, reallocate
from everstep_fabric.flows import Flow
from everstep_fabric.routing import Routing
from everstep_fabric.topology import FabricNode, Link, Path, Port, Switch, Topology

__all__ = [
    "FabricNode",
    "Flow",
    "Link",
    "Path",
    "Port",
    "Routing",
    "Switch",
    "Topology",
    "allocate",
    "reallocate",
]
