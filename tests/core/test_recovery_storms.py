"""Random deaths at random moments: every microbatch reaches every sealed sum exactly once, and it always
ends.
"""

import pytest

from tests.core.world import World

CASES = {
    "one death": {"deaths": 1},
    "two deaths, three replicas": {"deaths": 2, "replicas": 3},
    "many deaths with returns": {"deaths": 6, "replicas": 3, "stages": 3, "steps": 6, "restarts": 100},
    "eager updates, some invalid": {"deaths": 1, "clip": True, "stagger": "always", "steps": 6},
    "eager updates and many deaths": {
        "deaths": 5,
        "clip": True,
        "stagger": "always",
        "steps": 6,
        "replicas": 3,
        "stages": 3,
    },
    "tied ends": {"deaths": 2, "tied": True, "stages": 3, "replicas": 3, "clip": True},
    "checkpoints and lost stages": {"deaths": 6, "checkpoint_every": 2, "steps": 7, "restarts": 100},
    "one replica": {"deaths": 2, "replicas": 1, "stages": 2, "checkpoint_every": 1, "steps": 5},
    "one stage": {"deaths": 2, "replicas": 3, "stages": 1, "clip": True},
    "fused backward": {"deaths": 2, "replicas": 3, "stages": 3, "mode": "reroute"},
    "late returns": {"deaths": 3, "replicas": 3, "stages": 2, "steps": 8, "rejoin_after_steps": 2},
    "workers that raise": {"deaths": 3, "replicas": 3, "raises": True},
}


@pytest.mark.parametrize("name", CASES)
def test_a_storm_of_deaths_loses_no_microbatch_and_ends(name: str, storms: int) -> None:
    for seed in range(storms):
        world = World(seed, **CASES[name])
        try:
            assert world.run() == "finished"
            world.check_the_end()
        except BaseException:
            print(f"\n{name}: seed {seed}\n" + "\n".join(world.log[-60:]))
            raise
