"""pytest with a second look: what fails is run again alone, and what fails then too has failed.

    python -m tools.second_look -n 4 --dist worksteal        what `make unit` runs
    python -m tools.second_look tests --slow -m slow         what `make cluster` runs

A test of real processes can fail because the machine was busy with the test beside it. Alone on a quiet
machine it has no such excuse. One that passes then is printed as flaky and counted, so that it is seen and
mended; it does not stop a change that has nothing to do with it. More than MOST failures are not looked at
again: so many are no accident. Anything but failed tests (an error in a test module, no tests at all, an
interrupt) ends with pytest's own exit code.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 12
TRIES = 2  # alone: with the first run, a test has three


def pytest(cache: Path, arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    return subprocess.run(command, check=False).returncode


def failed_in(cache: Path) -> list[str]:
    """The tests of the last run that failed, by their ids; pytest keeps them for `--last-failed`."""
    found = cache / "v/cache/lastfailed"
    return sorted(json.loads(found.read_text())) if found.is_file() else []


def passes_alone(test: str, options: list[str]) -> bool:
    for attempt in range(TRIES):
        print(f"\nsecond look, {attempt + 1} of {TRIES}: {test}", flush=True)
        with tempfile.TemporaryDirectory() as cache:
            if pytest(Path(cache), [test, *options]) == 0:
                return True
    return False


def main(arguments: list[str]) -> int:
    if arguments in (["--help"], ["-h"]):
        print(f"usage: python -m tools.second_look [pytest's own options]\n\n{__doc__}")
        return 0
    with tempfile.TemporaryDirectory() as cache:
        code = pytest(Path(cache), arguments)
        failed = failed_in(Path(cache))
    if code != 1 or not failed:
        return code
    if len(failed) > MOST:
        print(f"second look: {len(failed)} tests failed, more than {MOST}: no accident")
        return code
    options = ["--slow"] if "--slow" in arguments else []
    results = {test: passes_alone(test, options) for test in failed}
    print()
    for test, passed in results.items():
        print(f"{'flaky: passes alone' if passed else 'failed each time'}: {test}")
    print(f"second look: {sum(results.values())} flaky, {len(failed) - sum(results.values())} failed")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
