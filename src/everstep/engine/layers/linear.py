"""The backward of a Linear in two halves: I now, W whenever the schedule says.

    F   y = x Wᵀ + b                     saves x and W
    I   dx = dy W                        returned to autograd; (W, b, x, dy) goes on a queue
    W   dW += dyᵀ x,  db += Σ dy         run from the queue, into the gradient buffer

`taken_over` gives the modules of a layer these forwards. The weight gradient of an embedding is a dense
table, too large to hold from I to W; its indices are not.

Rejected: `torch.distributed.pipelining`'s split of the autograd graph. It walks private graph state, fails on
outputs that are views, and under activation checkpointing runs the forward once more per parameter group;
here the recompute happens once, in I, because W needs only tensors that I already has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from everstep.engine.layers.trusted import trusted

Into = Callable[[Tensor], Tensor]  # a parameter -> its view in the gradient buffer
Product = Callable[[], Tensor]  # makes a gradient
Products = list[tuple[Tensor, Product]]  # each with its parameter


class LinearGrad(NamedTuple):
    weight: Tensor | None
    bias: Tensor | None
    input: Tensor | None  # None where the weight is frozen
    grad: Tensor
    across: bool = False  # the weight is inputs x outputs

    @property
    def trained(self) -> list[Tensor]:
        weight = None if self.input is None else self.weight
        return [parameter for parameter in (weight, self.bias) if parameter is not None]

    @property
    def is_larger_than_made(self) -> bool:
        """Does it hold more bytes than its gradients, in fp32, will?"""
        if self.weight is None or self.input is None:
            return False
        return 4 * self.weight.numel() <= self.input.nbytes + self.grad.nbytes

    def run(self, into: Into) -> None:
        grad = self.grad.reshape(-1, self.grad.shape[-1])
        if self.weight is not None and self.input is not None:
            x = self.input.reshape(-1, self.input.shape[-1])
            add_product(into(self.weight), *((x, grad) if self.across else (grad, x)))
        if self.bias is not None:
            into(self.bias).add_(_column_sums(grad))

    def products(self) -> Products:
        """As `run`, but each gradient by itself."""
        made: Products = []
        grad = self.grad.reshape(-1, self.grad.shape[-1])
        if self.weight is not None and self.input is not None:
            x = self.input.reshape(-1, self.input.shape[-1])
            made.append((self.weight, partial(_product, *((x, grad) if self.across else (grad, x)))))
        if self.bias is not None:
            made.append((self.bias, partial(_column_sums, grad)))
        return made


class EmbeddingGrad(NamedTuple):
    weight: Tensor
    tokens: Tensor
    padding: int
    grad: Tensor

    @property
    def trained(self) -> list[Tensor]:
        return [self.weight]

    def run(self, into: Into) -> None:
        into(self.weight).add_(self._table())

    def products(self) -> Products:
        return [(self.weight, self._table)]

    def _table(self) -> Tensor:
        made: Tensor = torch.ops.aten.embedding_dense_backward(
            self.grad, self.tokens, self.weight.shape[0], self.padding, False
        )
        return made


class GroupedGrad(NamedTuple):
    """Of stacked matrices: one for each expert, with rows of its own, those of one after the other's."""

    weight: Tensor
    input: Tensor
    grad: Tensor
    ends: Tensor  # where the rows of each expert end
    across: bool  # a matrix is inputs x outputs

    @property
    def trained(self) -> list[Tensor]:
        return [self.weight]

    def run(self, into: Into) -> None:
        target = into(self.weight)
        if grouped_weights(self.input):
            target.add_(self._stacked())
            return
        for number, pair in self._pairs():
            add_product(target[number], *pair)

    def products(self) -> Products:
        return [(self.weight, self._stacked)]

    def _stacked(self) -> Tensor:
        if grouped_weights(self.input):  # rounded once to 16 bits, as torch does
            x, grad = (self.input, self.grad) if self.across else (self.grad, self.input)
            return torch._grouped_mm(x.t(), grad.contiguous(), offs=self.ends)
        made = torch.zeros(self.weight.shape, dtype=torch.float32, device=self.grad.device)
        for number, pair in self._pairs():
            made[number] = _product(*pair)
        return made

    def _pairs(self) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        for number, (start, stop) in enumerate(pairwise((0, *self.ends.tolist()))):
            if start < stop:
                x, grad = self.input[start:stop], self.grad[start:stop]
                yield number, (x, grad) if self.across else (grad, x)


class MadeGrad(NamedTuple):
    """Made in I."""

    weight: Tensor
    grad: Tensor

    @property
    def trained(self) -> list[Tensor]:
        return [self.weight]

    def run(self, into: Into) -> None:
        into(self.weight).add_(self.grad)

    def products(self) -> Products:
        return [(self.weight, partial(_itself, self.grad))]


Queue = list[LinearGrad | EmbeddingGrad | GroupedGrad | MadeGrad]


class MakingQueue(Queue):
    """Where no other worker waits for I. What a gradient is made of is in a cache while I runs, and is let go
    there if the gradient takes less memory. It is the product that W would make, so the same bits.
    """

    def append(self, entry: LinearGrad | EmbeddingGrad | GroupedGrad | MadeGrad) -> None:
        if isinstance(entry, LinearGrad) and entry.is_larger_than_made:
            self.extend(MadeGrad(parameter, product()) for parameter, product in entry.products())
        else:
            super().append(entry)


def contributions_of(queue: Queue, others: list[tuple[Tensor, Tensor]]) -> Products:
    """One product per parameter: a layer that is used twice adds up its own, in the order of I."""
    made: Products = [pair for queued in queue for pair in queued.products()]
    made += [(parameter, partial(_itself, gradient)) for parameter, gradient in others]
    by_parameter: dict[Tensor, list[Product]] = {}
    for parameter, product in made:
        by_parameter.setdefault(parameter, []).append(product)
    return [
        (parameter, products[0] if len(products) == 1 else partial(_sum_of, products))
        for parameter, products in by_parameter.items()
    ]


def _itself(gradient: Tensor) -> Tensor:
    return gradient


def _sum_of(products: list[Product]) -> Tensor:
    total = products[0]()
    for product in products[1:]:
        total = total.float() + product()
    return total


def add_product(target: Tensor, grad: Tensor, x: Tensor) -> None:
    """target += gradᵀ x, in the target's precision, in as few passes over memory as the types allow.

    One fused pass when the product can be accumulated where it is computed.
    """
    if target.dtype == grad.dtype:
        target.addmm_(grad.t(), x)
    elif target.dtype == torch.float32 and grad.is_cuda:
        torch.addmm(target, grad.t(), x, out_dtype=torch.float32, out=target)
    else:
        target.add_(_product(grad, x))


def _product(grad: Tensor, x: Tensor) -> Tensor:
    """gradᵀ x, in fp32 where the device can keep what it accumulates."""
    if grad.dtype == torch.float32 or not grad.is_cuda:
        return torch.mm(grad.t(), x)
    return torch.mm(grad.t(), x, out_dtype=torch.float32)


def grouped_weights(x: Tensor) -> bool:
    """Can the weight gradients of all experts be one product, without asking the device for their rows?"""
    return x.is_cuda and x.dtype == torch.bfloat16 and groups_trusted(x.device)


GROUPS = "torch's products of groups"


def groups_trusted(device: torch.device) -> bool:
    """Is torch's product of groups used here? It rounds to 16 bits where single products do not."""
    return trusted(GROUPS, device, partial(_groups_agree, device), rounds=True)


def _groups_agree(device: torch.device) -> bool:
    """Does it give what single products give, and zeros for an expert without rows?"""
    draw = torch.Generator(device).manual_seed(1)
    x, grad = (torch.randn(64, 64, generator=draw, device=device).bfloat16() for _ in range(2))
    ends = torch.tensor([0, 24, 24, 64], dtype=torch.int32, device=device)
    made = torch._grouped_mm(grad.t(), x, offs=ends)
    single = [grad[a:b].t().float() @ x[a:b].float() for a, b in pairwise((0, 0, 24, 24, 64))]
    return bool(torch.allclose(made.float(), torch.stack(single), rtol=0.02, atol=0.05))


def _column_sums(grad: Tensor) -> Tensor:
    return grad.sum(0) if grad.dtype == torch.float32 else grad.sum(0, dtype=torch.float32)


def _alone(x: Tensor | None) -> Tensor | None:
    """Without the graph that made it, which would live on in the queue."""
    return None if x is None else x.detach()


def _queued(ctx: Any, grad: Tensor, *, across: bool) -> Tensor:
    """Queue the weight gradient of a linear map, as far as it is needed; its weight."""
    x, weight = ctx.saved_tensors
    _, of_weight, of_bias, _ = ctx.needs_input_grad
    if of_weight or of_bias:
        ours = ctx.weight if of_weight else None, ctx.bias if of_bias else None
        ctx.queue.append(LinearGrad(*ours, _alone(x), grad, across))
    found: Tensor = weight
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: Queue) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue  # the objects: a saved tensor may be an alias
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (grad,) = grads
        weight = _queued(ctx, grad, across=False)
        return grad.matmul(weight) if ctx.needs_input_grad[0] else None, None, None, None


class _LinearInOne(_Linear):
    """What W would make is given to autograd, in I."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        ctx.queue = Queue()
        of_input, *_ = _Linear.backward(ctx, *grads)
        made = {parameter: product() for entry in ctx.queue for parameter, product in entry.products()}
        return of_input, made.get(ctx.weight), made.get(ctx.bias), None


class _Conv1D(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, queue: Queue) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (grad,) = grads
        weight = _queued(ctx, grad, across=True)
        return grad.matmul(weight.t()) if ctx.needs_input_grad[0] else None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding: int | None, queue: Queue) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding, ctx.queue = weight, -1 if padding is None else padding, queue
        return nn.functional.embedding(tokens, weight, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.queue.append(EmbeddingGrad(ctx.weight, tokens, ctx.padding, *grads))
        return None, None, None, None


def queued_linear(x: Tensor, weight: Tensor, bias: Tensor | None, queue: Queue) -> Tensor:
    output: Tensor = _Linear.apply(x, weight, bias, queue)  # type: ignore[no-untyped-call]
    return output


# ------------------------------------------------------------------
# In a layer that torch.compile fuses. The compiler sees two operations without side effects; the second, run
# in I, queues what W needs. It is dropped where nobody wants the gradient of its input: there, and where the
# weight is frozen, autograd has the whole backward.


@dataclass(slots=True)
class Receiver:
    """Where the I that runs queues, and whose weights lie at which address: compiled layers do not know."""

    queue: Queue = field(default_factory=list)
    at: Mapping[int, Tensor] = field(default_factory=dict)


RECEIVER = Receiver()


def fused_linear(self: nn.Linear, input: Tensor) -> Tensor:
    """The forward of a Linear in such a layer: a method, for the compiler takes an object by its identity,
    and would compile equal layers one by one.
    """
    if input.requires_grad and self.weight.requires_grad and torch.is_grad_enabled():
        made: Tensor = torch.ops.everstep.linear(input, self.weight, self.bias)
        return made
    return nn.functional.linear(input, self.weight, self.bias)


@torch.library.custom_op(
    "everstep::linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
def _linear_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x, weight, bias)


@torch.library.custom_op(
    "everstep::linear_back",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)
def _linear_back_op(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    ours = [None if one is None else RECEIVER.at[one.data_ptr()] for one in (weight, bias)]
    RECEIVER.queue.append(LinearGrad(weight=ours[0], bias=ours[1], input=_alone(x), grad=grad.detach()))
    return grad.matmul(weight)


@_linear_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@_linear_back_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return grad.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    x, weight, bias = ctx.saved_tensors
    return (
        torch.ops.everstep.linear_back(grad, x, weight, bias if ctx.needs_input_grad[2] else None),
        None,
        None,
    )


_linear_op.register_autograd(_back, setup_context=_keep)


def of_one_input(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """What these Linears make of x. Their gradients of x take no pass of their own to be added up, where all
    are plain ones of ours; it rounds otherwise than one Linear after the other.
    """
    forwards = [layer.forward for layer in layers]
    plain = [one for one in forwards if isinstance(one, QueuedLinear) and one.module.bias is None]
    if len(plain) < len(layers) or not all(one.module.weight.requires_grad for one in plain):
        return [layer(x) for layer in layers]
    return list(_Linears.apply(x, plain[0].queue, *(one.module.weight for one in plain)))  # type: ignore[no-untyped-call]


def queued_conv1d(x: Tensor, weight: Tensor, bias: Tensor, queue: Queue) -> Tensor:
    output: Tensor = _Conv1D.apply(x, weight, bias, queue)  # type: ignore[no-untyped-call]
    return output


def queued_embedding(tokens: Tensor, weight: Tensor, padding: int | None, queue: Queue) -> Tensor:
    output: Tensor = _Embedding.apply(tokens, weight, padding, queue)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, slots=True, eq=False)
class QueuedLinear:
    """What an nn.Linear runs as its forward, once it is taken over."""

    module: Any  # with a weight and a bias, read at every call
    queue: Queue

    def __call__(self, input: Tensor) -> Tensor:
        return queued_linear(input, self.module.weight, self.module.bias, self.queue)


@dataclass(frozen=True, slots=True, eq=False)
class LinearInOne:
    """The same where no other worker waits for I, of a trained weight in fp32. torch's own backward makes the
    products that W would make, of the same matrices, so the same bits, in less time than a backward in
    Python. Not so of inputs that lie otherwise in memory: there it sums the gradient of the bias in another
    order.
    """

    module: Any
    queue: Queue

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        if input.is_contiguous() and 2 <= input.dim() <= 3:
            return nn.functional.linear(input, weight, bias)
        output: Tensor = _LinearInOne.apply(input, weight, bias, self.queue)  # type: ignore[no-untyped-call]
        return output


class _Linears(torch.autograd.Function):
    """Several of one input. What they give back to it is added up inside the products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, queue: Queue, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.weights, ctx.queue = weights, queue
        return tuple(nn.functional.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        for parameter, grad in zip(ctx.weights, grads, strict=True):
            ctx.queue.append(LinearGrad(weight=parameter, bias=None, input=_alone(x), grad=grad))
        none = (None,) * (1 + len(weights))
        if not ctx.needs_input_grad[0]:
            return None, *none
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        total = flat[0].matmul(weights[0])
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            total.addmm_(grad, weight)
        return total.view(x.shape), *none
