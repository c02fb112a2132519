"""Does an optimizer train here as in a plain loop? Found out by a few steps on small parameters.

An optimizer is any code with any state, so it is tried, and what differs by one bit is refused:

    plain       one step after the other                          what all others are compared with
    eager       each step made, put back, and made again          as a staggered update does
    resumed     a new optimizer takes over the state halfway      as a joiner and a resumed run do
    apart       half of the parameters has other values and gradients; the other half must not notice, because
                with several stages it is on another worker
    split       a new optimizer for one half of every matrix, as each of several shards has it

What moves and cannot be carried is named, where it can be seen. torch's own elementwise optimizers are known
and not tried. A launcher tries on the CPU, before the start; a worker on its device, before its first update.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine import device as devices
from everstep.engine import keys
from everstep.engine.layers.model import in_short
from everstep.engine.state.optimizer_state import (
    BESIDE,
    STATE,
    Named,
    NotCarriedError,
    OptimizerState,
    made_optimizer,
)
from everstep.errors import UserError

STEPS, HALF = 4, 2
OF_EACH_KIND = 4  # parameters that are tried of each group and number of dimensions
MOST_ELEMENTS, MOST_ROWS = 1 << 14, 64  # of a tried parameter; a larger one is cut in all its dimensions
_SEED = 0x7E57
_APART = "with several stages those are on other workers; use stages = 1, or another optimizer"
_TWICE = "the model's tied parameters count twice there; do not tie them, or use another optimizer"

Factory = Callable[[Named], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Small:
    """A parameter to try. Every kind of parameter is in both halves, where there are two of it."""

    name: str
    shape: tuple[int, ...]
    half: int


class TrialError(UserError):
    """It raised: where it was tried, or anywhere."""


def try_optimizer(
    build: Factory,
    made: torch.optim.Optimizer,
    named: Named,
    *,
    device: torch.device,
    several: bool = False,
    tied: bool = False,
    split: bool = False,
) -> None:
    """`made`: what `build` gives for `named`. `several`: is this one of several stages? `tied`: has the model
    tied parameters, each of which is two here? `split`: has a worker shards, which hold parts of matrices?
    """
    kind = type(made).__name__
    instead = "use another optimizer, such as AdamW"
    with devices.kept_generators(device):
        chosen = _chosen(build, made, named)
        plain = _Tried(build, chosen, device)
        rates, hidden = plain.rates(), plain.hidden()
        expected = plain.steps(0, STEPS)
        plain.state.tensors()  # raises for what it cannot carry
        for where, printed in plain.hidden().items():
            if printed != hidden.get(where):
                raise NotCarriedError(made, where)
        if plain.rates() != rates:
            raise UserError(f"{kind} changes the learning rate of its groups, which the job sets; {instead}.")
        if tied and plain.draws:
            raise UserError(
                f"{kind} draws random numbers, others for each half of the model's tied parameters; do not "
                f"tie them, or {instead}."
            )
        eager = _Tried(build, chosen, device).steps(0, STEPS, eager=True)
        if not _same(expected, eager):
            raise UserError(f"{kind} does not forget a step that is undone; {instead}.")
        first, second = _Tried(build, chosen, device), _Tried(build, chosen, device)
        first.steps(0, HALF)
        second.take_over(first)
        if not _same(expected[HALF * len(chosen) :], second.steps(HALF, STEPS)):
            raise UserError(f"{kind} continues differently from a copy of its state; {instead}.")
        for half in (0, 1) if several or tied else ():
            apart = _Tried(build, chosen, device, other=half)
            apart.steps(0, STEPS)
            for one in [one for one in chosen if one.half != half]:
                if not _same(plain.all_of(one.name), apart.all_of(one.name)):
                    raise UserError(
                        f"{kind} computes the step of a parameter from other parameters too, and "
                        f"{_APART if several else _TWICE}."
                    )
        for part in (0, 1) if split else ():
            halved = _Tried(build, chosen, device, part=part)
            if not _close([_part(p, part) for p in expected], halved.steps(0, STEPS)):
                raise UserError(
                    f"{kind} computes the step of a part of a matrix from its other parts too, and shards "
                    "have one part each; use shards = 1, or an optimizer such as AdamW."
                )


class _Tried:
    """Small parameters and their optimizer. `other`: the half with different values and gradients. `part`:
    which half of every matrix it has, if not all of it.
    """

    def __init__(
        self,
        build: Factory,
        chosen: list[_Small],
        device: torch.device,
        other: int | None = None,
        part: int | None = None,
    ) -> None:
        self._chosen, self._device, self._other, self._part = chosen, device, other, part
        self.draws = False  # random numbers
        devices.seed(device, _SEED)
        drawn = zip(chosen, self._drawn(0), strict=True)
        self.named = [(one.name, nn.Parameter(0.1 * values)) for one, values in drawn]
        self.optimizer = made_optimizer(build, self.named)
        self.state = OptimizerState(self.optimizer, self.named)

    def steps(self, first: int, last: int, *, eager: bool = False) -> list[Tensor]:
        """All weights after each."""
        found: list[Tensor] = []
        for step in range(first + 1, last + 1):
            if eager:
                put_back = self.state.keep(self.named)
                self._step(step)
                put_back()
            self._step(step)
            found += [p.detach().clone() for _, p in self.named]
        return found

    def take_over(self, other: _Tried) -> None:
        kept, as_sent = other.state.tensors(), torch.contiguous_format
        copied = {name: tensor.clone(memory_format=as_sent) for name, tensor in kept.items()}
        for (_, mine), (_, theirs) in zip(self.named, other.named, strict=True):
            mine.detach().copy_(theirs.detach())
        self.state.load(copied)

    def all_of(self, name: str) -> list[Tensor]:
        """A parameter, and all that the optimizer keeps for it, its group included."""
        kept = self.state.tensors()
        prefix, beside = f"{STATE}{name}/", f"{BESIDE}{name}"
        mine = [full for full in sorted(kept) if full.startswith(prefix) or full == beside]
        return [dict(self.named)[name].detach(), *(kept[full] for full in mine)]

    def hidden(self) -> dict[str, Any]:
        """What cannot be carried, as far as it can be seen, by its place."""
        return {where: _print(value) for where, value in self.state.opaque().items()}

    def rates(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _step(self, step: int) -> None:
        # Alike from step to step, as those of a model are: an optimizer that adapts its rate then does.
        for (_, p), always, now in zip(self.named, self._drawn(-1), self._drawn(step), strict=True):
            p.grad = always + 0.1 * now
        devices.seed(self._device, keys.key(_SEED, step))
        try:
            self.optimizer.step()
        except Exception as error:  # the user's optimizer
            kind = type(self.optimizer).__name__
            raise TrialError(f"{kind} raised {in_short(error)} in step {step} of a trial.") from error
        self.draws |= devices.has_drawn(self._device, keys.key(_SEED, step))
        for _, p in self.named:
            p.grad = None

    def _drawn(self, step: int) -> list[Tensor]:
        found = []
        for index, one in enumerate(self._chosen):
            key = keys.key(_SEED, step, index, int(one.half == self._other))
            drawn = torch.randn(one.shape, generator=torch.Generator().manual_seed(key))
            found.append(_part(drawn, self._part).to(self._device))
        return found


def _chosen(build: Factory, made: torch.optim.Optimizer, named: Named) -> list[_Small]:
    """Some parameters of each kind, the smallest ones; all, if the optimizer cannot be made for some."""
    group_of = {id(p): number for number, group in enumerate(made.param_groups) for p in group["params"]}
    counts: Counter[tuple[int | None, int]] = Counter()
    halves, few = {}, set()
    for name, p in sorted(named, key=lambda pair: pair[1].numel()):
        kind = group_of.get(id(p)), p.ndim
        halves[name] = counts[kind] % 2
        counts[kind] += 1
        if counts[kind] <= OF_EACH_KIND:
            few.add(name)
    whole = [_Small(name=name, shape=_cut(tuple(p.shape)), half=halves[name]) for name, p in named]
    chosen = [one for one in whole if one.name in few]
    try:
        build([(one.name, nn.Parameter(torch.zeros(one.shape))) for one in chosen])
    except Exception:  # the user's function: it asks for some parameter by its name
        return whole
    return chosen


def _cut(shape: tuple[int, ...]) -> tuple[int, ...]:
    if prod(shape) <= MOST_ELEMENTS:
        return shape
    most = MOST_ROWS
    while prod(min(n, most) for n in shape) > MOST_ELEMENTS:
        most //= 2
    return tuple(min(n, most) for n in shape)


def _part(tensor: Tensor, part: int | None) -> Tensor:
    """Rows of a matrix that has them for two."""
    if part is None or tensor.ndim < 2 or tensor.shape[0] < 2:
        return tensor
    return tensor.tensor_split(2)[part].clone()


def _close(one: list[Tensor], other: list[Tensor]) -> bool:
    """But for rounding, which may depend on where in a tensor an element is."""
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(one, other, strict=True))


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    """To the bit: what is not a number equals itself."""
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(one, other, strict=True)
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _print(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """All that can be seen of an object: equal before and after a step that did not change it."""
    if id(value) in seen or isinstance(value, type | ModuleType | FunctionType | MethodType):
        return None
    inside = seen | {id(value)}
    if isinstance(value, Tensor):
        return value.detach().cpu().flatten().tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, Mapping):
        return [(_print(key, inside), _print(one, inside)) for key, one in value.items()]
    if isinstance(value, list | tuple | deque | set | frozenset):
        return [_print(one, inside) for one in value]
    if hasattr(value, "__dict__"):
        return _print(vars(value), inside)
    return repr(value)
