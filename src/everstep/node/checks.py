"""Is this node fit to train? Checks with known answers, bounded in time: `everstep check`.

A check measures, through a `Probe`, and gives findings: passed, warning or failed, with its figures. Failed
means that the node should get no workers: it computes wrong numbers, loses bytes, or lacks what every worker
needs. Figures are compared with a baseline where there is one: the median of other nodes, or of this node on
other days.

A finding that is about one GPU names it (`gpu`: its UUID, or its PCI address): the slots of that GPU get no
workers then, the others do.

To add a check: a function of a `Probe` in `CHECKS`. The user's own are commands.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from everstep.core.faults.severity import Severity, judge
from everstep.core.faults.xids import place_of_xid
from everstep.errors import UserError
from everstep.node.slot_devices import SlotDevice
from everstep.protocol.messages import CheckResult

TOTAL_S = 20.0  # for all checks together
APART_S = 90.0  # with the time in which a process of its own loads torch
QUICK = ("room", "clock", "hardware-log")  # what takes no time, and no torch
SIZE = 256  # of matrices: whole numbers whose products are exact in every order of addition
MEMORY_BYTES = 64 << 20
DISK_BYTES = 16 << 20
TRIES = 3  # of copies and writes; the fastest counts, for what else runs on the machine slows some of them
LEAST_MEMORY, LEAST_SHM, LEAST_DISK = 1 << 30, 64 << 20, 1 << 30
LEAST_FILES = 1024
SLOW = 0.5  # of the baseline's median: slower than this is a warning
KERNEL_LINES = 5000
State = Literal["passed", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    check: str
    state: State
    says: str
    figures: Mapping[str, float] = field(default_factory=dict)  # larger is better
    facts: Mapping[str, str] = field(default_factory=dict)  # to be the same on all nodes
    gpu: str = ""  # it is about this one alone
    seconds: float = 0.0


class Probe:
    """What checks ask of the machine; tests put a defect into one of its answers."""

    def __init__(self, directory: Path, devices: Sequence[str] = ("cpu",)) -> None:
        self.directory, self.devices = directory, tuple(devices)

    def product(self, device: str, kind: str, a: Any, b: Any) -> Any:
        import torch

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
        return (a.to(device, dtype) @ b.to(device, dtype)).float().cpu()

    def copied(self, here: Any, there: Any) -> Any:
        """From one block of a device's memory to another one."""
        there.copy_(here)
        if there.is_cuda:
            import torch

            torch.cuda.synchronize(there.device)
        return there

    def gpu_of(self, device: str) -> str:
        if not device.startswith("cuda"):
            return ""
        import torch

        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def free_on(self, device: str) -> int:
        """Bytes that no process uses."""
        import torch

        return int(torch.cuda.mem_get_info(device)[0])

    def write(self, path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def free_bytes(self, directory: Path) -> int:
        return shutil.disk_usage(directory).free

    def available_memory(self) -> int:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {
            name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)
        }
        return found.get("MemAvailable", 0)

    def open_files(self) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def clock_is_kept(self) -> bool:
        """Does a time service keep the clock? The kernel knows."""
        status = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
        return bool(status != 5 and status >= 0)

    def kernel_lines(self) -> list[str]:
        """The last lines of the kernel's log; none without permission."""
        try:
            handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return []
        lines: list[str] = []
        try:
            while len(lines) < 100_000 and (data := os.read(handle, 8192)):
                lines.append(data.decode(errors="replace").partition(";")[2].strip())
        except OSError:
            pass  # that was the last one
        finally:
            os.close(handle)
        return lines[-KERNEL_LINES:]

    def ecc_errors(self) -> list[tuple[str, str, int]]:
        """Of each GPU its number, its UUID, and uncorrected errors since the driver was loaded. None without
        nvidia-smi.
        """
        asked = "--query-gpu=index,uuid,ecc.errors.uncorrected.volatile.total"
        query = ["nvidia-smi", asked, "--format=csv,noheader"]
        try:
            told = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return []
        rows = [
            row for line in told.splitlines() if len(row := [part.strip() for part in line.split(",")]) == 3
        ]
        return [(index, uuid, int(count)) for index, uuid, count in rows if count.isdigit()]

    def versions(self) -> dict[str, str]:
        import torch

        from everstep import __version__

        return {"everstep": __version__, "python": platform.python_version(), "torch": torch.__version__}


# ------------------------------------------------------------------ the checks


def compute(probe: Probe) -> Iterable[CheckFinding]:
    """Whole numbers: every order of addition gives the same bits, on every device."""
    import torch

    row = torch.arange(SIZE, dtype=torch.int64)
    a = (row[:, None] * 7 + row[None, :] * 3) % 13 - 6
    b = (row[:, None] * 5 + row[None, :] * 11) % 9 - 4
    right = (a @ b).float()
    for device in probe.devices:
        for kind in ("fp32", "bf16"):
            wanted = right if kind == "fp32" else right.bfloat16().float()
            runs, wrong, began, least_s = 0, 0, time.monotonic(), math.inf
            while runs < 3 or (time.monotonic() - began < 0.5 and runs < 1000):
                run_began = time.monotonic()
                found = probe.product(device, kind, a, b)
                least_s = min(least_s, time.monotonic() - run_began)
                wrong += not torch.equal(found, wanted)
                runs += 1
            # The fastest: what else runs on the machine slows some of them, a slow device all.
            name, rate = f"compute {device} {kind}", 1 / max(least_s, 1e-9)
            says = f"{wrong} of {runs} products are wrong" if wrong else f"{runs} products are right"
            state: State = "failed" if wrong else "passed"
            figures = {"products per second": rate}
            gpu = probe.gpu_of(device)
            yield CheckFinding(check=name, state=state, says=says, figures=figures, gpu=gpu)


def memory(probe: Probe) -> Iterable[CheckFinding]:
    """Patterns and places, so that a stuck bit and a wrong line both show."""
    import torch

    words = torch.arange(MEMORY_BYTES // 8, dtype=torch.int64)
    for device in probe.devices:
        least_s, wrong = math.inf, 0
        here, there = words.to(device, copy=True), torch.zeros_like(words, device=device)
        for block in (words, ~words, torch.full_like(words, 0x5555555555555555)):
            here.copy_(block)
            for _ in range(TRIES):
                began = time.monotonic()
                copied = probe.copied(here, there)
                least_s = min(least_s, time.monotonic() - began)
            wrong += int((copied.cpu() != block).sum())
        rate = MEMORY_BYTES / max(least_s, 1e-9) / 1e9
        says = f"{wrong} words were changed" if wrong else f"{rate:.2f} GB/s, written and read back"
        state: State = "failed" if wrong else "passed"
        figures = {"GB per second": rate}
        if gpu := probe.gpu_of(device):
            figures["GB free"] = probe.free_on(device) / 1e9
        yield CheckFinding(check=f"memory {device}", state=state, says=says, figures=figures, gpu=gpu)


def disk(probe: Probe) -> Iterable[CheckFinding]:
    data = hashlib.shake_128(b"everstep").digest(1 << 20) * (DISK_BYTES >> 20)
    path = Path(tempfile.mkdtemp(prefix="everstep-check-", dir=probe.directory)) / "block"
    try:
        least_s = math.inf
        for _ in range(TRIES):
            began = time.monotonic()
            probe.write(path, data)
            least_s = min(least_s, time.monotonic() - began)
        rate = DISK_BYTES / max(least_s, 1e-9) / 1e6
        same, free = probe.read(path) == data, probe.free_bytes(probe.directory)
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)
    figures = {"MB per second": rate}
    if not same:
        yield CheckFinding(check="disk", state="failed", says="other bytes were read than written")
    elif free < LEAST_DISK:
        says = f"{free >> 20} MiB are free in {probe.directory}"
        yield CheckFinding(check="disk", state="warning", says=says, figures=figures)
    else:
        says = f"{rate:.0f} MB/s written and flushed, {free >> 30} GiB free"
        yield CheckFinding(check="disk", state="passed", says=says, figures=figures)


def room(probe: Probe) -> Iterable[CheckFinding]:
    available, files = probe.available_memory(), probe.open_files()
    yield _least("free memory", available >> 20, LEAST_MEMORY >> 20, "MiB available")
    shared = Path("/dev/shm")
    there = probe.free_bytes(shared) if shared.is_dir() else 0
    yield _least("shared memory", there >> 20, LEAST_SHM >> 20, "MiB free in /dev/shm")
    limited = files != resource.RLIM_INFINITY
    yield _least("open files", files if limited else 1 << 20, LEAST_FILES, "open files allowed (ulimit -n)")


def _least(check: str, found: int, least: int, what: str) -> CheckFinding:
    says = f"{found} {what}" if found >= least else f"{found} {what}, at least {least} are needed"
    return CheckFinding(check=check, state="passed" if found >= least else "failed", says=says)


def clock(probe: Probe) -> Iterable[CheckFinding]:
    kept = probe.clock_is_kept()
    says = "kept by a time service" if kept else "no time service keeps it: times of incidents may be off"
    yield CheckFinding(check="clock", state="passed" if kept else "warning", says=says)


def hardware_log(probe: Probe) -> Iterable[CheckFinding]:
    """What the kernel and the GPUs' counters have seen since they were started."""
    worst: dict[str, str] = {}  # by GPU; of the whole machine: ""
    for line in probe.kernel_lines():
        if judge("kernel", line).severity is Severity.SEV1:
            place = place_of_xid(line)
            worst["" if place is None else place.address] = line
    for gpu, line in worst.items():
        says = f"the kernel says: {line[:200]}"
        yield CheckFinding(check=f"kernel log {gpu}".strip(), state="failed", says=says, gpu=gpu)
    if not worst:
        yield CheckFinding(check="kernel log", state="passed", says="no hardware fault in the kernel's log")
    for number, uuid, count in probe.ecc_errors():
        says = f"GPU {number} has {count} uncorrected ECC errors" if count else f"GPU {number} has none"
        state: State = "failed" if count else "passed"
        yield CheckFinding(check=f"ecc {number}", state=state, says=says, gpu=uuid)


def software(probe: Probe) -> Iterable[CheckFinding]:
    facts = probe.versions()
    says = ", ".join(f"{name} {version}" for name, version in facts.items())
    yield CheckFinding(check="versions", state="passed", says=says, facts=facts)


CHECKS: dict[str, Callable[[Probe], Iterable[CheckFinding]]] = {
    "software": software,
    "room": room,
    "clock": clock,
    "hardware-log": hardware_log,
    "compute": compute,
    "memory": memory,
    "disk": disk,
}

# ------------------------------------------------------------------ all of them


def command(text: str, limit_s: float) -> CheckFinding:
    """A check of the user's own: exit code 0 passes, its last line is shown. It leads a process group of its
    own, which ends with it.
    """
    process = subprocess.Popen(
        text, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        told = process.communicate(timeout=limit_s)[0].decode(errors="replace").strip()
        last = told.splitlines()[-1][:200] if told else "it said nothing"
        state: State = "passed" if process.returncode == 0 else "failed"
        says = last if state == "passed" else f"exit code {process.returncode}: {last}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        state, says = "failed", f"no answer within {limit_s:.0f} s"
    return CheckFinding(check=f"command {text}"[:80], state=state, says=says)


def run_checks(
    probe: Probe,
    *,
    only: Sequence[str] = (),
    others: Sequence[Callable[[float], CheckFinding]] = (),
    baseline: Sequence[Sequence[CheckFinding]] = (),
    total_s: float = TOTAL_S,
) -> list[CheckFinding]:
    """`others`: checks of others, each of which is given the seconds that are left; `baseline`: the findings
    of other nodes, or of earlier days.
    """
    found: list[CheckFinding] = []
    ends = time.monotonic() + total_s
    for name in only or CHECKS:
        began = time.monotonic()
        if began > ends:
            found.append(CheckFinding(check=name, state="warning", says=f"not run: {total_s:.0f} s are over"))
            continue
        try:
            made = list(CHECKS[name](probe))
        except Exception as error:
            says = f"{type(error).__name__}: {error}"[:300]
            made = [CheckFinding(check=name, state="failed", says=says)]
        seconds = (time.monotonic() - began) / max(1, len(made))
        found += [_compared(one, baseline, seconds) for one in made]
    for other in others:
        began = time.monotonic()
        one = other(max(1.0, ends - began))
        found.append(replace(one, seconds=time.monotonic() - began))
    return found


def checked_apart(words: Sequence[str], *, only: Sequence[str] = ()) -> tuple[CheckResult, ...]:
    """In a process of its own: checks use torch and the GPUs, an agent must not. `words`: options of
    `everstep check` for the checks of others.
    """
    program = [sys.executable, "-c", "from everstep.cli.main import main; main()", "check", "--json", *words]
    program += [word for name in only for word in ("--only", name)]
    try:
        done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=APART_S)
        rows = json.loads(done.stdout)["checks"]
    except subprocess.TimeoutExpired:
        says = f"no answer within {APART_S:.0f} s"
        return (CheckResult(check="command everstep check", state="failed", says=says),)
    except (ValueError, KeyError):
        says = done.stderr.strip()[-300:] or f"exit code {done.returncode}"
        raise UserError(f"the checks of this node did not run: {says}") from None
    return tuple(results(rows))


def results(rows: Iterable[Mapping[str, Any]]) -> Iterable[CheckResult]:
    """As a coordinator is told them."""
    for row in rows:
        figures = {str(name): float(value) for name, value in row["figures"].items()}
        yield CheckResult(
            check=row["check"],
            state=row["state"],
            says=row["says"][:300],
            figures=figures,
            facts=row["facts"],
            gpu=row["gpu"],
        )


def at_slots(
    found: Iterable[CheckResult], devices: Sequence[SlotDevice], slots: int
) -> tuple[CheckResult, ...]:
    """Which slots is each about? One that is about a GPU without a slot is about the node."""

    def place(gpu: str) -> tuple[int, ...]:
        if not gpu or not devices:
            return ()
        at = [devices[slot % len(devices)] for slot in range(slots)]
        return tuple(slot for slot, one in enumerate(at) if gpu in (one.gpu, one.bus.upper()))

    return tuple(replace(one, slots=place(one.gpu)) for one in found)


def _compared(one: CheckFinding, baseline: Sequence[Sequence[CheckFinding]], seconds: float) -> CheckFinding:
    """With the same check elsewhere: slower than half of the median, or other facts, is a warning."""
    others = [other for findings in baseline for other in findings if other.check == one.check]
    worse = []
    for name, figure in one.figures.items():
        known = [other.figures[name] for other in others if name in other.figures]
        if known and figure < SLOW * (usual := statistics.median(known)):
            worse.append(f"{figure:.4g} {name}, the median of {len(known)} others is {usual:.4g}")
    for name, fact in one.facts.items():
        usual_facts = [other.facts[name] for other in others if name in other.facts]
        if usual_facts and fact != (usual_fact := statistics.mode(usual_facts)):
            worse.append(f"{name} is {fact}, {usual_fact} elsewhere")
    state: State = "warning" if worse and one.state == "passed" else one.state
    says = "; ".join(worse) if worse and one.state == "passed" else one.says
    return replace(one, state=state, says=says, seconds=seconds)
