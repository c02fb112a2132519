"""A slot of a node is a device: a GPU, or an instance of one that MIG has cut.

The fork server finds the devices once, without touching CUDA; a worker takes its slot's device before CUDA
is loaded, so it sees that one and no other, and runs on the CPUs nearest to it. Where a node offers more
slots than it has devices, slots share them in turn: an operator asked for that by `--slots`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.core.faults.xids import XidPlace

_GPU = re.compile(r"^GPU \d+: .*\(UUID: (GPU-[0-9a-f-]+)\)", re.M)
_MIG = re.compile(r"^\s+MIG .*\(UUID: (MIG-[0-9a-f-]+)\)", re.M)


@dataclass(frozen=True, slots=True)
class SlotDevice:
    """What CUDA_VISIBLE_DEVICES calls it, and the PCI address of its GPU, as in lines about an Xid."""

    uuid: str
    bus: str = ""

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


@functools.cache
def found() -> tuple[SlotDevice, ...]:
    """The devices of this node, in the order of their numbers. A GPU that is cut counts as its instances."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    asked = [command, "--query-gpu=uuid,pci.bus_id,mig.mode.current", "--format=csv,noheader"]
    try:
        listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=30, check=True)
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [row for line in answer.stdout.splitlines() if len(row := line.split(", ")) == 3]
    cut = {uuid for uuid, _, mode in rows if mode.strip() == "Enabled"}
    return parsed(listed.stdout, {uuid: bus for uuid, bus, _ in rows}, cut)


def parsed(
    listed: str, buses: Mapping[str, str], cut: Collection[str] = frozenset()
) -> tuple[SlotDevice, ...]:
    """From what `nvidia-smi -L` prints. `cut`: GPUs in MIG mode, of which CUDA can use instances only."""
    devices: list[SlotDevice] = []
    for part in re.split(r"(?=^GPU \d+:)", listed, flags=re.M):
        gpu = _GPU.search(part)
        if gpu is None:
            continue
        instances = _MIG.findall(part) or ([] if gpu[1] in cut else [gpu[1]])
        devices += [SlotDevice(uuid, buses.get(gpu[1], "")) for uuid in instances]
    return tuple(devices)


def take(slot: int, devices: tuple[SlotDevice, ...]) -> SlotDevice | None:
    """Make the slot's device the only one this process sees. To be called before CUDA is loaded."""
    if not devices:
        return None
    device = devices[slot % len(devices)]
    os.environ["CUDA_VISIBLE_DEVICES"] = device.uuid
    near = device.cpus() & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)
    return device


def is_shared(device: SlotDevice | None, devices: tuple[SlotDevice, ...], *, slots: int) -> bool:
    """Can workers of several slots be on this device?"""
    return device is not None and slots > len(devices)


def slots_named(
    place: XidPlace, devices: tuple[SlotDevice, ...], *, slots: int, pids: Mapping[int, int]
) -> tuple[int, ...]:
    """The slots that an Xid is about: the process's own, else all of the GPU. `pids`: slots by process."""
    if place.pid is not None and place.pid in pids:
        return (pids[place.pid],)
    if not devices:
        return ()
    return tuple(slot for slot in range(slots) if place.is_at(devices[slot % len(devices)].bus))


def _cpus(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
