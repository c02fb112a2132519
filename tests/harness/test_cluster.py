"""A bench that is killed leaves no cluster behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import signal, sys
from pathlib import Path
from harness.cluster import Cluster
cluster = Cluster(Path(sys.argv[1]))
cluster.start_coordinator()
cluster.start_agent("a", slots=1)
print(cluster.coordinators["first"].pid, cluster.agents["a"].pid, flush=True)
signal.pause()
"""


def test_a_cluster_ends_with_the_process_that_made_it_however_that_ends(tmp_path: Path) -> None:
    maker = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    started = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(started) == 2
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    deadline = time.monotonic() + 60
    while any(_lives(pid) for pid in started):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in started if _lives(pid)]}"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
