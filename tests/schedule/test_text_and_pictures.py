"""Notation, pictures, documents, the command: what people and other programs read."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from everstep.diagnose import drawing
from everstep.errors import UserError
from everstep.protocol.ops import Kind
from everstep.schedule import Instance, Microbatch, Op, Schedule, Worker, plan, uniform
from everstep_lab.cli.schedule import schedule_command
from everstep_lab.schedule import gantt, grid
from everstep_lab.schedule.document import instance_from
from everstep_lab.schedule.notation import parse_schedule

numbers = st.integers(0, 120)
of_a_microbatch = st.builds(
    Op, st.sampled_from([Kind.F, Kind.I, Kind.W, Kind.B]), st.builds(Microbatch, numbers, numbers), numbers
)
ops = of_a_microbatch | st.builds(Op, st.sampled_from([Kind.R, Kind.U]), st.none(), numbers)
schedules = st.dictionaries(st.builds(Worker, numbers, numbers), st.lists(ops).map(tuple)).map(Schedule)


def example() -> Instance:
    one = uniform(replicas=3, stages=4, value=1.0)
    return Instance(
        replicas=3,
        stages=4,
        microbatches=6,
        forward=one,
        input_grad=one,
        weight_grad=one,
        dead=frozenset({Worker(1, 2)}),
    )


@given(schedules)
def test_text_has_an_exact_inverse(schedule: Schedule) -> None:
    assert parse_schedule(schedule.text()) == schedule
    assert parse_schedule(schedule.text()).text() == schedule.text()


def test_a_plan_survives_its_text_form() -> None:
    planned = plan(example(), "staggered")
    assert parse_schedule(planned.schedule.text()) == planned.schedule


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0:1 1F0.0", "no '='"),
        ("x = 1R", "worker 'x'"),
        ("0:1 = 1X", "op '1X'"),
        ("0:1 = 1R\n0:1 = 1U", "keep one"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_schedule(line)


def test_the_grid_shows_every_op_of_a_unit_step() -> None:
    planned = plan(example(), "staggered")
    text = grid.draw(example(), planned, columns=200).text()
    assert text.count("F") + text.count("f") == 3 * 4 * 6
    assert text.count("f") == 6
    assert text.splitlines()[0].startswith("0:0 |F0 F1 F2")


def test_a_wide_step_is_squeezed_into_the_terminal() -> None:
    rows = grid.draw(example(), plan(example(), "reroute"), columns=20).text().splitlines()
    assert max(map(len, rows)) <= 26


def test_the_chart_is_well_formed_and_marks_what_is_rerouted_and_dead() -> None:
    planned = plan(example(), "reroute")
    chart = gantt.picture(example(), planned)
    root = ElementTree.fromstring(drawing.svg(chart))
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3 * 4 * 6 * 2
    assert sum(box.stroke == gantt.FRAME for box in chart.boxes) == 6 * 2 + 1  # and the legend's
    assert any(word.text == "dead" for word in chart.words)


def test_the_png_is_a_png() -> None:
    pytest.importorskip("matplotlib")
    assert drawing.png(gantt.picture(example(), plan(example(), "staggered")))[:8] == b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> None:
    app = typer.Typer()
    app.command("schedule")(schedule_command)
    app(args=list(arguments), standalone_mode=False)


def test_the_command_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    run(
        "--stages",
        "4",
        "--replicas",
        "3",
        "--microbatches",
        "6",
        "--dead",
        "1:2",
        "--times",
        "F=1,I=1,W=1",
        "--hop",
        "0",
        "--stash",
        "none",
        "--mode",
        "staggered",
        "--json",
    )
    printed = json.loads(capsys.readouterr().out)
    assert {
        "mode",
        "period",
        "makespan",
        "lower_bound",
        "gap",
        "fault_free_1f1b",
        "planning_ms",
        "peak_stash",
        "ops",
    } <= set(printed)
    assert (printed["period"], printed["fault_free_1f1b"], printed["gap"]) == (27, 27, 0)
    assert len(printed["ops"]) == 3 * 4 * 6 * 3
    assert set(printed["ops"][0]) == {"worker", "kind", "microbatch", "start", "end"}


def test_the_document_says_where_failures_would_hurt_least(capsys: pytest.CaptureFixture[str]) -> None:
    run("--dead", "1:3", "--mode", "reroute", "--normalize", "--compare", "--json")
    printed = json.loads(capsys.readouterr().out)
    stay, *_, best = printed["normalization"]
    assert (stay["moves"], stay["failures"]) == ([], [0, 0, 0, 1])
    assert best["moves"] == [{"worker": "1:0", "becomes": "1:3", "state_bytes": 0.0}]
    assert (best["failures"], best["dead"]) == ([1, 0, 0, 0], ["1:0"])
    assert best["lower_bound"] < stay["lower_bound"]
    assert printed["policies"][0] == {"policy": "fault-free 1F1B", "step": 27, "lower_bound": 27}
    assert printed["relative_throughput"] == 27 / 36


def test_the_command_prints_text_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run("--text", "--dead", "1:2", "--mode", "reroute", "--svg", str(tmp_path / "a.svg"))
    assert set(parse_schedule(capsys.readouterr().out).ops) == set(example().workers())
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_the_command_takes_a_full_instance(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = {
        "replicas": 2,
        "stages": 2,
        "microbatches": 4,
        "forward": [1, 2],
        "input_grad": 1,
        "weight_grad": [[1, 1], [1, 3]],
        "hop": 0.5,
        "reduce": 1,
        "memory": 6,
        "held_forward": 2,
        "held_weight": 1,
        "dead": ["0:1"],
        "done": {"0.0@0": [0, "F"]},
    }
    path = tmp_path / "step.json"
    path.write_text(json.dumps(document))
    run("--instance", str(path), "--stash", "from-memory", "--json", "--mode", "decoupled")
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["ops"]) == 2 * 2 * 4 * 3 - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mode fast", "--mode fast"),
        ("--times F=1,I=1", "lacks W"),
        ("--times F=a,I=1,W=1", "'F=a'"),
        ("--dead 9:9", "dead worker 9:9"),
        ("--dead x", "--dead: worker 'x'"),
        ("--stash -3", "--stash"),
        ("--stash from-memory", "--memory"),
        ("--instance nowhere.json", "nowhere.json"),
        ("--replicas 0", "at least 1"),
    ],
)
def test_bad_input_is_one_sentence(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(*arguments.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": "four"}, "stages"),
        ({"forward": None}, "forward is missing"),
        ({"colour": 1}, "'colour'"),
        ({"forward": -1}, "forward"),
        ({"done": {"x": 1}}, "done has"),
        ({"stash_cap": [1]}, "stash_cap"),
    ],
)
def test_a_bad_document_names_the_field(change: dict[str, object], message: str) -> None:
    good = {"replicas": 2, "stages": 2, "microbatches": 4, "forward": 1, "input_grad": 1, "weight_grad": 1}
    instance_from(good)
    with pytest.raises(UserError, match=message):
        instance_from({**good, **change})


def test_polish_proves_the_example() -> None:
    pytest.importorskip("ortools")
    from everstep_lab.schedule.polish import polish

    planned = polish(example(), "reroute", seconds=10)
    assert (planned.value, planned.lower_bound) == (33, 33)
    small = Instance(
        replicas=1,
        stages=3,
        microbatches=4,
        forward=((1.0,) * 3,),
        input_grad=((1.0,) * 3,),
        weight_grad=((1.0,) * 3,),
        hop=0.5,
        stash_cap={Worker(0, s): 2 for s in range(3)},
    )
    better = polish(small, "staggered", seconds=5)
    assert better.value <= plan(small, "staggered").value
    assert better.lower_bound <= better.value + 1e-9
