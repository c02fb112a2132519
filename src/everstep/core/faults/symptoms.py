"""What broken things say: the words of PyTorch, gloo, NCCL, CUDA, Python and the kernel, and what each means.

A `Symptom` is one pattern, the kind of error it shows, and where its text comes from, so that the next one to
add a pattern can check the old ones. Order is meaning: the first symptom that is found wins, and causes stand
before what follows from them. A GPU with an ECC error also raises CUDA errors, and its peers time out; a
worker out of memory also resets its connections:

    hardware → memory, disk → CUDA → timeouts and links → connections → data → how the process ended

Patterns quote whole phrases. Single words are no evidence: a healthy NCCL log is full of "NVLink". Every
repeat in a pattern is bounded, for what is matched was written by a process that has failed.

Xid lines of NVIDIA's driver are told apart by number, as in NVIDIA's Xid catalog. Of several the gravest
counts, for the others (43, 45) are mostly its echo.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum


class ErrorKind(StrEnum):
    # Hardware, and what can only be mended by leaving the node
    ECC = "ecc error"
    NVLINK = "nvlink error"
    DMA_MAPPING = "invalid dma mapping"
    GPU_DRIVER = "gpu driver error"
    GPU_LOST = "gpu lost"
    HOST_HARDWARE = "host hardware error"
    STORAGE = "storage error"
    NODE_TAKEN = "node taken away"
    LOST_CONNECTION = "lost connection"
    # The worker
    ECC_CONTAINED = "contained ecc error"
    ILLEGAL_MEMORY_ACCESS = "illegal memory access"
    DEVICE_ASSERT = "device-side assert"
    CUDA = "cuda error"
    XID = "other xid"
    GPU_OUT_OF_MEMORY = "gpu out of memory"
    HOST_OUT_OF_MEMORY = "host out of memory"
    DISK_FULL = "disk full"
    TASK_HANG = "task hang"
    DATA = "data error"
    USER_CODE = "exception in user code"
    KILLED = "killed"
    CRASH = "crash"
    ABNORMAL_EXIT = "abnormal exit"
    OTHER = "other"
    # What may pass
    ECC_CORRECTED = "corrected ecc error"
    NVLINK_NONFATAL = "nonfatal nvlink error"
    NCCL_TIMEOUT = "nccl timeout"
    LINK_FLAPPING = "link flapping"
    CONNECTION_REFUSED = "connection refused"
    CONNECTION_RESET = "connection reset"
    OTHER_NETWORK = "other network error"
    SLOW_WORKER = "slow worker"
    SLOW_LINK = "slow link"


ANYWHERE = frozenset({"exit", "exception", "kernel", "log"})
PROGRAM = frozenset({"exit", "exception", "log"})
KERNEL = frozenset({"kernel", "log"})
EXIT = frozenset({"exit", "log"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    kind: ErrorKind
    pattern: re.Pattern[str]
    origin: str
    sources: frozenset[str] = field(default=ANYWHERE)


def _symptom(
    kind: ErrorKind, pattern: str, origin: str, sources: frozenset[str] = ANYWHERE, flags: int = 0
) -> Symptom:
    return Symptom(kind=kind, pattern=re.compile(pattern, flags), origin=origin, sources=sources)


XID_LINE = re.compile(r"NVRM: Xid \([0-9A-Za-z:.]{1,32}\): (\d{1,4})(?:,[^\n]{0,300})?")
XIDS: dict[int, tuple[ErrorKind, str]] = {  # NVIDIA, "Xid Errors" and its catalog
    13: (ErrorKind.CUDA, "graphics engine exception"),
    31: (ErrorKind.ILLEGAL_MEMORY_ACCESS, "GPU memory page fault"),
    32: (ErrorKind.DMA_MAPPING, "invalid or corrupted push buffer stream, from the DMA controller"),
    38: (ErrorKind.GPU_DRIVER, "driver firmware error"),
    43: (ErrorKind.CUDA, "GPU stopped processing: a fault of the program"),
    45: (ErrorKind.CUDA, "preemptive cleanup after an earlier error, or a killed process"),
    46: (ErrorKind.GPU_DRIVER, "GPU stopped processing"),
    48: (ErrorKind.ECC, "double-bit ECC error"),
    61: (ErrorKind.GPU_DRIVER, "internal micro-controller breakpoint"),
    62: (ErrorKind.GPU_DRIVER, "internal micro-controller halt"),
    63: (ErrorKind.ECC_CORRECTED, "row remapped or page retired"),
    64: (ErrorKind.ECC, "row remapping or page retirement failed"),
    69: (ErrorKind.CUDA, "graphics engine class error"),
    74: (ErrorKind.NVLINK, "NVLink error"),
    79: (ErrorKind.GPU_LOST, "GPU has fallen off the bus"),
    92: (ErrorKind.ECC_CORRECTED, "high rate of single-bit ECC errors"),
    94: (ErrorKind.ECC_CONTAINED, "contained ECC error"),
    95: (ErrorKind.ECC, "uncontained ECC error"),
    109: (ErrorKind.GPU_DRIVER, "context switch timeout"),
    119: (ErrorKind.GPU_DRIVER, "GSP RPC timeout"),
    120: (ErrorKind.GPU_DRIVER, "GSP error"),
    121: (ErrorKind.NVLINK, "C2C link error"),
    140: (ErrorKind.ECC, "unrecovered ECC error"),
    143: (ErrorKind.GPU_DRIVER, "GPU initialisation error"),
    144: (ErrorKind.NVLINK, "NVLink SAW error"),
    145: (ErrorKind.NVLINK, "NVLink RLW error"),
    146: (ErrorKind.NVLINK, "NVLink TLW error"),
    147: (ErrorKind.NVLINK, "NVLink TREX error"),
    148: (ErrorKind.NVLINK, "NVLink NVLPW_CTRL error"),
    149: (ErrorKind.NVLINK, "NVLink NETIR error"),
    150: (ErrorKind.NVLINK, "NVLink MSE error"),
    154: (ErrorKind.GPU_DRIVER, "GPU recovery action changed"),
}


def kind_of_xid(number: int, line: str) -> ErrorKind:
    """The words of the line count where NVIDIA's own meaning of a number depends on them."""
    kind, _ = XIDS.get(number, (ErrorKind.XID, ""))
    if kind is ErrorKind.NVLINK and " Nonfatal " in line:
        return ErrorKind.NVLINK_NONFATAL
    if number == 154 and re.search(r"to 0x0 \(None\)", line):
        return ErrorKind.XID
    return kind


SYMPTOMS: tuple[Symptom, ...] = (
    # Hardware: the GPU
    _symptom(ErrorKind.ECC, r"uncorrectable ECC error encountered", "CUDA: cudaErrorECCUncorrectable"),
    _symptom(ErrorKind.NVLINK, r"uncorrectable NVLink error detected", "CUDA: cudaErrorNvlinkUncorrectable"),
    _symptom(
        ErrorKind.NVLINK, r"SXid \([0-9A-Za-z:.]{1,32}\): \d+, Fatal", "kernel: nvidia-nvswitch", KERNEL
    ),
    _symptom(
        ErrorKind.NVLINK_NONFATAL,
        r"SXid \([0-9A-Za-z:.]{1,32}\): \d+, Non-fatal",
        "kernel: nvidia-nvswitch",
        KERNEL,
    ),
    _symptom(ErrorKind.GPU_LOST, r"(?:GPU has )?fallen off the bus", "kernel: NVRM, with and without Xid 79"),
    _symptom(ErrorKind.GPU_LOST, r"Unable to determine the device handle for GPU", "nvidia-smi"),
    _symptom(
        ErrorKind.DMA_MAPPING,
        r"DMAR: \[DMA (?:Read|Write)[^\n]{0,300}fault addr",
        "kernel: Intel IOMMU",
        KERNEL,
    ),
    _symptom(ErrorKind.DMA_MAPPING, r"AMD-Vi: Event logged \[IO_PAGE_FAULT", "kernel: AMD IOMMU", KERNEL),
    _symptom(
        ErrorKind.DMA_MAPPING, r"arm-smmu-v3[^\n]{0,300}: event 0x10 received", "kernel: Arm SMMU", KERNEL
    ),
    _symptom(ErrorKind.DMA_MAPPING, r"swiotlb buffer is full", "kernel: swiotlb", KERNEL),
    _symptom(
        ErrorKind.DMA_MAPPING, r"mapping of buffer object failed", "CUDA: cudaErrorMapBufferObjectFailed"
    ),
    _symptom(ErrorKind.GPU_DRIVER, r"Driver/library version mismatch", "NVML"),
    _symptom(
        ErrorKind.GPU_DRIVER, r"CUDA driver version is insufficient", "CUDA: cudaErrorInsufficientDriver"
    ),
    _symptom(ErrorKind.GPU_DRIVER, r"no CUDA-capable device is detected", "CUDA: cudaErrorNoDevice"),
    _symptom(
        ErrorKind.GPU_DRIVER,
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        "CUDA: DevicesUnavailable",
    ),
    _symptom(ErrorKind.GPU_DRIVER, r"system not yet initialized", "CUDA: cudaErrorSystemNotReady"),
    _symptom(
        ErrorKind.GPU_DRIVER, r"unsupported display driver / cuda driver combination", "CUDA: DriverMismatch"
    ),
    _symptom(ErrorKind.GPU_DRIVER, r"(?:Found no NVIDIA driver|NVIDIA driver) on your system", "torch.cuda"),
    _symptom(ErrorKind.GPU_DRIVER, r"Unexpected error from cudaGetDeviceCount\(\)", "torch.cuda"),
    _symptom(ErrorKind.GPU_DRIVER, r"NVRM: [^\n]{0,300}RmInitAdapter failed", "kernel: NVRM", KERNEL),
    # Hardware: the host
    _symptom(ErrorKind.HOST_HARDWARE, r"EDAC [^\n]{0,300}: \d+ UE ", "kernel: EDAC", KERNEL),
    _symptom(
        ErrorKind.HOST_HARDWARE,
        r"\[Hardware Error\]: [^\n]{0,300}(?:[Ff]atal|Uncorrected)",
        "kernel: MCE",
        KERNEL,
    ),
    _symptom(
        ErrorKind.HOST_HARDWARE, r"PCIe Bus Error: severity=Uncorrect\w+ \(Fatal\)", "kernel: AER", KERNEL
    ),
    _symptom(ErrorKind.ECC_CORRECTED, r"EDAC [^\n]{0,300}: \d+ CE ", "kernel: EDAC", KERNEL),
    _symptom(
        ErrorKind.STORAGE,
        r"(?:blk_update_request: )?I/O error, dev \w+, sector",
        "kernel: block layer",
        KERNEL,
    ),
    _symptom(ErrorKind.STORAGE, r"Remounting filesystem read-only", "kernel: ext4", KERNEL),
    _symptom(ErrorKind.STORAGE, r"\[Errno (?:5|30)\]|Read-only file system", "errno EIO, EROFS", PROGRAM),
    _symptom(
        ErrorKind.NODE_TAKEN,
        r"CANCELLED AT [^\n]{0,300} DUE TO (?:PREEMPTION|NODE FAILURE)",
        "slurmstepd",
        PROGRAM,
    ),
    # Memory and disk
    _symptom(
        ErrorKind.HOST_OUT_OF_MEMORY, r"[Oo]ut of memory: Kill(?:ed)? process", "kernel: OOM killer", KERNEL
    ),
    _symptom(ErrorKind.HOST_OUT_OF_MEMORY, r"oom-kill:constraint=", "kernel: OOM killer", KERNEL),
    _symptom(ErrorKind.HOST_OUT_OF_MEMORY, r"[Dd]etected \d+ oom[-_]kill event", "slurmstepd", PROGRAM),
    _symptom(ErrorKind.GPU_OUT_OF_MEMORY, r"(?:CUDA|HIP) out of memory\.", "torch: CUDACachingAllocator"),
    _symptom(ErrorKind.GPU_OUT_OF_MEMORY, r"CUDA error: out of memory", "CUDA: cudaErrorMemoryAllocation"),
    _symptom(ErrorKind.GPU_OUT_OF_MEMORY, r"Cuda failure (?:\d+ )?'out of memory'", "NCCL: CUDACHECK"),
    _symptom(ErrorKind.GPU_OUT_OF_MEMORY, r"CUBLAS_STATUS_ALLOC_FAILED", "cuBLAS"),
    _symptom(
        ErrorKind.HOST_OUT_OF_MEMORY,
        r"DefaultCPUAllocator: (?:not enough memory|can't allocate memory)",
        "torch: alloc_cpu.cpp",
        PROGRAM,
    ),
    _symptom(
        ErrorKind.HOST_OUT_OF_MEMORY, r"insufficient shared memory \(shm\)", "torch: DataLoader", PROGRAM
    ),
    _symptom(ErrorKind.HOST_OUT_OF_MEMORY, r"\[Errno 12\]|Cannot allocate memory", "errno ENOMEM", PROGRAM),
    _symptom(ErrorKind.HOST_OUT_OF_MEMORY, r"std::bad_alloc|^MemoryError\b", "C++, Python", PROGRAM, re.M),
    _symptom(
        ErrorKind.DISK_FULL,
        r"\[Errno (?:28|122)\]|No space left on device|Disk quota exceeded",
        "errno ENOSPC, EDQUOT",
        PROGRAM,
    ),
    # CUDA
    _symptom(ErrorKind.DEVICE_ASSERT, r"device-side assert triggered", "CUDA: cudaErrorAssert", PROGRAM),
    _symptom(
        ErrorKind.ILLEGAL_MEMORY_ACCESS,
        r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA: cudaErrorIllegalAddress",
        PROGRAM,
    ),
    _symptom(
        ErrorKind.ILLEGAL_MEMORY_ACCESS,
        r"CUDA error: misaligned address|CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA: cudaErrorMisalignedAddress",
        PROGRAM,
    ),
    _symptom(ErrorKind.ILLEGAL_MEMORY_ACCESS, r"Memory access fault by GPU node-\d+", "ROCm", PROGRAM),
    _symptom(ErrorKind.CUDA, r"HW Exception by GPU node-\d+", "ROCm", PROGRAM),
    _symptom(ErrorKind.CUDA, r"(?:CUDA|HIP) error: [^\n]{0,300}", "torch: CUDAException", PROGRAM),
    _symptom(ErrorKind.CUDA, r"Cuda failure[^\n]{0,300}", "NCCL: CUDACHECK", PROGRAM),
    _symptom(ErrorKind.CUDA, r"unhandled cuda error", "NCCL: ncclUnhandledCudaError", PROGRAM),
    _symptom(ErrorKind.CUDA, r"CUBLAS_STATUS_\w+|CUDNN_STATUS_\w+|CUDA_ERROR_\w+", "cuBLAS, cuDNN", PROGRAM),
    # Hangs and timeouts of collectives
    _symptom(
        ErrorKind.TASK_HANG,
        r"INFO: task \S{1,99} blocked for more than \d+ seconds",
        "kernel: khungtaskd",
        KERNEL,
    ),
    _symptom(ErrorKind.TASK_HANG, r"soft lockup - CPU#\d+ stuck for", "kernel: watchdog", KERNEL),
    _symptom(
        ErrorKind.LINK_FLAPPING,
        r"Got completion from peer [^\n]{0,300}(?:status=(?:12\b|IBV_WC_RETRY_EXC_ERR)|error 12\b)",
        "NCCL: NET/IB, transport retries exhausted",
        PROGRAM,
    ),
    _symptom(ErrorKind.LINK_FLAPPING, r"Got async event ?: port error", "NCCL: NET/IB", PROGRAM),
    _symptom(ErrorKind.OTHER_NETWORK, r"Got completion from peer [^\n]{0,300}", "NCCL: NET/IB", PROGRAM),
    _symptom(
        ErrorKind.NCCL_TIMEOUT,
        r"Watchdog caught collective operation timeout",
        "torch: ProcessGroupNCCL",
        PROGRAM,
    ),
    _symptom(
        ErrorKind.NCCL_TIMEOUT,
        r"ProcessGroupNCCL's watchdog got stuck for",
        "torch: ProcessGroupNCCL",
        PROGRAM,
    ),
    _symptom(
        ErrorKind.NCCL_TIMEOUT,
        r"Some NCCL operations have failed or timed out",
        "torch: ProcessGroupNCCL",
        PROGRAM,
    ),
    _symptom(
        ErrorKind.NCCL_TIMEOUT,
        r"Timed out waiting \d+ms for (?:recv|send) operation",
        "gloo: unbound_buffer.cc",
        PROGRAM,
    ),
    _symptom(ErrorKind.NCCL_TIMEOUT, r"Application timeout caused pair closure", "gloo: pair.cc", PROGRAM),
    _symptom(ErrorKind.NCCL_TIMEOUT, r"timed out in monitoredBarrier", "torch: ProcessGroupGloo", PROGRAM),
    _symptom(ErrorKind.NCCL_TIMEOUT, r"wait timeout after \d+ms, keys", "torch: TCPStore", PROGRAM),
    _symptom(
        ErrorKind.NCCL_TIMEOUT, r"DistStoreError: Socket Timeout", "torch: TCPStore before 2.6", PROGRAM
    ),
    # Links and connections
    _symptom(ErrorKind.LINK_FLAPPING, r"NIC Link is Down", "kernel: Intel drivers", KERNEL),
    _symptom(
        ErrorKind.LINK_FLAPPING, r"mlx\d_core [^\n]{0,300}[Ll]ink (?:DOWN|down)", "kernel: mlx5", KERNEL
    ),
    _symptom(
        ErrorKind.LINK_FLAPPING, r"link status definitely down for interface", "kernel: bonding", KERNEL
    ),
    _symptom(
        ErrorKind.CONNECTION_REFUSED,
        r"Connection refused|ConnectionRefusedError",
        "errno ECONNREFUSED",
        PROGRAM,
    ),
    _symptom(
        ErrorKind.CONNECTION_REFUSED,
        r"The client socket has (?:timed out after [^\n]{0,40} while trying to connect|failed to connect to)",
        "torch: socket.cpp",
        PROGRAM,
    ),
    _symptom(
        ErrorKind.CONNECTION_RESET,
        r"Connection reset by peer|ConnectionResetError",
        "errno ECONNRESET",
        PROGRAM,
    ),
    _symptom(ErrorKind.CONNECTION_RESET, r"Broken pipe|BrokenPipeError", "errno EPIPE", PROGRAM),
    _symptom(
        ErrorKind.CONNECTION_RESET, r"Connection closed by (?:remote )?peer", "gloo: pair.cc, NCCL", PROGRAM
    ),
    _symptom(ErrorKind.CONNECTION_RESET, r"Connection was likely closed", "torch: TCPStore", PROGRAM),
    _symptom(
        ErrorKind.CONNECTION_RESET,
        r"remote process exited or there was a network error|ncclRemoteError",
        "NCCL: ncclRemoteError",
        PROGRAM,
    ),
    _symptom(
        ErrorKind.OTHER_NETWORK,
        r"Network is unreachable|No route to host|Connection timed out|Software caused connection abort",
        "errno",
        PROGRAM,
    ),
    _symptom(
        ErrorKind.OTHER_NETWORK,
        r"Name or service not known|Temporary failure in name resolution",
        "getaddrinfo",
        PROGRAM,
    ),
    _symptom(ErrorKind.OTHER_NETWORK, r"Stale file handle|\[Errno 116\]", "errno ESTALE", PROGRAM),
    _symptom(ErrorKind.USER_CODE, r"ncclInvalid(?:Usage|Argument)", "NCCL, torch: NCCLUtils", PROGRAM),
    _symptom(ErrorKind.OTHER_NETWORK, r"unhandled system error|ncclSystemError", "NCCL", PROGRAM),
    _symptom(ErrorKind.OTHER_NETWORK, r"Dist(?:Network|Backend)Error", "torch.distributed", PROGRAM),
    # Data
    _symptom(ErrorKind.DATA, r"in DataLoader worker process \d+", "torch: DataLoader", PROGRAM),
    _symptom(
        ErrorKind.DATA,
        r"DataLoader worker \(pid[^\n]{0,80}(?:exited unexpectedly|is killed by signal)",
        "torch: DataLoader",
        PROGRAM,
    ),
    _symptom(
        ErrorKind.DATA,
        r"^(?:\w{1,40}\.){0,6}(?:UnicodeDecodeError|JSONDecodeError|ArrowInvalid|SafetensorError|BadZipFile)\b",
        "Python and its readers",
        PROGRAM,
        re.M,
    ),
    _symptom(ErrorKind.DATA, r"PytorchStreamReader failed", "torch.load", PROGRAM),
    # How the process ended
    _symptom(
        ErrorKind.KILLED, r"killed by SIGKILL|Signal 9 \(SIGKILL\)|exited with code 137\b", "wait(2)", EXIT
    ),
    _symptom(
        ErrorKind.CRASH,
        r"(?:killed by|Signal \d+ \() ?SIG(?:SEGV|BUS|ABRT|ILL|FPE|SYS|TRAP)",
        "wait(2)",
        EXIT,
    ),
    _symptom(
        ErrorKind.CRASH, r"exited with code (?:132|134|135|136|139)\b", "wait(2), by way of a shell", EXIT
    ),
    _symptom(
        ErrorKind.USER_CODE, r"Traceback \(most recent call last\)", "Python, on stderr", EXIT - {"log"}
    ),
    _symptom(ErrorKind.ABNORMAL_EXIT, r"killed by SIG\w+|exited with code \d+", "wait(2)", EXIT),
)
