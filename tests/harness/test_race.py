"""The race's pure parts: the trace that a seed gives, and what diaries come to."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.race_models import CHOICE, MODELS
from harness.race_score import apart, rates, score
from harness.race_trace import KINDS, NODES, PER_NODE, trace
from tools.race_report import NoPlace, joined, markdown, placed, small, sums

ROOT = Path(__file__).resolve().parents[2]


def lines(*steps: tuple[float, int], rank: int = 0, loss: float = 1.0) -> list[dict[str, object]]:
    return [{"kind": "step", "rank": rank, "step": step, "loss": loss + step, "at": at} for at, step in steps]


def steady(first: int, last: int, begin: float, pace: float = 0.5) -> list[tuple[float, int]]:
    return [(begin + pace * k, step) for k, step in enumerate(range(first, last + 1))]


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_gives_every_kind_of_fault_once_training_is_warm_and_spares_worker_0(seed: int) -> None:
    faults = trace(seed, 340)
    assert faults == trace(seed, 340)
    assert sorted(fault.kind for fault in faults) == sorted(KINDS)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert times[0] >= 40
    assert times[-1] < 300
    assert all(0 < fault.slot < NODES * PER_NODE for fault in faults)


def test_seeds_give_different_traces() -> None:
    assert len({trace(seed, 200) for seed in range(10)}) == 10


def test_without_faults_every_step_is_useful() -> None:
    found = score(lines(*steady(1, 41, begin=100.0)), [], 20.0)
    assert found is not None
    assert (found.useful_steps, found.redone_steps) == (41, 0)
    assert found.healthy_step_s == pytest.approx(0.5)
    assert found.lost_s == ()


def test_steps_after_a_rollback_are_redone_and_their_time_is_lost() -> None:
    # Steps 1 to 21 until 10 s; a fault at 10.1 s; from 15 s on again from step 17.
    diary = lines(*steady(1, 21, 100.0), *steady(17, 27, 115.0))
    found = score(diary, [10.1], 20.0)
    assert found is not None
    assert (found.useful_steps, found.redone_steps) == (27, 5)
    assert found.lost_s[0] == pytest.approx(20.0 - 10.1 - 6 * 0.5)
    assert found.stalled_s[0] == pytest.approx(17.5 - 10.1)


def test_a_step_is_counted_once_however_many_ranks_write_it() -> None:
    diary = lines(*steady(1, 11, 0.0)) + lines(*steady(1, 11, 0.01), rank=1)
    found = score(diary, [], 10.0)
    assert found is not None
    assert (found.useful_steps, found.redone_steps) == (11, 0)


def test_what_happens_after_the_end_does_not_count() -> None:
    found = score(lines(*steady(1, 100, 0.0)), [], 10.0)
    assert found is not None
    assert found.useful_steps == 21


def test_what_was_done_before_all_systems_were_up_is_not_counted() -> None:
    found = score(lines(*steady(1, 100, 0.0)), [], 10.0, began=20.1)
    assert found is not None
    assert (found.useful_steps, found.redone_steps) == (20, 0)
    assert found.losses[1] == 2.0, "the curve is whole"


def test_the_pace_is_that_of_the_time_before_the_first_fault() -> None:
    diary = lines(*steady(1, 41, 0.0), *steady(42, 61, 20.9, pace=1.0))
    found = score(diary, [20.0], 40.0)
    assert found is not None
    assert found.healthy_step_s == pytest.approx(0.5)
    assert found.lost_s == (pytest.approx(20.0 - 20 * 0.5),)


def test_a_fault_from_which_a_system_never_comes_back_costs_the_rest() -> None:
    found = score(lines(*steady(1, 21, 0.0)), [10.0], 60.0)
    assert found is not None
    assert found.lost_s == (pytest.approx(50.0),)
    assert found.stalled_s == (pytest.approx(50.0),)


def test_a_diary_without_a_step_has_no_score() -> None:
    assert score([{"kind": "born", "slot": 0, "pid": 1, "at": 0.0}], [], 10.0) is None


def test_too_few_steps_give_no_pace() -> None:
    found = score(lines((0.0, 1), (1.0, 2)), [1.5], 10.0)
    assert found is not None
    assert math.isnan(found.healthy_step_s)
    assert math.isnan(found.lost_s[0]), "not 0: it is not known"
    assert math.isnan(found.goodput), "not 1"


def test_rates_sum_to_the_useful_steps() -> None:
    at = [0.5 * k for k in range(1, 41)]
    assert rates(at, 20.0, 2.5) == pytest.approx([2.0] * 8)


def test_rates_of_steps_longer_than_half_a_bin_are_even_and_a_standstill_is_seen() -> None:
    at = [1.5 * k for k in range(1, 11)] + [35.0]
    found = rates(at, 40.0, 2.5)
    assert found[:6] == pytest.approx([1 / 1.5] * 6)
    assert found[6:14] == pytest.approx([1 / 20] * 8)
    assert found[14:] == [0.0, 0.0], "a step that has not ended"
    assert sum(found) * 2.5 == pytest.approx(len(at))


def test_steps_that_are_known_of_at_once_are_all_counted() -> None:
    assert sum(rates([1.0, 4.0, 4.0, 4.0], 5.0, 2.5)) * 2.5 == pytest.approx(4)


def test_losses_are_compared_at_the_steps_that_both_have() -> None:
    assert apart({1: 5.0, 2: 4.0, 3: 3.5}, {1: 5.5, 2: 4.25}) == (2, 0.25, 0.5)
    assert apart({3: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize("name", MODELS)
def test_a_models_parameters_are_those_that_torch_counts(name: str) -> None:
    code = "import trial; print(sum(p.numel() for build in trial.layers() for p in build().parameters()))"
    there = {**os.environ, CHOICE: name, "PYTHONPATH": str(ROOT / "bench" / "peers")}
    ran = subprocess.run([sys.executable, "-c", code], env=there, capture_output=True, text=True, check=True)
    assert int(ran.stdout) == MODELS[name].parameters


def test_the_large_model_is_ten_times_the_small_one_and_its_slow_steps_are_no_hangs() -> None:
    few, many = MODELS["small"], MODELS["large"]
    assert 9.5 < many.parameters / few.parameters < 11
    assert all(model.microbatches % 8 == 0 and model.width % model.heads == 0 for model in (few, many))
    assert many.beat_s > few.beat_s


def result(name: str, useful: int, step_s: float, lost: list[float], stalled: list[float]) -> dict[str, Any]:
    faults = [{"kind": "kill", "slot": 1, "planned_s": 50.0 + k, "at_s": 50.0 + k} for k in range(len(lost))]
    at = [step_s * k for k in range(1, useful + 1)]
    return {
        "name": name,
        "version": "1",
        "useful_steps": useful,
        "redone_steps": 1,
        "healthy_step_s": step_s,
        "lost_s": lost,
        "stalled_s": stalled,
        "faults": faults,
        "useful_at": at,
        "relaunched": 0,
        "losses": {"50": 1.0, "51": 2.0},
    }


def race_of(seed: int, **systems: dict[str, Any]) -> dict[str, Any]:
    return {"seed": seed, "seconds": 100.0, "model": {"name": "large"}, "systems": systems}


TWO_SEEDS = {
    "races": [
        race_of(1, a=result("A", 80, 1.0, [2.0], [1.5]), b=result("B", 70, 1.2, [9.0], [8.0])),
        race_of(2, a=result("A", 82, 1.1, [3.0], [2.5]), b={"name": "B", "version": "1"}),
    ]
}


def test_a_sum_over_seeds_has_the_systems_that_ran_under_all_of_them() -> None:
    head, *rows = sums(TWO_SEEDS["races"])
    assert rows == [["A", "80, 1000", "82, 1100", "162", "2", "5", "2.5"]]
    assert len(head) == len(rows[0])
    assert markdown(TWO_SEEDS).splitlines()[-1] == "| A | 80, 1000 | 82, 1100 | 162 | 2 | 5 | 2.5 |"


def test_seeds_that_were_raced_apart_are_one_document() -> None:
    first, second = TWO_SEEDS["races"]
    assert joined([first]) == first
    assert joined([first, second]) == TWO_SEEDS
    assert len(joined([TWO_SEEDS, first])["races"]) == 3


def test_what_is_kept_of_several_seeds_is_small_too() -> None:
    kept = small(TWO_SEEDS, {})
    assert [each["seed"] for each in kept["races"]] == [1, 2]
    assert kept["races"][0]["systems"]["a"]["losses"] == {"50": 1.0}


def test_a_table_goes_between_the_markers_of_its_model() -> None:
    page = "a\n<!-- race small -->\nold\n<!-- end -->\nb\n<!-- race large -->\nold\n<!-- end -->\nc\n"
    found = placed(page, TWO_SEEDS["races"][0])
    assert found.startswith("a\n<!-- race small -->\nold\n<!-- end -->\nb\n<!-- race large -->\n| system |")
    assert found.endswith("\n<!-- end -->\nc\n")
    assert found.count("old") == 1
    assert placed(found, TWO_SEEDS["races"][0]) == found
    with pytest.raises(NoPlace, match="<!-- race large, seeds -->"):
        placed(page, TWO_SEEDS)


@pytest.mark.parametrize("kept", sorted((ROOT / "bench" / "peers").glob("race*.json")), ids=lambda p: p.stem)
def test_the_page_has_the_tables_of_the_races_that_are_kept(kept: Path) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert placed(page, json.loads(kept.read_text())) == page
