"""Small DeepSpeed trainings, as an oracle for our converters. Run by `deepspeed_oracle.py`.

It reads jobs from stdin, a JSON line each, and forks their ranks: deepspeed is imported once for all.

Two groups of parameters with different hyper-parameters, a frozen embedding if asked for. Every rank takes
its rows of one global batch, which depends on the step alone, so that the mean gradient is the same for
every number of ranks. Needs deepspeed, and nothing of ours: it runs in a venv of its own.
"""

import argparse
import json
import os
import sys
import traceback

import deepspeed
import torch
from torch import nn

ROWS, WIDTH, VOCAB, LENGTH = 12, 24, 37, 10


class Net(nn.Module):
    """Odd sizes on purpose: nothing divides, so that every kind of padding is there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 41)
        self.norm = nn.LayerNorm(41)
        self.down = nn.Linear(41, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.norm(self.up(x))))
        return nn.functional.cross_entropy(self.head(x).float().reshape(-1, VOCAB), targets.reshape(-1))


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=draw)[rank::world]
    return tokens[:, :-1], tokens[:, 1:]


def groups_of(model: nn.Module) -> list[dict]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for _, p in trained if p.ndim > 1]
    vectors = [p for _, p in trained if p.ndim == 1]
    return [
        {"params": matrices, "lr": 0.01, "weight_decay": 0.1},
        {"params": vectors, "lr": 0.003, "weight_decay": 0.0},
    ]


def train(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd"])
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-at", type=int, default=-1)
    parser.add_argument("--folder", default="")
    parser.add_argument("--load", default="")
    parser.add_argument("--tag", default="")
    parser.add_argument("--universal", action="store_true")
    parser.add_argument("--out", required=True)
    options = parser.parse_args(arguments)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # It would compile an op for minutes, and look like a hang.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Net()
    if options.frozen:
        model.embed.weight.requires_grad_(False)
    groups = groups_of(model)
    if options.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups)
    else:
        optimizer = torch.optim.SGD(groups, momentum=0.9)
    config = {
        "train_micro_batch_size_per_gpu": ROWS // world,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": options.stage},
        "bf16": {"enabled": options.precision == "bf16"},
        "checkpoint": {"load_universal": options.universal},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    start = 0
    if options.load:
        path, client = engine.load_checkpoint(options.load, options.tag or None)
        assert path is not None, f"nothing loaded from {options.load}"
        start = client["next_step"]
    losses = {}
    for step in range(start, options.steps):
        tokens, targets = batch(step, rank, world)
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        deepspeed.comm.all_reduce(mean)
        losses[step] = float(mean) / world
        if step + 1 == options.save_at:
            engine.save_checkpoint(
                options.folder, tag=f"global_step{step + 1}", client_state={"next_step": step + 1}
            )
    told = [{"lr": g["lr"], "weight_decay": g["weight_decay"]} for g in engine.optimizer.param_groups]
    if rank == 0:
        with open(options.out, "w", encoding="utf-8") as out:
            json.dump({"losses": losses, "groups": told}, out)


def rank_of(job: dict, rank: int) -> int:
    """A rank in a process of its own; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(job["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {**job["environment"], "RANK": str(rank), "LOCAL_RANK": str(rank)}
        train(job["arguments"])
        code = 0
    except BaseException:  # a rank that fails says why in its log, and is not the parent
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        ranks = [rank_of(job, rank) for rank in range(len(job["logs"]))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        sys.__stdout__.write(json.dumps({"codes": codes}) + "\n")
        sys.__stdout__.flush()


if __name__ == "__main__":
    main()
