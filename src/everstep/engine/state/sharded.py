"""Sharded states: the master weights and the optimizer of the chunks that this worker holds.

A chunk is a fixed stretch of the stage's flat buffers, cut at rows of tensors: a piece of a matrix is a
matrix, so the optimizer's factory sees what it would see of the whole. Every chunk has an optimizer of its
own, so it can come and go alone. An optimizer that treats every element by itself gives the same bits.

    apply(step, means, scale)   one step of some chunks; the working weights follow
    fill_of, take_fill          the state of a chunk, on its way to another holder
    slices, load                the state in a checkpoint's terms: boxes of logical tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from everstep.engine.layers.model import Slot
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer import (
    OptimizerFactory,
    Rate,
    adamw,
    is_elementwise,
    plain_groups,
)
from everstep.engine.state.optimizer_state import Named
from everstep.errors import UserError
from everstep.layout.box import Box

_SCALARS = {"int": torch.int64, "float": torch.float64}


class RowPiece(NamedTuple):
    """Rows of a tensor, and where they begin in the stage's flat buffers."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]  # of the whole tensor
    offset: int

    @property
    def rows(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.shape[1:]) if self.shape else ()

    @property
    def size(self) -> int:
        return torch.Size(self.rows).numel()

    @property
    def box(self) -> Box:
        return Box((self.start, *(0 for _ in self.shape[1:])), self.rows) if self.shape else Box((), ())


class StateSlice(NamedTuple):
    """What a checkpoint holds of a state: values of a box of a logical tensor."""

    tensor: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


class StoredState(Mapping[str, Tensor]):
    """A stage's state by logical name, somewhere: a tensor, or some rows of it, is read when it is asked for,
    and every time. `shapes`: of the tensors of this state.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str, Box | None], Tensor]
    ) -> None:
        self.shapes, self._read = shapes, read

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> StoredState:
        if isinstance(state, StoredState):
            return state
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        return cls(shapes, lambda name, box: state[name] if box is None else state[name][box.slices()])

    def rows(self, name: str, piece: RowPiece) -> Tensor:
        return self._read(name, piece.box if piece.shape else None)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self._read(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@dataclass(slots=True)
class HeldChunk:
    where: slice
    pieces: list[RowPiece]
    masters: Tensor
    named: Named
    optimizer: torch.optim.Optimizer
    rates: list[float]
    average: Tensor | None = None  # of the masters, where the job asks for one

    def states(self) -> Iterator[tuple[int, str, Any]]:
        for index, (_, p) in enumerate(self.named):
            for key, value in self.optimizer.state.get(p, {}).items():
                yield index, key, value


def chunk_ranges(slots: Mapping[str, Slot], size: int, count: int) -> list[slice]:
    """Fixed stretches of about the same size, cut between rows of tensors."""
    edges = [0]
    for index in range(1, count):
        edges.append(max(edges[-1], _row_edge(slots, size * index // count)))
    edges.append(size)
    return [slice(edges[i], edges[i + 1]) for i in range(count)]


def _row_edge(slots: Mapping[str, Slot], at: int) -> int:
    for slot in slots.values():
        if slot.offset <= at < slot.offset + slot.size:
            row = slot.size // slot.shape[0] if slot.shape else slot.size
            return slot.offset + round((at - slot.offset) / row) * row
    return at


def pieces_in(slots: Mapping[str, Slot], where: slice) -> list[RowPiece]:
    found = []
    for name, slot in slots.items():
        start, stop = max(slot.offset, where.start), min(slot.offset + slot.size, where.stop)
        if start < stop:
            row = slot.size // slot.shape[0] if slot.shape else slot.size
            rows = (start - slot.offset) // row, (stop - slot.offset) // row
            found.append(RowPiece(name, *rows, slot.shape, start))
    return found


class ShardedUpdater:
    """The optimizer of the chunks that this worker holds, by chunk."""

    def __init__(
        self,
        stage: Stage,
        optimizer: OptimizerFactory | None = None,
        rate: Rate = lambda step: 1.0,
        *,
        chunks: int,
        ema: float | None = None,
    ) -> None:
        self.stage, self.rate, self._factory, self.ema = stage, rate, optimizer or adamw(), ema
        self.ranges = chunk_ranges(stage.slots, stage.size, chunks)
        self.held: dict[int, HeldChunk] = {}
        empty = torch.zeros((), device=stage.device)
        shapes: Named = [(name, nn.Parameter(empty.expand(s.shape))) for name, s in stage.slots.items()]
        self._whole = self._factory(shapes)  # it never steps: for its groups alone
        self._shapes = shapes
        refuse_unless_elementwise(self._whole)

    # -------------------------------------------------------------- chunks come and go

    def begin(self, chunks: Iterable[int]) -> None:
        """The initial state: the masters that the stage has drawn."""
        for chunk in chunks:
            self._hold(chunk, self.stage.masters[self.ranges[chunk]].clone())
        self.stage.release_masters()

    def follow(self, state: Mapping[str, Tensor], step: int) -> None:
        """The working weights of a peer, and no chunk."""
        self.held.clear()
        self.stage.release_masters()
        for name, slot in self.stage.slots.items():
            slot.of(self.stage.working).copy_(_given(state, name, slot.shape))
        self.stage.load_beside(step, state)

    def release(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self.held.pop(chunk, None)

    def _hold(self, chunk: int, masters: Tensor) -> HeldChunk:
        where = self.ranges[chunk]
        pieces = pieces_in(self.stage.slots, where)
        named: Named = []
        for piece in pieces:
            at = piece.offset - where.start
            named.append((piece.name, nn.Parameter(masters[at : at + piece.size].view(piece.rows))))
        optimizer = self._factory(named) if named else torch.optim.SGD([nn.Parameter(torch.zeros(0))])
        rates = [group["lr"] for group in optimizer.param_groups]
        average = None if self.ema is None else masters.clone()
        held = HeldChunk(where, pieces, masters, named, optimizer, rates, average)
        self.held[chunk] = held
        return held

    # -------------------------------------------------------------- a step

    def apply(self, step: int, means: Mapping[int, Tensor], scale: float) -> None:
        """One optimizer step of these chunks with the gradient mean x scale."""
        multiplier = self.rate(step)
        for chunk, mean in means.items():
            held = self.held[chunk]
            if not held.named:
                continue
            for group, base in zip(held.optimizer.param_groups, held.rates, strict=True):
                group["lr"] = base * multiplier
            for (_, p), piece in zip(held.named, held.pieces, strict=True):
                at = piece.offset - held.where.start
                grad = mean[at : at + piece.size].view(piece.rows)
                p.grad = grad if scale == 1.0 else grad * scale
            held.optimizer.step()
            for _, p in held.named:
                p.grad = None
            if held.average is not None and self.ema is not None:
                held.average.lerp_(held.masters, 1 - self.ema)
            self.weights_of(chunk).copy_(held.masters)

    def weights_of(self, chunk: int) -> Tensor:
        return self.stage.working[self.ranges[chunk]]

    # -------------------------------------------------------------- to another holder

    def fill_of(self, chunk: int) -> tuple[tuple[Tensor, ...], list[Any]]:
        """A chunk's state: live tensors, and in JSON's terms what each is."""
        held = self.held[chunk]
        tensors, facts = [held.masters], []
        if held.average is not None:
            tensors.append(held.average)
        for index, key, value in held.states():
            if isinstance(value, Tensor):
                tensors.append(value)
                facts.append([index, key, None])
            else:
                facts.append([index, key, value])
        return tuple(tensors), facts

    def take_fill(self, chunk: int, tensors: Sequence[Tensor], facts: Sequence[Any]) -> None:
        """The tensors are this worker's from now on."""
        for tensor in tensors:
            if tensor.is_cuda:  # they were made on another stream
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        masters = tensors[0].to(self.stage.device)
        held = self._hold(chunk, masters)
        rest = iter(tensors[1:])
        if held.average is not None:
            held.average.copy_(next(rest))
        for index, key, value in facts:
            p = held.named[index][1]
            state = held.optimizer.state.setdefault(p, {})
            state[key] = self._placed(held, p, next(rest), copy=False) if value is None else value
        self.weights_of(chunk).copy_(masters)

    # -------------------------------------------------------------- checkpoints

    def slices(self, chunk: int, step: int) -> list[StateSlice]:
        """Live tensors, to be copied before the next step."""
        held = self.held[chunk]
        beside: dict[str, list[tuple[str, Tensor]]] = {}
        for full, value in self.stage.beside(step).items():
            beside.setdefault(full.split("/", 2)[2], []).append((full, value))
        found = []
        for index, piece in enumerate(held.pieces):
            values = held.named[index][1].detach()
            found.append(StateSlice(f"model/{piece.name}", piece.shape, piece.box, values))
            if held.average is not None:
                at = piece.offset - held.where.start
                averaged = held.average[at : at + piece.size].view(piece.rows)
                found.append(StateSlice(f"extra/ema/{piece.name}", piece.shape, piece.box, averaged))
            for full, number in beside.get(piece.name, ()) if piece.start == 0 else ():
                found.append(StateSlice(full, (), Box((), ()), number))
        for index, key, value in held.states():
            piece = held.pieces[index]
            name = f"optimizer/{piece.name}/{key}"
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                if kind in _SCALARS and piece.start == 0:
                    scalar = torch.tensor(value, dtype=_SCALARS[kind])
                    found.append(StateSlice(f"{name}#{kind}", (), Box((), ()), scalar))
            elif tuple(value.shape) == piece.rows and value.ndim:
                found.append(StateSlice(name, piece.shape, piece.box, value))
            elif piece.start == 0:
                found.append(StateSlice(name, tuple(value.shape), _whole(value), value))
        return found

    def groups(self, step: int) -> list[dict[str, Any]]:
        """The whole stage's, as the next step will find them."""
        rates = [group["lr"] for group in self._whole.param_groups]
        return plain_groups(self._whole.param_groups, rates, self._shapes, self.rate(step + 1))

    def weights(self, step: int) -> dict[str, Tensor]:
        """For a joining worker: live tensors."""
        found = self.stage.beside(step)
        return found | {f"model/{n}": view for n, view in self.stage.views(self.stage.working).items()}

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Where the working weights of a peer belong; `follow` comes with the last of them."""
        slot = self.stage.slots.get(name.removeprefix("model/")) if name.startswith("model/") else None
        if slot is None or not shape or slot.shape != shape or dtype != self.stage.working.dtype:
            return None
        return slot.of(self.stage.working)

    def load(self, state: Mapping[str, Tensor], step: int, chunks: Iterable[int]) -> None:
        """Take over a whole stage's state: working weights, and these chunks. A weight is read once, of all
        else only the rows that are held.
        """
        self.held.clear()
        self.stage.release_masters()
        stored = StoredState.of(state)
        keyed: dict[str, list[str]] = {}
        for full in stored:
            if full.startswith("optimizer/"):
                keyed.setdefault(full.removeprefix("optimizer/").rpartition("/")[0], []).append(full)
        parts: dict[str, list[tuple[HeldChunk, int]]] = {}
        for chunk in chunks:
            where = self.ranges[chunk]
            held = self._hold(chunk, torch.zeros(where.stop - where.start, device=self.stage.device))
            for index, piece in enumerate(held.pieces):
                parts.setdefault(piece.name, []).append((held, index))
        for name, slot in self.stage.slots.items():
            given = _given(stored, name, slot.shape)
            slot.of(self.stage.working).copy_(given)
            for held, index in parts.get(name, ()):
                self._load_piece(held, index, given, stored, keyed.get(name, ()))
        self.stage.load_beside(step, stored)

    def _load_piece(
        self, held: HeldChunk, index: int, given: Tensor, stored: StoredState, states: Iterable[str]
    ) -> None:
        piece, p = held.pieces[index], held.named[index][1]
        p.detach().copy_(_rows(given, piece))
        if held.average is not None:  # a state that was saved without an average starts one
            at, kept = piece.offset - held.where.start, f"extra/ema/{piece.name}"
            rows = stored.rows(kept, piece) if kept in stored else _rows(given, piece)
            held.average[at : at + piece.size].view(piece.rows).copy_(rows)
        mine: dict[str, Any] = {}
        for full in states:
            word, _, kind = full.rpartition("/")[2].partition("#")
            if kind:
                mine[word] = stored[full].item()
            elif stored.shapes[full] == piece.shape:
                mine[word] = self._placed(held, p, stored.rows(full, piece))
            else:
                mine[word] = self._placed(held, p, stored[full])
        if mine:
            held.optimizer.state[p] = mine

    def _placed(self, held: HeldChunk, p: nn.Parameter, value: Tensor, *, copy: bool = True) -> Tensor:
        """Counters live on the CPU, unless the optimizer reads them in a kernel of its own."""
        group = next(g for g in held.optimizer.param_groups if any(p is q for q in g["params"]))
        in_kernel = group.get("fused") or group.get("capturable")
        device = p.device if value.ndim or in_kernel else torch.device("cpu")
        return value.detach().to(device, copy=copy)


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer) -> None:
    if not is_elementwise(optimizer):
        raise UserError(
            f"optimizer.shard = true needs an optimizer that treats every element by itself, and "
            f"{type(optimizer).__name__} may not; use one of torch's own like AdamW, or set shard = false."
        )


def tied_refused(name: str) -> str:
    return f"optimizer.shard = true does not work with tied tensors ({name}); set it to false or untie them."


def _given(state: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    given = state.get(f"model/{name}")
    if given is None or tuple(given.shape) != shape:
        raise UserError(f"the state holds no tensor model/{name} of this shape; is it of another model?")
    return given


def _rows(value: Tensor, piece: RowPiece) -> Tensor:
    return value[piece.start : piece.stop] if piece.shape else value


def _whole(value: Tensor) -> Box:
    return Box(tuple(0 for _ in value.shape), tuple(value.shape))
