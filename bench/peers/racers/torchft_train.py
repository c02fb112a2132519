"""A replica group of one worker under torchft; `--lighthouse` runs the server that groups register with."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
from loop import TIMEOUT_S, Diary, Training


def lighthouse() -> None:
    from torchft.coordination import LighthouseServer

    # As its README starts it: --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000.
    bind = f"127.0.0.1:{os.environ['RACE_PORT']}"
    server = LighthouseServer(bind=bind, min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100)
    print(server.address(), flush=True)
    signal.pause()  # its threads serve; the race ends it


def main() -> None:
    from torch.distributed import ReduceOp
    from torchft import Manager, ProcessGroupGloo

    slot = int(os.environ["RACE_SLOT"])
    diary, training = Diary(), Training()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S)),
        load_state_dict=training.load,
        state_dict=training.state,
        min_replica_size=1,
        timeout=timedelta(seconds=TIMEOUT_S),
        replica_id=f"group_{slot}",
        init_sync=False,  # the same seed gives everyone the same weights
    )
    empty = torch.zeros(sum(p.numel() for p in training.model.parameters()) + 1)
    while True:
        manager.start_quorum()
        rank, world, step = (
            manager.participating_rank(),
            manager.num_participants(),
            manager.current_step() + 1,
        )
        counts = rank is not None and manager.is_participating()
        summed = training.gradients(step, rank, world) if counts else empty.clone()
        manager.allreduce(summed, reduce_op=ReduceOp.SUM).wait()
        if manager.should_commit():
            if any(p.grad is None for p in training.model.parameters()):
                for p in training.model.parameters():
                    p.grad = torch.zeros_like(p)
            step = manager.current_step()
            reached = training.update(summed)
            diary.step(rank=rank if counts else -1, world=world, step=step, loss=reached)


if __name__ == "__main__":
    lighthouse() if "--lighthouse" in sys.argv else main()
