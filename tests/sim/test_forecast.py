"""What a storm on real processes should earn: real decisions over coarse nodes and workers."""

from __future__ import annotations

from typing import Any

from everstep.core.words.shape import Shape
from harness.forecast_steps import ForecastKind
from harness.storm_forecast import StormForecast

NODES = ("a", "b", "c")


def earned(*faults: dict[str, Any], seconds: float = 60.0) -> dict[str, int]:
    kinds = [
        ForecastKind(
            name=name,
            weight=weight,
            shape=shape,
            steps=10_000,
            alone_s=0.1,
            beside_s=0.2,
            begin_s=1.0,
            cold_s=3.0,
        )
        for name, weight, shape in (
            ("heavy", 4.0, Shape(2, 2, 2)),
            ("middle", 2.0, Shape(2, 1, 2)),
            ("light", 1.0, Shape(1, 2, 4)),
        )
    ]
    return StormForecast(kinds, NODES).run(faults, seconds)


def test_without_faults_a_step_takes_what_it_takes_beside_the_others() -> None:
    for steps in earned().values():
        assert 280 <= steps <= 300, "59 s of 0.2 s each"


def test_a_worker_with_a_peer_costs_little_and_one_without_costs_a_restart() -> None:
    calm = earned()
    rerouted = earned({"at_s": 20.0, "what": "kill worker", "task": "heavy-1", "worker": "0:1"})
    restarted = earned({"at_s": 20.0, "what": "kill worker", "task": "light-1", "worker": "0:1"})
    assert calm["heavy"] - 5 <= rerouted["heavy"] <= calm["heavy"] + 5
    assert calm["light"] - 15 <= restarted["light"] < calm["light"] - 2


def test_a_coordinator_that_is_away_costs_nothing_but_what_fails_meanwhile_waits_for_it() -> None:
    away = [{"at_s": 20.0, "what": "kill coordinator"}, {"at_s": 30.0, "what": "start coordinator"}]
    calm, alone = earned(), earned(*away)
    assert abs(alone["light"] - calm["light"]) <= 2
    both = earned(*away, {"at_s": 21.0, "what": "kill worker", "task": "light-1", "worker": "0:0"})
    assert calm["light"] - both["light"] > 40, "some 10 s of 0.2 s each"


def test_a_node_that_is_lost_for_good_costs_a_moment_where_the_others_have_room() -> None:
    calm, lost = earned(), earned({"at_s": 10.0, "what": "kill node", "node": "a"})
    assert all(0.8 * calm[name] < lost[name] <= calm[name] for name in calm), (calm, lost)
