"""Options of the test suite, and who may run beside whom."""

import fcntl
import gc
import os
import subprocess
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from everstep import log
from everstep.node.fork_server import ForkServer

# Read when torch is loaded, and some CPU kernels heed nothing else. Tests run beside others, and some fork: a
# child has none of its parent's threads, and a kernel that has once computed with them waits for ever.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes depends on what else the machine does: it is no claim of ours.
# The same examples in every run: a change is not stopped by luck. `--fresh` (`make fresh`) draws new ones,
# and four times as many.
settings.register_profile("everstep", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("fresh", deadline=None, print_blob=True, max_examples=200)
settings.load_profile("everstep")
START_PROCESSES = {"cli", "docs", "harness", "launch", "node", "server"}  # folders of tests
BEGAN, OVER_BUDGET = time.monotonic(), "because the time for all of them was over"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--storms", type=int, default=6, help="random storms of deaths per case")
    parser.addoption("--slow", action="store_true", help="also the tests that take a minute each")
    parser.addoption("--fresh", action="store_true", help="new random examples instead of those of every run")
    parser.addoption("--budget", type=float, help="seconds after which no test is begun; the rest is listed")
    parser.addoption("--rewrite", action="store_true", help="write golden files again")


def pytest_configure(config: pytest.Config) -> None:
    if (
        getattr(config.option, "numprocesses", None) is None
    ):  # the process that starts others imports no tests
        gc.disable()  # until all of them are imported
    if config.getoption("--fresh"):
        settings.load_profile("fresh")
    config.addinivalue_line("markers", "slow: takes about a minute; run by `make cluster`")
    config.addinivalue_line("markers", "alone: measures time or load; no other test runs beside it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow; run by make cluster"))
    if (count := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        items[:] = _long_ones_first(items, count)


def _long_ones_first(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Each process gets a stretch of the tests, and takes some of another's when it is through. So a stretch
    begins with tests of real processes: at the end there is something small to take.
    """
    files = dict.fromkeys(item.path for item in items)
    long = [path for path in files if path.parent.name in START_PROCESSES]
    of_file = {path: number % count for number, path in enumerate(long)}
    short = [item for item in items if item.path not in of_file]
    found: list[pytest.Item] = []
    for number in range(count):
        found += [item for item in items if of_file.get(item.path) == number]
        found += short[len(short) * number // count : len(short) * (number + 1) // count]
    return found


def pytest_collection_finish() -> None:
    """What imports have left lives to the end. Looking through it again takes half a second per collection,
    and some tests and ops collect often.
    """
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget_s = item.config.getoption("--budget")
    if budget_s is not None and time.monotonic() - BEGAN > budget_s:
        pytest.skip(OVER_BUDGET)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    left = [report.nodeid for report in skipped if OVER_BUDGET in str(report.longrepr)]
    if left:
        terminalreporter.write_line(f"{len(left)} tests were not run, {OVER_BUDGET}:")
        for test in left:
            terminalreporter.write_line(f"    {test}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Where several processes run tests, one marked `alone` waits until no other is under way, and the
    next ones wait for it. Two locks: who waits for the second keeps the first, so it is not overtaken.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    with Path(__file__).open() as turn, Path(__file__).with_name("__init__.py").open() as room:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # not by closing: a child may have it too


@pytest.fixture(autouse=True)
def plain_lines() -> Iterator[None]:
    """A test that runs an agent's command in its own process would leave its kind of lines behind."""
    yield
    log.start()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """One for all tests of this process that start workers: loading torch takes seconds."""
    running = ForkServer(threads=1).start()
    yield running
    running.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, to be filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={16 << 20}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def storms(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--storms"))
