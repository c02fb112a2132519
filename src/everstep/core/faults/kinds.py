"""The kinds of errors, how severe each is, and what it means: one table.

    SEV1  the node must be left
    SEV2  the worker must be restarted; it comes back from a live replica
    SEV3  a retry in place may do

To add a kind: a member of `ErrorKind`, a row of `KINDS`, and rows of `symptoms.SYMPTOMS` that find it. The
kinds and severities of Unicron's table are kept; what it does not name answers the same question: what must
be replaced for the error to go away? Where two answers are possible, the table has the milder one: a remedy
that fails is followed by a more severe one, while a node that is left for nothing is lost at once.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple


class Severity(IntEnum):
    SEV1 = 1
    SEV2 = 2
    SEV3 = 3

    def __str__(self) -> str:
        return self.name


SEV1, SEV2, SEV3 = Severity


class ErrorKind(StrEnum):
    ECC = "ecc error"
    NVLINK = "nvlink error"
    DMA_MAPPING = "invalid dma mapping"
    GPU_DRIVER = "gpu driver error"
    GPU_LOST = "gpu lost"
    HOST_HARDWARE = "host hardware error"
    KERNEL = "kernel failure"
    NIC = "network adapter error"
    STORAGE = "storage error"
    NODE_TAKEN = "node taken away"
    UNKILLABLE = "unkillable process"
    WRONG_NUMBERS = "wrong numbers"
    GRAY_FAILURE = "gray failure"
    UNFIT = "unfit node"
    LOST_CONNECTION = "lost connection"
    ECC_CONTAINED = "contained ecc error"
    DAMAGED_TENSOR = "damaged tensor"
    ILLEGAL_MEMORY_ACCESS = "illegal memory access"
    DEVICE_ASSERT = "device-side assert"
    CUDA = "cuda error"
    NCCL_INTERNAL = "nccl internal error"
    XID = "other xid"
    GPU_OUT_OF_MEMORY = "gpu out of memory"
    HOST_OUT_OF_MEMORY = "host out of memory"
    RESOURCE_LIMIT = "resource limit"
    DISK_FULL = "disk full"
    TASK_HANG = "task hang"
    DATA = "data error"
    MIXED_VERSIONS = "mixed versions"
    USER_CODE = "exception in user code"
    KILLED = "killed"
    CRASH = "crash"
    ABNORMAL_EXIT = "abnormal exit"
    OTHER = "other"
    ECC_CORRECTED = "corrected ecc error"
    NVLINK_NONFATAL = "nonfatal nvlink error"
    XID_NOTED = "xid without effect"
    NCCL_TIMEOUT = "nccl timeout"
    COMMUNICATOR_ABORTED = "communicator aborted"
    LINK_FLAPPING = "link flapping"
    REMOTE_STORAGE = "remote storage error"
    CONNECTION_REFUSED = "connection refused"
    CONNECTION_RESET = "connection reset"
    OTHER_NETWORK = "other network error"
    SLOW_WORKER = "slow worker"
    SLOW_LINK = "slow link"
    NOT_FINITE = "non-finite gradient"
    LOSS_SPIKE = "loss spike"
    MARKED = "marked node"
    NOT_DETERMINISTIC = "nondeterministic code"


class KindRow(NamedTuple):
    severity: Severity
    meaning: str


E = ErrorKind
KINDS: dict[ErrorKind, KindRow] = {
    # SEV1: hardware, and what can only be repaired by leaving the node
    E.ECC: KindRow(SEV1, "the memory of a GPU has an uncorrectable error"),
    E.NVLINK: KindRow(SEV1, "a link between GPUs has failed"),
    E.DMA_MAPPING: KindRow(SEV1, "a device accessed memory that is not mapped for it"),
    E.GPU_DRIVER: KindRow(SEV1, "the driver or the firmware of a GPU has failed"),
    E.GPU_LOST: KindRow(SEV1, "a GPU does not answer on its bus"),
    E.HOST_HARDWARE: KindRow(SEV1, "memory, processor, power or bus of the host has failed"),
    E.KERNEL: KindRow(SEV1, "the operating system's kernel has failed"),
    E.NIC: KindRow(SEV1, "a network adapter has failed"),
    E.STORAGE: KindRow(SEV1, "a disk of the node cannot be read or written"),
    E.UNKILLABLE: KindRow(SEV1, "a process outlives SIGKILL: a device or a mount hangs"),
    E.WRONG_NUMBERS: KindRow(SEV1, "a worker computes, or holds, other bits than its peers"),
    E.GRAY_FAILURE: KindRow(SEV1, "a node fails, or mends itself, more often than its peers"),
    E.UNFIT: KindRow(SEV1, "a node fails a check, or is far slower than its peers"),
    E.NODE_TAKEN: KindRow(SEV1, "the cluster's scheduler reclaims the node"),
    E.LOST_CONNECTION: KindRow(SEV1, "the node does not answer"),
    # SEV2: the worker
    E.ECC_CONTAINED: KindRow(SEV2, "an ECC error that affects one process only"),
    E.DAMAGED_TENSOR: KindRow(SEV2, "a tensor is not what its sender had sent"),
    E.ILLEGAL_MEMORY_ACCESS: KindRow(SEV2, "a kernel on the GPU read or wrote outside its memory"),
    E.DEVICE_ASSERT: KindRow(SEV2, "an assertion on the GPU failed, usually an index out of range"),
    E.CUDA: KindRow(SEV2, "a CUDA call or kernel failed"),
    E.NCCL_INTERNAL: KindRow(SEV2, "NCCL found its own state inconsistent"),
    E.XID: KindRow(SEV2, "the GPU driver reports an error that is not in this table"),
    E.GPU_OUT_OF_MEMORY: KindRow(SEV2, "a GPU is out of memory"),
    E.HOST_OUT_OF_MEMORY: KindRow(SEV2, "the host, or the worker's share of it, is out of memory"),
    E.RESOURCE_LIMIT: KindRow(SEV2, "a limit is reached: threads, open files, processes on a shared GPU"),
    E.DISK_FULL: KindRow(SEV2, "a disk or a quota is full"),
    E.TASK_HANG: KindRow(SEV2, "an op makes no progress"),
    E.DATA: KindRow(SEV2, "training data cannot be read"),
    E.MIXED_VERSIONS: KindRow(SEV2, "workers of one task have versions that must not train it together"),
    E.USER_CODE: KindRow(SEV2, "the program raised an exception"),
    E.KILLED: KindRow(SEV2, "the process was killed, by a user, a scheduler or the OOM killer"),
    E.CRASH: KindRow(SEV2, "native code crashed"),
    E.ABNORMAL_EXIT: KindRow(SEV2, "the process exited before its work was done"),
    E.OTHER: KindRow(SEV2, "no known pattern"),
    # SEV3: what may pass
    E.ECC_CORRECTED: KindRow(SEV3, "memory errors were corrected"),
    E.NVLINK_NONFATAL: KindRow(SEV3, "a link between GPUs had a nonfatal error"),
    E.XID_NOTED: KindRow(SEV3, "the GPU driver reports something that needs no action"),
    E.NCCL_TIMEOUT: KindRow(SEV3, "a collective timed out while it waited for a peer"),
    E.COMMUNICATOR_ABORTED: KindRow(SEV3, "a communicator was aborted because of an error elsewhere"),
    E.LINK_FLAPPING: KindRow(SEV3, "a network link went down, possibly for a moment"),
    E.REMOTE_STORAGE: KindRow(SEV3, "a file server or object store does not answer"),
    E.CONNECTION_REFUSED: KindRow(SEV3, "no process listens at the other end"),
    E.CONNECTION_RESET: KindRow(SEV3, "the other end closed a connection"),
    E.OTHER_NETWORK: KindRow(SEV3, "another network failure"),
    E.SLOW_WORKER: KindRow(SEV3, "a worker takes longer for the same work than before, or than its peers"),
    E.SLOW_LINK: KindRow(SEV3, "messages between two workers take longer than before, or than elsewhere"),
    E.NOT_FINITE: KindRow(SEV3, "gradients are infinite or not numbers, so steps are skipped"),
    E.MARKED: KindRow(SEV3, "a check of a node warns, or finds it slower than its peers"),
    E.LOSS_SPIKE: KindRow(SEV3, "the loss of a step is far above those of the steps before"),
    E.NOT_DETERMINISTIC: KindRow(SEV3, "the model's code computes other bits from run to run"),
}

# What a job's own input does not cause, also if several workers raise it at the same op. A missing driver is
# not among them: it is what a job for GPUs meets on nodes without.
_MAY_BE = {E.GPU_DRIVER, E.NOT_FINITE, E.LOSS_SPIKE} | {
    kind for kind, row in KINDS.items() if row.severity is SEV2
}
NEVER_OF_THE_INPUT = frozenset(ErrorKind) - (_MAY_BE - {E.RESOURCE_LIMIT, E.DISK_FULL, E.MIXED_VERSIONS})

# What makes a lemon if a node has it more often than its peers: of the machine, as far as one can say.
DEATHS_OF_NODES = frozenset(
    {E.ECC_CONTAINED, E.ILLEGAL_MEMORY_ACCESS, E.CUDA, E.NCCL_INTERNAL, E.XID, E.TASK_HANG, E.CRASH}
)
# What a program that raises it says of the machine it runs on.
OF_HARDWARE = DEATHS_OF_NODES - {E.TASK_HANG} | {
    E.ECC,
    E.NVLINK,
    E.DMA_MAPPING,
    E.GPU_DRIVER,
    E.GPU_LOST,
    E.HOST_HARDWARE,
    E.KERNEL,
    E.NIC,
    E.STORAGE,
}
CORRECTED = frozenset({E.ECC_CORRECTED, E.NVLINK_NONFATAL, E.LINK_FLAPPING})
