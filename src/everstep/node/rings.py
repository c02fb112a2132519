"""A worker's ring, read by its agent. The file is its user's: no link is followed, nothing is waited for, and
no more is read than a ring has.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from everstep.diagnose import Dump, UnusableFileError, read
from everstep.diagnose.ring import MAGIC

_MOST_BYTES = 4 << 20  # a ring of 4,096 records has 266 KB


def ring_at(path: Path) -> Dump:
    """What the worker has recorded; OSError or UnusableFileError if that cannot be known."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnusableFileError("no file")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES or not content.startswith(MAGIC):
        raise UnusableFileError("no ring of records")
    return read(path.name, content)
