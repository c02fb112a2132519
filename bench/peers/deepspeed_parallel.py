"""DeepSpeed's files of tensor, pipeline and expert parallelism: read, taken to other shapes, resumed there.

    python bench/peers/deepspeed_parallel.py --python ds/bin/python [--only moe]     a venv with deepspeed

On CPUs over gloo. Every row: DeepSpeed trains six steps and saves after three; we convert the checkpoint to
universal and on to the target; DeepSpeed loads that in another shape and runs the last three steps. `apart`
is the largest difference of their losses from those of the run that was not interrupted.

    pipeline   PipelineModule with a tied embedding, buffers, and a layer without parameters
    moe        deepspeed.moe.layer.MoE, two layers of four experts
    autotp     AutoTP of transformers' Llama: the patterns are those that DeepSpeed wrote
    shards     a model that splits itself (mpu=): every logical tensor against what DeepSpeed says it holds
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SAVE_AT, STEPS = 3, 6
LIMIT = 1e-5
VOCAB, WIDTH = 12, 6


@dataclass(frozen=True)
class Case:
    """`size`: pipeline stages, expert-parallel or tensor-parallel ranks. `data`: data-parallel ranks."""

    kind: str
    size: int
    to_size: int
    precision: str = "fp32"
    universal: bool = False
    data: int = 2

    def world(self, size: int) -> int:
        return 4 if self.kind == "moe" else self.data * size


CASES = [
    Case("pipeline", 2, 3),
    Case("pipeline", 2, 1),
    Case("pipeline", 2, 3, "bf16"),
    Case("moe", 2, 4),
    Case("moe", 2, 1),
    Case("moe", 4, 2, "bf16"),
    Case("autotp", 2, 1),
    Case("autotp", 1, 2),
    Case("autotp", 2, 2, universal=True),
    Case("autotp", 1, 2, universal=True),
    Case("shards", 2, 2),
]


# DeepSpeed's side: needs deepspeed, and nothing of ours.


def draw_weights(model: Any, first_expert: int = 0) -> None:
    """By the name in the whole model, whichever rank has it."""
    import re

    import torch

    for name, parameter in model.named_parameters():
        full = re.sub(r"(deepspeed_experts\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + first_expert}", name)
        seed = sum((i + 1) * ord(letter) for i, letter in enumerate(full))
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.copy_(drawn * 0.3)


def config_of(job: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2 if job["kind"] == "pipeline" else 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    if job["precision"] == "bf16":
        config["bf16"] = {"enabled": True}
    if job["kind"] == "autotp":
        config["tensor_parallel"] = {"autotp_size": job["size"]}
    if job["universal"]:
        config["checkpoint"] = {"load_universal": True}
    return config


def pipeline(job: dict[str, Any], rank: int) -> tuple[Any, Any]:
    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from torch import nn

    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(VOCAB, WIDTH))

        def forward(self, tokens: Any) -> Any:
            return self.weight[tokens]

    class Block(nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden)
            self.down = nn.Linear(hidden, WIDTH)
            self.register_buffer("scale", torch.tensor([0.5]))

        def forward(self, x: Any) -> Any:
            return x + self.scale.to(x.dtype) * self.down(torch.relu(self.up(self.norm(x))))

    def loss(out: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(out.float().reshape(-1, VOCAB), targets.reshape(-1))

    head = TiedLayerSpec("embed", Embed, forward_fn=lambda module, x: x @ module.weight.t())
    blocks = [LayerSpec(Block, 7), LayerSpec(Block, 9), lambda x: x * 1.0, LayerSpec(Block, 5)]
    model = PipelineModule(
        layers=[TiedLayerSpec("embed", Embed), *blocks, head], num_stages=job["size"], loss_fn=loss
    )
    draw_weights(model)
    known = list(model.parameters())
    groups = [
        {"params": [p for p in known if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in known if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(job))

    def step(number: int) -> float:
        def batches() -> Any:
            for micro in range(2):
                seed = 1000 * number + 10 * micro + engine.grid.data_parallel_id
                drawn = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(seed))
                yield drawn[:, :-1], drawn[:, 1:]

        return float(engine.train_batch(batches()))

    return engine, step


def moe(job: dict[str, Any], rank: int) -> tuple[Any, Any]:
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
    from torch import nn

    experts, parallel = 4, job["size"]

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.down(torch.relu(self.up(x)))

    def layer() -> Any:
        sizes = {"num_experts": experts, "ep_size": parallel, "k": 1, "capacity_factor": 4.0}
        return MoE(hidden_size=WIDTH, expert=Expert(), min_capacity=4, use_rts=False, **sizes)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.moe = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), layer()
            self.norm2, self.moe2, self.head = nn.LayerNorm(WIDTH), layer(), nn.Linear(WIDTH, VOCAB)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            y, balance, _ = self.moe(self.norm(x))
            z, other, _ = self.moe2(self.norm2(x + y))
            return self.head(x + y + z), balance + other

    model = Net()
    draw_weights(model, rank % parallel * (experts // parallel))
    optimizer = torch.optim.AdamW(split({"params": list(model.parameters()), "name": "all"}), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(job))

    def step(number: int) -> float:
        seed = torch.Generator().manual_seed(1000 * number + rank)
        tokens = torch.randint(VOCAB, (2, 6), generator=seed)
        out, balance = engine(tokens[:, :-1])
        loss = nn.functional.cross_entropy(out.float().reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
        loss = loss + 0.01 * balance
        engine.backward(loss)
        engine.step()
        return float(loss)

    return engine, step


def autotp(job: dict[str, Any], rank: int) -> tuple[Any, Any]:
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="eager"))
    if job["size"] > 1:
        model = deepspeed.tp_model_init(model, tp_size=job["size"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(job))

    def step(number: int) -> float:
        seed = torch.Generator().manual_seed(1000 * number + rank // job["size"])
        tokens = torch.randint(32, (2, 6), generator=seed)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return engine, step


SPLIT = {"embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}  # the rest is on every rank


def shards(job: dict[str, Any], rank: int) -> tuple[Any, Any]:
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch import nn

    size, hidden = job["size"], 20
    data = dist.get_world_size() // size
    columns = [dist.new_group([d * size + t for t in range(size)]) for d in range(data)]
    copies = [dist.new_group([d * size + t for d in range(data)]) for t in range(size)]
    mine, shard, copy = rank % size, columns[rank // size], copies[rank % size]

    class Ranks:
        """What DeepSpeed asks a Megatron-like model about its ranks."""

        get_model_parallel_rank = get_tensor_model_parallel_rank = staticmethod(lambda: mine)
        get_model_parallel_world_size = get_tensor_model_parallel_world_size = staticmethod(lambda: size)
        get_model_parallel_group = get_tensor_model_parallel_group = staticmethod(lambda: shard)
        get_data_parallel_rank = staticmethod(lambda: rank // size)
        get_data_parallel_world_size = staticmethod(lambda: data)
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
            self.embed, self.norm = nn.Embedding(hidden // size, WIDTH), nn.LayerNorm(WIDTH)
            self.up, self.down = nn.Linear(WIDTH, hidden // size), nn.Linear(hidden // size, WIDTH)
            for name, parameter in self.named_parameters():
                parameter.tensor_model_parallel = name in SPLIT
                parameter.partition_dim = SPLIT.get(name, -1)

        def forward(self, tokens: Any) -> Any:
            local = tokens - mine * (hidden // size)
            here = (local >= 0) & (local < hidden // size)
            x = Whole.apply(self.embed(local.clamp(0, hidden // size - 1)) * here[..., None])
            y = torch.relu(self.up(Split.apply(self.norm(x))))
            return x + Whole.apply(y @ self.down.weight.t()) + self.down.bias

    model = Net()
    for name, parameter in model.named_parameters():
        seed = torch.Generator().manual_seed(sum(map(ord, name)) + (mine if name in SPLIT else 0))
        parameter.data.copy_(torch.randn(parameter.shape, generator=seed) * 0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(job), mpu=Ranks())

    def step(number: int) -> float:
        seed = torch.Generator().manual_seed(100 * number + rank // size)
        loss = (engine(torch.randint(hidden, (4, 6), generator=seed)) ** 2).mean()
        engine.backward(loss)
        engine.step()
        return float(loss)

    return engine, step


KINDS = {"pipeline": pipeline, "moe": moe, "autotp": autotp, "shards": shards}


def rank_main(job: dict[str, Any], rank: int) -> None:
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile for minutes
    deepspeed.comm.init_distributed(dist_backend="gloo")
    engine, step = KINDS[job["kind"]](job, rank)
    if job["load"]:
        engine.load_checkpoint(job["load"])
    losses = {}
    for number in range(engine.global_steps, STEPS):
        if job["save"] and number == SAVE_AT:
            engine.save_checkpoint(job["save"], tag=f"global_step{SAVE_AT}")
            if job["kind"] == "shards":
                _tell_held(engine, job, rank)
        losses[number] = step(number)
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)


def _tell_held(engine: Any, job: dict[str, Any], rank: int) -> None:
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    held = {}
    for name, parameter in engine.module.named_parameters():
        held[f"{name}/weight"] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            held[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    if rank < job["size"]:
        torch.save(held, f"{job['out']}-held-{rank}.pt")


def serve() -> int:
    """Jobs from stdin, a JSON line each; ranks are forks of this process, which imports deepspeed once."""
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    for count, line in enumerate(sys.stdin):
        job = json.loads(line)
        port = str(20000 + (os.getpid() * 7 + count) % 20000)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {"WORLD_SIZE": str(job["world"])}
        pids = []
        for rank in range(job["world"]):
            pid = os.fork()
            if not pid:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                log = os.open(f"{job['out']}-{rank}.log", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                try:
                    rank_main(job, rank)
                finally:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps({"codes": codes}), flush=True)
    return 0


# Our side.


class DeepSpeed:
    def __init__(self, python: str, root: Path) -> None:
        self.root, self.runs = root, 0
        self._server = subprocess.Popen(
            [python, __file__, "--serve"],
            env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def run(
        self, case: Case, size: int, *, save: Path | None = None, load: Path | None = None
    ) -> dict[str, float]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self.runs += 1
        out = self.root / f"run-{self.runs}"
        job = {
            "kind": case.kind,
            "size": size,
            "world": case.world(size),
            "precision": case.precision,
            "universal": case.universal and load is not None,
            "save": str(save or ""),
            "load": str(load or ""),
            "out": str(out),
        }
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        while not (line := self._server.stdout.readline()).startswith('{"codes"'):
            assert line, "the DeepSpeed process is gone"
        if any(json.loads(line)["codes"]):
            logs = sorted(self.root.glob(f"run-{self.runs}-*.log"))
            said = [row for log in logs for row in log.read_text(errors="replace").splitlines()]
            raise RuntimeError(next((row for row in reversed(said) if "Error" in row), "it failed")[:300])
        found: dict[str, float] = json.loads(out.read_text())
        return found


def row_of(deepspeed: DeepSpeed, case: Case) -> dict[str, Any]:
    from everstep.convert.conversion import Target, read_state, write_state

    at = deepspeed.root / f"case-{deepspeed.runs}"
    before = deepspeed.run(case, case.size, save=at / "theirs")
    if case.kind == "shards":
        return {**asdict(case), **_compared(at / "theirs", deepspeed.root / f"run-{deepspeed.runs}", case)}
    write_state(at / "u", read_state(at / "theirs"), Target(format="universal"))
    shape = {"pipeline": "pp", "moe": "ep", "autotp": "tp"}[case.kind]
    target = Target(
        format="deepspeed-universal" if case.universal else "deepspeed",
        world=4 if case.kind == "moe" else case.data,
        stage_starts=(0, 2, 4) if (case.kind, case.to_size) == ("pipeline", 3) else (),
        patterns=llama_patterns() if case.kind == "autotp" else None,
        **{shape: case.to_size},
    )
    write_state(at / "to", read_state(at / "u"), target)
    after = deepspeed.run(case, case.to_size, load=at / "to")
    steps = [str(step) for step in range(SAVE_AT, STEPS)]
    assert list(after) == steps, after
    return {**asdict(case), "apart": max(abs(before[step] - after[step]) for step in steps)}


def llama_patterns() -> Any:
    """How AutoTP splits a Llama; its embedding is on every rank."""
    from everstep.layout.patterns import Pattern, Patterns

    return Patterns(
        (
            Pattern(match=r".*(norm|embed_tokens)\.weight", kind="replicated"),
            Pattern(match=r".*([qkv]_proj|gate_proj|up_proj|lm_head)\.weight", kind="fragment", dim=0),
            Pattern(match=r".*(o_proj|down_proj)\.weight", kind="fragment", dim=1),
        )
    )


def _compared(folder: Path, held_at: Path, case: Case) -> dict[str, Any]:
    """Every logical tensor as we read it, against what DeepSpeed said it holds."""
    import torch

    from everstep.convert.conversion import read_state
    from everstep.convert.formats.format import Reading
    from everstep.layout.patterns import Pattern, Patterns
    from everstep.store.stored import read_all

    held = [torch.load(f"{held_at}-held-{t}.pt", weights_only=True) for t in range(case.size)]
    patterns = Patterns(
        (
            Pattern(match=r"(embed|up)\.(weight|bias)", kind="fragment", dim=0),
            Pattern(match=r"down\.weight", kind="fragment", dim=1),
            Pattern(match=r"down\.bias|norm\..*", kind="replicated"),
        )
    )
    state = read_state(folder, reading=Reading(patterns=patterns))
    differing = []
    for key, first in held[0].items():
        name, kind = key.split("/")
        parts = [one[key].reshape(first.shape) for one in held]
        logical = torch.cat(parts, SPLIT[name]) if name in SPLIT else first
        found = state.tensors.get(f"model/{name}" if kind == "weight" else f"optimizer/{name}/{kind}")
        if found is None or not torch.equal(torch.from_numpy(read_all(found).view("float32")), logical):
            differing.append(key)
    return {"apart": 0.0 if not differing else None, "tensors": len(held[0]), "differing": differing}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--python", help="the Python of a venv with deepspeed and transformers")
    parser.add_argument("--only", default="", help="one kind")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve()
    rows = []
    with tempfile.TemporaryDirectory(prefix="deepspeed-parallel-") as name:
        deepspeed = DeepSpeed(given.python, Path(name))
        for case in CASES:
            if given.only in ("", case.kind):
                try:
                    rows.append(row_of(deepspeed, case))
                except RuntimeError as error:
                    rows.append({**asdict(case), "apart": None, "error": str(error)})
                print(json.dumps(rows[-1]), file=sys.stderr if given.json else sys.stdout, flush=True)
        deepspeed.close()
    limits = {"fp32": LIMIT, "bf16": 2e-2}
    ok = all(row["apart"] is not None and row["apart"] <= limits[row["precision"]] for row in rows)
    if given.json:
        print(json.dumps({"rows": rows, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
