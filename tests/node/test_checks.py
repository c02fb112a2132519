"""`everstep check`: a healthy machine passes; each planted defect is found, and nothing else is."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.main import run as everstep
from everstep.node import checks
from everstep.node.agent import KernelLog
from everstep.node.checks import CheckFinding, Probe, at_slots, checked_apart, command, run_checks
from everstep.node.slot_devices import SlotDevice
from everstep.protocol.messages import CheckResult


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(checks, "DISK_BYTES", 1 << 20)


class Healthy(Probe):
    """What differs from machine to machine is as it should be."""

    def kernel_lines(self) -> list[str]:
        return ["usb 1-1: new high-speed USB device number 2 using xhci_hcd"]

    def ecc_errors(self) -> list[tuple[str, str, int]]:
        return [("0", "GPU-a", 0)]

    def clock_is_kept(self) -> bool:
        return True

    def available_memory(self) -> int:
        return 64 << 30

    def free_bytes(self, directory: Path) -> int:
        return 64 << 30

    def open_files(self) -> int:
        return 65536


def flipped(tensor: Any) -> Any:
    made = tensor.clone()
    made.view(-1)[-1] += 1
    return made


def sometimes(times: list[int], make: Callable[[], Any], broken: Callable[[], Any]) -> Any:
    times.append(1)
    return broken() if len(times) == 3 else make()


calls: list[int] = []
DEFECTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    # name: the check that finds it, the answer that is changed, and how
    "a product is wrong": (
        "compute cpu fp32",
        "product",
        lambda p, d, k, a, b: flipped(Probe.product(p, d, k, a, b)),
    ),
    "a product is wrong once": (
        "compute cpu fp32",
        "product",
        lambda p, *x: sometimes(calls, lambda: Probe.product(p, *x), lambda: flipped(Probe.product(p, *x))),
    ),
    "a word of memory is changed": ("memory cpu", "copied", lambda p, *x: flipped(Probe.copied(p, *x))),
    "the disk returns other bytes": ("disk", "read", lambda p, path: Probe.read(p, path)[:-1] + b"?"),
    "the disk does not take bytes": ("disk", "write", lambda p, path, data: 1 / 0),
    "the disk is full": ("disk", "free_bytes", lambda p, d: 64 << 30 if d == Path("/dev/shm") else 1 << 20),
    "shared memory is small": (
        "shared memory",
        "free_bytes",
        lambda p, d: (1 << 20) if "shm" in str(d) else 64 << 30,
    ),
    "memory is used up": ("free memory", "available_memory", lambda p: 1 << 20),
    "few files may be open": ("open files", "open_files", lambda p: 256),
    "nobody keeps the clock": ("clock", "clock_is_kept", lambda p: False),
    "an Xid in the kernel log": (
        "kernel log 00000000:06:00.0",
        "kernel_lines",
        lambda p: ["NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."],
    ),
    "uncorrected ECC errors": ("ecc 0", "ecc_errors", lambda p: [("0", "GPU-a", 2)]),
    "nvidia-smi answers nonsense": ("hardware-log", "ecc_errors", lambda p: 1 / 0),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SIZE", 32)
    check, answer, change = DEFECTS[name]
    calls.clear()
    broken = type("Broken", (Healthy,), {answer: change})(tmp_path)
    found = {one.check: one.state for one in run_checks(broken) if one.state != "passed"}
    assert set(found) == {check} or (
        name == "a product is wrong" and set(found) == {check, "compute cpu bf16"}
    )


def test_fifty_healthy_machines_pass_and_none_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SIZE", 32)
    first = run_checks(Healthy(tmp_path))
    assert {one.state for one in first} == {"passed"}
    for _ in range(50):
        quick = ["software", "room", "clock", "hardware-log", "memory", "disk"]
        assert {one.state for one in run_checks(Healthy(tmp_path), only=quick)} == {"passed"}


def test_a_node_is_compared_with_its_peers(tmp_path: Path) -> None:
    mine = run_checks(Healthy(tmp_path), only=["memory", "software"])
    quick = [
        CheckFinding(
            check=one.check,
            state="passed",
            says="",
            figures={name: 10 * figure for name, figure in one.figures.items()},
            facts={**one.facts, "torch": "1.0"} if one.facts else {},
        )
        for one in mine
    ]
    found = {
        one.check: one
        for one in run_checks(Healthy(tmp_path), only=["memory", "software"], baseline=[quick] * 3)
    }
    assert found["memory cpu"].state == "warning"
    assert "the median of 3 others" in found["memory cpu"].says
    assert found["versions"].state == "warning"
    assert "1.0 elsewhere" in found["versions"].says


def test_commands_of_others_pass_fail_and_are_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    others = [partial(command, text) for text in ("echo fine", "echo broken; exit 3", "sleep 60 & wait")]
    good, bad, hung = run_checks(Healthy(tmp_path), only=["software"], others=others, total_s=2.0)[1:]
    assert (good.state, good.says) == ("passed", "fine")
    assert (bad.state, bad.says) == ("failed", "exit code 3: broken")
    assert hung.state == "failed"
    assert time.monotonic() - began < 30


def test_the_command_prints_one_document_and_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert everstep(["check", "--only", "software", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    saved = tmp_path / "a.json"
    saved.write_text(json.dumps(document))
    assert everstep(["check", "--only", "software", "--baseline", str(saved)]) == 0
    assert everstep(["check", "--only", "software", "--command", "false"]) == 1
    capsys.readouterr()
    broken = tmp_path / "b.json"
    broken.write_text("{}")
    for wrong in (
        ["--only", "memroy"],
        ["--device", "tpu"],
        ["--dir", "/nowhere"],
        ["--device", "cuda:99"],
        ["--tolerate", "a/b"],
        ["--baseline", str(broken)],
    ):
        assert everstep(["check", *wrong]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_what_needs_no_torch_does_not_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')")
    command = [sys.executable, "-m", "everstep.cli.main", "check", "--only", "clock", "--only", "room"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "clock" in ran.stdout


def test_an_unfit_node_does_not_join(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it calls any coordinator."""
    monkeypatch.setattr(checks, "checked_apart", partial(checked_apart, only=["clock"]))  # not for seconds
    given = ["agent", "--coordinator", "http://127.0.0.1:1", "--check", "--check-command", "echo no; false"]
    assert everstep(given) == 2
    assert (
        "does not join, because it fails: command echo no; false (exit code 1: no)" in capsys.readouterr().err
    )


def test_an_agent_checks_its_node_in_a_process_of_its_own() -> None:
    """As when a coordinator asks for it: the same checks, with the node's own."""
    words = ["--command", "echo fine", "--command", "echo broken; exit 3"]
    found = {one.check: one for one in checked_apart(words, only=["clock"])}
    assert set(found) == {"clock", "command echo fine", "command echo broken; exit 3"}
    assert found["command echo fine"].state == "passed"
    assert found["command echo broken; exit 3"].state == "failed"
    assert found["command echo broken; exit 3"].says == "exit code 3: broken"


def test_the_kernels_log_ends_where_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with an error in every container: its end was read as empty lines, which pushed the others out."""
    log, opened = tmp_path / "kmsg", checks.os.open
    log.write_text("3,1,1,-;NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.")
    monkeypatch.setattr(checks.os, "open", lambda path, flags: opened(log, flags))
    assert Probe(tmp_path).kernel_lines() == ["NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."]


def test_what_a_gpu_fails_is_about_its_slots() -> None:
    devices = [SlotDevice(f"GPU-{n}", f"00000000:0{n}:00.0", f"GPU-{n}") for n in "ab"]
    found = [
        CheckResult(check=gpu or "room", state="failed", says="", gpu=gpu)
        for gpu in ("GPU-b", "00000000:0A:00.0", "GPU-c", "")
    ]
    assert [one.slots for one in at_slots(found, devices, 4)] == [(1, 3), (0, 2), (), ()]
    assert [one.slots for one in at_slots(found, (), 4)] == [()] * 4


# ------------------------------------------------------------------ checks of others


def test_a_kernel_log_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """`User=everstep` and pods without capabilities heard no Xid, and no one was told."""
    closed = KernelLog(path=str(tmp_path / "kmsg"))
    assert (closed.fd, closed.error) == (None, f"{tmp_path / 'kmsg'}: No such file or directory")
    (tmp_path / "kmsg").touch()
    there = KernelLog(path=str(tmp_path / "kmsg"))
    assert there.fd is not None
    os.close(there.fd)
    assert there.error == ""
