"""A model whose builder ends the first follower that calls it: before the shards of a worker have met."""

import os
import signal
import time
from pathlib import Path

from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Model


def model(folder: str) -> Model:
    here = Path(folder)
    (here / str(os.getpid())).touch()
    if _is_follower(here) and not (here / "struck").exists():
        (here / "struck").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return gpt("gpt-tiny")


def _is_follower(here: Path) -> bool:
    """Its parent builds the model too; a leader's parent, the fork server, does not."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        if (here / str(os.getppid())).exists():
            return True
        time.sleep(0.01)
    return False
