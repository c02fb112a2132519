"""The update of a stage: master weights, any torch optimizer, and a way back that needs no copy.

The optimizer works on fp32 masters, views of one flat buffer of the stage. What the layers compute with, the
working weights, follow by one copy; for fp32 they are the masters themselves until the first eager update. A
staggered optimizer steps before the whole model's gradient norm is known, so a step can turn out wrong:

    preview(step, mean)             the working weights become those of the next step; nothing else changes
        commit(step, mean)          the norm is within the clip: the same step once more, in masters and state
        undo(); apply(step, ...)    it was not: the working weights are copied from the masters again
        undo()                      it was NaN: the step is skipped

So an eager step is computed twice, and nothing is kept of the state before it: 0 bytes per parameter in bf16,
4 in fp32 (working weights of their own). Rejected: a copy of all that a step changes (12 bytes per parameter,
and as much traffic as the second computation), and inverse arithmetic, which is not exact.

What a step needs besides (the scaled gradient, the state to put back after a preview) is held for one bucket
of parameters at a time, where the optimizer treats every parameter by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine import device as devices
from everstep.engine import keys
from everstep.engine.layers.model import Slot
from everstep.engine.stage.counted import counted, counts, squares_of
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer_state import Named, OptimizerState, has_modes, made_optimizer
from everstep.engine.state.optimizer_trial import try_optimizer
from everstep.errors import UserError
from everstep.job.presets import closest

BUCKET = 16 << 20  # parameters that are updated at once where a step needs scratch
OptimizerFactory = Callable[[Named], torch.optim.Optimizer]
Rate = Callable[[int], float]  # step -> multiplier of every group's learning rate

# Of torch's own optimizers those that treat every parameter, and every element of it, by itself.
ELEMENTWISE = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)


def adamw(
    *,
    lr: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> OptimizerFactory:
    """AdamW in one fused pass; norms and biases (1-D tensors) do not decay."""

    def build(named: Named) -> torch.optim.Optimizer:
        matrices = [(name, p) for name, p in named if p.ndim > 1]
        vectors = [(name, p) for name, p in named if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=True,
        )

    return build


def torch_optimizer(name: str, options: Mapping[str, Any]) -> OptimizerFactory:
    """One of torch's optimizers by its name."""
    kinds = [n for n, kind in vars(torch.optim).items() if isinstance(kind, type) and n != "Optimizer"]
    if name not in kinds:
        raise UserError(f"optimizer {name!r} is not one of torch.optim; {closest(name, kinds)}")

    def build(named: Named) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = getattr(torch.optim, name)(named, **options)
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer {name} cannot be made: {error}.") from None
        return made

    return build


class Updater:
    """The optimizer of one stage. The factory gets the masters as `named_parameters()` would give them."""

    def __init__(
        self,
        stage: Stage,
        optimizer: OptimizerFactory | None = None,
        rate: Rate = lambda step: 1.0,
        ema: float | None = None,
    ) -> None:
        """`ema`: the decay of an average of the masters, which every step for good moves on."""
        self.stage, self.rate, self.ema = stage, rate, ema
        self._factory = optimizer or adamw()
        devices.seed(stage.device, keys.key(stage.seed, keys.UPDATE, 0, stage.layers.start))
        self._average = stage.masters.clone() if ema is not None else None
        self.named: Named = [(name, nn.Parameter(view)) for name, view in stage.views(stage.masters).items()]
        self.optimizer = made_optimizer(self._factory, self.named) if self.named else None
        self._remembered = OptimizerState(self.optimizer, self.named) if self.optimizer is not None else None
        if ema is not None and self.optimizer is not None and has_modes(self.optimizer):
            kind = type(self.optimizer).__name__
            raise UserError(f"optimizer.ema is {ema}, and {kind} keeps an average itself; leave ema out.")
        self._base_rates = [group["lr"] for group in self._groups]
        self._pairs = [pair for pair in stage.model.tied if all(half in stage.slots for half in pair)]
        elsewhere = [stage.slots[b] for _, b in stage.model.tied if b in stage.slots]
        self._counted = _outside({*elsewhere, *(stage.slots[a] for a, _ in self._pairs)}, stage.size)
        self._mean: Tensor | None = None
        self._loaded = False  # was a state?
        # The largest needs room anyway; and each bucket is a call, in which a GPU waits for the host.
        most = max((p.numel() for _, p in self.named), default=0)
        size = max(BUCKET, most) if is_elementwise(self.optimizer) else stage.size + 1
        self._buckets = buckets(self.named, size)

    # Gradients.

    def mean(self, total: Tensor, count: int) -> Tensor:
        """The fp32 mean of `count` microbatches from their flat sum, in a buffer the next call reuses."""
        if self._mean is None:
            self._mean = torch.empty(self.stage.size, dtype=torch.float32, device=self.stage.device)
        return torch.div(total, count, out=self._mean)

    def sum_of_squares(self, flat: Tensor) -> float:
        """For the global norm, in fp64. A tied pair counts once in the whole model, as its sum."""
        own = [flat[both] for part in self._counted for both in counted(self.stage, part)]
        joined = [total for (name, _), total in self._joined(flat).items() if counts(self.stage, name)]
        return squares_of(self.stage, [[*own, *joined]])[0]

    def squares(self, flat: Tensor, chunks: Sequence[slice]) -> tuple[float, ...]:
        """The sum of squares of each chunk. What every shard has whole counts on the first one."""
        parts = [[flat[both] for both in counted(self.stage, chunk)] for chunk in chunks]
        return squares_of(self.stage, parts)

    # A step, and back.

    def apply(self, step: int, mean: Tensor, scale: float = 1.0) -> None:
        """One optimizer step with the gradient mean x scale. `mean` is not changed.

        The halves of a tied pair that are both here get the sum of the two.
        """
        self._step(step, mean, scale)
        self._follow()

    def preview(self, step: int, mean: Tensor) -> None:
        """From now on the layers compute with what `apply` would give them."""
        if self._remembered is None:
            return
        if self.stage.working is self.stage.masters:
            self.stage.separate_weights()
        self._begin(step)
        joined = self._joined(mean)
        for bucket in self._buckets:
            put_back = self._remembered.keep(bucket)
            self._step_bucket(bucket, mean, joined, 1.0)
            for name, p in bucket:
                self.stage.slots[name].of(self.stage.working).copy_(p.detach())
            put_back()

    def commit(self, step: int, mean: Tensor) -> None:
        """The step of the last preview, for good. The layers compute with it already."""
        self._step(step, mean, 1.0)

    def undo(self) -> None:
        """Back to before the last preview, bit for bit."""
        self._follow()

    def _step(self, step: int, mean: Tensor, scale: float) -> None:
        if self.optimizer is None:
            return
        self._begin(step)
        joined = self._joined(mean)
        for bucket in [self.named] if scale == 1.0 else self._buckets:
            self._step_bucket(bucket, mean, joined, scale)
        if self._average is not None and self.ema is not None:
            self._average.lerp_(self.stage.masters, 1 - self.ema)

    def _begin(self, step: int) -> None:
        if step == 1:
            self._try()
        devices.seed(self.stage.device, keys.key(self.stage.seed, keys.UPDATE, step, self.stage.layers.start))
        multiplier = self.rate(step)
        for group, base in zip(self._groups, self._base_rates, strict=True):
            group["lr"] = base * multiplier

    def _try(self) -> None:
        """Before the first step of a run: a job that nobody has checked may name any optimizer."""
        if self.optimizer is not None and not is_elementwise(self.optimizer):
            several = not (self.stage.is_first and self.stage.is_last)
            tried = self._factory, self.optimizer, self.named
            tied, split = bool(self.stage.model.tied), self.stage.shards is not None
            try_optimizer(*tried, device=self.stage.device, several=several, tied=tied, split=split)

    def _step_bucket(
        self, bucket: Named, mean: Tensor, joined: Mapping[tuple[str, str], Tensor], scale: float
    ) -> None:
        """One optimizer step of some parameters; the others have no gradient, and stay as they are."""
        assert self.optimizer is not None
        assert self._remembered is not None
        tied = {name: total for pair, total in joined.items() for name in pair}
        grads = [tied[name] if name in tied else self.stage.slots[name].of(mean) for name, _ in bucket]
        if scale != 1.0 or not self._remembered.is_torchs_own:  # others compute in the gradient's own memory
            grads = list(torch._foreach_mul(grads, scale))
        for (_, p), grad in zip(bucket, grads, strict=True):
            p.grad = grad
        try:
            self.optimizer.step()
        except KeyError as error:
            if not self._loaded:
                raise
            raise UserError(
                f"{type(self.optimizer).__name__} does not find {error} in the state that was loaded; was it "
                "saved with another optimizer? Resume with that one."
            ) from error
        for _, p in bucket:
            p.grad = None

    # The whole state, by logical name.

    def state(self, step: int | None = None) -> dict[str, Tensor]:
        """`model/<name>` and the optimizer's own: live tensors, to be copied before the next step.

        With the step that made this state also what the next one is computed with (`Stage.beside`).
        """
        found = {} if step is None else self.stage.beside(step)
        if self._average is not None:
            found |= {f"extra/ema/{name}": view for name, view in self.stage.views(self._average).items()}
        elif self._remembered is not None and has_modes(self._remembered.optimizer):
            found |= {f"extra/ema/{name}": values for name, values in self._evaluated().items()}
        found |= {f"model/{name}": p.detach() for name, p in self.named}
        return found if self._remembered is None else found | self._remembered.tensors()

    def _evaluated(self) -> dict[str, Tensor]:
        """The weights that an optimizer with modes says are those to use: as `eval` makes them, and put back
        with every bit, which its `train` would not do.
        """
        remembered: Any = self._remembered
        put_back = remembered.keep(self.named)
        remembered.optimizer.eval()
        found = {name: p.detach().clone() for name, p in self.named}
        put_back()
        return found

    def groups(self, step: int) -> list[dict[str, Any]]:
        """The optimizer's groups as the next step will find them: names, and every number they hold."""
        return plain_groups(self._groups, self._base_rates, self.named, self.rate(step + 1))

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Where a tensor of a state that `load` will be given belongs: its values may be put there before."""
        kind, _, rest = name.removeprefix("extra/").partition("/")
        if kind == "ema" and self._average is not None and rest in self.stage.slots:
            slot = self.stage.slots[rest]
            return slot.of(self._average) if shape and slot.shape == shape else None
        parameter = rest if kind == "model" else rest.rpartition("/")[0]
        p = next((p for n, p in self.named if n == parameter and tuple(p.shape) == shape), None)
        if p is None or not shape or kind not in ("model", "optimizer") or self.optimizer is None:
            return None
        if kind == "model":
            return p.detach()
        key = rest.rpartition("/")[2]
        if "." in key:  # it belongs into a list or an object that is not there yet
            return None
        found: Tensor = self.optimizer.state[p].setdefault(
            key, torch.empty(shape, dtype=dtype, device=p.device)
        )
        return found if found.shape == p.shape and found.dtype == dtype else None

    def load(self, state: Mapping[str, Tensor], step: int | None = None, *, owned: bool = False) -> None:
        """Take over a state that `state` gave, here or on another worker, optimizer and all. Each of its
        tensors is asked for once, and not kept, unless they are `owned`: read for this call alone.
        """
        averages = {} if self._average is None else self.stage.views(self._average)
        for name, p in self.named:
            given = state.get(f"model/{name}")
            if given is None:
                raise UserError(f"the state holds no tensor model/{name}; was it saved from another model?")
            if given.shape != p.shape:
                raise UserError(
                    f"tensor model/{name} has shape {tuple(given.shape)} in the state and "
                    f"{tuple(p.shape)} in the model; was it saved from another model?"
                )
            p.detach().copy_(given)
            if name in averages:  # a state that was saved without an average starts one
                kept = f"extra/ema/{name}"
                averages[name].copy_(state.get(kept, given))
        self._loaded = True
        if self._remembered is not None:
            self._remembered.load(state, owned=owned)
        if step is not None:
            self.stage.load_beside(step, state)
        self._follow()

    # How.

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    def _joined(self, flat: Tensor) -> dict[tuple[str, str], Tensor]:
        """The sums of the tied pairs that are both here."""
        slots = self.stage.slots
        return {(a, b): slots[a].of(flat) + slots[b].of(flat) for a, b in self._pairs}

    def _follow(self) -> None:
        if self.stage.working is not self.stage.masters:
            self.stage.working.copy_(self.stage.masters)


def plain_groups(
    groups: list[dict[str, Any]], rates: list[float], named: Named, multiplier: float
) -> list[dict[str, Any]]:
    """An optimizer's groups by the names of their parameters, with every number that JSON can hold."""
    names = {id(p): name for name, p in named}
    found = []
    for group, base in zip(groups, rates, strict=True):
        plain = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        numbers = {key: _in_json(value) for key, value in plain.items() if _is_plain(value)}
        now = {"lr": float(base * multiplier), "initial_lr": float(base)}  # some keep it in a tensor
        found.append({"params": [names[id(p)] for p in group["params"]], **numbers, **now})
    return found


def is_elementwise(optimizer: torch.optim.Optimizer | None) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE


def buckets(named: Named, size: int) -> list[Named]:
    """Parameters in order, in groups of at most `size` elements; a larger one is alone."""
    found: list[Named] = []
    room = 0
    for name, p in named:
        if p.numel() > room or not found:
            found.append([])
            room = size
        found[-1].append((name, p))
        room -= p.numel()
    return found


def _is_plain(value: Any) -> bool:
    """What JSON can hold, some of it with a tag."""
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def _in_json(value: Any) -> Any:
    """As `convert.values` reads it: an index has no infinite numbers."""
    if isinstance(value, list | tuple):
        return [_in_json(one) for one in value]
    return {"$float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _outside(holes: set[Slot], size: int) -> list[slice]:
    """The parts of 0..size that are in no slot."""
    edges = [0, *(edge for slot in sorted(holes) for edge in (slot.offset, slot.offset + slot.size)), size]
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
