"""Storms: the real recovery, workers and agents in a virtual cluster where everything goes wrong."""

from tests.storms.run import Report, run_storm
from tests.storms.spec import Spec, StormKind, draw_spec, draw_storm, is_of_cluster, with_sharded_states

__all__ = [
    "Report",
    "Spec",
    "StormKind",
    "draw_spec",
    "draw_storm",
    "is_of_cluster",
    "run_storm",
    "with_sharded_states",
]
