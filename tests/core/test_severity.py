"""Real words of broken things, each with what it must be read as.

Texts marked `measured` were printed by torch 2.13 (CPU) and by Linux in front of us; those with a source are
quoted from it, with its addresses and names; the rest (several kernel, Slurm, NVSwitch and ROCm lines) are
written from memory of what such lines look like.
"""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.faults.remedies import REMEDIES, Situation, choose
from everstep.core.faults.severity import MEANINGS, TABLE, ErrorKind, Severity, judge, known
from everstep.core.faults.symptoms import SYMPTOMS
from everstep.core.faults.xids import XIDS
from everstep.protocol.messages import Patience
from tests.core.test_error_texts import LATER, TEXTS

E = ErrorKind
XID_LINES = [  # issues of open-gpu-kernel-modules, gpu-operator, TensorRT-LLM and gpud; NVIDIA's forum
    (
        "NVRM: Xid (PCI:0000:01:00): 13, Graphics SM Warp Exception on (GPC 1, TPC 0): Out Of Range Address",
        E.CUDA,
    ),
    (
        "[ 130.456250] [ T1946] NVRM: Xid (PCI:0000:2b:00): 31, pid=1942, name=llama-bench, channel "
        "0x00000002, "
        "intr 00000000. MMU Fault: ENGINE GRAPHICS GPC6 GPCCLIENT_T1_13 faulted @ 0x6f6f_320c2000. "
        "Fault is of "
        "type FAULT_PDE ACCESS_TYPE_VIRT_READ",
        E.ILLEGAL_MEMORY_ACCESS,
    ),
    ("Feb 01 14:25:31 archbox kernel: NVRM: Xid (PCI:0000:01:00): 38, pid=1659,", E.GPU_DRIVER),
    ("NVRM: Xid (PCI:0000:01:00): 43, Ch 00000020, engmask 00000101", E.CUDA),
    (
        "kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by "
        "previous Xid 149",
        E.CUDA,
    ),
    (
        "NVRM: Xid (PCI:0000:8a:00): 48, An uncorrectable double bit error (DBE) has been detected on "
        "GPU in the "
        "framebuffer at partition 4, subpartition 1",
        E.ECC,
    ),
    (
        "NVRM: Xid (PCI:0000:07:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit "
        "error (DBE) "
        "has been detected on GPU in the framebuffer at physAddr 0x7fdf0de80 partition 5, subpartition 1",
        E.ECC,
    ),
    (
        "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to "
        "activate.",
        E.ECC_CORRECTED,
    ),
    (
        "kernel: NVRM: Xid (PCI:0000:c1:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error "
        "detected "
        "on link 1",
        E.NVLINK,
    ),
    ("[155044.078590] NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.", E.GPU_LOST),
    (
        "NVRM: Xid (PCI:0004:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        E.GPU_LOST,
    ),
    ("NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000", E.ILLEGAL_MEMORY_ACCESS),
    ("NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error", E.ECC_CONTAINED),
    (
        "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, "
        "D-RST: No",
        E.ECC_CONTAINED,
    ),
    (
        "NVRM: Xid (PCI:0004:01:00): 119, pid=430, name=nv_queue, Timeout waiting for RPC from GSP!",
        E.GPU_DRIVER,
    ),
    (
        "NVRM: Xid (PCI:0000:01:00): 120, GSP task exception: load access page fault (cause:0xd) @ "
        "pc:0x13636b2",
        E.GPU_DRIVER,
    ),
    ("NVRM: Xid (PCI:0000:5f:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 02", E.NVLINK_NONFATAL),
    (
        "NVRM: Xid (PCI:0000:01:00): 144, SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008 0x00000000 "
        "0x00000000 0x00000000 0x00000000)",
        E.NVLINK_NONFATAL,
    ),
    (
        "NVRM: Xid (PCI:0000:00:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 "
        "0x00000000 "
        "0x00000000 0x00000000 0x00000000)",
        E.NVLINK,
    ),
    (
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset "
        "Required)",
        E.GPU_DRIVER,
    ),
    ("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (Reset) to 0x0 (None)", E.XID),
    ("NVRM: Xid (PCI:0000:01:00): 9999, Something new", E.XID),
]
KERNEL_LINES = [
    (  # measured
        "Out of memory: Killed process 18084 (python) total-vm:68720133748kB, anon-rss:24305400kB, "
        "file-rss:64kB, "
        "shmem-rss:0kB, UID:0 pgtables:48056kB oom_score_adj:0",
        E.HOST_OUT_OF_MEMORY,
    ),
    (  # measured
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task=python,"
        "pid=18084,uid=0",
        E.HOST_OUT_OF_MEMORY,
    ),
    (  # linux-mm
        "[337533.314412] Memory cgroup out of memory: Killed process 23793 (leaker) total-vm:2623712kB, "
        "anon-rss:506500kB, file-rss:1268kB, shmem-rss:0kB",
        E.HOST_OUT_OF_MEMORY,
    ),
    (  # kernel mailing lists
        "DMAR: [DMA Write NO_PASID] Request device [3e:00.0] fault addr 0x7efef4f08000 [fault reason "
        "0x79] SM: "
        "Read/Write permission error in second-level paging entry",
        E.DMA_MAPPING,
    ),
    (
        "DMAR: [DMA Write] Request device [04:00.0] PASID ffffffff fault addr 69974000 [fault reason "
        "05] PTE Write "
        "access is not set",
        E.DMA_MAPPING,
    ),
    (
        "thunderbolt 0000:06:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0010 address=0xbb0e3400 "
        "flags=0x0020]",
        E.DMA_MAPPING,
    ),
    ("[  94.579211] e1000e: enp0s31f6 NIC Link is Down", E.LINK_FLAPPING),
    ("igc 0000:03:00.0 enp3s0: NIC Link is Down", E.LINK_FLAPPING),
    ("mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN", E.LINK_FLAPPING),
    ("mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE", E.OTHER),
    (  # NVSentinel #155: three lines, no Xid
        "NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands.",
        E.GPU_LOST,
    ),
    ("NVRM: GPU 0000:02:00.0: RmInitAdapter failed! (0x62:0x55:1861)", E.GPU_DRIVER),
    (  # gpu-burn #1
        "pcieport 0000:00:02.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, "
        "id=0010(Receiver ID)",
        E.HOST_HARDWARE,
    ),
    (  # returnn #1486: corrected by the link itself
        "pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
        E.OTHER,
    ),
    ("INFO: task kworker/13:2:4055883 blocked for more than 120 seconds.", E.TASK_HANG),
    ("blk_update_request: I/O error, dev sdb, sector 2048", E.STORAGE),
    ("eth0: link up", E.OTHER),
    ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 46 sourcetrack timeout", E.NVLINK),
    (
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)",
        E.NVLINK_NONFATAL,
    ),
    ("arm-smmu-v3 arm-smmu-v3.0.auto: event 0x10 received:", E.DMA_MAPPING),
    (
        "nvme 0000:01:00.0: swiotlb buffer is full (sz: 131072 bytes), total 32768 (slots), used 26 (slots)",
        E.DMA_MAPPING,
    ),
    ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0", E.HOST_HARDWARE),
    ("EDAC MC1: 1 CE memory scrubbing error on CPU_SrcID#1_MC#0_Chan#0_DIMM#0", E.ECC_CORRECTED),
    ("{1}[Hardware Error]: event severity: fatal", E.HOST_HARDWARE),
    ("EXT4-fs (sda1): Remounting filesystem read-only", E.STORAGE),
    ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4242]", E.TASK_HANG),
    ("bond0: link status definitely down for interface ens1f0, disabling it", E.LINK_FLAPPING),
]
EXCEPTIONS = [
    # CUDA's own texts, cudaGetErrorString, as torch wraps them
    ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", E.ECC),
    (  # DLRover's documentation
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution\nCUDA "
        "kernel errors "
        "might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1.\nCompile with `TORCH_USE_CUDA_DSA` to enable "
        "device-side assertions.\n",
        E.NVLINK,
    ),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", E.ILLEGAL_MEMORY_ACCESS),
    ("Triton Error [CUDA]: an illegal memory access was encountered", E.ILLEGAL_MEMORY_ACCESS),
    ("cuLaunchKernel failed: <CUresult.CUDA_ERROR_ILLEGAL_ADDRESS: 700>", E.ILLEGAL_MEMORY_ACCESS),
    ("RuntimeError: CUDA error: misaligned address", E.ILLEGAL_MEMORY_ACCESS),
    ("RuntimeError: CUDA error: device-side assert triggered", E.DEVICE_ASSERT),
    ("RuntimeError: CUDA error: unspecified launch failure", E.CUDA),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", E.CUDA),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", E.CUDA),
    (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        E.GPU_OUT_OF_MEMORY,
    ),
    ("RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected", E.GPU_DRIVER),
    ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", E.GPU_DRIVER),
    ("Failed to initialize NVML: Driver/library version mismatch", E.GPU_DRIVER),
    ("nvls.cc:123 NCCL WARN Cuda failure 802 'system not yet initialized'", E.GPU_DRIVER),
    (
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        E.GPU_DRIVER,
    ),
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 146.00 MiB.\n"
        "GPU 0 has a total capacity of 8.00 GiB of which 0 bytes is free.",
        E.GPU_OUT_OF_MEMORY,
    ),
    ("RuntimeError: CUDA error: out of memory", E.GPU_OUT_OF_MEMORY),
    (
        "Memory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f. Reason: Unknown.",
        E.ILLEGAL_MEMORY_ACCESS,
    ),
    # NCCL and torch's ProcessGroupNCCL
    (  # LlamaFactory #7396
        "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective "
        "operation "
        "timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, "
        "Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",
        E.NCCL_TIMEOUT,
    ),
    (  # OFA #271
        "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before "
        "timing out.",
        E.NCCL_TIMEOUT,
    ),
    (
        "[PG 0 Rank 25] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in "
        "monitoring enqueued collectives.",
        E.NCCL_TIMEOUT,
    ),
    (
        "[Rank 3] Some NCCL operations have failed or timed out. Due to the asynchronous nature",
        E.NCCL_TIMEOUT,
    ),
    (
        "NCCL error: remote process exited or there was a network error, NCCL version "
        "2.19.3\nncclRemoteError: A "
        "call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
        "NET/IB : Got completion from peer 10.42.0.2<47534> with error 5, opcode 48, len 32764, vendor "
        "err 244",
        E.OTHER_NETWORK,
    ),
    (
        "transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, "
        "opcode 0, len 0, vendor err 129 (Recv)",
        E.LINK_FLAPPING,
    ),
    (
        "NCCL WARN NET/IB: Got completion from peer 10.153.235.13<40554> with "
        "status=IBV_WC_RETRY_EXC_ERR(12) "
        "opcode=IBV_WC_RECV_RDMA_WITH_IMM(129) vendor_err=129 localGid ::ffff:1.1.2.2 hca mlx5_1",
        E.LINK_FLAPPING,
    ),
    (
        "NCCL error: remote process exited or there was a network error\n"
        "ncclRemoteError: socketProgress: Connection closed by remote peer",
        E.CONNECTION_RESET,
    ),
    (
        "torch.distributed.DistBackendError: NCCL error in: "
        "../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, "
        "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version "
        "2.21.5\nncclSystemError: "
        "System call (e.g. socket, malloc) or external library call failed or device error.",
        E.OTHER_NETWORK,
    ),
    (
        "socketStartConnect: Connect to 172.18.0.2<44801> failed : Software caused connection abort",
        E.OTHER_NETWORK,
    ),
    (
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1333, invalid usage\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000",
        E.USER_CODE,
    ),
    (
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        E.GPU_OUT_OF_MEMORY,
    ),
    # measured: gloo with a killed peer, with a sleeping peer
    (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
        "[127.0.0.1]:27823: "
        "Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the "
        "application. "
        "Check the logs of the remote worker before reporting an error. GLHF! 🏖️",
        E.CONNECTION_RESET,
    ),
    (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
        "3000ms for recv operation to complete",
        E.NCCL_TIMEOUT,
    ),
    ("RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:27823", E.CONNECTION_RESET),
    # measured: torch's store
    (
        "torch.distributed.DistNetworkError: The client socket has timed out after 1500ms while trying "
        "to connect "
        "to (127.0.0.1, 1).",
        E.CONNECTION_REFUSED,
    ),
    (
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. "
        "Did the "
        "remote server shutdown or crash?",
        E.CONNECTION_RESET,
    ),
    ("torch.distributed.DistStoreError: wait timeout after 500ms, keys: /zz", E.NCCL_TIMEOUT),
    # measured: memory, disk, data, sockets
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough "
        "memory: you tried "
        "to allocate 4611686018427387904 bytes.",
        E.HOST_OUT_OF_MEMORY,
    ),
    ("MemoryError", E.HOST_OUT_OF_MEMORY),
    ("OSError: [Errno 28] No space left on device", E.DISK_FULL),
    ("OSError: [Errno 122] Disk quota exceeded", E.DISK_FULL),
    ("OSError: [Errno 5] Input/output error", E.STORAGE),
    ("OSError: [Errno 116] Stale file handle: 'train.bin'", E.REMOTE_STORAGE),
    ("RuntimeError: DataLoader worker (pid(s) 18294) exited unexpectedly", E.DATA),
    ("RuntimeError: DataLoader worker (pid 18294) is killed by signal: Killed. ", E.DATA),
    (
        "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        "last):\nValueError: bad record 7",
        E.DATA,
    ),
    (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared "
        "memory "
        "(shm).",
        E.HOST_OUT_OF_MEMORY,
    ),
    ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", E.DATA),
    (
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        E.DATA,
    ),
    ("ConnectionRefusedError: [Errno 111] Connection refused", E.CONNECTION_REFUSED),
    ("BrokenPipeError: [Errno 32] Broken pipe", E.CONNECTION_RESET),
    ("socket.gaierror: [Errno -3] Temporary failure in name resolution", E.OTHER_NETWORK),
    ("OSError: [Errno 113] No route to host", E.OTHER_NETWORK),
    ("RuntimeError: Cannot allocate memory", E.HOST_OUT_OF_MEMORY),
    # returnn #1486
    ("Unable to determine the device handle for GPU0000:03:00.0: Unknown Error", E.GPU_LOST),
    ("RuntimeError: CUDA error: mapping of buffer object failed", E.DMA_MAPPING),
    ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version", E.GPU_DRIVER),
    ("Error 803: system has unsupported display driver / cuda driver combination", E.GPU_DRIVER),
    (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions",
        E.GPU_DRIVER,
    ),
    (":0:rocdevice.cpp :2672: HW Exception by GPU node-2 (Agent handle: 0x1) reason :GPU Hang", E.CUDA),
    ("NCCL WARN Cuda failure 'unspecified launch failure'", E.CUDA),
    ("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5", E.CUDA),
    ("NCCL WARN NET/IB : mlx5_0:1 Got async event : port error", E.LINK_FLAPPING),
    ("RuntimeError: Application timeout caused pair closure", E.NCCL_TIMEOUT),
    ("RuntimeError: Rank 1 timed out in monitoredBarrier after 3000 ms.", E.NCCL_TIMEOUT),
    ("torch.distributed.DistStoreError: Socket Timeout", E.NCCL_TIMEOUT),
    ("NCCL failure: remote process exited or there was a network error", E.CONNECTION_RESET),
    ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.", E.COMMUNICATOR_ABORTED),
    # measured: the program is wrong
    ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)", E.USER_CODE),
    ("IndexError: index out of range in self", E.USER_CODE),
    ("AssertionError: Torch not compiled with CUDA enabled", E.USER_CODE),
    ("", E.USER_CODE),
]
EXITS = [
    ("killed by SIGKILL", E.KILLED),
    ("Signal 9 (SIGKILL) received by PID 4242", E.KILLED),
    ("exited with code 137", E.KILLED),
    ("killed by SIGSEGV", E.CRASH),
    ("killed by SIGBUS", E.CRASH),
    ("killed by SIGABRT", E.CRASH),
    ("Signal 11 (SIGSEGV) received by PID 4242", E.CRASH),
    ("exited with code 134", E.CRASH),
    ("killed by SIGTERM", E.ABNORMAL_EXIT),
    ("exited with code 1", E.ABNORMAL_EXIT),
    ("exited with code 1\nRuntimeError: CUDA error: uncorrectable ECC error encountered", E.ECC),
    (
        "killed by SIGABRT\nterminate called after throwing an instance of 'std::bad_alloc'",
        E.HOST_OUT_OF_MEMORY,
    ),
    (
        "slurmstepd: error: *** JOB 1234 ON node1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***",
        E.NODE_TAKEN,
    ),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=1234.0.", E.HOST_OUT_OF_MEMORY),
    (
        'exited with code 1\nTraceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
        "ZeroDivisionError: division by zero",
        E.USER_CODE,
    ),
    ("killed by SIGKILL\nTraceback (most recent call last):\nValueError: handled long ago", E.KILLED),
    ("gone", E.ABNORMAL_EXIT),
]


@pytest.mark.parametrize(("text", "kind"), XID_LINES + KERNEL_LINES)
def test_a_line_of_the_kernel_is_read_as(text: str, kind: ErrorKind) -> None:
    assert judge("kernel", text).kind is kind


@pytest.mark.parametrize(("text", "kind"), EXCEPTIONS)
def test_an_exception_is_read_as(text: str, kind: ErrorKind) -> None:
    assert judge("exception", text).kind is kind


@pytest.mark.parametrize(("text", "kind"), EXITS)
def test_an_exit_is_read_as(text: str, kind: ErrorKind) -> None:
    assert judge("exit", text).kind is kind


def test_silence_and_missing_progress_speak_for_themselves() -> None:
    assert judge("silence", "websocket closed: Connection reset by peer").kind is E.LOST_CONNECTION
    assert judge("progress", "F3 has run for 4 times its expected time, in recv").kind is E.TASK_HANG


def test_unicrons_table_is_kept() -> None:
    """Table 1 of the paper: every error it names, with its severity."""
    unicron = {
        1: [E.LOST_CONNECTION, E.ECC, E.NVLINK, E.DMA_MAPPING, E.GPU_DRIVER],
        2: [E.ABNORMAL_EXIT, E.ILLEGAL_MEMORY_ACCESS, E.CUDA, E.USER_CODE, E.OTHER, E.TASK_HANG],
        3: [E.CONNECTION_REFUSED, E.CONNECTION_RESET, E.OTHER_NETWORK, E.NCCL_TIMEOUT, E.LINK_FLAPPING],
    }
    for severity, kinds in unicron.items():
        assert {TABLE[kind] for kind in kinds} == {Severity(severity)}


def test_every_kind_has_a_severity_a_meaning_and_a_way_to_be_found() -> None:
    assert set(TABLE) == set(MEANINGS) == set(ErrorKind)
    assert {kind for rule in REMEDIES for kind in rule.kinds} == set(ErrorKind)
    by_source = {E.OTHER, E.LOST_CONNECTION, E.TASK_HANG, E.XID, E.USER_CODE, E.SLOW_WORKER, E.SLOW_LINK}
    by_source |= {
        E.UNKILLABLE,
        E.NOT_FINITE,
        E.LOSS_SPIKE,
        E.GRAY_FAILURE,
        E.UNFIT,
        E.MARKED,
        E.WRONG_NUMBERS,
        E.DAMAGED_TENSOR,
        E.NOT_DETERMINISTIC,
        E.MIXED_VERSIONS,
    }
    assert {symptom.kind for symptom in SYMPTOMS} | {kind for kind, _ in XIDS.values()} | by_source == set(E)


def test_every_symptom_is_the_first_for_some_text() -> None:
    """None hides behind another, and none was written without a text to match."""
    here = [("kernel", XID_LINES + KERNEL_LINES), ("exception", EXCEPTIONS), ("exit", EXITS)]
    texts = [(source, text) for source, rows in here for text, _ in rows]
    first = {
        next((s for s in SYMPTOMS if source in s.sources and s.pattern.search(text)), None)
        for source, text in texts + [(text.source, text.text) for text in TEXTS + LATER]
    }
    assert [symptom.pattern.pattern for symptom in SYMPTOMS if symptom not in first] == []


def test_no_text_can_make_a_pattern_run_for_long() -> None:
    """Repeats are bounded or of one small class: a hostile log would else hold up a coordinator for long."""
    for symptom in SYMPTOMS:
        without_small = re.sub(r"\\[dw]\+", "", symptom.pattern.pattern)
        assert not re.search(r"(?<!\\)[*+]", without_small), symptom.pattern.pattern


def test_of_several_xids_the_gravest_is_the_cause() -> None:
    lines = "\n".join(text for text, kind in XID_LINES if kind in (E.CUDA, E.GPU_LOST))
    judgement = judge("kernel", lines)
    assert judgement.kind is E.GPU_LOST
    assert "79, GPU has fallen off the bus" in judgement.because


def test_what_is_said_on_the_way_to_success_is_no_evidence() -> None:
    chatter = (
        "[rank1]:[W1115 04:47:59.711402017 TCPStore.cpp:340] [c10d] TCP client failed to "
        "connect/validate to host "
        "127.0.0.1:1 - retrying: Connection refused\n"
        "node-2:5776:5898 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/CUMEM Connection reset by peer\n"
    )
    assert judge("exit", chatter + "exited with code 1").kind is E.ABNORMAL_EXIT
    assert judge("exception", chatter + "ValueError: n").kind is E.USER_CODE
    assert judge("log", chatter).kind is E.OTHER


def test_because_says_what_is_wrong_and_quotes_the_words() -> None:
    judgement = judge("exception", EXCEPTIONS[0][0])
    assert judgement.because == (
        'the memory of a GPU has an uncorrectable error ("uncorrectable ECC error encountered")'
    )
    assert "\n" not in judge("exception", "a" * 500 + "\nb").because
    assert len(judge("exception", "a" * 500).because) < 400


@given(
    source=st.sampled_from(["exit", "exception", "silence", "progress", "kernel", "log", "unheard of"]),
    text=st.one_of(st.text(), st.from_regex(re.compile(r"NVRM: Xid \(PCI:0000:01:00\): \d{1,6}, .*"))),
)
def test_any_text_is_judged_and_the_table_has_the_last_word(source: str, text: str) -> None:
    judgement = judge(source, text)  # type: ignore[arg-type]
    assert judgement.severity is TABLE[judgement.kind]
    assert judgement.because.startswith(MEANINGS[judgement.kind])


def test_a_text_without_end_is_judged_by_its_beginning_and_its_end() -> None:
    filling = "nothing to see here\n" * 100_000
    assert judge("exit", "exited with code 1\n" + filling + "CUDA error: unknown error").kind is E.CUDA
    assert judge("exit", "uncorrectable ECC error encountered\n" + filling).kind is E.ECC


@given(
    kind=st.sampled_from(ErrorKind),
    is_alive=st.booleans(),
    retries=st.integers(0, 9),
    failures=st.integers(0, 9),
    can_leave_node=st.booleans(),
)
def test_there_is_a_remedy_for_every_fault_and_it_is_never_milder_than_the_fault(
    kind: ErrorKind, is_alive: bool, retries: int, failures: int, can_leave_node: bool
) -> None:
    situation = Situation(
        judgement=known(kind, "a test"),
        is_alive=is_alive,
        retries=retries,
        failures=failures,
        node="a",
        can_leave_node=can_leave_node,
    )
    choice = choose(situation, Patience())
    rule = next(rule for rule in REMEDIES if rule.name == choice.what)
    assert kind in rule.kinds
    assert rule.severity <= TABLE[kind]
    assert choice.because


def test_where_something_is_used_up_a_restart_waits_and_then_escalates_as_usual() -> None:
    def at(failures: int) -> Situation:
        judgement = known(ErrorKind.HOST_OUT_OF_MEMORY, "a test")
        return Situation(judgement=judgement, failures=failures, node="a", can_leave_node=True)

    first, later = choose(at(1), Patience()), choose(at(9), Patience())
    assert (first.what, first.wait_s) == ("restart the worker after a pause", 5.0)
    assert later.what == "isolate the node"


@pytest.mark.parametrize("kind", [E.GPU_OUT_OF_MEMORY, E.DISK_FULL, E.RESOURCE_LIMIT])
def test_a_remedy_that_two_rules_refuse_alike_is_refused_once_in_the_reason(kind: ErrorKind) -> None:
    """ "2 restarts on n1 have not helped; 2 restarts on n1 have not helped"."""
    situation = Situation(judgement=known(kind, "no room"), node="n1", failures=3, can_leave_node=True)
    because = choose(situation, Patience()).because
    assert because.count("have not helped") == 1, because
