"""A training job in words: what a person writes in job.toml, checked before anything is started.

The file's tables are these dataclasses, key by key. A mistake is one sentence that names the key and says
what to write instead. No torch here: the launcher reads a job, and the workers get it back from JSON.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

from everstep.errors import UserError
from everstep.job import presets
from everstep.job.tables import at_least, at_most, checked, one_of, positive, read, refuse_unknown, shown
from everstep.protocol.messages import CheckpointFolder, TaskNeeds
from everstep.protocol.shape import CHUNKS_PER_REPLICA, Shape

# A schedule holds every op of a step: beyond this the coordinator would plan for minutes.
MOST_WORKERS, MOST_OPS = 16_384, 1 << 20
COPY_INTERVAL = 10  # steps between copies of states in memory that nobody asked for
MOST_SHARDS = 64  # of a worker: they are on one node
_NO_VOTES = {
    "replicas": "needs a second replica to compute microbatches again; give replicas = 2 or more.",
    "accumulate": 'compares bits, and accumulate = "fp32" does not ask for the same bits; use "strict".',
    "shards": "does not work with shards yet; give shards = 1, or leave it out.",
}
_OF_ADAMW = ("lr", "betas", "eps", "weight_decay")
_USUAL_NAMES = {  # of other trainers
    "learning_rate": "lr",
    "max_grad_norm": "clip",
    "gradient_clip_val": "clip",
    "grad_clip": "clip",
    "warmup_steps": "warmup",
    "batch_size": "rows",
    "block_size": "sequence",
    "sequence_length": "sequence",
    "max_steps": "steps",
    "gradient_accumulation_steps": "microbatches",
    "accumulate_grad_batches": "microbatches",
    "gradient_checkpointing": "recompute",
    "activation_checkpointing": "recompute",
    "dtype": "precision",
    "output_dir": "folder",
    "save_steps": "interval",
    "eval_steps": "every",
}
HF_ARGUMENTS = ("weights", "train", "freeze", "prepare")  # of `everstep.hf`; other keys are its config's


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One of our models by `preset`, `hf` for a folder of a Hugging Face model, or
    `build = "module:function"` that returns a Model or its layers.

    Every other key goes to it: numbers of the preset (`dropout = 0.1`), arguments of `everstep.hf`, or
    arguments of the function.
    """

    preset: str | None = None
    build: str | None = None
    hf: str | None = None  # config.json and, to start from weights, safetensors
    card: dict[str, Any] = field(default_factory=dict)  # what checkpoints say of the model besides
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.preset or self.build or self.hf):  # one of them may be misspelt
            _refuse_unknown("model", self.options)
        one_of("model", preset=self.preset, build=self.build, hf=self.hf)
        self.shape()

    def shape(self) -> presets.GptShape | None:
        """The numbers of the preset, as changed by the options; None for any other model."""
        if self.preset is None:
            return None
        hints = get_type_hints(presets.GptShape)
        known = {
            name: checked(hints[name], value, f"model.{name}")
            for name, value in self.options.items()
            if name in hints
        }
        for name, value in known.items():
            if isinstance(value, int):
                at_most(f"model.{name}", value, 10_000 if name == "depth" else 2**24)
        _refuse_misplaced("model.", self.options, hints, self.preset)
        return presets.shape(self.preset, **{**self.options, **known})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """A microbatch is `rows` of `sequence` tokens: synthetic text, packed tokens or a table in shuffled
    epochs, or a user's own.

    `build = "module:function"` is called with the other keys, and returns an object with
    `batch(step, microbatch) -> (inputs, targets)`.
    """

    kind: Literal["synthetic", "tokens", "table"] | None = None
    build: str | None = None
    rows: int = 4
    sequence: int | None = None  # None: the model's context
    path: str | None = None
    token: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint8"
    document_end: int | None = None  # of tokens: the token that ends a document; attention stays within one
    pack: bool = False  # of a table: several documents (input_ids) in a row of `sequence` tokens
    columns: list[str] | None = None  # of a table; all that are numbers, if not given
    shuffle: bool = True  # of tokens and tables, again in every epoch
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("data", kind=self.kind, build=self.build)
        at_least("data.rows", self.rows, 1)
        at_least("data.sequence", self.sequence, 1)
        at_most("data.rows", self.rows, 2**20)
        at_most("data.sequence", self.sequence, 2**30)
        if self.kind in ("tokens", "table") and self.path is None:
            raise UserError(f'data.path is missing; data.kind = "{self.kind}" needs a path.')
        for key, is_set, kinds in (
            ("document_end", self.document_end is not None, ("tokens",)),
            ("pack", self.pack, ("table",)),
            ("columns", self.columns is not None, ("table",)),
            ("path", self.path is not None, ("tokens", "table", None)),
        ):
            if is_set and self.kind not in kinds:
                usual = " or ".join(f'"{kind}"' for kind in kinds if kind)
                raise UserError(f"data.{key} is for data.kind = {usual}; leave it out, or change the kind.")
        at_least("data.document_end", self.document_end, 0)
        if self.build is None and self.options:
            _refuse_unknown("data", self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """AdamW, one of torch's by `name`, or `build = "module:function"` called with named parameters; the rate;
    what bounds a step.
    """

    build: str | None = None
    name: str | None = None  # of torch.optim; other keys go to it
    lr: float = 3e-4  # the highest, after the warm-up
    betas: tuple[float, float] = (0.9, 0.95)  # this and the next two: of AdamW
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup: int = 0  # steps over which the rate rises from 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    floor: float = 0.1  # what the rate falls to by the last step, as a part of lr
    schedule: str | None = None  # of torch's schedulers, or "module:function" of the step; instead of decay
    schedule_options: dict[str, Any] = field(default_factory=dict)  # arguments of torch's scheduler
    ema: float | None = None  # decay of an average of the weights, kept beside them
    clip: float | None = 1.0  # global gradient norm; `clip = false` for none
    shard: bool = False  # share master weights and optimizer states among the replicas of a stage (ZeRO-1)
    stagger: Literal["auto", "always", "never"] = "auto"  # step a stage before the global norm is known
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive("optimizer.lr", self.lr)
        positive("optimizer.eps", self.eps)
        if self.clip is not None:
            positive("optimizer.clip", self.clip)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        at_least("optimizer.warmup", self.warmup, 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas is {list(self.betas)}; each must be at least 0 and below 1.")
        if not 0 <= self.floor <= 1:
            raise UserError(f"optimizer.floor is {self.floor}; it is a part of lr, from 0 to 1.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UserError(
                f"optimizer.ema is {self.ema}; it is a decay, above 0 and below 1, such as 0.999."
            )
        if self.build is not None and self.name is not None:
            raise UserError("optimizer.build and optimizer.name are both given; give one.")
        if self.build is None and self.name is None and self.options:
            _refuse_unknown("optimizer", self.options)

    def changed(self) -> dict[str, Any]:
        """The numbers of AdamW that are not ours; another optimizer has its own defaults."""
        ours = {f.name: f.default for f in fields(OptimizerSpec) if f.name in _OF_ADAMW and f.name != "lr"}
        return {name: getattr(self, name) for name, usual in ours.items() if getattr(self, name) != usual}

    def rate(self, step: int, steps: int) -> float:
        """What lr is multiplied with at a step; of the step alone, so that a resumed run agrees."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.decay == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, steps - 1 - self.warmup))
        left = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.floor + (1 - self.floor) * left


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Where checkpoints go, how often, and how many stay."""

    folder: str  # or any URL that fsspec knows
    interval: int = 100  # steps
    keep: int = 3  # older ones are removed
    start_over: bool = False  # continue without checkpoints that cannot be used, from step 1 if none can

    def __post_init__(self) -> None:
        at_least("checkpoint.interval", self.interval, 1)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetSpec:
    """How what workers send each other is protected, and what they read from memory servers."""

    encrypt: bool = False  # on every TCP connection; needs the package cryptography
    # every chunk of a message carries a tag made with the task's secret; auto: except on loopback
    authenticate: Literal["auto", "always", "never"] = "auto"

    def __post_init__(self) -> None:
        if self.encrypt and self.authenticate == "never":
            raise UserError(
                'net.encrypt = true authenticates as well, and net.authenticate is "never"; leave one out.'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySpec:
    """Replicas compute a share of each other's microbatches again and compare the bits."""

    # auto: sampled on CPUs, off on GPUs, where votes are untried. every: all microbatches of every step
    votes: Literal["auto", "off", "sampled", "every"] = "auto"
    cost: float = 0.01  # sampled: at most this part of a step is spent on it
    # A step with a NaN, or with a loss far above the last ones, is computed again. If it is the same again:
    nan: Literal["off", "skip", "pause"] = "skip"  # off: skipped, and not computed again
    spike: Literal["off", "skip", "pause"] = "off"
    band: float = 10.0  # a spike is so many times the spread of the last 32 losses above their median

    def __post_init__(self) -> None:
        if self.band <= 0:
            raise UserError(f"verify.band is {self.band}; give a number above 0.")
        if not 0 < self.cost <= 1:
            raise UserError(f"verify.cost is {self.cost}; it is a part of a step, above 0 and at most 1.")

    def period(self, microbatches: int) -> int:
        """Steps between two votes; 0: there are none."""
        if self.votes == "off":
            return 0
        return 1 if self.votes == "every" else math.ceil(1 / min(1.0, microbatches * self.cost))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """How often the weights are evaluated, and on what. The last step's always are."""

    every: int = 100  # steps
    batches: int = 8
    data: DataSpec = DataSpec(kind="synthetic")  # as [data]: the table [evaluation.data]
    metrics: list[str] = field(default_factory=list)  # "module:function" of (output, targets)

    def __post_init__(self) -> None:
        at_least("evaluation.every", self.every, 1)
        at_least("evaluation.batches", self.batches, 1)
        at_most("evaluation.batches", self.batches, 2**16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`replicas` x `stages` workers; each replica brings `microbatches` to every step."""

    model: ModelSpec
    data: DataSpec = DataSpec(kind="synthetic")
    optimizer: OptimizerSpec = OptimizerSpec()
    checkpoint: CheckpointSpec | None = None  # None: a stage that is lost whole starts the run over
    evaluation: EvaluationSpec | None = None  # None: there is none
    verify: VerifySpec = VerifySpec()
    net: NetSpec = NetSpec()
    steps: int = 100  # optimizer steps
    replicas: int = 1  # data-parallel copies
    max_replicas: int = 0  # on a cluster, the most that the planner may give by itself; 0: `replicas`
    stages: int = 1  # pipeline parts; at most as many as there are layers
    min_stages: int = 0  # fewest that fit a slot's memory: the planner may go so far; 0: as many as `stages`
    shards: int = 1  # processes, each with a device of its own, that share every layer of a worker
    min_shards: int = 0  # fewest that fit a slot's memory: the planner may go so far; 0: as many as `shards`
    microbatches: int = 4  # that each replica brings to a step
    precision: Literal["fp32", "bf16"] = "fp32"  # of the computation; weights are kept in fp32
    accumulate: Literal["strict", "fp32"] = "strict"  # how gradients are summed
    compile: bool | Literal["auto"] = "auto"  # fuse what is between Linears; auto: where that is faster
    graphs: Literal["auto", "always", "never"] = "auto"  # launch F and I of a GPU as CUDA graphs
    recompute: bool = False  # keep a layer's input only, and run the layer again in the backward
    recompute_every: int = 1  # with recompute: only one layer of this many
    recompute_part: Literal["layer", "attention"] = "layer"  # with recompute: all of a layer, or less
    seed: int = 0  # of weights, data and dropout
    device: str = "cpu"  # or "cuda"
    threads: int = 1  # of each worker
    memory_gib: float | None = None  # that each worker may use; None: its device's, shared evenly
    transport: Literal["auto", "tcp", "nccl"] = "auto"  # of tensors; auto: the best per pair
    load_ahead: int | None = None  # microbatches of data; by default 2, for functions of your own 0
    memory_interval: int | None = (
        None  # steps between copies of the state in nodes' memory; None: 10, if it fits
    )
    callbacks: list[str] = field(default_factory=list)  # "module:function" or class, called without arguments
    environment: dict[str, str] = field(default_factory=dict)  # variables of every worker
    workdir: str | None = None  # in which workers run; None: the agent's
    python: str | None = None  # command that starts the workers' Python; None: the agent's
    log: str | None = None  # folder of the step log
    base: str = "."  # the job file's folder: paths and modules are looked up from here
    code: str | None = None  # set by `everstep submit`: the folder of the packed code (`job.code`)

    def __post_init__(self) -> None:
        for name in ("steps", "replicas", "stages", "shards", "microbatches", "threads", "recompute_every"):
            at_least(name, getattr(self, name), 1)
        if self.device not in ("cpu", "cuda"):
            raise UserError(
                f"device {self.device!r} is not known; use cpu or cuda. Each worker gets the GPU of its "
                "slot; CUDA_VISIBLE_DEVICES=1,3 makes GPUs 1 and 3 the slots."
            )
        for name, value in self.environment.items():
            _refuse_variable(name, value)
        if self.python is not None and not self.python_words():
            raise UserError("python is empty; give a command that starts Python, or leave it out.")
        at_least("seed", self.seed, 0)
        at_least("max_replicas", self.max_replicas, 0)
        at_least("min_stages", self.min_stages, 0)
        at_least("min_shards", self.min_shards, 0)
        at_least("memory_interval", self.memory_interval, 0)
        if self.memory_gib is not None:
            positive("memory_gib", self.memory_gib)
            at_most("memory_gib", self.memory_gib, 10**9)
        at_most("steps", self.steps, 10**9)
        at_most("threads", self.threads, 1024)
        at_least("load_ahead", self.load_ahead, 0)
        at_most("load_ahead", self.load_ahead, 1024)
        at_most("shards", self.shards, MOST_SHARDS)
        form = self.model.shape()
        if form is not None:
            presets.refuse_shards(self.shards, form.shared_out())
        at_most("replicas * stages", self.replicas * self.stages, MOST_WORKERS)
        ops = self.replicas * self.stages * self.microbatches
        at_most("replicas * stages * microbatches", ops, MOST_OPS)

    def refuse_contradictions(self) -> None:
        """In a job that a user gives: a later change of its shape can leave such settings behind."""
        if 0 < self.max_replicas < self.replicas:
            raise UserError(
                f"max_replicas is {self.max_replicas}, less than replicas, which is {self.replicas}; give at "
                f"least {self.replicas}, or leave max_replicas out."
            )
        for least, most in (("min_stages", "stages"), ("min_shards", "shards")):
            if getattr(self, least) > getattr(self, most):
                raise UserError(
                    f"{least} is {getattr(self, least)}, more than {most}, which is {getattr(self, most)}; "
                    f"give at most {getattr(self, most)}, or leave {least} out."
                )
        if self.recompute_part == "attention":
            self._refuse_attention_again()
        if self.net.encrypt and self.transport == "nccl":
            raise UserError(
                'transport = "nccl" is not encrypted, and net.encrypt is true; leave transport out: NCCL is '
                "then used between the GPUs of one machine, and TCP between machines."
            )
        for name, chosen in (("nan", self.verify.nan), ("spike", self.verify.spike)):
            if chosen == "pause" and self.checkpoint is None:
                raise UserError(
                    f'verify.{name} = "pause" needs a saved state; give a [checkpoint], or "skip".'
                )
        if self.verify.votes == "every":
            for name, value in (("replicas", self.replicas == 1), ("accumulate", self.accumulate == "fp32")):
                if value:
                    raise UserError(f'verify.votes = "every" {_NO_VOTES[name]}')
            if self.shards > 1:
                raise UserError(f'verify.votes = "every" {_NO_VOTES["shards"]}')

    def _refuse_attention_again(self) -> None:
        part = 'recompute_part = "attention"'
        if not self.recompute:
            raise UserError(f"{part} is about what is run again, and recompute is false; set it to true.")
        if self.shards > 1:
            raise UserError(
                f"{part} cannot be combined with shards that split the layers; leave recompute_part out."
            )
        if self.compiles:
            raise UserError(f"{part} cannot be combined with compile = true; leave one of them out.")

    @property
    def compiles(self) -> bool:
        """Do its workers compile? "auto" becomes true or false before they start (`job.compiling`)."""
        return self.compile is True

    @property
    def copy_interval(self) -> int:
        """Steps between copies in memory. By default only a worker knows whether they are made."""
        return COPY_INTERVAL if self.memory_interval is None else self.memory_interval

    @property
    def vote_period(self) -> int:
        """As `VerifySpec.period`; 0 where no two workers compute the same bits."""
        if self.replicas == 1 or self.shards > 1 or self.accumulate == "fp32":
            return 0
        if self.verify.votes == "auto" and self.device != "cpu":
            return 0
        return self.verify.period(self.microbatches)

    @property
    def sums(self) -> Literal["strict", "strict40", "fp32"]:
        """Strict sums as wide as the precision needs: products of 16-bit numbers have few right bits."""
        return "strict40" if self.accumulate == "strict" and self.precision != "fp32" else self.accumulate

    @property
    def microbatches_in_step(self) -> int:
        return self.replicas * self.microbatches

    @property
    def chunks(self) -> int:
        """Of each stage's optimizer state; 0: it is not sharded."""
        return CHUNKS_PER_REPLICA * self.replicas if self.optimizer.shard else 0

    def task_shape(self) -> Shape:
        return Shape(
            self.replicas,
            self.stages,
            self.microbatches,
            chunks=self.chunks,
            shards=self.shards,
        )

    def reshaped(self, replicas: int, stages: int, shards: int | None = None) -> Self:
        """The same training, the same batch, cut otherwise. `shards`: as many as now, if not given."""
        total, shards = self.microbatches_in_step, self.shards if shards is None else shards
        if replicas < 1 or stages < 1 or total % replicas:
            raise UserError(
                f"shape {replicas}x{stages} does not fit: a step has {total} microbatches, which "
                f"{replicas} replicas cannot share evenly; give a divisor of {total}."
            )
        each = total // replicas
        made = replace(self, replicas=replicas, stages=stages, shards=shards, microbatches=each)
        presets.refuse_shards(shards, made.heads())
        return made

    def rate(self, step: int) -> float:
        return self.optimizer.rate(step, self.steps)

    def path(self, name: str) -> Path:
        """A path of the job file, seen from the job file's folder."""
        return Path(self.base, name)

    def language(self) -> tuple[int, int | None] | None:
        """The vocabulary and the usual length of a row, where the model's words say."""
        form, config = self.model.shape(), self._hf_config()
        if form is not None:
            return form.vocab, form.context
        return (int(config["vocab_size"]), None) if "vocab_size" in config else None

    def hf_kind(self) -> str | None:
        """As Hugging Face calls its architecture; None: it is none of theirs."""
        if self.model.hf is None and "hf_config" not in self.model.card:
            return None
        return str((self._hf_config() or self.model.card.get("hf_config", {})).get("model_type", "?"))

    def width(self) -> int | None:
        """Numbers per token between two layers, where the model's words say."""
        form, config = self.model.shape(), self._hf_config() or self.model.card.get("hf_config", {})
        width = config.get("hidden_size", config.get("n_embd")) if form is None else form.width
        return width if isinstance(width, int) else None

    def most_stages(self) -> int | None:
        """How many stages the model can be cut into, where its words say: its layers and both ends. With one
        stage an optimizer of one's own may let all parameters depend on each other, so it stays one.
        """
        if self.optimizer.build is not None and self.stages == 1:
            return 1
        form, config = self.model.shape(), self._hf_config()
        if form is not None:
            return form.depth + 2
        depth = config.get("num_hidden_layers", config.get("n_layer"))
        return depth + 2 if isinstance(depth, int) else None

    def heads(self) -> dict[str, int | None]:
        """Of a Hugging Face model, where its config says: shards share them out."""
        config = self._hf_config() if self.shards > 1 else {}
        keys = ("num_attention_heads", "num_key_value_heads")
        return {key: config[key] for key in keys if isinstance(config.get(key), int)}

    def model_card(self) -> dict[str, Any]:
        """What a checkpoint says about the model, so that others can build it."""
        spec, form = self.model, self.model.shape()
        if form is not None:
            return {"model": asdict(form), **spec.card}
        if spec.hf is not None:
            started = {} if spec.options.get("weights") is False else {"hf_folder": str(self.path(spec.hf))}
            model = {"hf": spec.hf, **spec.options}
            return {"model": model, "hf_config": self._hf_config(), **started, **spec.card}
        return {"model": {"build": spec.build}, **spec.card}

    def checkpoint_meta(self, step: int) -> dict[str, Any]:
        """What a run needs of a checkpoint besides tensors. Data and random draws are functions of (seed,
        step, microbatch), the rate of the step: the step is the position of them all.
        """
        optimizer = self.optimizer
        return {
            "seed": self.seed,
            "steps": self.steps,
            "precision": self.precision,
            "compile": self.compiles,
            **self.model_card(),
            "shape": {"replicas": self.replicas, "stages": self.stages, "microbatches": self.microbatches},
            "rng": {"kind": "of (seed, step, microbatch, layer)", "seed": self.seed},
            "scheduler": {
                "decay": optimizer.decay,
                "warmup": optimizer.warmup,
                "floor": optimizer.floor,
                "next_multiplier": self.rate(step),
            },
            "data": {"next_step": step + 1, "microbatches_in_step": self.microbatches_in_step},
        }

    def needs(self) -> TaskNeeds:
        """What the agents of its nodes are told of it."""
        spec = self.checkpoint
        folder = None
        if spec is not None:
            folder = CheckpointFolder(
                base=self.base,
                folder=spec.folder,
                keep=spec.keep,
                start_over=spec.start_over,
                interval=spec.interval,
            )
        log = None if self.log is None else str(self.path(self.log))
        return TaskNeeds(
            device=self.device,
            threads=self.threads,
            modules=self.modules(),
            log=log,
            checkpoints=folder,
            python=self.python_words(),
        )

    def python_words(self) -> tuple[str, ...]:
        """The words of `python`; empty: the agent's own."""
        try:
            return tuple(shlex.split(self.python or ""))
        except ValueError as error:
            raise UserError(f"python {self.python!r} is not a command: {error}.") from None

    def modules(self) -> tuple[str, ...]:
        """What its workers import besides torch: better once, before they are forked."""
        if self.model.hf is None:
            return ()
        kind = str(self._hf_config().get("model_type", "auto"))
        return "everstep.engine.hf.model", f"transformers.models.{kind}.modeling_{kind}"

    def _hf_config(self) -> dict[str, Any]:
        """The config.json of a Hugging Face model with what the job changes; read without transformers."""
        if self.model.hf is None:
            return {}
        path = self.path(self.model.hf)
        path = path if path.name == "config.json" else path / "config.json"
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # said in words when the model is built
            return {}
        changes = {key: value for key, value in self.model.options.items() if key not in HF_ARGUMENTS}
        return {**table, **changes} if isinstance(table, dict) else {}

    def to_dict(self) -> dict[str, Any]:
        """JSON, with an exact inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        for name, kind in {"": Job, **_TABLES}.items():
            given, known = table.get(name) if name else table, [f.name for f in fields(kind)]
            if isinstance(given, Mapping) and "options" not in known:
                _refuse_misplaced(f"{name}." if name else "", given, known, f"[{name}]" if name else "a job")
        return read(cls, _from_home(table), "")


def _refuse_variable(name: str, value: Any) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UserError(f"environment.{name} is not a name of a variable; use letters, digits and _.")
    if not isinstance(value, str) or "\0" in value:
        raise UserError(f"environment.{name} is {shown(value)}; it must be text in quotes.")
    if name == "CUDA_VISIBLE_DEVICES" or name.startswith(("LD_", "PYTHON")):
        raise UserError(
            f"environment.{name} has no effect on a worker, which has started by then; set it for the agent."
        )


def _from_home(value: Any, key: str = "") -> Any:
    """`~` in the paths of a job is the home folder of the user who writes it."""
    if isinstance(value, Mapping):
        theirs = ("options", "environment")
        return {n: inner if n in theirs else _from_home(inner, n) for n, inner in value.items()}
    is_path = key in ("folder", "log", "path", "hf", "workdir", "python") and isinstance(value, str)
    return str(Path(value).expanduser()) if is_path and value.startswith("~") else value


def load_job(path: str | Path) -> Job:
    """Read a job file."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a mark in front
    except FileNotFoundError:
        raise UserError(f"job file {str(path)!r} is not there.") from None
    except UnicodeDecodeError:
        raise UserError(f"job file {str(path)!r} is not UTF-8 text; save it as UTF-8.") from None
    except OSError as error:
        raise UserError(f"job file {str(path)!r} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        hint = "; everstep run runs scripts" if Path(path).suffix == ".py" else ""
        raise UserError(f"job file {str(path)!r} is not TOML: {error}{hint}.") from None
    own = table.get("optimizer")
    if isinstance(own, dict) and "build" in own:  # the function gets what the file says, and no defaults
        own["options"] = {**own.get("options", {}), **{key: own[key] for key in _OF_ADAMW if key in own}}
    return Job.from_dict({**table, "base": str(path.resolve().parent)})


_TABLES: dict[str, Any] = {f.name: type(f.default) for f in fields(Job) if is_dataclass(f.default)}
_TABLES |= {"checkpoint": CheckpointSpec, "evaluation": EvaluationSpec, "model": ModelSpec}


def _homes() -> dict[str, str]:
    """The table of each key that a user may set and that only one table has; "": the job itself."""
    keys = [("", f.name) for f in fields(Job) if f.name not in (*_TABLES, "base", "code")]
    keys += [(name, f.name) for name, table in _TABLES.items() for f in fields(table) if f.name != "options"]
    count = Counter(key for _, key in keys)
    return {key: name for name, key in keys if count[key] == 1 and key not in _TABLES}


_HOMES = _homes()


def _refuse_misplaced(where: str, given: Mapping[str, Any], known: Collection[str], table: str) -> None:
    """A key that is in another table, or has another name here."""
    for key in given:
        name = _USUAL_NAMES.get(key, key)
        home = _HOMES.get(name)
        if key in known or home is None:
            continue
        place = f"[{home}]" if home else "the job: move it above all tables"
        hint = f"{f'here it is called {name}, ' if name != key else 'it is '}a key of {place}."
        raise UserError(f"{where}{key} is not a key of {table}; {hint}")


def _refuse_unknown(where: str, given: Mapping[str, Any]) -> None:
    """Of a table whose other keys would be arguments, had it anything to give them to."""
    known = [f.name for f in fields(_TABLES[where])]
    _refuse_misplaced(f"{where}.", given, known, f"[{where}]")
    refuse_unknown(where, given, known)
