"""The C library's allocator under the settings that the fork server makes for its workers."""

import os
import subprocess
import sys

import pytest

from everstep.node.fork_server import ALLOCATOR

MIB = 1 << 20
PROGRAM = f"""
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def take_and_free():
    taken = [libc.malloc({MIB}) for _ in range(20)]
    for at in taken:
        ctypes.memset(at, 1, {MIB})
    for at in taken:
        libc.free(at)

take_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
take_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(settings: dict[str, str]) -> int:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=plain | settings, check=True, capture_output=True, text=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION"), reason="another C library than glibc")
def test_a_worker_keeps_the_memory_that_it_frees() -> None:
    pages = 20 * MIB // os.sysconf("SC_PAGE_SIZE")
    assert faults({}) > pages / 2, "glibc keeps it by itself: the settings are of no use"
    assert faults(ALLOCATOR) < pages / 100
