"""How long a plan holds: failures by rate, repairs by promise."""

from __future__ import annotations

import math

import pytest

from everstep.plan import Cluster, PlanNode
from everstep.plan.running import MOST_REPAIRS, periods
from tests.plan.worlds import nodes


def down(name: str, back_in_s: float | None) -> PlanNode:
    return PlanNode(name=name, lost=True, back_in_s=back_in_s)


def test_a_larger_cluster_is_interrupted_sooner() -> None:
    small, large = (periods(Cluster(nodes=nodes(n, 8)))[0].running_s for n in (10, 1000))
    assert small == pytest.approx(100 * large)
    assert small == pytest.approx(86_400 * 1000 / 6.5 / 10)


def test_a_node_that_often_fails_shortens_every_plan() -> None:
    sound = nodes(9, 8)
    lemon = PlanNode(name="lemon", failures_per_1000_days=650.0)
    assert (
        periods(Cluster(nodes=[*sound, lemon]))[0].running_s
        < 0.1 * periods(Cluster(nodes=sound))[0].running_s
    )


def test_a_repair_ends_a_period_in_expectation() -> None:
    cluster = Cluster(nodes=[*nodes(3, 8), down("gone", 3600.0)], running_s=7200.0)
    now, later = periods(cluster)
    assert now.ends_by_repair == pytest.approx(math.exp(-0.5))
    assert now.running_s == pytest.approx(7200 * (1 - math.exp(-0.5)))
    assert now.repaired == ("gone",)
    assert later.cluster.capacity == 32
    assert (later.ends_by_repair, later.running_s) == (0.0, 7200.0)


def test_an_unpromised_repair_is_no_period() -> None:
    assert len(periods(Cluster(nodes=[*nodes(3, 8), down("gone", None)]))) == 1


def test_many_repairs_are_looked_at_together() -> None:
    cluster = Cluster(nodes=[*nodes(3, 8), *(down(f"d{i}", 60.0 * (i + 1)) for i in range(12))])
    found = periods(cluster)
    assert len(found) == MOST_REPAIRS + 1
    assert found[-1].cluster.capacity == 15 * 8
    assert [p.starts_s for p in found] == sorted(p.starts_s for p in found)


def test_without_failures_a_plan_holds_as_long_as_anybody_looks() -> None:
    assert periods(Cluster(nodes=nodes(2, 2), failures_per_1000_node_days=0.0))[0].running_s > 1e8
