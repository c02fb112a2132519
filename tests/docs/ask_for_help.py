"""Asks programs for their `--help`, each in a fork of one process that has loaded what takes seconds.

Reads a JSON list of `bench/x.py` and `-m bench.x`; prints a JSON line for each. The path is what Python makes
it: the folder of a script, or the folder that `-m` is used in, and what is installed.
"""

import contextlib
import importlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

# Installed, so every program finds them from anywhere; `bench` and `harness` are left to the programs.
for installed in ("torch", "everstep.launch.local.api", "everstep.server.serve"):
    importlib.import_module(installed)


def asked(word: str) -> dict[str, Any]:
    said, code = io.StringIO(), None
    sys.argv = [word.removeprefix("-m "), "--help"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            if word.startswith("-m "):
                sys.path[0] = os.getcwd()
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(word).resolve().parent)
                runpy.run_path(word, run_name="__main__")
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
    return {"word": word, "code": code or 0, "said": said.getvalue()}


for word in json.loads(sys.stdin.read()):
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with os.fdopen(writer, "w") as line:
            json.dump(asked(word), line)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as line:
        print(line.read() or json.dumps({"word": word, "code": "it died", "said": ""}))
    os.waitpid(child, 0)
