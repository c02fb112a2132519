"""Traffic planned over the fabric: a leaf-spine network's paths, flows, and which flow takes which.

    topology  what is connected to what, and how well      watch      a slow or dead path becomes moves
    flows     who sends how much to whom, and when         catalogue  which source port takes which path
    allocate  flows onto paths, whole or by few moves      fairness   the rates that paths then give (max-min)
    bound     what no routing can beat                     discovery  a topology from traces

Pure: no sockets, no clock, no randomness. `everstep.node.probe` and `.steer` touch the world;
`everstep_lab.fabric` simulates it.
"""

from everstep.fabric.allocate import allocate, reallocate
from everstep.fabric.flows import Flow
from everstep.fabric.routing import Routing
from everstep.fabric.topology import FabricNode, Link, Path, Port, Switch, Topology, clos

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
    "clos",
    "reallocate",
]
