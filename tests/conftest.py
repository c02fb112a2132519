"""Options of the test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--storms", type=int, default=60, help="random storms of deaths per case")


@pytest.fixture
def storms(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--storms"))
