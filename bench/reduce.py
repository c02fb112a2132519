"""How the reduce grows with the number of replicas: what a worker pays for 2 to 64 of them.

    python bench/reduce.py                          2, 4, 8, 16, 32 and 64 replicas, by tcp
    python bench/reduce.py --replicas 2,8 --json
    python bench/reduce.py --replicas 16,64 --per-node 8    replicas by eights, each on an address of its own

One stage, one microbatch per replica, a model that hardly computes: an embedding of a million numbers, of
which all are reduced in every step. Beside it gloo's all-reduce of as many fp32 numbers by as many processes.
All processes share the cores of this machine: compare CPU per worker, not seconds.

connections     sockets of a worker
threads         of a worker
private         memory that a worker shares with no other process, in MB
CPU             of a worker, in ms per step: ops, reduce and update; of gloo: per all-reduce
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from harness.slow_workers import texts  # noqa: E402, F401  (workers build their data from this module)

WIDTH = 64
SETTLED, LAST = 4, 12  # steps: measured are those between
LIMIT_S = 120  # of a collective


def layers(numbers: int) -> dict[str, Any]:
    """As workers build it."""
    from torch import nn

    return {"embed": lambda: nn.Embedding(numbers // WIDTH, WIDTH), "head": lambda: nn.Linear(WIDTH, 16)}


class Looks:
    """At a run's processes, when it is in its stride and when it ends."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, float]] = {}
        self.began = self.ended = 0.0
        self.steps = 0  # between both looks

    def __call__(self, kind: str, what: Any) -> None:
        if kind != "tick" or what.last_step < SETTLED:
            return
        pids = [process.child.pid for process in what.processes.values()]
        if not self.found:
            self.began, self.steps = time.monotonic(), -what.last_step
            self.found = {pid: facts_of(pid) for pid in pids}
        elif what.last_step >= LAST and not self.ended:
            self.ended = time.monotonic()
            self.steps += what.last_step
            for pid in pids:
                before = self.found[pid]["cpu_ms"]
                self.found[pid] = facts_of(pid)
                self.found[pid]["cpu_ms"] = (self.found[pid]["cpu_ms"] - before) / self.steps


def facts_of(pid: int) -> dict[str, float]:
    proc = Path("/proc") / str(pid)
    ticks = (proc / "stat").read_text().rsplit(")", 1)[1].split()
    links = [os.readlink(entry) for entry in (proc / "fd").iterdir() if entry.is_symlink()]
    rollup = dict(line.split(":", 1) for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
    private = sum(float(rollup[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    return {
        "connections": sum(link.startswith("socket:") for link in links),
        "threads": len(list((proc / "task").iterdir())),
        "private_mb": private / 1e3,
        "cpu_ms": 1e3 * (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK"),
    }


def ours(replicas: int, numbers: int, transport: str, fork_server: Any) -> dict[str, Any]:
    from everstep.job.job import Job
    from everstep.launch.local.run import LocalTask

    job = Job.from_dict(
        {
            "base": str(Path(__file__).parent),
            "model": {"build": "reduce:layers", "options": {"numbers": numbers}},
            "data": {"build": "reduce:texts", "options": {"lengthy": False}},
            "optimizer": {"clip": None, "lr": 1e-3},
            "verify": {"votes": "off"},
            "replicas": replicas,
            "stages": 1,
            "microbatches": 1,
            "steps": LAST + 12,  # a look at 64 processes takes a while
            "threads": 1,
            "transport": transport,
        }
    )
    looks = Looks()
    outcome = LocalTask(job, fork_server=fork_server, watch=looks).run()
    if outcome.failure is not None or outcome.incidents:
        raise SystemExit(f"{replicas} replicas: {outcome.failure or outcome.incidents}")
    rows = {
        name: statistics.median(facts[name] for facts in looks.found.values())
        for name in ("connections", "threads", "private_mb", "cpu_ms")
    }
    step_ms = 1e3 * (looks.ended - looks.began) / looks.steps
    return {"system": "everstep", "replicas": replicas, "step_ms": step_ms, **rows}


def gloo(replicas: int, numbers: int) -> dict[str, Any]:
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_reduces, (replicas, numbers, folder), nprocs=replicas)
        rows = [json.loads(file.read_text()) for file in Path(folder).glob("rank-*.json")]
    return {
        "system": "gloo",
        "replicas": replicas,
        **{name: statistics.median(row[name] for row in rows) for name in rows[0]},
    }


def _reduces(rank: int, replicas: int, numbers: int, folder: str) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=replicas,
        timeout=timedelta(seconds=LIMIT_S),
    )
    flat = torch.ones(numbers)
    for number in range(LAST):
        if number == SETTLED:
            distributed.barrier()
            began, before = time.monotonic(), facts_of(os.getpid())["cpu_ms"]
        distributed.all_reduce(flat)
    ended, facts = time.monotonic(), facts_of(os.getpid())
    facts["cpu_ms"] = (facts["cpu_ms"] - before) / (LAST - SETTLED)
    facts["step_ms"] = 1e3 * (ended - began) / (LAST - SETTLED)
    distributed.barrier()
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(facts))
    distributed.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", default="2,4,8,16,32,64", help="several with commas")
    parser.add_argument("--numbers", type=int, default=1 << 20, help="that are reduced")
    parser.add_argument("--transport", default="tcp", help="auto, tcp, shm")
    parser.add_argument("--per-node", type=int, default=0, help="so many have one address; 0: all")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    try:
        numbers_of_replicas = [int(word) for word in given.replicas.split(",")]
    except ValueError:
        parser.error(f"--replicas has numbers with commas between them, such as 2,8; not {given.replicas!r}")
    from everstep.node.fork_server import ForkServer
    from harness.addresses import spread_over_addresses

    fork_server = ForkServer().start()
    found = []
    if not given.json:
        print(
            f"{'':10}{'replicas':>9}{'connections':>13}{'threads':>9}{'private':>9}{'CPU':>9}{'step ms':>9}"
        )
    try:
        for replicas in numbers_of_replicas:
            with spread_over_addresses(given.per_node):
                own = ours(replicas, given.numbers, given.transport, fork_server)
            for row in (own, gloo(replicas, given.numbers)):
                found.append(row)
                if not given.json:
                    print(
                        f"{row['system']:10}{row['replicas']:9}{row['connections']:13.0f}{row['threads']:9.0f}"
                        f"{row['private_mb']:9.1f}{row['cpu_ms']:9.1f}{row['step_ms']:9.1f}",
                        flush=True,
                    )
    finally:
        fork_server.close()
    if given.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
