"""What a storm on real processes should earn: real decisions over coarse nodes and workers."""

from __future__ import annotations

from typing import Any

from everstep.protocol.shape import Shape
from everstep_lab.agenda import Agenda
from everstep_lab.forecast.coarse_steps import ForecastKind
from everstep_lab.forecast.cores import Cores
from everstep_lab.forecast.storm_forecast import StormForecast, forecast

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
    assert calm["light"] - 20 <= restarted["light"] < calm["light"] - 2, "0.9 s of a core beside others"


def test_a_coordinator_that_is_away_costs_nothing_but_what_fails_meanwhile_waits_for_it() -> None:
    away = [{"at_s": 20.0, "what": "kill coordinator"}, {"at_s": 30.0, "what": "start coordinator"}]
    calm, alone = earned(), earned(*away)
    assert abs(alone["light"] - calm["light"]) <= 2
    both = earned(*away, {"at_s": 21.0, "what": "kill worker", "task": "light-1", "worker": "0:0"})
    assert calm["light"] - both["light"] > 40, "some 10 s of 0.2 s each"


def test_a_node_that_is_lost_for_good_costs_a_moment_where_the_others_have_room() -> None:
    calm, lost = earned(), earned({"at_s": 10.0, "what": "kill node", "node": "a"})
    assert all(0.8 * calm[name] < lost[name] for name in calm), (calm, lost)
    assert sum(lost.values()) < sum(calm.values()), "while some wait, the others are faster"


def test_a_program_that_starts_has_as_much_of_the_cores_as_any_process() -> None:
    agenda, up, processes = Agenda(), [], [0.0]
    cores = Cores(agenda, 2, training=lambda: processes[0], changed=lambda: cores.settle())

    def starts(name: str) -> None:
        cores.start(2.0, lambda: up.append((name, agenda.now_us / 1e6)))

    starts("alone")
    while agenda.step():
        pass
    assert up == [("alone", 2.0)]
    processes[0] = 7.0  # with it eight on two cores
    starts("beside")
    assert cores.share_left() == 1 - 1 / 8
    while agenda.step():
        pass
    assert up[-1] == ("beside", 2.0 + 8.0)


def test_a_fork_server_that_was_killed_costs_when_a_worker_is_to_start() -> None:
    calm = earned()
    killed = [{"at_s": 10.0, "what": "kill fork server", "node": node} for node in NODES]
    assert earned(*killed) == calm
    death = {"at_s": 20.0, "what": "kill worker", "task": "light-1", "worker": "0:1"}
    assert earned(*killed, death)["light"] < earned(death)["light"] - 5


def test_a_stopped_fork_server_forks_when_it_continues() -> None:
    stopped = [{"at_s": 10.0, "what": "stop fork server", "node": node} for node in NODES]
    death = {"at_s": 20.0, "what": "kill worker", "task": "light-1", "worker": "0:1"}
    go_on = [{"at_s": 40.0, "what": "continue fork server", "node": node} for node in NODES]
    assert 60 < earned(death)["light"] - earned(*stopped, death, *go_on)["light"] < 110, "20 s of 0.2 s each"


def test_a_coordinator_that_dies_again_before_agents_are_back_has_healed_nothing() -> None:
    death = {"at_s": 21.0, "what": "kill worker", "task": "light-1", "worker": "0:0"}
    once = [{"at_s": 20.0, "what": "kill coordinator"}, {"at_s": 30.0, "what": "coordinator up"}]
    again = [{"at_s": 30.5, "what": "kill coordinator"}, {"at_s": 40.0, "what": "coordinator up"}]
    assert earned(*once, death)["light"] - earned(*once, death, *again)["light"] > 40, "10 s of 0.2 s each"


def test_a_forecast_that_begins_with_cold_fork_servers_begins_later() -> None:
    kinds = {"alone_s": 0.1, "beside_s": 0.2, "begin_s": 1.0, "cold_s": 7.0}
    storm = {"steps": 10_000, "seconds": 30.0, "trace": [], "cores": 2}
    storm |= {"measured": dict.fromkeys(("heavy", "middle", "light"), kinds)}
    warm, cold = forecast(storm), forecast(storm | {"warm": False})
    for name in warm:
        assert 20 <= warm[name] - cold[name] <= 45, "6 s of 0.2 s each"


def test_tasks_train_beside_programs_that_start_however_many() -> None:
    """Tasks that begin while four programs start had no share of two cores, until those were up."""
    starts = [{"at_s": 5.0, "what": "start agent", "node": node} for node in NODES]
    starts += [{"at_s": 5.0, "what": "start coordinator"}, {"at_s": 55.0, "what": "coordinator up"}]
    tasks = [f"{kind}-1" for kind in ("heavy", "middle", "light")]
    pauses = [{"at_s": 10.0, "what": "pause", "task": task} for task in tasks]
    pauses += [{"at_s": 12.0, "what": "resume", "task": task} for task in tasks]
    for steps in earned(*starts, *pauses).values():
        assert steps > 100


def test_a_node_that_is_stopped_is_given_up_because_peers_elsewhere_wait() -> None:
    """Not only when it continues: its tasks train elsewhere by then."""
    calm, stopped = earned(), earned({"at_s": 10.0, "what": "stop node", "node": "a"})
    assert sum(stopped.values()) > 0.8 * sum(calm.values()), (calm, stopped)
