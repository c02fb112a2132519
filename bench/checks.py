"""Checks before joining: are defects found, and healthy machines let in?

    python -m bench.checks                                every defect once, then 20 healthy joins
    python -m bench.checks --joins 200 --side-by-side 8   on 16 cores
    python -m bench.checks slow-network late --joins 0

Machines on one host (`harness/machines.py`; needs root) with two networks, one for the control plane and one
for tensors. A coordinator and four healthy agents run; then agents join with `--check`, each with one defect
planted in its machine, or with none. A defect is found if the machine does not join, is isolated, or is
marked, each with an incident or an error that names it; `time` is from the start of the agent.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from bench.machines import TOKEN, Scene, _skewed
from harness.cluster import EVERSTEP
from harness.machines import Machines, absent, inside

PEERS = ("n1", "n2", "n3", "n4")
RATE = 6e6  # bytes/s of every cable of the data network: less than a busy host carries
JOINED, REFUSED, ISOLATED, MARKED = "joined", "refused", "isolated", "marked"
# Put into a machine's Python: an answer of its probe is another one.
PATCH = """
import sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name != "everstep.node.checks":
            return None
        sys.meta_path.remove(self)
        import importlib.util
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            Probe = module.Probe
{patch}
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""


@dataclass
class Defect:
    """How it is planted in a machine, and what is to come of it."""

    wanted: str
    says: str  # in the error or in the incident
    patch: str = ""  # of the machine's Python
    shell: str = ""  # on the machine, before the agent starts
    prefix: str = ""  # of the agent's command
    options: tuple[str, ...] = ()
    cable: dict[str, Any] = field(default_factory=dict)
    skewed: bool = False


def _patched(method: str, body: str) -> str:
    lines = (
        f"real = Probe.{method}",
        f"def {method}(self, *given):",
        *(f"    {b}" for b in body.split("\n")),
    )
    return "\n".join(" " * 12 + line for line in (*lines, f"Probe.{method} = {method}"))


_ECC = "#!/bin/sh\\ncase $1 in *ecc*) echo 0, GPU-a, 3;; *) exit 9;; esac\\n"
DEFECTS: dict[str, Defect] = {
    "wrong-product": Defect(
        REFUSED,
        "products are wrong",
        _patched("product", "made = real(self, *given)\nmade.view(-1)[7] += given[1] == 'bf16'\nreturn made"),
    ),
    "memory": Defect(
        REFUSED,
        "words were changed",
        _patched("copied", "made = real(self, *given)\nmade[99] ^= 64\nreturn made"),
    ),
    "disk": Defect(REFUSED, "other bytes", _patched("read", "return real(self, *given)[:-1] + b'?'")),
    "slow-processor": Defect(
        ISOLATED,
        "products per second",
        _patched("product", "import time; time.sleep(0.25)\nreturn real(self, *given)"),
    ),
    "slow-memory": Defect(
        ISOLATED,
        "GB per second",
        _patched("copied", "import time; time.sleep(0.5)\nreturn real(self, *given)"),
    ),
    "ecc": Defect(
        REFUSED,
        "3 uncorrected ECC errors",
        shell=f"printf '{_ECC}' > /tmp/nvidia-smi && chmod +x /tmp/nvidia-smi",
        prefix='PATH=/tmp:"$PATH"',
    ),
    "kernel-log": Defect(
        REFUSED,
        "Xid",
        shell="echo '3,1,1,-;NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.' > /tmp/kmsg && "
        "mount --bind /tmp/kmsg /dev/kmsg",
    ),
    "shared-memory": Defect(REFUSED, "/dev/shm", shell="mount -o remount,size=8m /dev/shm"),
    "open-files": Defect(REFUSED, "open files", prefix="ulimit -n 512;"),
    "own-command": Defect(REFUSED, "link is down", options=("--check-command", "echo link is down; exit 3")),
    "dead-network": Defect(ISOLATED, "network to", cable={"is_cut": True}),
    "slow-network": Defect(ISOLATED, "MB/s; usual", cable={"bytes_per_s": 0.1 * RATE}),
    "late": Defect(ISOLATED, "network to", cable={"delay_s": 0.1, "bytes_per_s": RATE}),
    "lost-packets": Defect(ISOLATED, "network to", cable={"loss": 0.08, "bytes_per_s": RATE}),
    "clock": Defect(MARKED, "30 s ahead of", skewed=True),
}
UNDO = "umount /dev/kmsg 2>/dev/null; mount -o remount,size=512m /dev/shm; rm -f /tmp/nvidia-smi; true"


class Bed:
    """The machines, their coordinator and the healthy peers."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines, self.folder = machines, folder
        self.scene = Scene(machines, ["c1"])

    def start(self) -> None:
        self.scene.start_coordinator("c1")
        self.scene.until(lambda: self.scene.client, "the coordinator answers")
        assert self.machines.data is not None
        for name in self.machines.all:
            self.heal(name)
        for name in PEERS:
            self.agent(name, name, Defect(JOINED, ""))
        up = lambda: all(self.state(name) == "up" for name in PEERS)  # noqa: E731
        self.scene.until(up, "the peers are up", within_s=120)

    def heal(self, machine: str) -> None:
        assert self.machines.data is not None
        self.machines.data.heal([machine])
        for cable in (self.machines.data.out[machine], self.machines.data.into[machine]):
            cable.bytes_per_s = RATE

    def agent(self, machine: str, node: str, defect: Defect) -> subprocess.Popen[bytes]:
        here = self.machines[machine]
        more = {"EVERSTEP_TOKEN": TOKEN}
        if defect.patch:
            place = here.folder / "patched"
            place.mkdir(exist_ok=True)
            (place / "sitecustomize.py").write_text(PATCH.format(patch=defect.patch))
            more["PYTHONPATH"] = f"{place}:{_python_path()}"
        if defect.skewed:
            more["LD_PRELOAD"] = str(_skewed(here.folder / "skew"))
        if defect.shell:
            here.run("sh", "-c", defect.shell)
        assert self.machines.data is not None
        for cable in (self.machines.data.out[machine], self.machines.data.into[machine]):
            for name, value in defect.cable.items():
                setattr(cable, name, value)
        command = [*EVERSTEP, "agent", "--node", node, "--slots", "1", "--host", here.data_address]
        command += ["--coordinator", "http://c1:7077", "--check", "--grace", "0", *defect.options]
        script = f'echo $$ > /tmp/agent.pid; {defect.prefix} exec "$@"'
        return here.start(["sh", "-c", script, "sh", *command], f"{node}.log", more)

    def state(self, node: str) -> str:
        rows = self.scene.client.get("/v1/status")["nodes"]
        return next((row["state"] for row in rows if row["node"] == node), "")

    def join(self, machine: str, node: str, defect: Defect) -> dict[str, Any]:
        """One agent, from its start until the cluster has decided."""
        began = time.monotonic()
        process = self.agent(machine, node, defect)

        def decided() -> str:
            state = self.state(node)
            return state if state not in ("", "checking") else "" if process.poll() is None else REFUSED

        state = self.scene.until(decided, f"{node} is decided", within_s=180)
        took = time.monotonic() - began
        told = [i for i in self.scene.client.get("/v1/incidents") if i.get("node") == node]
        texts = [(i["verdict"] or {}).get("because", "") for i in told]
        if state == REFUSED:
            texts = [(self.machines[machine].folder / f"{node}.log").read_text()[-400:]]
        found = MARKED if state == "up" and told else JOINED if state == "up" else state
        if process.poll() is None:
            self.machines[machine].run("sh", "-c", "kill $(cat /tmp/agent.pid)")
            process.wait(60)
        self.machines[machine].run("sh", "-c", UNDO)
        self.heal(machine)
        return {"outcome": found, "seconds": round(took, 2), "says": texts}


def _python_path() -> str:
    return str(Path(__file__).resolve().parents[1] / "src")


def defects(bed: Bed, names: list[str], machine: str, told: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        defect = DEFECTS[name]
        row = bed.join(machine, f"bad-{name}", defect)
        row["found"] = row["outcome"] == defect.wanted and any(defect.says in text for text in row["says"])
        rows.append({"defect": name, "wanted": defect.wanted, **row})
        told(
            f"{name:16} {row['outcome']:9} {row['seconds']:6.1f} s  {'' if row['found'] else 'NOT FOUND '}"
            f"{(row['says'] or [''])[0].strip().splitlines()[-1][:150] if row['says'] else ''}"
        )
    return rows


def healthy(bed: Bed, count: int, machines: list[str], told: Callable[[str], None]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(len(machines)) as pool:
        for first in range(0, count, len(machines)):
            some = list(enumerate(machines, first))[: count - first]
            joins = [(machine, f"good-{number}") for number, machine in some]
            rows += pool.map(lambda one: bed.join(*one, Defect(JOINED, "")), joins)
            told(f"{len(rows)} healthy joins, {sum(r['outcome'] != JOINED for r in rows)} not simply let in")
            for row in rows[-len(joins) :]:
                if row["outcome"] != JOINED:
                    told(f"  {row['outcome']}: {row['says']}")
    return rows


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("defects", nargs="*", metavar="DEFECT", help=f"of {', '.join(DEFECTS)}; none: all")
    parser.add_argument("--joins", type=int, default=20, help="healthy ones")
    parser.add_argument("--side-by-side", type=int, default=2, help="healthy joins at a time")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--skip", action="store_true", help="end with 0 where there can be no machines")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args()
    if unknown := set(given.defects) - set(DEFECTS):
        parser.error(f"{sorted(unknown)[0]!r} is not a defect; choose from {', '.join(DEFECTS)}.")
    if why := absent():
        print(f"no machines: {why}.", file=sys.stderr)
        return 0 if given.skip else 2
    inside(["-m", "bench.checks", *sys.argv[1:]])
    told = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    folder = Path(tempfile.mkdtemp(prefix="everstep-checks-", dir="/var/tmp"))
    joiners = [f"v{number}" for number in range(max(1, given.side_by_side))]
    with Machines(folder, ["c1", *PEERS, *joiners], data=True) as machines:
        bed = Bed(machines, folder)
        bed.start()
        wrong = defects(bed, given.defects or list(DEFECTS), joiners[0], told)
        right = healthy(bed, given.joins, joiners, told) if given.joins else []
        blamed = [name for name in PEERS if bed.state(name) != "up"]
    if not given.keep:
        shutil.rmtree(folder, ignore_errors=True)
    refused = [row for row in right if row["outcome"] in (REFUSED, ISOLATED, "lemon")]
    found = {
        "defects": wrong,
        "found": sum(row["found"] for row in wrong),
        "joins": len(right),
        "refused": refused,
        "marked": [row for row in right if row["outcome"] == MARKED],
        "peers_blamed": blamed,
        "join_s": statistics.median(row["seconds"] for row in right) if right else None,
        "longest_s": max((row["seconds"] for row in [*wrong, *right]), default=None),
    }
    summary = (
        f"{found['found']} of {len(wrong)} defects found; {len(right)} healthy joins, {len(refused)} refused"
        f", {len(found['marked'])} marked, median {found['join_s']} s; peers blamed: {blamed or 'none'}"
    )
    print(json.dumps(found, indent=1) if given.json else summary)
    return 0 if found["found"] == len(wrong) and not refused and not blamed else 1


if __name__ == "__main__":
    raise SystemExit(main())
