"""NVIDIA's MPS for a bench whose processes share a GPU: with it they run at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextmanager
def mps(wanted: bool = True) -> Iterator[None]:
    """A daemon of our own, for this process and those it starts from here on. It ends with us, also where a
    time limit ends us; one of somebody else is left alone.
    """
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        before = {name: os.environ.get(name) for name in FOLDERS}
        os.environ.update(dict.fromkeys(FOLDERS, folder))
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)
            signal.signal(signal.SIGTERM, handler)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
