"""The update of a stage: master weights, any torch optimizer, and an exact way back.

The optimizer works on fp32 masters, views of one flat buffer of the stage; for fp32 they are the weights the
layers compute with, for bf16 those follow by one copy. A staggered optimizer steps before the whole model's
gradient norm is known, so a step can turn out wrong: `keep` copies all that a step changes, `undo` puts the
copy back, bit for bit. Inverse arithmetic would be cheaper and is not exact.

    keep(); apply(step, mean, 1.0)            the norm arrives and is within the clip: done
    undo(); apply(step, mean, clip / norm)    it was not
    undo()                                    it was NaN: the step is skipped
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it in their first step: 2 s, better spent before a fork
from torch import Tensor, nn

from everstep.engine.model import Slot
from everstep.engine.stage import Stage
from everstep.errors import InternalError, UserError

Named = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[Named], torch.optim.Optimizer]
Rate = Callable[[int], float]  # step -> multiplier of every group's learning rate

_SCALARS: dict[str, tuple[type, torch.dtype]] = {"int": (int, torch.int64), "float": (float, torch.float64)}


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


class Updater:
    """The optimizer of one stage. The factory gets the masters as `named_parameters()` would give them."""

    def __init__(
        self, stage: Stage, optimizer: OptimizerFactory | None = None, rate: Rate = lambda step: 1.0
    ) -> None:
        self.stage, self.rate = stage, rate
        self.named: Named = [(name, nn.Parameter(view)) for name, view in stage.views(stage.masters).items()]
        self._by_name = dict(self.named)
        self.optimizer = (optimizer or adamw())(self.named) if self.named else None
        self._base_rates = [group["lr"] for group in self._groups]
        self._pairs = [pair for pair in stage.model.tied if all(half in stage.slots for half in pair)]
        elsewhere = [stage.slots[b] for _, b in stage.model.tied if b in stage.slots]
        self._counted = _outside({*elsewhere, *(stage.slots[a] for a, _ in self._pairs)}, stage.size)
        self._gradient: Tensor | None = None  # the flat tensor the parameters' .grad are views of
        self._scaled: Tensor | None = None
        self._mean: Tensor | None = None
        self._kept: list[Tensor] = []
        self._kept_states: list[dict[str, Any]] = []

    # Gradients.

    def mean(self, total: Tensor, count: int) -> Tensor:
        """The fp32 mean of `count` microbatches from their flat sum, in a buffer the next call reuses."""
        if self._mean is None:
            self._mean = torch.empty(self.stage.size, dtype=torch.float32, device=self.stage.device)
        return torch.div(total, count, out=self._mean)

    def sum_of_squares(self, flat: Tensor) -> float:
        """For the global norm, in fp64. A tied pair counts once in the whole model, as its sum."""
        parts = [*(flat[part] for part in self._counted), *self._joined(flat).values()]
        return float(sum(torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts))

    # A step, and back.

    def apply(self, step: int, mean: Tensor, scale: float = 1.0) -> None:
        """One optimizer step with the gradient mean x scale. `mean` is not changed.

        The halves of a tied pair that are both here get the sum of the two.
        """
        if self.optimizer is None:
            return
        joined = self._joined(mean)
        if scale != 1.0:
            if self._scaled is None:
                self._scaled = torch.empty_like(mean)
            mean = torch.mul(mean, scale, out=self._scaled)
        self._attach(mean)
        for pair, total in joined.items():
            for name in pair:
                self._by_name[name].grad = total if scale == 1.0 else total * scale
        multiplier = self.rate(step)
        for group, base in zip(self._groups, self._base_rates, strict=True):
            group["lr"] = base * multiplier
        self.optimizer.step()
        self._follow()

    def skip(self, step: int) -> None:
        """A step whose gradient is not finite: nothing changes, not even the optimizer's count of steps."""

    def keep(self) -> None:
        """Copy everything a step changes. From the second step on this allocates nothing."""
        tensors = self._changing()
        if [t.shape for t in tensors] != [t.shape for t in self._kept]:
            self._kept = [torch.empty_like(t) for t in tensors]
        torch._foreach_copy_(self._kept, tensors)
        self._kept_states = [dict(self._state(p)) for _, p in self.named]

    def undo(self) -> None:
        """Back to the last `keep`, bit for bit."""
        if not self._kept:
            raise InternalError("undo without a keep before it.")
        for (_, p), kept in zip(self.named, self._kept_states, strict=True):
            self._set_state(p, kept)  # the same tensors as then; their contents follow
        torch._foreach_copy_(self._changing(), self._kept)
        self._follow()

    # The whole state, by logical name.

    def state(self) -> dict[str, Tensor]:
        """`model/<name>` and `optimizer/<name>/<key>`: live tensors, to be copied before the next step."""
        found: dict[str, Tensor] = {}
        for name, p in self.named:
            found[f"model/{name}"] = p.detach()
            for key, value in self._state(p).items():
                if isinstance(value, Tensor):
                    found[f"optimizer/{name}/{key}"] = value
                elif type(value).__name__ in _SCALARS:
                    kind = type(value).__name__
                    found[f"optimizer/{name}/{key}#{kind}"] = torch.tensor(value, dtype=_SCALARS[kind][1])
        return found

    def groups(self, step: int) -> list[dict[str, Any]]:
        """The optimizer's groups as the next step will find them: names, and every number they hold."""
        names = {id(p): name for name, p in self.named}
        found = []
        for group, base in zip(self._groups, self._base_rates, strict=True):
            plain = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            numbers = {key: value for key, value in plain.items() if _is_plain(value)}
            now = {"lr": base * self.rate(step + 1), "initial_lr": base}
            found.append({"params": [names[id(p)] for p in group["params"]], **numbers, **now})
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state that `state` gave, here or on another worker, optimizer and all."""
        keyed: dict[str, list[tuple[str, Tensor]]] = {}
        for full, value in state.items():
            if full.startswith("optimizer/"):
                name, _, key = full.removeprefix("optimizer/").rpartition("/")
                keyed.setdefault(name, []).append((key, value))
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
            self._set_state(p, dict(self._loaded(p, key, value) for key, value in keyed.get(name, ())))
        self._follow()

    # How.

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    def _state(self, p: nn.Parameter) -> dict[str, Any]:
        return self.optimizer.state.get(p, {}) if self.optimizer is not None else {}

    def _set_state(self, p: nn.Parameter, state: Mapping[str, Any]) -> None:
        assert self.optimizer is not None
        if state:
            self.optimizer.state[p] = dict(state)
        else:
            self.optimizer.state.pop(p, None)

    def _loaded(self, p: nn.Parameter, key: str, value: Tensor) -> tuple[str, Any]:
        key, _, kind = key.partition("#")
        if kind:
            return key, _SCALARS[kind][0](value.item())
        # Counters live on the CPU, unless the optimizer reads them in a kernel of its own.
        group = next(group for group in self._groups if any(p is q for q in group["params"]))
        in_kernel = group.get("fused") or group.get("capturable")
        device = p.device if value.ndim or in_kernel else torch.device("cpu")
        return key, value.detach().to(device, copy=True)

    def _changing(self) -> list[Tensor]:
        """The tensors a step writes to."""
        states = [value for _, p in self.named for _, value in sorted(self._state(p).items())]
        return [self.stage.masters, *(value for value in states if isinstance(value, Tensor))]

    def _attach(self, flat: Tensor) -> None:
        if self._gradient is not flat:
            self._gradient = flat
            for (_, p), view in zip(self.named, self.stage.views(flat).values(), strict=True):
                p.grad = view

    def _joined(self, flat: Tensor) -> dict[tuple[str, str], Tensor]:
        """The sums of the tied pairs that are both here."""
        slots = self.stage.slots
        return {(a, b): slots[a].of(flat) + slots[b].of(flat) for a, b in self._pairs}

    def _follow(self) -> None:
        if self.stage.working is not self.stage.masters:
            self.stage.working.copy_(self.stage.masters)


def _is_plain(value: Any) -> bool:
    """What JSON can hold."""
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def _outside(holes: set[Slot], size: int) -> list[slice]:
    """The parts of 0..size that are in no slot."""
    edges = [0, *(edge for slot in sorted(holes) for edge in (slot.offset, slot.offset + slot.size)), size]
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
