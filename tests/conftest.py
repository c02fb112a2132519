"""Options of the test suite."""

import pytest
from hypothesis import settings

# How long an example takes depends on what else the machine does: it is no claim of ours.
settings.register_profile("everstep", deadline=None)
settings.load_profile("everstep")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--storms", type=int, default=12, help="random storms of deaths per case")
    parser.addoption("--slow", action="store_true", help="also the tests that take a minute each")
    parser.addoption("--rewrite", action="store_true", help="write golden files anew")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes about a minute; run by `make cluster`")
    config.addinivalue_line("markers", "alone: measures time or load; `make test` runs nothing beside it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow; run by make cluster"))


@pytest.fixture
def storms(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--storms"))
