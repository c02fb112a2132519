"""A small part of `tests/attacks/fuzz.py`: what is broken is refused, and nothing else happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.attacks import fuzz_targets as targets
from tests.attacks.fuzzing import FuzzReport
from tests.support.served import served


@pytest.mark.parametrize("target", targets.PURE, ids=lambda target: str(target.__name__))
def test_broken_messages_are_refused(target: Callable[[int, int], FuzzReport]) -> None:
    report = target(2, 150)
    assert report.failures == []
    assert 0 < report.refused < report.inputs or target is targets.rings  # of those nothing is refused


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.mark.parametrize("target", [targets.api, targets.agent_line], ids=lambda t: str(t.__name__))
def test_a_coordinator_answers_after_whatever_it_was_sent(
    address: str, target: Callable[[int, int, str], FuzzReport]
) -> None:
    report = target(2, 150, address)
    assert report.failures == []
    assert targets.still_there(address)
