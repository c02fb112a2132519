"""A spot notice as a file: read once, in the forms that providers write, and nonsense changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep.node.leave_notice import LeaveNotice, leaves_in_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 100.0),
        ("2min\n", 100.0),
        ("90s", 70.0),
        ("5", 0.0),
        ('{"action": "terminate", "time": "1970-01-01T00:18:00Z"}', 60.0),
        ('{"action": "stop", "time": "1970-01-01T00:18:00"}', 60.0),
    ],
)
def test_forms(text: str, seconds: float) -> None:
    assert leaves_in_s(text, written=1000.0, now=1020.0) == seconds


@pytest.mark.parametrize(
    "text", ["soon", "-3", "{}", "{", '{"time": 7}', "1e999", "9" * 400, "9" * 400 + "d"]
)
def test_nonsense_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UserError):
        leaves_in_s(text, written=0.0, now=0.0)


def test_a_notice_is_told_once_and_again_only_if_it_changes(tmp_path: Path) -> None:
    said: list[str] = []
    notice = LeaveNotice(tmp_path / "spot", said.append)
    assert notice.look() is None
    (tmp_path / "spot").write_text("120")
    found = notice.look()
    assert found is not None
    assert found.leaves_in_s == pytest.approx(120.0, abs=5.0)
    assert notice.look() is None
    (tmp_path / "spot").write_text("nonsense")
    assert notice.look() is None
    assert len(said) == 1
    (tmp_path / "spot").write_text("30")
    assert notice.look() is not None
