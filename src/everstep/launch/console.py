"""Lines for people on stderr. A reader that exits ends the output, never the training."""

from __future__ import annotations

import os
import sys


def say(line: str) -> None:
    write(line, error=True)


def write(text: str, *, error: bool = False) -> None:
    """Print a line. If the pipe is broken (`| head`), it and all later ones go nowhere."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
