"""Every message says what it is, and has its place in the reference."""

import pytest

from tools import protocol

MESSAGES = {message for _, _, kinds in protocol.PARTS for message in kinds}


@pytest.fixture(scope="module")
def page() -> str:
    return protocol.page()


@pytest.mark.parametrize(
    "message", sorted(MESSAGES, key=lambda each: each.__name__), ids=lambda m: m.__name__
)
def test_every_message_says_what_it_is(message: type) -> None:
    assert protocol.describe(message).endswith(".")


def test_every_message_has_its_heading(page: str) -> None:
    lines = page.splitlines()
    assert MESSAGES
    for message in MESSAGES:
        assert lines.count(f"### {message.__name__}") == 1
