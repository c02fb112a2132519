"""Small optimizers that keep their state where optimizers from PyPI keep theirs. Each is a plain descent with
a rate that depends on that state, so a step with a wrong state gives other weights.
"""

import random
from enum import Enum

import numpy as np
import torch
from torch import Tensor, nn


class _Toy(torch.optim.Optimizer):
    def __init__(self, params, lr: float = 0.05, **more) -> None:
        super().__init__(params, {"lr": lr, **more})

    def begin(self, group: dict) -> None:
        """Before the parameters of a group."""

    def rate(self, group: dict, p: nn.Parameter, state: dict) -> float | Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                p.sub_(p.grad * self.rate(group, p, self.state[p]) * group["lr"])


class GroupCount(_Toy):
    """As ScheduleFree and all of pytorch_optimizer: a count in the group."""

    def begin(self, group) -> None:
        group["k"] = group.get("k", 0) + 1

    def rate(self, group, p, state):
        return 1 / group["k"]


class GroupTensors(_Toy):
    """As heavyball: tensors in the group, and a value that is removed again."""

    def __init__(self, params) -> None:
        super().__init__(params, first=True)

    def begin(self, group) -> None:
        group.pop("first", None)
        group.setdefault("means", [torch.zeros(3), ()])[0].add_(1)

    def rate(self, group, p, state):
        return group["means"][0].mean()


class ListInState(_Toy):
    """As SOAP: matrices in a list, in the order of memory that `qr` gives them, changed in place."""

    def rate(self, group, p, state):
        matrix = p.grad.reshape(len(p), -1)
        if "Q" not in state:
            state["Q"], state["seen"] = [torch.linalg.qr(matrix @ matrix.T + torch.eye(len(p)))[0]], (1, "a")
        state["Q"][0].add_(matrix @ matrix.T, alpha=0.1)
        state["seen"] = (state["seen"][0] + 1, "b")
        return (state["Q"][0] @ matrix).abs().mean() / state["seen"][0]


class Form(Enum):
    LEFT = 1
    RIGHT = 2


class Projector:
    def __init__(self, rank: int) -> None:
        raise AssertionError("made by the optimizer alone, never by who loads a state")

    @staticmethod
    def made() -> "Projector":
        found = object.__new__(Projector)
        found.count, found.form, found.basis = 0, Form.LEFT, None
        return found


class ObjectInState(_Toy):
    """As GaLore and Shampoo: an object of a class of its own."""

    def rate(self, group, p, state):
        found = state.setdefault("projector", Projector.made())
        found.count += 1
        found.form = Form.RIGHT if found.count % 2 else Form.LEFT
        found.basis = p.grad.abs().mean(0) if found.basis is None else found.basis * 0.5
        return found.basis.mean() * found.count * (2 if found.form is Form.LEFT else 1)


class Attributes(_Toy):
    """As bitsandbytes: flags and numbers on the optimizer itself; and a function, which stays."""

    def __init__(self, params) -> None:
        super().__init__(params)
        self.ready, self.history, self.scale = False, {}, lambda x: 2 * x

    def begin(self, group) -> None:
        self.history[len(self.history)] = float(group["params"][0].grad.ravel()[0]) if self.ready else 0.5
        self.ready = True

    def rate(self, group, p, state):
        return self.scale(sum(self.history.values()) + len(self.history))


class Words(_Toy):
    """Flags, words, and numbers that are not numbers, beside a parameter; keys that are no words."""

    def rate(self, group, p, state):
        state["flag"] = not state.get("flag", True)
        state[0] = {
            "a/b": [None, float("inf"), -0.0],
            7: {3, 1},
            "count": state.get(0, {"count": 0})["count"] + 1,
        }
        state["a/b"] = state.get("a/b", 0) + 1
        return (3 if state["flag"] else 1) * state[0]["count"] / state["a/b"]


class Shared(_Toy):
    """A state under a name instead of a parameter."""

    def begin(self, group) -> None:
        shared = self.state["all"]
        shared["k"] = shared.get("k", 0) + 1

    def rate(self, group, p, state):
        return 1 / self.state["all"]["k"]


class InPlace(_Toy):
    """As ScheduleFree: it computes in the gradient's own memory."""

    def rate(self, group, p, state):
        p.grad.mul_(0.5)
        return state.setdefault("speed", torch.zeros_like(p)).mul_(0.9).add_(p.grad)


class Drawing(_Toy):
    """As stochastic rounding and Langevin dynamics: random numbers of every kind."""

    def rate(self, group, p, state):
        return torch.rand_like(p) + random.random() + float(np.random.rand())


class Modes(_Toy):
    """As ScheduleFree: the weights to use are between those that are trained and an average."""

    def __init__(self, params) -> None:
        super().__init__(params, train_mode=False)

    def rate(self, group, p, state):
        assert group["train_mode"]
        state.setdefault("z", p.clone()).sub_(p.grad, alpha=group["lr"])
        return 0.5

    @torch.no_grad()
    def eval(self) -> None:
        self._turn(mode=False, weight=1 - 1 / 0.9)

    @torch.no_grad()
    def train(self) -> None:
        self._turn(mode=True, weight=1 - 0.9)

    def _turn(self, *, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=weight)
                group["train_mode"] = mode


class Coupled(_Toy):
    """As Prodigy and D-Adaptation: one number for all parameters, from all of them."""

    def begin(self, group) -> None:
        group["d"] = max(group.get("d", 1e-3), float(sum(p.grad.abs().sum() for p in group["params"])))

    def rate(self, group, p, state):
        return 1 / (1 + group["d"])


CARRIED = [
    GroupCount,
    GroupTensors,
    ListInState,
    ObjectInState,
    Attributes,
    Words,
    Shared,
    InPlace,
    Drawing,
    Modes,
    Coupled,
]  # fmt: skip

# Those that are refused.


class OwnRate(_Toy):
    def begin(self, group) -> None:
        group["lr"] *= 0.9

    def rate(self, group, p, state):
        return 1.0


class Around(_Toy):
    """As Lookahead: another optimizer inside, with all the state."""

    def __init__(self, params) -> None:
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9)

    def step(self, closure=None) -> None:
        self.inner.step()


class Iterating(_Toy):
    """A generator of Python's beside each parameter."""

    def rate(self, group, p, state):
        return next(state.setdefault("rates", iter([1, 2, 3, 4, 5, 6, 7, 8, 9])))


_everywhere: list[int] = []


class Global(_Toy):
    """A count outside of the optimizer, which nobody sees."""

    def begin(self, group) -> None:
        _everywhere.append(1)

    def rate(self, group, p, state):
        return 1 / len(_everywhere)


class LargeAttribute(_Toy):
    def __init__(self, params) -> None:
        super().__init__(params)
        self.sums = None

    def begin(self, group) -> None:
        self.sums = torch.full((10_000,), 1.0 if self.sums is None else float(self.sums[0]) + 1)

    def rate(self, group, p, state):
        return 1 / self.sums[0]


REFUSED = {
    OwnRate: "OwnRate changes the learning rate of its groups",
    Around: "Around keeps state in its attribute 'inner' (SGD)",
    Iterating: "Iterating keeps state in state[p]['rates'] (list_iterator)",
    Global: "Global does not forget a step that is undone",
    LargeAttribute: "LargeAttribute keeps state in its attribute 'sums' (Tensor)",
}
