"""Everything an optimizer remembers from one step to the next: put back after a trial step, or carried away.

torch's own optimizers keep tensors and numbers per parameter. Others keep counters in their groups
(ScheduleFree, Prodigy), lists and objects per parameter (SOAP, GaLore), flags on themselves. All of it moves
with a step, so all of it is put back after an eager step and travels to joiners, copies and checkpoints:

    optimizer/<parameter>/<key>         a tensor of state[p]; <key>#int and #float: a number
    optimizer/<parameter>/<key>.<n>     the n-th tensor inside of a list, a dict or an object of state[p]
    extra/optimizer/<parameter>         the rest, as JSON: what is around those tensors; the values of the
                                        parameter's group, and of the optimizer itself, that have changed
                                        since they were made

What belongs to a group or to the optimizer stands with every parameter: a stage that is cut differently finds
it there. An object is carried if its class is of the optimizer's own package: no other class is looked up, no
constructor is called. Whatever cannot be held is refused by its name (`NotCarriedError`); `optimizer_trial`
finds it before the start.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from everstep.errors import UserError

Named = list[tuple[str, nn.Parameter]]
Into = tuple[str, dict[str, Tensor]]  # what the names of tensors begin with, and where these go

STATE, BESIDE = "optimizer/", "extra/optimizer/"
MOST_INLINE = 4096  # elements of a tensor of a group or of the optimizer, which travels as text
_NUMBERS: dict[str, tuple[type, torch.dtype]] = {"int": (int, torch.int64), "float": (float, torch.float64)}
_PLAIN = (type(None), bool, int, float, str)
MOST_DEEP = 16  # lists in lists
_BUILT_IN = (dict, list, tuple, set, frozenset, deque)
_SEQUENCES = (tuple, set, frozenset, torch.Size)
_MAPPINGS = (dict, OrderedDict)
_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: kind for kind in (*_SEQUENCES, *_MAPPINGS)},
    "deque": lambda held: deque(held[1], held[0]),
}
_OF_JOB = ("params", "param_names", "lr")  # of a group: the rate of a step is the job's
# Of torch's base class and its schedulers; what they note for their checks and warnings is no state.
_OF_TORCH = (
    "state",
    "param_groups",
    "step",
    "_opt_called",
    "_need_device_dtype_check_for_fused",
    "_warned_capturable_if_run_uncaptured",
)


class NotCarriedError(UserError):
    """Something in an optimizer that no other worker could be given."""

    def __init__(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        super().__init__(
            f"{type(optimizer).__name__} keeps state in {where}, which cannot be copied to another worker or "
            "to a checkpoint; use another optimizer, such as AdamW."
        )


def made_optimizer(build: Callable[[Named], torch.optim.Optimizer], named: Named) -> torch.optim.Optimizer:
    """One that has a mode for training, as ScheduleFree has, is in it."""
    made = build(named)
    if has_modes(made):
        made.train()  # type: ignore[attr-defined]
    return made


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Does it train with other weights than those to use afterwards?"""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """A group of an optimizer, or its attributes. `made`: its first values, each in a list; an empty one for
    what cannot be carried, and therefore must not change.
    """

    values: dict[str, Any]
    made: Mapping[str, list[Any]]
    without: Iterable[str]
    where: str


class OptimizerState:
    """Of one optimizer, from the moment it was made. `named`: its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: Named) -> None:
        self.optimizer, self._named = optimizer, named
        kind = type(optimizer)
        self.is_torchs_own = kind.__module__.startswith("torch.optim.")
        self._packages = {_package(each) for each in kind.__mro__} - {"abc", "builtins", "torch", "typing"}
        self._group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._parameters = {id(p) for _, p in named}
        self._own: _Holder | None = None
        self._groups: list[_Holder] = []
        if not self.is_torchs_own:  # which keep nothing outside of state[p]
            self._own = self._holder(vars(optimizer), _OF_TORCH, "its attribute ")
            self._groups = [self._holder(each, _OF_JOB, "its group, ") for each in optimizer.param_groups]

    # -------------------------------------------------------------- put back

    def keep(self, bucket: Named) -> Callable[[], None]:
        """Call what this returns, and these parameters and the optimizer are what they are now."""
        state = self.optimizer.state
        if self.is_torchs_own:  # a step of a bucket changes its parameters and their states, nothing else
            inside = [each for _, p in bucket for each in (p, state.get(p))]
            kept = [(state, dict(state)), *self._copies(inside)]
        else:
            kept = list(self._copies([vars(self.optimizer)]))
        return lambda: _put_back(kept)

    def _copies(self, roots: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Each thing that can change in place, with what it holds now."""
        todo, seen = roots, set[int]()
        while todo:
            value = todo.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            match value:
                case Tensor() if _is_wrapper(value):
                    todo += [getattr(value, name) for name in _flattened(value)[0]]
                case Tensor():
                    yield value.detach(), value.detach().clone()
                case dict():
                    yield value, dict(value)
                    todo += [*value.keys(), *value.values()]
                case list() | set() | deque():
                    yield value, list(value)
                    todo += value
                case tuple():
                    todo += value
                case _ if self._is_own_object(value):
                    todo.append(vars(value))

    # -------------------------------------------------------------- carried away

    def tensors(self) -> dict[str, Tensor]:
        """Live tensors, to be copied before the next step."""
        found: dict[str, Tensor] = {}
        itself = {} if self._own is None else self._moved(self._own)
        moved = {id(group.values): self._moved(group) for group in self._groups}
        known = {p for _, p in self._named}
        others = [(key, value) for key, value in self.optimizer.state.items() if key not in known]
        shared = [[self._encode(part, "its state", None) for part in pair] for pair in others]
        for name, p in self._named:
            state, here = self._tensors_of(p)
            found |= {f"{STATE}{name}/{key}": tensor for key, tensor in here.items()}
            group = moved.get(id(self._group_of.get(p)))
            rest = {"state": state, "group": group, "optimizer": itself, "shared": shared}
            if any(rest.values()):
                given = {key: value for key, value in rest.items() if value}
                text = json.dumps(given, separators=(",", ":")).encode()
                found[f"{BESIDE}{name}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return found

    def _tensors_of(self, p: nn.Parameter) -> tuple[list[Any], dict[str, Tensor]]:
        """The state of a parameter: as JSON what is not a tensor or a number, and all tensors by key."""
        rest: list[Any] = []
        found: dict[str, Tensor] = {}
        for number, (key, value) in enumerate(self.optimizer.state.get(p, {}).items()):
            kind = type(value).__name__
            is_word = type(key) is str and not {"/", "#"} & set(key)
            if is_word and type(value) is Tensor and self._is_usual(p, value):
                found[key] = value
            elif is_word and kind in _NUMBERS:
                found[f"{key}#{kind}"] = torch.tensor(value, dtype=_NUMBERS[kind][1])
            else:
                where, inside = f"state[p][{key!r}]", dict[str, Tensor]()
                into = key if is_word else f"state{number}", inside
                rest.append([self._encode(key, where, None), self._encode(value, where, into)])
                assert not found.keys() & inside.keys()
                found |= inside
        return rest, found

    def load(self, state: Mapping[str, Tensor], *, owned: bool = False) -> None:
        """Take over what `tensors` gave, here or on another worker. Read and put in place parameter by
        parameter: a state may be larger than what is left of the memory. `owned`: its tensors are read for
        this call alone, and need no copy.
        """
        keyed: dict[str, dict[str, str]] = {}
        for full in state:
            if full.startswith(STATE):
                name, _, key = full.removeprefix(STATE).rpartition("/")
                keyed.setdefault(name, {})[key] = full
        names = [name for name, _ in self._named]
        rests: dict[str, dict[str, Any]] = {
            name: json.loads(state[f"{BESIDE}{name}"].cpu().numpy().tobytes())
            for name in names
            if f"{BESIDE}{name}" in state
        }
        for group in self._groups:
            members = [name for name, p in self._named if self._group_of.get(p) is group.values]
            self._set(group, self._agreed(members, rests, "group"))
        if self._own is not None:
            self._set(self._own, self._agreed(names, rests, "optimizer"))
        before = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for name, p in self._named:
            given = {key: state[full] for key, full in keyed.get(name, {}).items()}
            rest = rests.get(name, {}).get("state", ())
            mine = self._state_of(p, given, rest, before.pop(p, {}), copy=not owned)
            if mine:
                self.optimizer.state[p] = mine
            given.clear()  # before the next ones are read
        for key, value in next(iter(rests.values()), {}).get("shared", ()):
            self.optimizer.state[self._decode(key, {})] = self._decode(value, {})

    def _state_of(
        self,
        p: nn.Parameter,
        given: Mapping[str, Tensor],
        rest: Iterable[Any],
        before: Mapping[str, Any],
        *,
        copy: bool,
    ) -> dict[Any, Any]:
        """`before`: what `p` had, and where some of the tensors were put when they arrived."""
        found: dict[Any, Any] = {}
        inside = {word for _, value in rest for word in _words(value)}
        for key, value in given.items():
            word, _, kind = key.partition("#")
            if kind:
                found[word] = _NUMBERS[kind][0](value.item())
            elif key not in inside:
                placed = before.get(key) is value
                found[key] = value if placed else value.detach().to(self._usual_device(p, value), copy=copy)
        return found | {self._decode(key, {}): self._decode(value, given) for key, value in rest}

    def _agreed(self, names: list[str], rests: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """What all these parameters say of their group, or of the optimizer."""
        said = [rests.get(name, {}).get(kind, {}) for name in names]
        for name, other in zip(names, said, strict=True):
            if json.dumps(other) != json.dumps(said[0]):
                raise UserError(
                    f"the saved state of the optimizer differs between {names[0]} and {name}, which are in "
                    "one group now; resume with the groups and the optimizer that it was saved with."
                )
        found: dict[str, Any] = said[0] if said else {}
        return found

    # -------------------------------------------------------------- values of groups and of the optimizer

    def _holder(self, values: dict[str, Any], without: Iterable[str], where: str) -> _Holder:
        return _Holder(values=values, made=self._values(values, without), without=without, where=where)

    def _values(self, values: Mapping[str, Any], without: Iterable[str]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for key, value in values.items():
            if key not in without:
                try:
                    found[key] = [self._encode(value, key, None)]
                except NotCarriedError:
                    found[key] = []
        return found

    def _moved(self, holder: _Holder) -> dict[str, list[Any] | None]:
        """What is not as it was made; None for what is gone."""
        now = self._values(holder.values, holder.without)
        found: dict[str, list[Any] | None] = {key: None for key in holder.made if key not in now}
        for key, value in now.items():
            if json.dumps(value) != json.dumps(holder.made.get(key)):
                if not value:
                    raise NotCarriedError(self.optimizer, _place(holder, key))
                found[key] = value
        return found

    def opaque(self) -> dict[str, Any]:
        """What groups and optimizer hold and cannot be carried, by its place: fine as long as it stays."""
        holders = [*self._groups, *([] if self._own is None else [self._own])]
        return {
            _place(holder, key): holder.values[key]
            for holder in holders
            for key, value in self._values(holder.values, holder.without).items()
            if not value
        }

    def _set(self, holder: _Holder, moved: Mapping[str, list[Any] | None]) -> None:
        """To what it was made with, but for what has moved since."""
        target = {**holder.made, **moved}
        now = self._values(holder.values, holder.without)
        for key in now.keys() - {key for key, value in target.items() if value is not None}:
            del holder.values[key]
        for key, value in target.items():
            if value and json.dumps(value) != json.dumps(now.get(key)):
                holder.values[key] = self._decode(value[0], {})

    # -------------------------------------------------------------- values as JSON

    def _encode(self, value: Any, where: str, into: Into | None, deep: int = 0) -> Any:
        """`into`: where tensors go, and what their names begin with; None: they are small, and text."""

        def inner(one: Any) -> Any:
            return self._encode(one, where, into, deep + 1)

        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in (Tensor, nn.Parameter) and id(value) not in self._parameters:
            return self._encode_tensor(value, where, into)
        if deep < MOST_DEEP:
            if isinstance(value, Tensor) and _is_wrapper(value) and self._is_ours(kind):
                names, context = _flattened(value)
                parts = [[name, inner(getattr(value, name))] for name in names]
                return {"wrapper": [_named(kind), parts, inner(context), list(value.shape), value.stride()]}
            if kind is list:
                return [inner(one) for one in value]
            if kind is deque:
                return {"deque": [value.maxlen, [inner(one) for one in value]]}
            if kind in _SEQUENCES:
                ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
                return {kind.__name__: [inner(one) for one in ordered]}
            if kind in _MAPPINGS:
                return {kind.__name__: [[inner(key), inner(one)] for key, one in value.items()]}
            if kind is torch.dtype:
                return {"dtype": str(value).removeprefix("torch.")}
            if isinstance(value, Enum) and self._is_ours(kind):
                return {"enum": [_named(kind), value.name]}
            if self._is_own_object(value):
                return {"object": [_named(kind), inner(vars(value))]}
        raise NotCarriedError(self.optimizer, f"{where} ({kind.__name__})")

    def _encode_tensor(self, value: Tensor, where: str, into: Into | None) -> Any:
        at = value.device.type
        if into is not None:
            prefix, tensors = into
            word = f"{prefix}.{len(tensors)}"
            tensors[word] = value.detach()
            return {"tensor": [word, at, value.stride() if _is_dense(value) else None]}
        if value.numel() > MOST_INLINE:
            raise NotCarriedError(self.optimizer, f"{where} (a tensor of {value.numel():,} elements)")
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        text = base64.b64encode(flat.numpy().tobytes()).decode()
        return {"small": [str(value.dtype).removeprefix("torch."), list(value.shape), at, text]}

    def _decode(self, value: Any, given: Mapping[str, Tensor]) -> Any:
        """`given`: the tensors that it may refer to."""

        def inner(one: Any) -> Any:
            return self._decode(one, given)

        if isinstance(value, list):
            return [inner(one) for one in value]
        if not isinstance(value, dict):
            return value
        ((tag, held),) = value.items()
        match tag:
            case "tensor":
                word, at, stride = held
                arrived, device = given[word], self._device_of(at)
                if stride is None:
                    return arrived.to(device, copy=True)
                made = torch.empty_strided(arrived.shape, stride, dtype=arrived.dtype, device=device)
                return made.copy_(arrived)
            case "small":
                dtype, shape, at, text = held
                flat = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
                return flat.view(getattr(torch, dtype)).reshape(shape).to(self._device_of(at))
            case "wrapper":
                name, parts, context, shape, stride = held
                tensors = {key: inner(part) for key, part in parts}
                return self._class(name).__tensor_unflatten__(tensors, inner(context), shape, stride)
            case "dtype":
                return getattr(torch, held)
            case "enum":
                return self._class(held[0])[held[1]]
            case "object":
                made_object = object.__new__(self._class(held[0]))
                vars(made_object).update(inner(held[1]))
                return made_object
            case _ if tag in _MAKERS:
                return _MAKERS[tag](inner(held))
        raise UserError(f"the saved state of the optimizer has an unknown kind of value, {tag!r}.")

    def _class(self, name: str) -> Any:
        module, _, words = name.partition(":")
        found: Any = sys.modules.get(module) if module.partition(".")[0] in self._packages else None
        for word in words.split("."):
            found = getattr(found, word, None)
        if not isinstance(found, type) or not self._is_ours(found):
            raise UserError(
                f"the saved state of the optimizer has a {name}, which {type(self.optimizer).__name__} does "
                "not have; was it saved with another optimizer?"
            )
        return found

    # -------------------------------------------------------------- how

    def _is_ours(self, kind: type) -> bool:
        """Is it a class of the optimizer's package?"""
        return _package(kind) in self._packages

    def _is_own_object(self, value: Any) -> bool:
        """Is what it holds all there is of it?"""
        kind = type(value)
        odd = (type, Tensor, nn.Module, torch.optim.Optimizer, Enum, *_BUILT_IN)
        return self._is_ours(kind) and hasattr(value, "__dict__") and not isinstance(value, odd)

    def _is_usual(self, p: nn.Parameter, value: Tensor) -> bool:
        """Is it where a state of this shape is expected, in the usual order?"""
        return value.is_contiguous() and value.device == self._usual_device(p, value)

    def _usual_device(self, p: nn.Parameter, value: Tensor) -> torch.device:
        """Counters live on the CPU, unless the optimizer reads them in a kernel of its own."""
        group = self._group_of.get(p, {})
        in_kernel = group.get("fused") or group.get("capturable")
        return p.device if value.ndim or in_kernel else torch.device("cpu")

    def _device_of(self, kind: str) -> torch.device:
        """Where something belongs that was on a CPU, or on the device, of another worker."""
        return torch.device("cpu") if kind == "cpu" else self._named[0][1].device


def _put_back(kept: Iterable[tuple[Any, Any]]) -> None:
    for value, held in kept:
        match value:
            case Tensor():
                value.copy_(held)
            case list():
                value[:] = held
            case deque():
                value.clear()
                value.extend(held)
            case dict() | set():
                value.clear()
                value.update(held)


def _is_wrapper(value: Tensor) -> bool:
    """Is it a class around other tensors, as those of quantized states are?"""
    return hasattr(type(value), "__tensor_flatten__") and hasattr(type(value), "__tensor_unflatten__")


def _flattened(wrapper: Any) -> tuple[list[str], Any]:
    """The attributes that are its tensors, and what else it takes to make one."""
    found: tuple[list[str], Any] = wrapper.__tensor_flatten__()
    return found


def _is_dense(value: Tensor) -> bool:
    """Does each of its elements have its own place, in some order, and is there nothing between them?"""
    steps = zip(value.stride(), value.shape, strict=True)
    expected = 1
    for stride, size in sorted(step for step in steps if step[1] > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _words(value: Any) -> Iterator[str]:
    """The names of the tensors in an encoded value."""
    if isinstance(value, dict) and list(value) == ["tensor"]:
        yield value["tensor"][0]
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _words(one)


def _place(holder: _Holder, key: str) -> str:
    return f"{holder.where}{key!r} ({type(holder.values[key]).__name__})"


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _named(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
