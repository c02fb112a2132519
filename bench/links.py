"""What protection on the wire costs: CPU time to send 1 GiB between two workers on loopback, by suite.

    python bench/links.py                      1 GiB in messages of 4 MiB, and 20,000 small ones

CPU time of sender and receiver together, which are two threads of one process, so it may be quoted from a
machine that others use; the wall time beside it may not.
"""

from __future__ import annotations

import argparse
import json
import queue
import time

import torch

from everstep.net.envelope import Envelope
from everstep.net.links import LinkEvents, Links
from everstep.net.seal import Suite, is_available
from everstep.protocol.ops import Microbatch
from everstep.protocol.parcels import Parcel, ParcelKind

SECRET = bytes(32)


def links(suite: Suite, inbox: queue.SimpleQueue) -> Links:
    made = Links(
        LinkEvents(deliver=inbox.put, broken=lambda address: None, failed=inbox.put),
        token=SECRET,
        host="127.0.0.1",
        empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
        accepts=lambda host: (suite,),
    )
    made.start()
    return made


def measure(suite: Suite, size: int, count: int, ahead: int) -> tuple[float, float]:
    """CPU and wall seconds for `count` messages of `size` bytes, `ahead` of them under way."""
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    here, there = links(suite, queue.SimpleQueue()), links(suite, inbox)
    tensor = torch.zeros(size // 4)
    parcel = Parcel(ParcelKind.ACTIVATION, 1, 1, 0, Microbatch(0, 0), 0, 0, 0)
    here.send(there.address, parcel, Envelope(), tensor)
    inbox.get()  # connected
    cpu, wall = time.process_time(), time.perf_counter()
    for number in range(count):
        here.send(there.address, parcel, Envelope(), tensor)
        if number >= ahead:
            inbox.get()
    for _ in range(min(ahead, count)):
        inbox.get()
    took = time.process_time() - cpu, time.perf_counter() - wall
    here.stop()
    there.stop()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="the least of so many counts")
    rounds = parser.parse_args().rounds
    rows = []
    for suite in filter(is_available, Suite):
        large = min(measure(suite, 4 << 20, 256, 4) for _ in range(rounds))
        small = min(measure(suite, 64, 20_000, 1) for _ in range(rounds))
        rows.append(
            {
                "suite": suite.name,
                "cpu_s_per_gib": round(large[0], 3),
                "wall_s_per_gib": round(large[1], 3),
                "cpu_us_per_small_message": round(small[0] / 20_000 * 1e6, 1),
            }
        )
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
