"""`everstep fabric`: documents on stdout, sentences on mistakes."""

import json
from pathlib import Path

import pytest

from everstep.cli.main import run

CLOS = """
[clos]
nodes = 8
port_gbps = 100
nodes_per_leaf = 2
spines = 4
uplink_gbps = 50
[[task]]
name = "gpt"
replicas = 4
stages = 2
gradient_bytes = 1e9
boundary_bytes = 1e7
microbatches = 8
workers = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"]
"""


@pytest.fixture
def fabric(tmp_path: Path) -> Path:
    path = tmp_path / "fabric.toml"
    path.write_text(CLOS)
    return path


def document(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    assert run([str(word) for word in ("fabric", *words, "--json")]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_is_a_document_and_the_next_one_keeps_its_paths(fabric, tmp_path, capsys) -> None:
    out = tmp_path / "plan.json"
    plan = document(capsys, "plan", fabric, "--out", out, "--bound", "--roce", tmp_path / "roce.json")
    assert plan["worst_link_s"] == pytest.approx(plan["bound_s"])
    assert json.loads((tmp_path / "roce.json").read_text())["untested"]
    up = next(f["path"] for f in plan["flows"] if f["phase"] == "reduce").split(" > ")
    fabric.write_text(CLOS + f'[condition]\n"{up[1]}>{up[2]}" = 0.0\n')
    again = document(capsys, "plan", fabric, "--previous", out)
    assert 1 <= len(again["moved"]) <= 2


def test_simulate_shows_all_policies_and_show_draws(fabric, tmp_path, capsys) -> None:
    answer = document(capsys, "simulate", fabric, "--seeds", 2, "--steps", 1, "--fail", "l0>s0=0.5@0.01")
    assert set(answer["policies"]) == {"planned", "ecmp", "random", "round-robin"}
    assert run(["fabric", "show", str(fabric), "--svg", str(tmp_path / "x.svg")]) == 0
    assert "planned: worst link" in capsys.readouterr().out
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("plan", "nowhere.toml"), "nowhere.toml cannot be read"),
        (("simulate", "--preset", "moon"), "one of c4p, c4p-2to1"),
        (("simulate", "FABRIC", "--fail", "l0>s0"), "is not LINK@SECONDS"),
        (("simulate", "FABRIC", "--fail", "l0>s9@1"), "'l0>s9' is not a link"),
        (("simulate", "FABRIC", "--fail", "l0>s0=-0.5@1"), "-0.5 of its capacity is left"),
        (("simulate", "FABRIC", "--fail", "l0>s0=nan@1"), "nan of its capacity is left"),
        (("simulate", "FABRIC", "--fail", "l0>s0=1.5@1"), "give a fraction from 0 to 1"),
        (("simulate", "FABRIC", "--fail", "l0>s0@-1"), "the link fails at -1 s"),
        (("simulate", "FABRIC", "--fail", "l0>s0@inf"), "the link fails at inf s"),
        (("probe", "FABRIC", "--from", "n0", "--ports", "9"), "is not a range such as 24000-24063"),
        (("probe", "FABRIC", "--from", "n99"), "node 'n99' is not in the fabric file"),
        (("probe", "FABRIC", "--from", "n0"), "n0 has no address in the fabric file"),
        (("plan", "FABRIC", "--previous", "FABRIC"), "is not JSON"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(fabric, capsys, words, sentence) -> None:
    code = run(["fabric", *(str(fabric) if word == "FABRIC" else word for word in words)])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert sentence in said.err
    assert len(said.err.strip().splitlines()) == 1


PROBE = """
[[leaf]]
name = "l"
[[node]]
name = "a"
ports = [{ leaf = "l", gbps = 1, address = "127.0.0.1" }]
[[node]]
name = "b"
ports = [{ leaf = "l", gbps = 1, address = "127.0.0.2" }]
"""


def test_probing_a_node_whose_switches_are_silent_says_so(tmp_path, capsys) -> None:
    path = tmp_path / "f.toml"
    path.write_text(PROBE.replace("127.0.0.2", "127.0.0.3").replace('"127.0.0.1"', '"192.0.2.1"'))
    assert run(["fabric", "probe", str(path), "--from", "a", "--ports", "24000-24001"]) == 2
    assert "192.0.2.1 is not an address of this machine" in capsys.readouterr().err
