"""An agent whose workers are told of the fabric: `everstep agent`, with one more key in what they get."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from everstep.cli.main import run
from everstep.core.words.ops import parse_worker
from everstep.node.fork_server import ForkedProcess, ForkServer


def main() -> int:
    told = json.loads(Path(sys.argv[1]).read_text())
    node = sys.argv[2]
    plain = ForkServer.spawn

    def spawn(self: ForkServer, spec: dict[str, Any], *, output: Path) -> ForkedProcess:
        worker = parse_worker(spec["worker"])
        first = 24000 + 500 * (2 * worker.stage + worker.replica)
        mine = [name for name in told["flows"][node] if name.startswith(f"stage{worker.stage} ")]
        steering = {
            "fabric": told["fabric"],
            "node": node,
            "worker_flows": mine,
            "ports": [first, first + 499],
        }
        return plain(self, {**spec, "fabric": steering}, output=output)

    ForkServer.spawn = spawn  # type: ignore[method-assign]
    return run(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
