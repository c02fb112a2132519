"""Xid numbers of NVIDIA's driver, by NVIDIA's Xid catalogue: what each is, and what is to be done.

The catalogue names an immediate action for each number. It becomes a severity:

    RESET_GPU, RESTART_BM, RESTART_VM, CHECK_MECHANICALS    SEV1   the node cannot continue as it is
    RESTART_APP                                             SEV2   the program is to be restarted
    IGNORE                                                  SEV3   (43 and 45 end the program: SEV2)

Of several lines the most severe one counts, for the others (43, 45) are mostly its echo.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from everstep.core.faults.kinds import ErrorKind as E

XID_LINE = re.compile(r"NVRM: Xid \([0-9A-Za-z:. -]{1,64}\): (\d{1,4})(?:,[^\n]{0,300})?")
_PLACE = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.\d)?"
    r"(?: GPU-I:(\d{1,3}))?(?: GPU-CI:\d{1,3})?\): \d{1,4}(?:, pid='?(\d{1,10}))?"
)
_COPY_ENGINES = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_VIDEO_ENGINES = (60, 68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139)

XIDS: dict[int, tuple[E, str]] = {
    8: (E.CUDA, "GPU stopped processing"),
    11: (E.CUDA, "invalid or corrupted push buffer stream"),
    13: (E.CUDA, "graphics engine exception"),
    25: (E.CUDA, "invalid or illegal push buffer stream"),
    31: (E.ILLEGAL_MEMORY_ACCESS, "GPU memory page fault"),
    32: (E.CUDA, "invalid or corrupted push buffer stream"),
    37: (E.XID_NOTED, "driver firmware error"),
    38: (E.GPU_DRIVER, "driver firmware error: watchdog timeout"),
    43: (E.CUDA, "GPU stopped processing: a fault of the program"),
    44: (E.XID_NOTED, "graphics engine fault during context switch"),
    45: (E.CUDA, "preemptive cleanup after an earlier error, or a killed process"),
    46: (E.GPU_DRIVER, "GPU stopped processing"),
    48: (E.ECC, "double-bit ECC error"),
    54: (E.HOST_HARDWARE, "auxiliary power is not connected"),
    61: (E.GPU_DRIVER, "internal micro-controller breakpoint"),
    62: (E.GPU_DRIVER, "internal micro-controller halt"),
    63: (E.ECC_CORRECTED, "row remapped or page retired"),
    64: (E.ECC, "row remapping or page retirement failed"),
    66: (E.XID_NOTED, "illegal access by driver"),
    67: (E.XID_NOTED, "illegal access by driver"),
    69: (E.CUDA, "graphics engine class error"),
    74: (E.NVLINK, "NVLink error"),
    78: (E.GPU_DRIVER, "vGPU start error"),
    79: (E.GPU_LOST, "GPU has fallen off the bus"),
    80: (E.CUDA, "corrupted data sent to GPU"),
    92: (E.ECC_CORRECTED, "high rate of single-bit ECC errors"),
    93: (E.XID_NOTED, "InfoROM wear limit"),
    94: (E.ECC_CONTAINED, "contained ECC error"),
    95: (E.ECC, "uncontained ECC error"),
    106: (E.XID_NOTED, "SMBPBI test message"),
    107: (E.XID_NOTED, "SMBPBI test message"),
    108: (E.XID_NOTED, "NVLink remote translation error"),
    109: (E.GPU_DRIVER, "context switch timeout"),
    110: (E.GPU_DRIVER, "security fault"),
    119: (E.GPU_DRIVER, "GSP RPC timeout"),
    120: (E.GPU_DRIVER, "GSP error"),
    121: (E.NVLINK_NONFATAL, "C2C link error"),
    136: (E.NVLINK, "link training failed"),
    137: (E.NVLINK_NONFATAL, "NVLink privilege error"),
    140: (E.ECC, "unrecovered ECC error"),
    141: (E.XID_NOTED, "CUDA fast path error"),
    143: (E.GPU_DRIVER, "GPU initialisation error"),
    144: (E.NVLINK, "NVLink SAW error"),
    145: (E.NVLINK, "NVLink RLW error"),
    146: (E.NVLINK, "NVLink TLW error"),
    147: (E.NVLINK, "NVLink TREX error"),
    148: (E.NVLINK, "NVLink NVLPW_CTRL error"),
    149: (E.NVLINK, "NVLink NETIR error"),
    150: (E.NVLINK, "NVLink MSE error"),
    151: (E.GPU_DRIVER, "key rotation error"),
    152: (E.XID_NOTED, "DLA SMMU error"),
    153: (E.XID_NOTED, "DLA timeout"),
    154: (E.GPU_DRIVER, "GPU recovery action changed"),
    155: (E.NVLINK, "NVLink error defined by software"),
    156: (E.ECC, "resource retired, active after a reset"),
    157: (E.XID_NOTED, "resource retirement failed"),
    158: (E.GPU_DRIVER, "GPU fatal timeout"),
    160: (E.XID_NOTED, "channel retired"),
    161: (E.XID_NOTED, "channel retirement failed"),
    167: (E.GPU_LOST, "PCIe fatal timeout"),
    168: (E.ECC, "errors in the write-protected region"),
    169: (E.GPU_DRIVER, "internal micro-controller halt"),
    171: (E.ECC, "uncorrectable DRAM error"),
    172: (E.ECC, "uncorrectable SRAM error"),
    **dict.fromkeys(_COPY_ENGINES, (E.CUDA, "copy engine exception")),
    **dict.fromkeys(_VIDEO_ENGINES, (E.CUDA, "video or image engine exception")),
}


class XidPlace(NamedTuple):
    """Where an Xid happened: the GPU's PCI address, its MIG instance if it is cut, the process if known."""

    domain: int
    bus: int
    device: int
    instance: int | None
    pid: int | None

    @property
    def address(self) -> str:
        """As nvidia-smi writes it."""
        return f"{self.domain:08X}:{self.bus:02X}:{self.device:02X}.0"

    def is_at(self, address: str) -> bool:
        """Is this the GPU with that PCI address, such as 00000000:3B:00.0?"""
        numbers = re.fullmatch(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.\d)?", address)
        return numbers is not None and tuple(int(n, 16) for n in numbers.groups()) == self[:3]


def place_of_xid(line: str) -> XidPlace | None:
    """None: the line is not about an Xid, or does not say where it was."""
    found = _PLACE.search(line)
    if found is None:
        return None
    domain, bus, device = (int(found[number], 16) for number in (1, 2, 3))
    instance, pid = (None if found[number] is None else int(found[number]) for number in (4, 5))
    return XidPlace(domain, bus, device, instance, pid)


def kind_of_xid(number: int, line: str) -> E:
    """The words of the line count where NVIDIA's own meaning of a number depends on them."""
    kind, _ = XIDS.get(number, (E.XID, ""))
    if kind is E.NVLINK and re.search(r" [Nn]on-?fatal ", line):
        return E.NVLINK_NONFATAL
    if number == 154 and re.search(r"to 0x0 \(None\)", line):
        return E.XID
    return kind
