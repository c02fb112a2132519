"""A slot of a node is a device: a GPU, or an instance of one that MIG has cut.

The owner of a node's processes asks nvidia-smi for the devices, in a thread and without touching CUDA. If an
operator or a scheduler has set CUDA_VISIBLE_DEVICES, only the devices it names are used. A worker takes its
slot's device before CUDA is loaded, so it sees that one and no other, and runs on the CPUs nearest to it.
Where a node offers more slots than it has devices, slots share them in turn: an operator asked for that by
`--slots`. Where the devices are not known, workers of several slots are not started: all of them would run
on the first GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from everstep.core.faults.xids import XidPlace
from everstep.errors import UserError

ANSWER_S = 30.0  # nvidia-smi hangs if a GPU has fallen off the bus
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia")  # is there while the driver is loaded
_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[0-9a-f-]+)\)", re.M)
_MIG = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)", re.M)


@dataclass(frozen=True, slots=True)
class SlotDevice:
    """What CUDA_VISIBLE_DEVICES calls it, and the PCI address of its GPU, as in lines about an Xid."""

    uuid: str
    bus: str = ""
    gpu: str = ""  # the UUID of its GPU
    number: str = field(default="", compare=False)  # of its GPU, as nvidia-smi and DCGM count

    @property
    def is_instance(self) -> bool:
        """A part of a GPU that MIG has cut."""
        return self.uuid.startswith("MIG-")

    def cpus(self, root: Path = Path("/sys/bus/pci/devices")) -> set[int]:
        """The CPUs nearest to it; empty: unknown."""
        domain, _, rest = self.bus.lower().partition(":")
        try:
            return _cpus((root / f"{domain[-4:]}:{rest}" / "local_cpulist").read_text())
        except (OSError, ValueError):
            return set()


class DevicesUnknownError(UserError):
    """The driver is loaded, and nvidia-smi does not say which devices there are."""


class NodeDevices:
    """The devices of this node. `find` asks until there is an answer; it is for threads that may wait."""

    def __init__(self, ask: Callable[[], tuple[SlotDevice, ...]] | None = None) -> None:
        self.known: tuple[SlotDevice, ...] = ()  # empty: none so far
        self._ask = ask or found
        self._lock = threading.Lock()  # one nvidia-smi at a time

    def find(self) -> tuple[SlotDevice, ...]:
        with self._lock:
            if not self.known:
                self.known = self._ask()
            return self.known

    def for_slots(self, slots: int) -> tuple[SlotDevice, ...]:
        """For workers that compute on GPUs. One slot alone may leave the choice to CUDA."""
        try:
            devices = self.find()
        except DevicesUnknownError:
            if slots > 1:
                raise
            return ()
        if devices or slots == 1:
            return devices
        named = f" among {VISIBLE}={os.environ[VISIBLE]!r}" if VISIBLE in os.environ else ""
        raise UserError(
            f'device = "cuda" and nvidia-smi shows no GPU{named} for {slots} slots: all their workers would '
            f"run on one GPU; install nvidia-smi, correct {VISIBLE}, or use one slot."
        )


def found(*, within_s: float = ANSWER_S) -> tuple[SlotDevice, ...]:
    """The devices this process may use, in the order of their slots. A GPU that is cut counts as its
    instances. Runs nvidia-smi twice: not for the thread of an event loop.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    until = time.monotonic() + within_s
    try:
        listed = _said([command, "-L"], until)
        answer = _said(
            [command, "--query-gpu=uuid,pci.bus_id,mig.mode.current", "--format=csv,noheader"], until
        )
    except subprocess.TimeoutExpired:
        raise DevicesUnknownError(
            f"nvidia-smi has not answered for {within_s:g} s, so the GPUs of this node are not known."
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        if not _DRIVER.exists():
            return ()
        raise DevicesUnknownError(f"the GPUs of this node are not known: {error}") from None
    rows = [row for line in answer.splitlines() if len(row := line.split(", ")) == 3]
    cut = {uuid for uuid, _, mode in rows if mode.strip() == "Enabled"}
    gpus = parsed(listed, {uuid: bus for uuid, bus, _ in rows}, cut)
    return visible(gpus, os.environ.get(VISIBLE))


def _said(command: list[str], until: float) -> str:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        said, _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
    finally:
        process.kill()
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)  # no longer: it may be in uninterruptible sleep
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return said


def parsed(
    listed: str, buses: Mapping[str, str], cut: Collection[str] = frozenset()
) -> tuple[tuple[SlotDevice, ...], ...]:
    """By GPU, from what `nvidia-smi -L` prints. `cut`: GPUs in MIG mode, of which CUDA can use instances
    only.
    """
    gpus: list[tuple[SlotDevice, ...]] = []
    for part in re.split(r"(?=^GPU \d+:)", listed, flags=re.M):
        gpu = _GPU.search(part)
        if gpu is None:
            continue
        number, own = gpu.groups()
        instances = _MIG.findall(part) or ([] if own in cut else [own])
        gpus.append(tuple(SlotDevice(uuid, buses.get(own, ""), own, number) for uuid in instances))
    return tuple(gpus)


def visible(gpus: tuple[tuple[SlotDevice, ...], ...], named: str | None) -> tuple[SlotDevice, ...]:
    """The devices that CUDA_VISIBLE_DEVICES names, in its order and by CUDA's own rules: a name that is not
    there ends the list, one that comes twice empties it. None: it is not set. The number or UUID of a GPU
    that MIG has cut means its instances; CUDA would take the first of them.
    """
    if named is None:
        return tuple(device for gpu in gpus for device in gpu)
    chosen: list[SlotDevice] = []
    for name in (part.strip() for part in named.split(",")):
        devices = _named(gpus, name)
        if devices is None:
            break
        if any(device in chosen for device in devices):
            return ()
        chosen += devices
    return tuple(chosen)


def _named(gpus: tuple[tuple[SlotDevice, ...], ...], name: str) -> tuple[SlotDevice, ...] | None:
    """By number, or by the beginning of a UUID if only one device has it."""
    if (number := re.match(r"\d+", name)) is not None:
        return gpus[int(number[0])] if int(number[0]) < len(gpus) else None
    names: dict[str, tuple[SlotDevice, ...]]
    if name.startswith("MIG-"):
        names = {device.uuid: (device,) for gpu in gpus for device in gpu}
    elif name.startswith("GPU-"):
        names = {gpu[0].gpu: gpu for gpu in gpus if gpu}
    else:
        return None
    found = [name] if name in names else [uuid for uuid in names if uuid.startswith(name)]
    return names[found[0]] if len(found) == 1 else None


def take(slot: int, devices: tuple[SlotDevice, ...]) -> SlotDevice | None:
    """Make the slot's device the only one this process sees. To be called before CUDA is loaded."""
    if not devices:
        return None
    device = devices[slot % len(devices)]
    os.environ[VISIBLE] = device.uuid
    near = device.cpus() & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)
    return device


def sharers(num_devices: int, *, slots: int) -> int:
    """How many slots of a node are on one device, at most."""
    return -(-slots // num_devices) if num_devices else 1


def slots_named(
    place: XidPlace, devices: tuple[SlotDevice, ...], *, slots: int, pids: Mapping[int, int]
) -> tuple[int, ...]:
    """The slots that an Xid is about: the process's own, else all of the GPU. `pids`: slots by process."""
    if place.pid is not None and place.pid in pids:
        return (pids[place.pid],)
    if not devices:
        return ()
    return tuple(slot for slot in range(slots) if place.is_at(devices[slot % len(devices)].bus))


class JobFiles:
    """Which task is on which GPU, for dcgm-exporter (`--hpc-job-mapping-dir`): a file per GPU, named by its
    number, with a task per line. Its metrics then have the label `hpc_job`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[str, list[str]] = {}

    def write(self, devices: tuple[SlotDevice, ...], tasks: Mapping[int, Collection[str]]) -> None:
        """`tasks`: those of each slot. A file that says the same already is left alone."""
        found: dict[str, set[str]] = {device.number: set() for device in devices}
        for slot, names in tasks.items():
            if devices:
                found[devices[slot % len(devices)].number].update(names)
        for number, named in found.items():
            if (lines := sorted(named)) != self._written.get(number):
                (self._folder / number).write_text("".join(f"{name}\n" for name in lines))
                self._written[number] = lines


def _cpus(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
