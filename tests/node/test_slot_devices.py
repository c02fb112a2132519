"""Which GPU a slot is, read from what nvidia-smi prints (driver 580, one H200, whole and cut by MIG)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.cli.agent import default_slots
from everstep.core.faults.xids import place_of_xid
from everstep.node import slot_devices
from everstep.node.slot_devices import SlotDevice, parsed

A, B = "GPU-47ac4606-dbd4-7c4f-5f61-e8d3c3565328", "GPU-00000000-dbd4-7c4f-5f61-e8d3c3565328"
WHOLE = f"GPU 0: NVIDIA H200 (UUID: {A})\nGPU 1: NVIDIA H200 (UUID: {B})\n"
CUT = (
    f"GPU 0: NVIDIA H200 (UUID: {A})\n"
    "  MIG 1g.35gb     Device  0: (UUID: MIG-8b91c2d4-1111-5b2a-9f00-0a0000000000)\n"
    "  MIG 1g.35gb     Device  1: (UUID: MIG-8b91c2d4-2222-5b2a-9f00-0a0000000000)\n"
    f"GPU 1: NVIDIA H200 (UUID: {B})\n"
)
INSTANCES = [f"MIG-8b91c2d4-{n * 4}-5b2a-9f00-0a0000000000" for n in ("1", "2")]
BUSES = {A: "00000000:3B:00.0", B: "00000000:5E:00.0"}


def test_a_gpu_is_a_slot_and_a_cut_gpu_is_as_many_as_its_instances() -> None:
    assert [d.uuid for d in parsed(WHOLE, BUSES)] == [A, B]
    cut = parsed(CUT, BUSES)
    assert [d.uuid[:13] for d in cut] == ["MIG-8b91c2d4-", "MIG-8b91c2d4-", B[:13]]
    assert [d.bus for d in cut] == ["00000000:3B:00.0", "00000000:3B:00.0", "00000000:5E:00.0"]
    assert parsed("No devices found.\n", {}) == ()


def smi(folder: Path, listed: str, modes: dict[str, str], *, code: int = 0) -> None:
    """An nvidia-smi that prints what the real one prints."""
    rows = "".join(f"{uuid}, {BUSES[uuid]}, {mode}\n" for uuid, mode in modes.items())
    (folder / "listed").write_text(listed)
    (folder / "rows").write_text(rows)
    script = f'case "$1" in -L) cat {folder}/listed;; *) cat {folder}/rows;; esac\nexit {code}\n'
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("listed", "modes", "slots"),
    [
        (WHOLE, {A: "Disabled", B: "[N/A]"}, [A, B]),
        (CUT, {A: "Enabled", B: "Disabled"}, [*INSTANCES, B]),
        (WHOLE, {A: "Enabled", B: "Disabled"}, [B]),  # in MIG mode, and no instance was made
        ("", {}, []),
    ],
)
def test_an_agent_offers_as_many_slots_as_nvidia_smi_lists_devices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listed: str,
    modes: dict[str, str],
    slots: list[str],
) -> None:
    smi(tmp_path, listed, modes)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slot_devices.found.cache_clear()
    try:
        assert [device.uuid for device in slot_devices.found()] == slots
        assert default_slots() == (len(slots) or os.cpu_count())
    finally:
        slot_devices.found.cache_clear()


def test_an_nvidia_smi_that_fails_shows_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, WHOLE, {A: "Disabled"}, code=9)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slot_devices.found.cache_clear()
    try:
        assert slot_devices.found() == ()
    finally:
        slot_devices.found.cache_clear()


def test_devices_are_shared_only_where_there_are_more_slots_than_devices() -> None:
    devices = parsed(CUT, BUSES)
    taken = [devices[slot % len(devices)].uuid for slot in range(3)]
    assert len(set(taken)) == 3
    assert not any(slot_devices.is_shared(device, devices, slots=3) for device in devices)
    assert all(slot_devices.is_shared(device, devices, slots=4) for device in devices)


def test_a_worker_sees_its_slot_s_device_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = parsed(WHOLE, BUSES)
    seen = []
    for slot in (0, 1, 2):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        slot_devices.take(slot, devices)
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == [A, B, A], "more slots than devices share them in turn"
    assert slot_devices.take(0, ()) is None


def test_the_cpus_nearest_to_a_device_are_read_from_its_pci_address(tmp_path: Path) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text("0-2,8\n")
    assert SlotDevice(A, "00000000:3B:00.0").cpus(tmp_path) == {0, 1, 2, 8}
    assert SlotDevice(B, "00000000:5E:00.0").cpus(tmp_path) == set()


@pytest.mark.parametrize(
    ("line", "slots"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            (0, 1),
        ),
        ("[155044.078590] NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.", (2,)),
        ("NVRM: Xid (0000:5E:00): 31, Ch 0000000b, engmask 00000120, intr 10000000", (2,)),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). "
            "RST: No, D-RST: No",
            (1,),
        ),
        ("NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:00): 13, pid=9, name=a, Graphics Exception", (0, 1)),
        (
            "kernel: NVRM: Xid (PCI:0000:5e:00): 45, pid=4711, name=python3, Ch 00000001 caused by previous "
            "Xid 149",
            (0,),
        ),
        ("NVRM: Xid (PCI:0004:01:00): 119, pid=430, name=nv_queue, Timeout waiting for RPC from GSP!", ()),
    ],
)
def test_an_xid_names_the_slots_of_its_gpu_or_of_its_process(line: str, slots: tuple[int, ...]) -> None:
    place = place_of_xid(line)
    assert place is not None
    pids = {7194: 1, 4711: 0}
    assert slot_devices.slots_named(place, parsed(CUT, BUSES), slots=3, pids=pids) == slots
    assert slot_devices.slots_named(place._replace(pid=None), (), slots=3, pids=pids) == ()


@pytest.mark.parametrize("line", ["NVRM: GPU has fallen off the bus", "Xid (PCI:zz:00): 79", ""])
def test_a_line_that_says_no_place_has_none(line: str) -> None:
    assert place_of_xid(line) is None


def test_slots_that_share_one_gpu_are_all_named() -> None:
    place = place_of_xid("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    assert place is not None
    assert slot_devices.slots_named(place, parsed(WHOLE, BUSES), slots=4, pids={}) == (0, 2)
