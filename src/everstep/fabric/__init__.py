"""Traffic planned over the fabric: a leaf-spine network's paths, a task's flows, and which flow takes which.

    topology  what is connected to what, and how well      watch      a slow or dead path becomes moves
    flows     who sends how much to whom, and when         catalogue  which source port takes which path
    allocate  flows onto paths, whole or by few moves      simulate   steps in time: phases, failures
    fairness  the rates that paths then give (max-min)     policies   what others do: hash, chance, turns
    bound     what no routing can beat                     picture    load per link, as text and SVG

Pure: no sockets, no clock, no chance but what was passed in. `everstep.node.probe` and `.steer` touch the
world.
"""

from everstep.fabric.allocate import allocate, reallocate
from everstep.fabric.flows import Flow, TrafficTask, flows_of
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
    "TrafficTask",
    "allocate",
    "clos",
    "flows_of",
    "reallocate",
]
