"""Whole incidents as text, one for every error kind and every remedy: `tests/golden/*.txt`.

`pytest tests/core/test_golden_incidents.py --rewrite` writes them anew; commit a diff only if you can explain
it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.core.faults.severity import TABLE, ErrorKind
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from tests.support.fake_cluster import FakeCluster

GOLDEN = Path(__file__).parent.parent / "golden"
W00, W01, W10, W11 = Worker(0, 0), Worker(0, 1), Worker(1, 0), Worker(1, 1)

RAISED = {  # what a worker raises, by kind
    ErrorKind.ECC: "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    ErrorKind.NVLINK: "CUDA error: uncorrectable NVLink error detected during the execution",
    ErrorKind.GPU_DRIVER: "RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected",
    ErrorKind.ILLEGAL_MEMORY_ACCESS: "RuntimeError: CUDA error: an illegal memory access was encountered",
    ErrorKind.DEVICE_ASSERT: "RuntimeError: CUDA error: device-side assert triggered",
    ErrorKind.CUDA: "RuntimeError: CUDA error: unspecified launch failure",
    ErrorKind.GPU_OUT_OF_MEMORY: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ErrorKind.DISK_FULL: "OSError: [Errno 28] No space left on device",
    ErrorKind.CONNECTION_REFUSED: "ConnectionRefusedError: [Errno 111] Connection refused",
    ErrorKind.CONNECTION_RESET: "ConnectionResetError: [Errno 104] Connection reset by peer",
    ErrorKind.USER_CODE: "ValueError: the batch is empty",
}
ENDED = {  # how a process ends, by kind
    ErrorKind.KILLED: "killed by SIGKILL",
    ErrorKind.CRASH: "killed by SIGSEGV",
    ErrorKind.ABNORMAL_EXIT: "exited with code 1",
}
KERNEL = {  # what the kernel says, by kind
    ErrorKind.GPU_LOST: "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.",
    ErrorKind.STORAGE: "EXT4-fs (sda1): Remounting filesystem read-only",
    ErrorKind.HOST_HARDWARE: "{1}[Hardware Error]: event severity: fatal",
    ErrorKind.DMA_MAPPING: "arm-smmu-v3 arm-smmu-v3.0.auto: event 0x10 received:",
    ErrorKind.ECC_CORRECTED: "EDAC MC1: 1 CE memory scrubbing error on CPU_SrcID#1_MC#0_Chan#0_DIMM#0",
    ErrorKind.LINK_FLAPPING: "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN",
    ErrorKind.NVLINK_NONFATAL: "NVRM: Xid (PCI:0000:5f:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 02",
}


def running() -> FakeCluster:
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
    cluster.submit()
    cluster.seal()
    cluster.transcript.clear()
    return cluster


def raised(error: str) -> Callable[[FakeCluster], None]:
    return lambda cluster: cluster.raises(W01, error)


def ended(reason: str) -> Callable[[FakeCluster], None]:
    return lambda cluster: cluster.exits(W01, reason)


def kernel(text: str) -> Callable[[FakeCluster], None]:
    return lambda cluster: cluster.report("t", W01, msg.KernelSpoke(text=text))


def crash_loop(cluster: FakeCluster) -> None:
    for _ in range(3):
        cluster.exits(W01, "killed by SIGSEGV")
        cluster.wait(1.5)


def hang(cluster: FakeCluster) -> None:
    cluster.overdue(W00, busy=False, doing="G[2 stage 0 0.0]", elapsed_s=1.1)
    cluster.overdue(W01, elapsed_s=2.0)


def stopped(cluster: FakeCluster) -> None:
    cluster.overdue(W01, stopped=True, elapsed_s=0.15)


def all_workers_wait(cluster: FakeCluster) -> None:
    for worker in (W00, W01, W10, W11):
        cluster.overdue(worker, busy=False, doing="A[2 stage 1 0.0]", elapsed_s=9.0, expected_s=0.5)


def flapping_link(cluster: FakeCluster) -> None:
    for _ in range(3):
        cluster.report("t", W00, msg.LinkMended(task="t", worker=W00, peer=W01))


def node_dies(cluster: FakeCluster) -> None:
    node = cluster.coordinator.tasks["t"].seats[W10].node
    cluster.crew.lose(node)
    cluster.silence(node)
    cluster.overdue(W00, busy=False, doing="A[2 stage 1 1.0]", elapsed_s=1.2)


def line_cut(cluster: FakeCluster) -> None:
    cluster.silence("b")
    cluster.wait(60)
    cluster.join("b")


def mixed_versions(cluster: FakeCluster) -> None:
    cluster.crew.sums = dict.fromkeys("abc", "40 bits")
    cluster.exits(W01, "killed by SIGKILL")
    cluster.crew.sums.clear()
    for _ in range(3):
        cluster.wait(61.0)
        cluster.seal()


def node_drained(cluster: FakeCluster) -> None:
    cluster.hear(msg.DrainRequested(node="a"))


SCENES: dict[str, Callable[[FakeCluster], None]] = {
    **{f"raised-{kind}": raised(text) for kind, text in RAISED.items()},
    **{f"ended-{kind}": ended(text) for kind, text in ENDED.items()},
    **{f"kernel-{kind}": kernel(text) for kind, text in KERNEL.items()},
    "remedy-restart-fails-then-isolate": crash_loop,
    "progress-hang": hang,
    "start-mixed-versions": mixed_versions,
    "progress-stopped": stopped,
    "remedy-retry-in-place-all-workers-wait": all_workers_wait,
    "remedy-retry-fails-then-restart": flapping_link,
    "silence-node-dies": node_dies,
    "silence-only-the-line-is-cut": line_cut,
    "person-drains-a-node": node_drained,
}


@pytest.mark.parametrize("name", SCENES)
def test_an_incident_runs_as_its_golden_transcript(name: str, request: pytest.FixtureRequest) -> None:
    cluster = running()
    SCENES[name](cluster)
    text = "\n".join([*cluster.transcript, "", *cluster.story()]) + "\n"
    path = GOLDEN / f"{name.replace(' ', '-').replace('/', '-')}.txt"
    if request.config.getoption("--rewrite"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} says otherwise; --rewrite if the change is meant"
    assert all(incident.closed for incident in cluster.coordinator.log.incidents)


@pytest.mark.parametrize(("kind", "text"), [*RAISED.items(), *ENDED.items(), *KERNEL.items()])
def test_the_golden_texts_are_of_the_kind_they_claim(kind: ErrorKind, text: str) -> None:
    cluster = running()
    source = "raised" if kind in RAISED else "ended" if kind in ENDED else "kernel"
    SCENES[f"{source}-{kind}"](cluster)
    if source == "kernel" and TABLE[kind] > 1:
        assert not cluster.coordinator.log.incidents, "what is not grave is no incident"
        return
    verdict = cluster.coordinator.log.incidents[0].verdict
    assert verdict is not None
    assert verdict.kind == kind
