"""gloo's dumps name groups and not their members: what is not known is not made up."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from everstep_diagnose import analyse, join, read

UNEQUAL = """
import os, sys, threading
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d

folder, rank, asleep = sys.argv[1], 0, int(sys.argv[2])
for rank in range(4):
    if not os.fork():
        break
else:
    rank = 4

def give_up():
    with open(f"{folder}/.{rank}", "wb") as file:
        file.write(c10d._dump_fr_trace(True, False, False))
    os.rename(f"{folder}/.{rank}", f"{folder}/fr_rank_{rank}")
    os._exit(0)

dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=5)
groups = [dist.new_group([0, 1, 2]), dist.new_group([3, 4])]
mine = groups[rank > 2]
for step in range(4):
    dist.all_reduce(torch.ones(8))
    dist.all_reduce(torch.ones(8), group=mine)
threading.Timer(3.0, give_up).start()
if rank == asleep:
    threading.Event().wait()
dist.all_reduce(torch.ones(8), group=mine)
dist.all_reduce(torch.ones(8))
threading.Event().wait()
"""


@pytest.mark.parametrize("asleep", [1, 4])
def test_in_groups_of_unequal_size_no_rank_is_made_up(tmp_path: Path, asleep: int) -> None:
    """Of five ranks, which had all left a dump, "rank 5" was to blame: groups were taken for equal blocks."""
    ran = subprocess.Popen([sys.executable, "-c", UNEQUAL, str(tmp_path), str(asleep)])
    files = [tmp_path / f"fr_rank_{rank}" for rank in range(5)]
    deadline = time.monotonic() + 120
    while ran.poll() is None or not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parts = [read(file.name, file.read_bytes(), modified_ns=file.stat().st_mtime_ns) for file in files]
    assert join(parts).world == (0, 1, 2, 3, 4)
    found = {s.rank: s.confidence for one in analyse(parts).incidents for s in one.suspects}
    assert set(found) <= set(range(5))
    assert max(found, key=lambda rank: found[rank], default=None) == asleep
