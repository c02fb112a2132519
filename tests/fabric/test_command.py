"""`everstep fabric`: documents on stdout, sentences on mistakes."""

from pathlib import Path

import pytest

from everstep.cli.main import run

FABRIC = """
[[leaf]]
name = "l"
[[node]]
name = "n0"
ports = [{ leaf = "l", gbps = 1 }]
"""


@pytest.fixture
def fabric(tmp_path: Path) -> Path:
    path = tmp_path / "fabric.toml"
    path.write_text(FABRIC)
    return path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("probe", "FABRIC", "--from", "n0", "--ports", "9"), "is not a range such as 24000-24063"),
        (("probe", "FABRIC", "--from", "n99"), "node 'n99' is not in the fabric file"),
        (("probe", "FABRIC", "--from", "n0"), "n0 has no address in the fabric file"),
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
