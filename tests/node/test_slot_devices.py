"""Which GPU a slot is, read from what nvidia-smi prints (driver 580, one H200, whole and cut by MIG)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from everstep.cli.agent import default_slots
from everstep.core.faults.xids import place_of_xid
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec
from everstep.launch.local.run import LocalTask
from everstep.node import slot_devices, worker
from everstep.node.agent import Agent, AgentSettings
from everstep.node.fork_server import ForkServer
from everstep.node.slot_devices import DevicesUnknownError, NodeDevices, SlotDevice, parsed, visible
from everstep.protocol.messages import KernelSpoke

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


def every(listed: str) -> tuple[SlotDevice, ...]:
    return visible(parsed(listed, BUSES), None)


@pytest.fixture(autouse=True)
def unrestricted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what a test sets itself is undone as well
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_a_gpu_is_a_slot_and_a_cut_gpu_is_as_many_as_its_instances() -> None:
    assert [d.uuid for d in every(WHOLE)] == [A, B]
    cut = every(CUT)
    assert [d.uuid[:13] for d in cut] == ["MIG-8b91c2d4-", "MIG-8b91c2d4-", B[:13]]
    assert [d.bus for d in cut] == ["00000000:3B:00.0", "00000000:3B:00.0", "00000000:5E:00.0"]
    assert every("No devices found.\n") == ()


def smi(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    listed: str = WHOLE,
    modes: dict[str, str] | None = None,
    first: str = "",
    code: int = 0,
) -> None:
    """An nvidia-smi that prints what the real one prints, after the shell command `first`."""
    modes = {A: "Disabled", B: "Disabled"} if modes is None else modes
    rows = "".join(f"{uuid}, {BUSES[uuid]}, {mode}\n" for uuid, mode in modes.items())
    (folder / "listed").write_text(listed)
    (folder / "rows").write_text(rows)
    script = f'{first}\ncase "$1" in -L) cat {folder}/listed;; *) cat {folder}/rows;; esac\nexit {code}\n'
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slot_devices, "_DRIVER", folder)  # it is loaded


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
    smi(tmp_path, monkeypatch, listed=listed, modes=modes)
    assert [device.uuid for device in slot_devices.found()] == slots
    assert default_slots() == (len(slots) or os.cpu_count())


def test_an_nvidia_smi_that_fails_is_not_taken_for_a_node_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an agent offered a slot for each CPU."""
    smi(tmp_path, monkeypatch, code=15)
    with pytest.raises(DevicesUnknownError, match="non-zero exit status 15"):
        slot_devices.found()
    with pytest.raises(UserError, match="give --slots"):
        default_slots()


def test_an_nvidia_smi_that_fails_without_a_driver_shows_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, code=9)
    monkeypatch.setattr(slot_devices, "_DRIVER", tmp_path / "not there")
    assert slot_devices.found() == ()


def test_an_nvidia_smi_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, first="exec sleep 60")
    began = time.monotonic()
    with pytest.raises(DevicesUnknownError, match=r"has not answered for 0\.2 s"):
        slot_devices.found(within_s=0.2)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("listed", "named", "slots"),
    [
        (WHOLE, "0,1", [A, B]),
        (WHOLE, "1,0", [B, A]),
        (WHOLE, "1", [B]),
        (WHOLE, " 1 , 0 ", [B, A]),
        (WHOLE, "", []),
        (WHOLE, "-1", []),
        (WHOLE, "1,-1,0", [B]),
        (WHOLE, "0,7,1", [A]),
        (WHOLE, "0,0", []),
        (WHOLE, "none", []),
        (WHOLE, A, [A]),
        (WHOLE, "GPU-00,GPU-47", [B, A]),
        (WHOLE, "GPU-", []),  # both begin like this
        (WHOLE, "GPU-11,0", []),
        (WHOLE, f"0,{A}", []),
        (CUT, "0", INSTANCES),
        (CUT, "1,0", [B, *INSTANCES]),
        (CUT, INSTANCES[1], [INSTANCES[1]]),
        (CUT, f"MIG-8b91c2d4-2,{B},MIG-8b91c2d4-1", [INSTANCES[1], B, INSTANCES[0]]),
        (CUT, f"{INSTANCES[1]},0", []),
        (CUT, "MIG-8b91", []),
        (
            f"GPU 0: A100 (UUID: {A})\n  MIG 1g.5gb Device 0: (UUID: MIG-{A}/1/0)\n"
            f"  MIG 1g.5gb Device 1: (UUID: MIG-{A}/13/0)\n",
            f"MIG-{A}/13/0",
            [f"MIG-{A}/13/0"],
        ),
    ],
)
def test_slots_are_the_devices_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, named: str, slots: list[str]
) -> None:
    """As CUDA reads it. All GPUs of the machine were taken, also those of somebody else."""
    smi(tmp_path, monkeypatch, listed=listed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert [device.uuid for device in slot_devices.found()] == slots


def test_workers_of_several_slots_are_not_all_put_on_the_first_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, listed="No devices found.\n", modes={})
    with pytest.raises(UserError, match="nvidia-smi shows no GPU for 8 slots"):
        NodeDevices().for_slots(8)
    assert NodeDevices().for_slots(1) == ()
    smi(tmp_path, monkeypatch, code=15)
    with pytest.raises(DevicesUnknownError):
        NodeDevices().for_slots(8)
    assert NodeDevices().for_slots(1) == ()


def test_no_answer_is_not_kept_as_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = NodeDevices()
    smi(tmp_path, monkeypatch, code=15)
    with pytest.raises(DevicesUnknownError):
        devices.find()
    smi(tmp_path, monkeypatch)
    assert [device.uuid for device in devices.for_slots(8)] == [A, B]
    smi(tmp_path, monkeypatch, code=15)
    assert [device.uuid for device in devices.for_slots(8)] == [A, B], "known is known"


def test_a_kernel_line_does_not_wait_for_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran on the agent's event loop, up to 60 s without a heartbeat, just when a GPU had failed."""
    smi(tmp_path, monkeypatch)
    agent = Agent(AgentSettings(node="a", slots=4, coordinators=()))
    agent.workers = SimpleNamespace(slots_by_pid=dict)  # type: ignore[assignment]
    agent.devices.find()
    smi(tmp_path, monkeypatch, first=f"touch {tmp_path}/asked")
    agent._kernel_spoke("NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.")
    (kept,) = agent.state.reports.after(0)
    assert kept.report == KernelSpoke(text=kept.report.text, slots=(1, 3))
    assert not (tmp_path / "asked").exists()


def test_a_run_on_this_machine_is_refused_before_its_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    job = Job(model=ModelSpec(preset="gpt-tiny"), device="cuda", replicas=2)
    with pytest.raises(UserError, match=r"no GPU among CUDA_VISIBLE_DEVICES='5' for 2 slots"):
        LocalTask(job, fork_server=ForkServer()).run()


@pytest.mark.parametrize("device", ["cuda:1", "cuda:0", "gpu", "mps", ""])
def test_a_device_that_workers_cannot_have_is_refused_before_the_start(device: str) -> None:
    """`cuda:1` passed the launcher's check and failed in every worker, which sees one GPU."""
    with pytest.raises(UserError, match=rf"device '{device}' is not known; use cpu or cuda"):
        Job(model=ModelSpec(preset="gpt-tiny"), device=device)


def test_devices_are_shared_only_where_there_are_more_slots_than_devices() -> None:
    devices = every(CUT)
    taken = [devices[slot % len(devices)].uuid for slot in range(3)]
    assert len(set(taken)) == 3
    assert [slot_devices.sharers(len(devices), slots=slots) for slots in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]
    assert slot_devices.sharers(0, slots=8) == 1


def test_a_worker_sees_its_slot_s_device_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = every(WHOLE)
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
    assert slot_devices.slots_named(place, every(CUT), slots=3, pids=pids) == slots
    assert slot_devices.slots_named(place._replace(pid=None), (), slots=3, pids=pids) == ()


@pytest.mark.parametrize("line", ["NVRM: GPU has fallen off the bus", "Xid (PCI:zz:00): 79", ""])
def test_a_line_that_says_no_place_has_none(line: str) -> None:
    assert place_of_xid(line) is None


def test_slots_that_share_one_gpu_are_all_named() -> None:
    place = place_of_xid("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    assert place is not None
    assert slot_devices.slots_named(place, every(WHOLE), slots=4, pids={}) == (0, 2)


def test_a_compiled_job_on_the_cpu_leaves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler opened each GPU of the machine: half a GiB of its memory per worker."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(worker.regions, "enable", lambda: None)
    monkeypatch.setattr(worker, "why_unable", lambda device: "")
    worker._device_of(Job(model=ModelSpec(preset="gpt-tiny")))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    worker._device_of(Job(model=ModelSpec(preset="gpt-tiny"), compile=True))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_dcgm_exporter_reads_which_task_is_on_which_gpu(tmp_path: Path) -> None:
    """Slots 0 and 1 are instances of the first GPU; a task that has left is in no file."""
    devices = visible(parsed(CUT, {}), None)
    files = slot_devices.JobFiles(tmp_path)

    def said() -> dict[str, str]:
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    files.write(devices, {0: {"llama"}, 1: {"gpt", "llama"}, 2: {"gpt"}})
    assert said() == {"0": "gpt\nllama\n", "1": "gpt\n"}
    files.write(devices, {1: {"gpt"}})
    assert said() == {"0": "gpt\n", "1": ""}
