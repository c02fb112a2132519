"""A flow that gets less than it is owed is moved, if the fabric can be to blame, and only then."""

import pytest

from everstep.errors import UserError
from everstep_fabric import Flow, Topology, allocate
from everstep_fabric.watch import CannotMove, FlowMeasured, MoveFlow, PathWatch, WatchLimits
from tests.fabric.clos import clos

LIMITS = WatchLimits(confirm=2, min_busy_s=0.1, dead_after_s=0.75, settle_s=0.5, retry_after_s=30.0)


class Sockets:
    """Flows' counters, advanced by hand."""

    def __init__(self, names: list[str]) -> None:
        self.acked = dict.fromkeys(names, 0)
        self.busy = dict.fromkeys(names, 0.0)
        self.now = 0.0

    def tick(self, gbps: dict[str, float], busy: float = 0.25) -> list[FlowMeasured]:
        self.now += 0.25
        for name, rate in gbps.items():
            self.acked[name] += int(rate * 1e9 / 8 * busy)
            self.busy[name] += busy
        return [
            FlowMeasured(flow=n, acked_bytes=self.acked[n], busy_s=self.busy[n], waiting=busy > 0)
            for n in gbps
        ]


def fabric(spines: int = 4) -> Topology:
    return clos(name="f", nodes=2, port_gbps=10.0 * spines, nodes_per_leaf=1, spines=spines, uplink_gbps=10.0)


def watched(num_flows: int = 3, spines: int = 4) -> tuple[PathWatch, Sockets, list[str]]:
    names = [f"f{n}" for n in range(num_flows)]
    flows = [
        Flow(name=n, task="t", phase="p", group=n, source=("n0", 0), target=("n1", 0), bytes=1e9)
        for n in names
    ]
    return PathWatch(fabric(spines), allocate(fabric(spines), flows), LIMITS), Sockets(names), names


def test_a_slow_flow_moves_to_the_free_spine_after_two_windows() -> None:
    watch, sockets, names = watched()
    healthy = dict.fromkeys(names, 9.5)
    assert watch.handle(sockets.tick(healthy), sockets.now) == []
    assert watch.handle(sockets.tick(healthy | {"f0": 1.0}), sockets.now) == []
    (move,) = watch.handle(sockets.tick(healthy | {"f0": 1.0}), sockets.now)
    assert isinstance(move, MoveFlow)
    assert move.flow == "f0"
    others = {link for name in ("f1", "f2") for link in watch.routing.by_name[name][1:-1]}
    assert not set(move.after[1:-1]) & (others | set(move.before[1:-1]))
    assert "f0 gets 1 of 9.5 Gbit/s" in move.because
    watch.validate()


def test_a_dead_path_shows_by_silence_even_if_no_window_has_ended() -> None:
    watch, sockets, names = watched()
    healthy = dict.fromkeys(names, 9.5)
    watch.handle(sockets.tick(healthy), sockets.now)
    actions = []
    while not actions and sockets.now < 3:
        looks = sockets.tick({n: 9.5 for n in names if n != "f0"})
        silent = FlowMeasured(flow="f0", acked_bytes=sockets.acked["f0"], busy_s=0.25, waiting=True)
        actions = watch.handle([*looks, silent], sockets.now)
    assert sockets.now == pytest.approx(1.0)
    assert [type(a) for a in actions] == [MoveFlow]


def test_a_trainer_that_computes_is_not_slow() -> None:
    watch, sockets, names = watched()
    for _ in range(20):
        assert watch.handle(sockets.tick(dict.fromkeys(names, 9.5), busy=0.01), sockets.now) == []


def test_a_fabric_file_that_promises_too_much_accuses_nobody() -> None:
    watch, sockets, names = watched()
    for _ in range(10):
        assert watch.handle(sockets.tick(dict.fromkeys(names, 1.0)), sockets.now) == []


def test_a_slow_flow_on_links_that_serve_another_well_stays_and_is_told_once() -> None:
    watch, sockets, names = watched(num_flows=2, spines=1)
    watch.handle(sockets.tick(dict.fromkeys(names, 5.0)), sockets.now)
    told = [a for _ in range(8) for a in watch.handle(sockets.tick({"f0": 5.0, "f1": 0.5}), sockets.now)]
    assert [type(a) for a in told] == [CannotMove]
    assert "f1 is slow, and every link of its path serves another flow well" in told[0].because


def test_two_flows_that_share_a_link_after_a_move_are_content_with_half() -> None:
    watch, sockets, names = watched(num_flows=4)
    healthy = dict.fromkeys(names, 9.5)
    watch.handle(sockets.tick(healthy), sockets.now)
    moves = []
    for _ in range(3):
        moves += watch.handle(sockets.tick(healthy | {"f0": 0.0}), sockets.now)
    assert [m.flow for m in moves] == ["f0"]
    partner = next(
        n for n in names if n != "f0" and watch.routing.by_name[n][1] == watch.routing.by_name["f0"][1]
    )
    sockets.acked["f0"] = sockets.busy["f0"] = 0  # a new connection
    for _ in range(20):
        assert watch.handle(sockets.tick(healthy | {"f0": 4.7, partner: 4.7}), sockets.now) == []


def test_after_a_while_a_suspect_counts_as_healthy_again() -> None:
    watch, sockets, names = watched()
    healthy = dict.fromkeys(names, 9.5)
    watch.handle(sockets.tick(healthy), sockets.now)
    for _ in range(3):
        watch.handle(sockets.tick(healthy | {"f0": 1.0}), sockets.now)
    assert watch.snapshot()["suspects"]
    sockets.now += LIMITS.retry_after_s
    watch.handle(sockets.tick(healthy), sockets.now)
    assert watch.snapshot()["suspects"] == {}


def test_an_unplanned_flow_is_refused_by_name() -> None:
    watch, _, _ = watched()
    with pytest.raises(UserError, match="'g' is not in the plan"):
        watch.handle([FlowMeasured(flow="g", acked_bytes=0, busy_s=0.0, waiting=False)], 1.0)


def test_a_new_plan_does_not_lead_back_over_a_link_that_is_suspected() -> None:
    watch, sockets, names = watched()
    healthy = dict.fromkeys(names, 9.5)
    first = watch.routing
    watch.handle(sockets.tick(healthy), sockets.now)
    moves = [m for _ in range(3) for m in watch.handle(sockets.tick(healthy | {"f0": 0.0}), sockets.now)]
    assert [m.flow for m in moves] == ["f0"]
    again = watch.adopt(first, sockets.now)
    assert [m.flow for m in again if isinstance(m, MoveFlow)] == ["f0"]
    assert watch.routing.by_name["f0"][1] != first.by_name["f0"][1]
    sockets.now += LIMITS.retry_after_s
    assert watch.adopt(first, sockets.now) == []
