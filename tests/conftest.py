"""Options of the test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--storms", type=int, default=12, help="random storms of deaths per case")
    parser.addoption("--rewrite", action="store_true", help="write golden files anew")


@pytest.fixture
def storms(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--storms"))
