"""A second look at tests that failed: what passes alone is flaky, what does not has failed."""

import json
from pathlib import Path

import pytest

from tools import second_look

TESTS = """
from pathlib import Path

def test_once():
    seen = Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first

def test_never():
    assert False

def test_passes():
    pass
"""


def test_what_passes_alone_is_flaky_and_what_fails_again_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(second_look, "TRIES", 1)
    assert second_look.main(["test_some.py", f"--rootdir={tmp_path}"]) == 1
    told = capfd.readouterr().out
    assert "flaky: passes alone: test_some.py::test_once" in told
    assert "failed each time: test_some.py::test_never" in told
    assert "second look: 1 flaky, 1 failed" in told


@pytest.mark.parametrize(
    ("codes", "failed", "ends", "runs"),
    [
        ([0], [], 0, 1),
        ([1, 0], ["a"], 0, 2),
        ([1, 1, 0], ["a"], 0, 3),
        ([1, 1, 1], ["a"], 1, 3),
        ([1], [str(number) for number in range(second_look.MOST + 1)], 1, 1),  # no accident
        ([2], ["a"], 2, 1),  # an error in a module
    ],
)
def test_how_often_it_looks(
    codes: list[int], failed: list[str], ends: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(cache: Path, arguments: list[str]) -> int:
        (cache / "v/cache").mkdir(parents=True)
        (cache / "v/cache/lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
        asked.append(arguments)
        return codes[len(asked) - 1]

    monkeypatch.setattr(second_look, "pytest", run)
    assert second_look.main(["tests", "--slow", "-n", "2"]) == ends
    assert len(asked) == runs
    assert all(arguments == ["a", "--slow"] for arguments in asked[1:])
