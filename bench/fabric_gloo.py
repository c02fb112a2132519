"""One of two ranks on the testbed: several gloo groups all-reducing at once, steered or not.

This is data parallelism of several stages or shards between two nodes. gloo opens one connection a pair and
group, by itself, and sends both ways over it. The groups are formed anew in each round, so that unsteered
ones get new ports and thereby new luck.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from everstep.fabric.catalogue import Tuple4
from everstep.fabric.document import topology_from
from everstep.node.probe import Budget, Prober

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.intercept import Interceptor

PORTS = range(24000, 28000)


class Chooser:
    """The interceptor's question, answered for the group that is being formed."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.source = spec["host"]
        self.hops: tuple[str, ...] | None = None  # None: leave it to the kernel
        self.took_ms: list[float] = []
        self.prober = Prober(topology=topology_from(spec["fabric"]), ports=PORTS)

    def __call__(self, host: str, port: int) -> tuple[str, int] | None:
        if self.hops is None:
            return None
        began = time.perf_counter()
        self.prober.budget = Budget()
        key = Tuple4(protocol="tcp", source=self.source, target=host, target_port=port)
        found = self.prober.port_for(key, self.hops)
        self.took_ms.append((time.perf_counter() - began) * 1e3)
        return None if found is None else (self.source, found)


def main() -> None:
    spec = json.loads(sys.argv[1])
    chooser = Chooser(spec)
    interceptor = Interceptor(chooser)
    interceptor.install()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(spec["store"], 2)
    device = dist.ProcessGroupGloo.create_device(hostname=spec["host"])

    def form(name: str) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timedelta(seconds=30)
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), spec["rank"], 2, options)

    rows = []
    for number in range(spec["rounds"]):
        for steered in (False, True):
            groups = []
            for index, hops in enumerate(spec["hops"]):
                chooser.hops = tuple(hops) if steered else None
                groups.append(form(f"{number}.{steered}.{index}"))
            tensors = [torch.ones(spec["nbytes"] // 4) for _ in groups]
            for group in groups:
                group.allreduce([torch.ones(1)]).wait()
            ends = [0.0] * len(groups)
            began = time.perf_counter()
            works = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]
            left = set(range(len(works)))
            while left:
                for index in [i for i in left if works[i].is_completed()]:
                    ends[index] = time.perf_counter() - began
                    left.discard(index)
                time.sleep(0.001)
            assert all(bool((tensor == 2).all()) for tensor in tensors)
            rows.append({"steered": steered, "seconds": ends})
            del works, groups
    answer = {"rows": rows, "probe_ms": chooser.took_ms, "connects": len(interceptor.steered)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
