"""`everstep plan`: one document on stdout, or one sentence and exit 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.cli.main import run

SIMPLE = """
[cluster]
nodes = 4
slots_per_node = 8

[[task]]
name = "big"
weight = 2.0
min_workers = 8
model = "gpt3-7b"
workers = 16

[[task]]
name = "small"
weight = 1.0
min_workers = 1
throughput = [0, 1e14, 1.9e14, 2.7e14, 3.4e14]
workers = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(SIMPLE)
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert run(["plan", *map(str, arguments), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_one_document(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = told(capsys, file)
    assert {"allocation", "objective", "waf_before", "waf_after", "planning_ms", "because"} <= set(document)
    assert set(document["allocation"]) == {"big", "small"}
    assert document["waf_after"] >= document["waf_before"]
    assert sum(document["allocation"].values()) <= 32
    total = sum(t["earns"] - t["pays"] - t["pays_on_the_way_back"] for t in document["tasks"].values())
    assert document["objective"] == pytest.approx(total)


def test_what_if(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = told(capsys, file, "--what-if", "lose node-0")
    assert document["because"].startswith("lose node-0: ")
    assert sum(document["allocation"].values()) <= 24
    assert not any(
        "node-0:" in place for places in document["assignment"].values() for place in places if place
    )


def test_tables_for_people(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(file), "--what-if", "lose node-3 for 2h"]) == 0
    out = capsys.readouterr().out
    assert "WAF" in out
    assert "runner-up" in out
    assert "back in" in out
    assert run(["plan", str(file), "--next"]) == 0
    assert "lose node-3" in capsys.readouterr().out
    assert "finish big" in str(told(capsys, file, "--next"))


NODES = '[[node]]\nname = "a"\n[[node]]\nname = "{}"\n'
MISTAKES = {
    "weight 0": ("weight = 2.0", "weight = 0", "weight of task 'big' is 0; make it more than 0."),
    "weight below 0": ("weight = 2.0", "weight = -1.5", "weight of task 'big' is -1.5"),
    "weight a text": ("weight = 2.0", 'weight = "2"', "weight of task 1 is '2'; it must be a number."),
    "table from 1": ("[0, 1e14", "[1e14, 1e14", "throughput of task 'small' must start with 0"),
    "table of texts": ("[0, 1e14", '[0, "x"', "throughput of task 'small' has 'x'"),
    "table below 0": ("[0, 1e14", "[0, -1.0", "throughput of task 'small' has -1.0"),
    "table empty": ("[0, 1e14, 1.9e14, 2.7e14, 3.4e14]", "[]", "must start with 0"),
    "table of one": ("[0, 1e14, 1.9e14, 2.7e14, 3.4e14]", "[0]", "ends at 0 workers"),
    "table with nan": ("[0, 1e14", "[0, nan", "throughput of task 'small' has nan"),
    "node twice": ("nodes = 4\n", "", "node 'a' is named twice", NODES.format("a")),
    "nodes both ways": ("weight = 2.0", "weight = 2.0", "not both", NODES.format("b")),
    "no nodes": ("nodes = 4\n", "", "say which nodes there are"),
    "nodes 0": ("nodes = 4", "nodes = 0", "nodes of [cluster] is 0"),
    "slots 0": ("slots_per_node = 8", "slots_per_node = 0", "slots_per_node of [cluster] is 0"),
    "min above cluster": ("min_workers = 8", "min_workers = 33", "more than the 32 slots of the cluster"),
    "min 0": ("min_workers = 8", "min_workers = 0", "min_workers of task 'big' is 0; make it at least 1."),
    "max below min": ("min_workers = 8", "min_workers = 8\nmax_workers = 4", "below its min_workers 8"),
    "task twice": ('name = "small"', 'name = "big"', "task 'big' is named twice"),
    "no name": ('name = "small"\n', "", "a [[task]] has no name"),
    "unknown model": ("gpt3-7b", "gpt3-8b", "model 'gpt3-8b' is not known; did you mean"),
    "model and table": ("weight = 1.0", 'weight = 1.0\nmodel = "gpt3-7b"', "either model or throughput"),
    "neither": ('model = "gpt3-7b"\n', "", "either model or throughput"),
    "unknown key": ("weight = 2.0", "wieght = 2.0", "wieght is not a key of task 1; did you mean 'weight'?"),
    "unknown table": ("[cluster]", "[klaster]", "klaster is not a key of the file"),
    "too many workers": ("workers = 16", "workers = 40", "more than are left of the 32 slots"),
    "workers below 0": ("workers = 16", "workers = -1", "workers of task 'big' is -1"),
    "shape and workers": ("workers = 4", "workers = 4\nshape = [3, 1]", "make them agree"),
    "unknown gpu": ("nodes = 4", 'nodes = 4\ngpu = "B9"', "gpu 'B9' is not known"),
    "unknown stack": ("nodes = 4", 'nodes = 4\nstack = "x"', "stack 'x' is not known"),
    "running 0": ("nodes = 4", "nodes = 4\nrunning_s = 0", "running_s of [cluster] is 0"),
    "cost below 0": ("nodes = 4", "nodes = 4\ntransition_s = -1", "transition_s of [cluster] is -1"),
    "places twice": ("workers = 4", 'places = ["node-0:0", "node-0:0"]', "one slot, one worker"),
    "places and workers": ("workers = 4", 'workers = 4\nplaces = ["node-0:0"]', "make them agree"),
    "state below 0": ("workers = 4", "workers = 4\nstate_gb = -1", "state_gb of task 'small' is -1"),
    "node not a list": ("nodes = 4\n", "", "write [[node]]", "", "node = 3\n"),
    "not toml": ("nodes = 4", "nodes = ", "is not TOML"),
    "no task": ("[[task]]", "[[node]]", "say which nodes"),
}


def refused(capsys: pytest.CaptureFixture[str], sentence: str, *arguments: object) -> None:
    assert run(["plan", *map(str, arguments)]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith("everstep: ")
    assert len(caught.err.splitlines()) == 1
    assert sentence in caught.err


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, sentence, *around = MISTAKES[name]
    assert before in SIMPLE
    below, above = (*around, "", "")[:2]
    file.write_text(above + SIMPLE.replace(before, after) + below)
    refused(capsys, sentence, file, "--json")


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ("lose node-9", "there is no node 'node-9'"),
        ("lose node-1:8", "node-1 has slots 0 to 7"),
        ("lose node-1:3 for 1h", "a repair time is for whole nodes"),
        ("lose", "is not valid"),
        ("lose node-1 for ever", "write seconds, or a time"),
        ("join node-1", "is there already"),
        ("finish nobody", "no such task 'nobody'"),
        ("submit big", "no such task 'big'"),
        ("paint node-1 red", "is not valid"),
    ],
)
def test_an_event_that_cannot_be(
    event: str, sentence: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, sentence, file, "--what-if", event)


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "cluster file 'away.toml' cannot be read", "away.toml")
