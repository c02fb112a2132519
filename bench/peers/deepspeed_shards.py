"""DeepSpeed's files of a real tensor-parallel run: are they read as DeepSpeed holds them?

    python bench/peers/deepspeed_shards.py --python ds/bin/python     a venv with deepspeed, on CPUs

Four ranks, two data-parallel by two tensor-parallel (`mpu=`), train a split MLP for three steps under ZeRO 1
and 2 and save. Each rank also writes what DeepSpeed itself says its weights and Adam's moments are. We read
the checkpoint with a file of patterns, and compare every logical tensor to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

WIDTH, HIDDEN, STEPS, TP, DP = 12, 20, 3, 2, 2
SPLIT = {"embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}  # the rest is on every rank
PATTERNS = r"""
[[pattern]]
match = '(embed|up)\.(weight|bias)'
kind = "fragment"
dim = 0
[[pattern]]
match = 'down\.weight'
kind = "fragment"
dim = 1
[[pattern]]
match = 'down\.bias|norm\..*'
kind = "replicated"
"""


def rank_main(folder: Path, rank: int, stage: int) -> None:
    """One rank; needs deepspeed, and nothing of ours."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from torch import nn

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile for minutes
    deepspeed.comm.init_distributed(dist_backend="gloo")
    shards = [dist.new_group([d * TP + t for t in range(TP)]) for d in range(DP)]
    copies = [dist.new_group([d * TP + t for d in range(DP)]) for t in range(TP)]
    mine, shard, copy = rank % TP, shards[rank // TP], copies[rank % TP]

    class Ranks:
        """What DeepSpeed asks a Megatron-like model about its ranks."""

        get_model_parallel_rank = get_tensor_model_parallel_rank = staticmethod(lambda: mine)
        get_model_parallel_world_size = get_tensor_model_parallel_world_size = staticmethod(lambda: TP)
        get_model_parallel_group = get_tensor_model_parallel_group = staticmethod(lambda: shard)
        get_data_parallel_rank = staticmethod(lambda: rank // TP)
        get_data_parallel_world_size = staticmethod(lambda: DP)
        get_data_parallel_group = staticmethod(lambda: copy)

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            x = x.clone()
            dist.all_reduce(x, group=shard)
            return x

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    class Split(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            grad = grads[0].contiguous().clone()
            dist.all_reduce(grad, group=shard)
            return grad

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(HIDDEN // TP, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, HIDDEN // TP)
            self.down = nn.Linear(HIDDEN // TP, WIDTH)
            for name, parameter in self.named_parameters():
                parameter.tensor_model_parallel = name in SPLIT
                parameter.partition_dim = SPLIT.get(name, -1)

        def forward(self, tokens: Any) -> Any:
            local = tokens - mine * (HIDDEN // TP)
            here = (local >= 0) & (local < HIDDEN // TP)
            x = Whole.apply(self.embed(local.clamp(0, HIDDEN // TP - 1)) * here[..., None])
            y = torch.relu(self.up(Split.apply(self.norm(x))))
            return x + Whole.apply(y @ self.down.weight.t()) + self.down.bias

    torch.manual_seed(0)
    model = Net()
    for name, parameter in model.named_parameters():
        draw = torch.Generator().manual_seed(sum(map(ord, name)) + (mine if name in SPLIT else 0))
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=Ranks())
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 * step + rank // TP)
        tokens = torch.randint(HIDDEN, (4, 6), generator=draw)
        loss = (engine(tokens) ** 2).mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(folder / "deepspeed"), tag=f"global_step{STEPS}")
    held = {}
    for name, parameter in model.named_parameters():
        held[f"{name}/weight"] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            held[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    if rank // TP == 0:
        torch.save({"held": held, "loss": loss.item()}, folder / f"held-{mine}.pt")
    dist.barrier()
    os._exit(0)


def trained(python: str, folder: Path, stage: int) -> None:
    """All ranks are forks of one process, which imports deepspeed once."""
    command = [python, __file__, "--stage", str(stage), "--folder", str(folder)]
    given = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(TP * DP)}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + (os.getpid() * 7 + stage) % 20000)}
    with (folder / "log").open("w") as log:
        ran = subprocess.run(
            command, env={**os.environ, **given}, stdout=log, stderr=log, timeout=280, check=False
        )
    if ran.returncode:
        raise RuntimeError(f"DeepSpeed failed with {ran.returncode}: {(folder / 'log').read_text()[-3000:]}")


def all_ranks(folder: Path, stage: int) -> int:
    import deepspeed  # noqa: F401  once, for all

    pids = []
    for rank in range(TP * DP):
        pid = os.fork()
        if not pid:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                rank_main(folder, rank, stage)
            finally:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def compared(folder: Path) -> dict[str, Any]:
    """Every logical tensor as we read it, against what DeepSpeed said it holds."""
    import torch

    from everstep.convert.conversion import read_state
    from everstep.convert.formats.format import Reading
    from everstep.layout.patterns import read_patterns
    from everstep.store.stored import read_all

    held = [torch.load(folder / f"held-{t}.pt", weights_only=True)["held"] for t in range(TP)]
    reading = Reading(patterns=read_patterns(PATTERNS, "patterns"))
    state = read_state(folder / "deepspeed", reading=reading)
    differing = []
    for key, first in held[0].items():
        name, kind = key.split("/")
        parts = [one[key].reshape(first.shape) for one in held]
        logical = torch.cat(parts, SPLIT[name]) if name in SPLIT else first
        found = state.tensors.get(f"model/{name}" if kind == "weight" else f"optimizer/{name}/{kind}")
        if found is None or not torch.equal(torch.from_numpy(read_all(found).view("float32")), logical):
            differing.append(key)
    return {"tensors": len(held[0]), "differing": differing}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--python", help="the Python of a venv with deepspeed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage is not None:
        return all_ranks(given.folder, given.stage)
    rows = []
    for stage in (1, 2):
        with tempfile.TemporaryDirectory(prefix="deepspeed-shards-") as name:
            trained(given.python, Path(name), stage)
            files = len(list(Path(name, "deepspeed").rglob("*.pt")))
            rows.append({"stage": stage, "files": files, **compared(Path(name))})
        print(json.dumps(rows[-1]), file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.json:
        print(json.dumps(rows))
    return 0 if not any(row["differing"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
