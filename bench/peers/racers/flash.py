"""Under dlrover-run: checkpoints in shared memory after every step, on disk every tenth."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from loop import CHECKPOINT_EVERY, MEET_S, Diary, Training, run


class Flash:
    def __init__(self, folder: str) -> None:
        self.checkpointer = DdpCheckpointer(folder)

    def load(self, training: Training) -> int:
        state = self.checkpointer.load_checkpoint()
        if not state:
            return 0
        training.load(state)
        return int(state["step"])

    def save(self, training: Training, step: int, rank: int) -> None:
        where = StorageType.MEMORY if step % CHECKPOINT_EVERY else StorageType.DISK
        state = {"step": step, **training.state()}
        self.checkpointer.save_checkpoint(step, state, storage_type=where)


def main() -> None:
    diary = Diary()
    dist.init_process_group("gloo", timeout=timedelta(seconds=MEET_S))
    run(diary, Training(), Flash(os.environ["RACE_FOLDER"]), dist.get_rank(), dist.get_world_size())


if __name__ == "__main__":
    main()
