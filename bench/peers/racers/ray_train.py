"""The driver of Ray Train: a worker group that is started again from the last reported checkpoint."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from loop import CHECKPOINT_EVERY, MEET_S, Diary, Training, run
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


class Reported:
    def load(self, training: Training) -> int:
        import torch

        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return 0
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        training.load(state)
        return int(state["step"])

    def save(self, training: Training, step: int, rank: int) -> None:
        import torch

        if step % CHECKPOINT_EVERY:
            return
        if rank != 0:
            ray.train.report({"step": step})
            return
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"step": step, **training.state()}, Path(folder, "state.pt"))
            ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))


def worker(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    diary = Diary(order=context.get_world_rank())
    run(diary, Training(), Reported(), context.get_world_rank(), context.get_world_size())


def main() -> None:
    here = str(Path(__file__).parent)
    env = {"env_vars": {"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}}
    for _ in range(60):  # until both nodes are up
        try:
            ray.init(address=os.environ["RACE_RAY"], runtime_env=env, log_to_driver=True)
            break
        except ConnectionError:
            time.sleep(0.5)
    workers = int(os.environ["RACE_WORKERS"])
    while ray.cluster_resources().get("CPU", 0) < workers:
        time.sleep(0.2)
    TorchTrainer(
        worker,
        torch_config=TorchConfig(backend="gloo", timeout_s=int(MEET_S)),
        scaling_config=ScalingConfig(
            num_workers=(1, workers), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=10
        ),
        run_config=RunConfig(
            name="race",
            storage_path=os.environ["RACE_FOLDER"],
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
