"""Studies: sources say what their papers say, accounts add up, policies are ordered as they must be."""

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from everstep.cli.main import run as everstep
from everstep.errors import UserError
from everstep_lab.plan import reroute
from everstep_lab.plan.curve import from_table
from everstep_lab.plan.holes import ratio, with_holes
from everstep_lab.plan.pipeline_orders import RESCHEDULED
from everstep_lab.study import readers, sources
from everstep_lab.study.failures import CAUSES, Failure, Seen, Trace
from everstep_lab.study.life import StudyTask
from everstep_lab.study.policies import concave_hull
from everstep_lab.study.request import Request, from_document
from everstep_lab.study.setting import _curve
from everstep_lab.study.study import POLICIES, StudyResult, Summary, first_life, run_study
from everstep_lab.study.templates import by_templates, upper_bound

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
SMALL = ("gpt3-1.3b", "gpt3-7b")


def earned(request: Request, *names: str) -> dict[str, StudyResult]:
    traces = request.traces()
    chosen = {n: p for n, p in request.chosen().items() if not names or n in names}
    return {n: s.results[0] for n, s in run_study(request.setup(traces[0]), traces, chosen).items()}


def test_severities_are_in_the_published_proportion() -> None:
    """Of jobs that fail: SEV1 28.1 %, SEV2 23.3 % with the unassigned, SEV3 48.6 %."""
    total = sum(c.share for c in CAUSES)
    assert total == pytest.approx(43.4)
    shares = {s: sum(c.share for c in CAUSES if c.severity == s) / total for s in (1, 2, 3)}
    assert [round(100 * shares[s], 1) for s in (1, 2, 3)] == [28.1, 23.3, 48.6]


def test_trace_a_and_trace_b_have_the_counts_of_the_paper() -> None:
    for trace, severe, other, days in ((sources.trace_a(1), 10, 33, 56), (sources.trace_b(1), 26, 80, 7)):
        assert sum(f.severity == 1 for f in trace.failures) == severe
        assert sum(f.severity != 1 for f in trace.failures) == other
        assert trace.horizon_s == days * 86_400


def test_the_llama_3_table_has_419_interruptions_and_one_in_three_hours() -> None:
    assert sum(c.share for c in sources.LLAMA3) == 419
    trace = sources.llama3(0, days=54)
    assert 54 * 24 / len(trace.failures) == pytest.approx(3.09, rel=0.12)


def test_c4s_crashes_are_local_to_a_node_in_82_5_per_cent_and_cost_what_its_table_says() -> None:
    """ "31.19 %" of a month before C4D, "1.16 %" with it (as recalled): lost work, detection, diagnosis and
    isolation, start. Crashes that fall into the recovery of another one cost less.
    """
    assert sum(c.share for c in sources.C4) == 100
    assert sum(c.share for c in sources.C4 if c.severity == 1) == 82.5
    assert len(sources.c4(0).failures) == 40
    request = Request(trace="c4", nodes=64, seeds=1, tasks=("gpt3-13b",), policies=("before-c4d", "c4d"))
    got = earned(request)
    assert 1 - got["before-c4d"].share == pytest.approx(0.3119, rel=0.25)
    assert 1 - got["c4d"].share == pytest.approx(0.0116, rel=0.05)


@pytest.mark.skipif(not DATA.exists(), reason="the shared traces are not here")
def test_real_traces_are_read_whole() -> None:
    spot = readers.read((DATA / "p3-trace.csv").read_text(), name="p3")
    assert len(spot.failures) == 167
    assert spot.nodes == 32
    text = gzip.decompress((DATA / "titan-gpu-lifetimes.csv.gz").read_bytes()).decode()
    titan = sources.titan(text, nodes=512, days=90)
    assert titan.failures
    assert all(f.severity == 1 and 0 <= f.node < 512 for f in titan.failures)


def test_what_is_lost_and_what_is_earned_add_up_to_a_life_without_faults() -> None:
    request = Request(trace="trace-b", seeds=1, tasks=SMALL)
    for name, result in earned(request).items():
        assert result.accumulated_waf + sum(result.lost.values()) == pytest.approx(result.healthy_waf), name


def test_without_failures_nothing_is_lost() -> None:
    request = Request(trace="poisson", rate="0", seeds=1, tasks=SMALL)
    for name, result in earned(request, "recycle", "oobleck", "unicron", "everstep").items():
        assert result.share == pytest.approx(1.0), name


def test_ours_is_above_unicron_and_the_ideal_above_all_on_both_traces() -> None:
    for trace in ("trace-a", "trace-b"):
        found = earned(Request(trace=trace, seeds=1, mix="3"))
        assert found["everstep"].share > found["unicron"].share > found["megatron"].share
        assert max(found, key=lambda name: found[name].share) == "ideal"


def test_unicron_over_megatron_is_what_was_published_within_ten_per_cent() -> None:
    """Accumulated WAF on trace-a 1.2 times Megatron's, on trace-b 1.9 times."""
    for trace, published in (("trace-a", 1.2), ("trace-b", 1.9)):
        request = Request(trace=trace, seeds=3, policies=("megatron", "unicron"))
        traces = request.traces()
        found = run_study(request.setup(traces[0]), traces, request.chosen())
        ratio = found["unicron"].mean(lambda r: r.share) / found["megatron"].mean(lambda r: r.share)
        assert ratio == pytest.approx(published, rel=0.1)


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    loss = Failure(at_s=100.0, node=0, severity=1, seen=Seen.EXCEPTION, cause="ECC error", repair_s=1e9)
    trace = Trace(name="one", horizon_s=100_000.0, nodes=5, failures=(loss,))
    request = Request(tasks=("gpt3-7b",), spares=0)
    shares = {}
    for spares in (0, 1):
        setup = Request(tasks=("gpt3-7b",), spares=spares).setup(trace)
        chosen = {"megatron": POLICIES["megatron"]}
        shares[spares] = run_study(setup, [trace], chosen)["megatron"].results[0].share
    assert shares[0] < 0.01 < 0.9 < shares[1]
    assert request.spares == 0


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps are bounded, not scheduled: quicker, and no schedule is faster."""
    reroute._longer.cache_clear()
    monkeypatch.setattr(reroute, "SCHEDULED_OPS", 0)
    yield
    reroute._longer.cache_clear()


def lost(*nodes: int) -> Trace:
    """An hour apart, from the first hour on; none comes back within the ten hours."""
    failures = [
        Failure(at_s=3600.0 * i, node=n, severity=1, seen=Seen.SILENCE, cause="lost", repair_s=1e9)
        for i, n in enumerate(nodes, 1)
    ]
    return Trace(name="lost", horizon_s=36_000.0, nodes=32, failures=tuple(failures), spot=True)


@pytest.mark.usefixtures("bounded")
def test_recycle_moves_failures_to_the_stages_where_they_cost_least() -> None:
    """As its paper describes. It was left with the stage that had lost most, and waited for an empty one."""
    setup = Request(trace="x", text="", tasks=("gpt3-7b",)).setup(lost(0))
    life = first_life(setup, lost(0))
    shape = life.tasks[0].shape
    assert shape is not None
    assert (shape.stages > 1, shape.shards) == (True, 1)
    one_stage = [replica * shape.stages for replica in range(3)]
    spread = [replica * shape.stages + replica % shape.stages for replica in range(3)]
    earned_by = {
        name: run_study(setup, [lost(*nodes)], {"recycle": POLICIES["recycle"]})["recycle"].results[0].share
        for name, nodes in (("one stage", one_stage), ("spread", spread))
    }
    assert earned_by["one stage"] == pytest.approx(earned_by["spread"], rel=0.01)
    every = [replica * shape.stages for replica in range(shape.replicas)]
    whole_stage = run_study(setup, [lost(*every)], {"recycle": POLICIES["recycle"]})["recycle"].results[0]
    assert whole_stage.lost["waiting"] == 0


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", ["gpt3-1.3b", "gpt3-7b"])
def test_the_ideal_is_an_upper_bound_at_every_number_of_workers(name: str) -> None:
    """It was not: pipelines of a number that does not divide the batch, and shapes larger than the cluster
    with places empty, brought more.
    """
    curve = _curve(name, "A800", "megatron-2022", 32, 1)
    bound = concave_hull(upper_bound(curve)) * (1 + 1e-9)
    assert (np.diff(bound) >= 0).all()
    ours = replace(curve, schedule=RESCHEDULED)
    holes = with_holes(ours).throughput
    for workers in range(33):
        assert max(curve.throughput[workers], holes[workers], by_templates(curve, workers)) <= bound[workers]
    for cut in curve.cuts[:4]:  # any shape it may happen to be in, not only the best of so many workers
        for replicas in (r for r in np.flatnonzero(cut.throughput) if r * cut.stages in range(16, 129)):
            for workers in (23, 29, 31):
                rate = cut.throughput[replicas] * ratio(ours, cut, int(replicas), workers)
                assert rate <= bound[workers], (cut.stages, replicas)


@pytest.mark.usefixtures("bounded")
def test_seventy_nodes_run_a_shape_of_128_with_places_empty() -> None:
    """Between 65 and 80 nodes a batch of 512 had no shape at all: the throughput was that of 64."""
    curve = _curve("gpt3-1.3b", "A800", "megatron-2022", 80, 1)
    holes = with_holes(replace(curve, schedule=RESCHEDULED)).throughput
    assert holes[72] > 1.05 * curve.throughput[:73].max()


def test_a_second_failure_starts_detection_anew_and_keeps_what_is_owed() -> None:
    task = StudyTask(name="t", curve=None, healthy=1.0, rate=1.0)  # type: ignore[arg-type]
    task.stall(detection=10.0, transition=20.0, replay=30.0)
    task.advance(15.0)
    task.stall(detection=10.0, transition=20.0, replay=5.0)
    task.advance(1000.0)
    assert task.lost["detection"] == 20.0
    assert task.lost["transition"] == 25.0
    assert task.lost["replay"] == 35.0
    assert task.done == 1015.0 - 80.0


def test_confidence_is_students() -> None:
    """Three results 1, 2, 3: 4.303 / sqrt(3) = 2.484 by the table."""
    results = [
        StudyResult(accumulated_waf=x, healthy_waf=1.0, lost={}, availability=1.0, failures=0)
        for x in (1.0, 2.0, 3.0)
    ]
    half = Summary("p", results).half_width(lambda r: r.accumulated_waf)
    assert half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)


def test_a_study_file_says_the_same_as_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "study.toml"
    study.write_text(
        '[failures]\ntrace = "trace-b"\n[study]\nseeds = 1\npolicies = ["megatron", "everstep"]\n'
        '[[task]]\nmodel = "gpt3-1.3b"\n[[task]]\nmodel = "gpt3-7b"\nweight = 2.0\n'
    )
    assert everstep(["simulate", str(study), "--json"]) == 0
    by_file = json.loads(capsys.readouterr().out)
    flags = (
        "--trace trace-b --seeds 1 --policies megatron,everstep --task gpt3-1.3b --task gpt3-7b:2.0 --json"
    )
    assert everstep(["simulate", *flags.split()]) == 0
    assert json.loads(capsys.readouterr().out) == by_file
    assert set(by_file["policies"]) == {"megatron", "everstep"}
    assert (
        by_file["policies"]["everstep"]["accumulated_waf"]
        > by_file["policies"]["megatron"]["accumulated_waf"]
    )


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"clutser": {}}, "clutser"),
        ({"cluster": {"node": 3}}, "did you mean 'nodes'"),
        ({"cluster": {"nodes": "many"}}, "nodes"),
        ({"failures": {"repair_hours": [3]}}, "repair_hours"),
        ({"task": [{"weight": 1.0}]}, "model"),
    ],
)
def test_a_wrong_study_file_is_told_in_one_sentence(document: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_document(document, "study.toml")


@pytest.mark.parametrize(
    "arguments",
    [
        "simulate --trace trace-c",
        "simulate --trace missing.csv",
        "simulate --policies unicorn",
        "simulate --trace poisson --rate often",
        "simulate --vary colour=1,2",
        "simulate --repair-hours 3",
        "simulate --seeds 0",
        "simulate --trace poisson --nodes 0",  # was 16
        "simulate --trace poisson --nodes 200000000",
        "simulate --trace poisson --slots 0",  # was 8
        "simulate --trace poisson --days 0",  # was 56
        "simulate --trace poisson --days inf",  # did not end
        "simulate --trace poisson --mtbf-hours nan",
        "simulate --trace poisson --rate nan",
        "simulate --trace poisson --rate -1",
        "simulate --checkpoint-minutes nan",
        "simulate --repair-hours 1:inf",
    ],
)
def test_wrong_flags_end_with_code_2_and_one_line(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert everstep(arguments.split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "cut.csv.gz",
            gzip.compress(b"time,up\n0,8\n3600,7\n", mtime=0)[:-6],
            "cut or damaged",
        ),  # was "stopped"
        (
            "flipped.csv.gz",
            gzip.compress(b"time,up\n0,8\n3600,7\n", mtime=0)[:12] + b"\xff" * 30,
            "cut or damaged",
        ),
        ("moment.csv", b"0,add,a\n", "give it later events"),  # was a division by zero
    ],
)
def test_a_damaged_trace_is_told_in_one_sentence(
    name: str, content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert everstep(["simulate", "--trace", str(tmp_path / name), "--policies", "everstep"]) == 2
    assert says in capsys.readouterr().err


def share_of_ideal(kind: str, days: float, *names: str) -> dict[str, float]:
    results = earned(Request(trace=kind, seeds=1, days=days, tasks=("gpt3-1.3b",)), *names, "ideal")
    return {name: results[name].accumulated_waf / results["ideal"].accumulated_waf for name in names}


def test_nodes_that_join_at_once_are_one_change() -> None:
    task = StudyTask(name="t", curve=from_table([0.0, 1.0]))
    task.healthy = task.rate = 1.0
    for seconds in (3.0, 5.0, 4.0):
        task.pause(seconds)
    assert task.stalls == [("transition", 5.0)]
    task.advance(1.0)
    task.pause(2.0)
    assert task.stalls == [("transition", 4.0), ("transition", 2.0)]


def test_more_than_100_per_cent_gets_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trace", "trace-b", "--seeds", "1", "--policies"]
    assert everstep(["simulate", *flags, "ideal"]) == 0
    assert "More than 100 %: the reference" in capsys.readouterr().out
    assert everstep(["simulate", *flags, "megatron"]) == 0
    assert "More than 100 %" not in capsys.readouterr().out


def test_pipelines_reduce_once_per_step_whatever_their_number_of_microbatches() -> None:
    """They were as fast as in the nearest whole shape, with its many microbatches to share one reduction."""
    table = from_table([0.0, 0, 0, 0, 8.0], stages=1, batch=16)
    cut = replace(table.cuts[0], per_step=np.full(5, 0.5))
    # Four workers: 2 s a step, one for 4 sequences each, one to reduce. Three: ceil(16 / 3) = 6 sequences.
    assert by_templates(replace(table, cuts=(cut,)), 3) == pytest.approx(8.0 / (6 / 4 * 0.5 + 0.5))


def test_pipelines_of_two_depths_share_a_batch_in_whole_microbatches() -> None:
    """Seven workers as three pipelines of two and one of one: 9 + 9 + 9 + 5 of 32 sequences."""
    single = from_table([0.0, *(float(n) for n in range(1, 8))], stages=1, batch=32)
    pairs = from_table([float(n) for n in range(8)], stages=2, batch=32)
    both = replace(single, cuts=(*single.cuts, *pairs.cuts))
    assert by_templates(both, 7) == pytest.approx(32 / 5)


def test_a_pipeline_of_another_depth_does_no_work_while_the_others_reduce() -> None:
    """All reduce together: the deep pipeline, whose workers have few layers, waits for the shallow ones."""
    table = from_table([0.0, 0.0, 4.0], stages=2, batch=16)
    cut = table.cuts[0]
    shallow = replace(cut, per_step=np.array([0.0, 0.1]))
    deep = replace(cut, stages=3, throughput=np.array([0.0, 6.0]))
    # A step of the shallow one alone takes 1/4: 0.025 of reduction, 0.225 for 16 sequences. Here it has 7.
    step = max(7 / 16 * 0.225, 9 / 96) + 0.025
    assert by_templates(replace(table, cuts=(shallow, deep)), 5) == pytest.approx(1 / step)
