"""Storms: the real recovery and the real walkers in a virtual cluster where everything goes wrong."""

from everstep.sim.storm.run import Report, run_storm
from everstep.sim.storm.spec import Spec, draw_spec, with_drain, with_moves, with_shards

__all__ = ["Report", "Spec", "draw_spec", "run_storm", "with_drain", "with_moves", "with_shards"]
