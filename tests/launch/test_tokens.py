"""Where a token comes from, and who can read it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep.launch import coordinator_token


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_a_coordinator_without_a_token_makes_one_that_only_its_user_can_read() -> None:
    assert coordinator_token.found() == ""
    made = coordinator_token.made()
    assert len(made) >= 24
    assert stat.S_IMODE(coordinator_token.own_file().stat().st_mode) == 0o600
    assert coordinator_token.found() == coordinator_token.made() == made


def test_what_is_given_comes_before_the_user_s_own(tmp_path: Path) -> None:
    coordinator_token.made()
    held = tmp_path / "token"
    held.write_text("from-a-file\n")
    held.chmod(0o600)
    assert coordinator_token.found("given") == "given"
    assert coordinator_token.found(f"@{held}") == coordinator_token.found(file=held) == "from-a-file"
    with pytest.raises(UserError, match="both given"):
        coordinator_token.found("given", held)


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("t\n", 0o644, "chmod 600"),
        ("", 0o600, "one line"),
        ("a\nb", 0o600, "one line"),
        (None, 0, "cannot be"),
    ],
)
def test_a_file_that_is_no_token_is_refused_in_words(tmp_path: Path, text, mode, why) -> None:
    held = tmp_path / "token"
    if text is not None:
        held.write_text(text)
        held.chmod(mode)
    with pytest.raises(UserError, match=why):
        coordinator_token.read_token(held)


@pytest.mark.parametrize("written", [b"secret\n", b"secret\r\n", b"\xef\xbb\xbfsecret\r\n", b"  secret\n\n"])
def test_a_token_is_read_as_editors_write_it(tmp_path: Path, written: bytes) -> None:
    (file := tmp_path / "token").write_bytes(written)
    file.chmod(0o600)
    assert coordinator_token.read_token(file) == "secret"


def test_a_token_in_a_variable_may_end_with_the_line_break_of_its_file() -> None:
    """A secret of Kubernetes often does: it ended in a traceback of http.client."""
    assert coordinator_token.found("secret\n") == "secret"
    with pytest.raises(UserError, match="the token has control characters; give it as one line"):
        coordinator_token.found("two\nlines")
