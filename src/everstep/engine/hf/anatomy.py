"""Which modules of a causal LM run before its row of decoder layers, in it, and after it.

Masks, positions and rotary tables are made by the model's own code in front of the layers, differently in
every architecture. So a stage runs the model's own forward, with stand-ins where modules of other stages
would be, and what comes out of a stand-in does not matter: hidden states are put in at the first layer that
is here and taken out behind the last. What can be cut is what this file finds out:

    before   every module with parameters that is called ahead of the first layer   embed_tokens, wte, wpe
    layers   the decoder layers, in order                                            model.layers.0, ...
    after    what is called behind the last one                                      norm, lm_head
    frame    everything else, which has no parameters and is on every stage          rotary_emb, dropout

The order is not that in which modules are registered (OPT has its last norm in front): the model is run once,
on eight tokens, with a stand-in for every module, which says when it was called and with what.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everstep.errors import UserError

TRIED = 8  # tokens with which a model is run to see what it does
TOKENS_MEET = (nn.Conv1d, nn.Conv2d, nn.RNNBase)  # other than by attention
FAR_BELOW = -1e30  # what a mask adds to scores that do not count is
PARTED_BY_MASKS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
ROWS_OF_LAYERS = ("layers", "h", "blocks", "block", "decoder_layers", "layer")
Act = Callable[..., Any]  # what a stand-in does when it is called


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    before: tuple[str, ...]
    layers: tuple[str, ...]
    after: tuple[str, ...]
    given: int  # what a layer gives: 0, hidden states; else a tuple of so many, hidden states first
    takes_tokens: bool = False  # do layers take the tokens of the batch besides, as `input_ids`?
    passed_on: tuple[str, ...] = ()  # arguments of a layer that the one before has given beside hidden states

    def as_given(self, hidden: Tensor) -> Any:
        """Hidden states in the form in which a layer gives them."""
        return (hidden, *[None] * (self.given - 1)) if self.given else hidden

    @property
    def names(self) -> tuple[str, ...]:
        """Everything with parameters, in the order in which it runs."""
        return (*self.before, *self.layers, *self.after)


class StandIn(nn.Module):
    """In the place of a module that is not here: with its attributes, and without its parameters."""

    def __init__(self, original: nn.Module, act: Act) -> None:
        super().__init__()
        self.__dict__["original"], self.__dict__["act"] = original, act

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["act"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)


def with_stand_ins(model: Any, acts: dict[str, Act]) -> Any:
    """A copy of the model with a stand-in for each module that `acts` names."""
    inside: dict[int, Any] = {}
    for name, act in acts.items():
        original = model.get_submodule(name)
        inside[id(original)] = StandIn(original, act)
    return copy.deepcopy(model, inside)


def frame_of(model: Any, acts: dict[str, Act]) -> Any:
    """The model on the CPU with stand-ins for all modules that have parameters, ready to run."""
    frame = with_stand_ins(model, acts)
    materialize(frame)
    frame.initialize_weights()  # tables such as rotary frequencies
    return frame.train()


def materialize(module: nn.Module) -> None:
    """Memory for what is on the meta device; what has its values stays. Zeros: what the model sets when it is
    built and not when it is initialised would otherwise be different garbage on every worker.
    """
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                zeros = torch.zeros_like(parameter, device="cpu")
                part._parameters[key] = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
        for key, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[key] = torch.zeros_like(buffer, device="cpu")


def anatomy_of(model: Any) -> Anatomy:
    """Of a model on the meta device."""
    kind = type(model).__name__
    row = _row_of_layers(model)
    layers = tuple(f"{row}.{i}" for i in range(len(model.get_submodule(row))))
    others = tuple(_parts(model, row))
    _check_sharing(model, (*others, *layers))
    last_error: Exception | None = None
    for given in (0, 2, 3):
        trace = _Trace(model, others, layers, given)
        try:
            trace.run()
        except UserError:
            raise
        except Exception as error:  # transformers' own, or the sign that layers give tuples
            last_error = error
            continue
        if trace.is_sound:
            before, after = trace.split(others)
            takes = any(kwargs.get("input_ids") is not None for _, kwargs in trace.calls.values())
            return Anatomy(
                before=before,
                layers=layers,
                after=after,
                given=given,
                takes_tokens=takes,
                passed_on=tuple(sorted(trace.passed_on)),
            )
    why = f": {type(last_error).__name__}: {last_error}" if last_error else ""
    raise UserError(f"{kind} does not pass hidden states from layer to layer in a way we know{why}.")


class _Trace:
    """One run of the model with nothing in it, and what was seen."""

    def __init__(self, model: Any, others: tuple[str, ...], layers: tuple[str, ...], given: int) -> None:
        self.layers, self.kind = layers, type(model).__name__
        self.form = Anatomy(before=(), layers=layers, after=(), given=given)
        self.width = getattr(model.config.get_text_config(), "hidden_size", 1)
        self.called: list[str] = []
        self.hidden: list[tuple[int, ...]] = []  # what each layer was given
        self.calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # of each layer
        self.passed_on: set[str] = set()
        self._beside: list[Tensor] = []  # what the layer before has given beside hidden states
        acts = {name: self._other(name, model.get_submodule(name)) for name in others}
        acts |= {name: self._layer(name) for name in layers}
        self.frame = frame_of(model, acts)
        self.frame.config.output_router_logits = False

    def run(self, **more: Tensor) -> None:
        with torch.device("cpu"):
            tokens = torch.zeros(1, TRIED, dtype=torch.long)
            self.frame(input_ids=tokens, use_cache=False, **more)

    @property
    def is_sound(self) -> bool:
        called = [name for name in self.called if name in self.layers]
        whole = self.hidden and len(self.hidden[0]) >= 3  # some have several streams of hidden states
        return bool(whole) and called == list(self.layers) and len(set(self.hidden)) == 1

    def split(self, others: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        first = self.called.index(self.layers[0])
        order = [name for name in dict.fromkeys(self.called) if name in others]
        order += [name for name in others if name not in order]  # never called, as some old heads
        before = tuple(name for name in order if name in self.called[:first])
        after = tuple(name for name in order if name not in before)
        if twice := [name for name in before if name in self.called[first:]]:
            raise UserError(
                f"{self.kind} runs {twice[0]} before its layers and after them; it cannot be cut."
            )
        return before, after

    def _other(self, name: str, original: nn.Module) -> Act:
        def act(*args: Any, **kwargs: Any) -> Tensor:
            self.called.append(name)
            given = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
            if isinstance(original, nn.Embedding):
                return torch.zeros(*given.shape, original.embedding_dim, requires_grad=True) + 0
            if not given.is_floating_point():  # embeddings of several kinds in one module
                return torch.zeros(*given.shape, self.width, requires_grad=True) + 0
            if isinstance(original, nn.Linear):
                return given.new_zeros(*given.shape[:-1], original.out_features) + given.sum() * 0
            return given

        return act

    def _layer(self, name: str) -> Act:
        def act(*args: Any, **kwargs: Any) -> Any:
            self.called.append(name)
            self.calls[name] = args, kwargs
            hidden, rest = given_to(args, kwargs)
            self.hidden.append(tuple(hidden.shape))
            for key, value in rest.items():
                if any(value is one for one in self._beside):
                    self.passed_on.add(key)
                    continue
                if any(tensor.requires_grad for tensor in _tensors(value)):
                    raise UserError(
                        f"the layers of {self.kind} take {_argument(key)} that parts of the model with "
                        "parameters have computed; only hidden states pass from stage to stage."
                    )
                if isinstance(value, dict | list) and not value:
                    raise UserError(
                        f"the layers of {self.kind} pass values to each other in {_argument(key)}; only "
                        "hidden states pass from stage to stage."
                    )
            # What else a layer gives is marked as computed, so that a layer that is given it is noticed.
            self._beside = [torch.zeros(1) + hidden.sum() for _ in range(1, self.form.given)]
            return (hidden, *self._beside) if self.form.given else hidden

        return act


def crossing_layer(model: Any, anatomy: Anatomy) -> str | None:
    """The first layer in which a document would see the one ahead of it in its row, as far as that can be
    told: its tokens meet elsewhere than in attention, or no mask that it gets parts documents.
    """
    trace = _Trace(model, (*anatomy.before, *anatomy.after), anatomy.layers, anatomy.given)
    half = TRIED // 2
    trace.run(position_ids=torch.arange(half).repeat(2)[None])
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ("full_attention",)
    for number, name in enumerate(anatomy.layers):
        args, kwargs = trace.calls[name]
        masks = [one for one in _tensors([*args, *kwargs.values()]) if one.shape[-2:] == (TRIED, TRIED)]
        blocked = [~one if one.dtype == torch.bool else one < FAR_BELOW for one in masks]
        parted = any(bool(one[..., half:, :half].all()) for one in blocked)
        meet = any(isinstance(part, TOKENS_MEET) for part in model.get_submodule(name).modules())
        if not parted or meet or kinds[number % len(kinds)] not in PARTED_BY_MASKS:
            return name
    return None


def given_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The hidden states that a decoder layer was called with, and all its other arguments."""
    if args:
        return args[0], {**{str(i): a for i, a in enumerate(args[1:], 1)}, **kwargs}
    rest = dict(kwargs)
    return rest.pop("hidden_states"), rest


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[Any, dict[str, Any]]:
    """The same call with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _argument(key: str) -> str:
    return f"an argument (number {key})" if key.isdigit() else f"{key!r}"


def _row_of_layers(model: Any) -> str:
    """The path of the ModuleList of decoder layers: by the model's own plan, or by its usual name."""
    base, prefix = model.base_model, model.base_model_prefix
    text = model.config.get_text_config()
    depth, decoders = (getattr(text, key, None) for key in ("num_hidden_layers", "decoder_layers"))
    plan = getattr(base, "_pp_plan", None) or getattr(model.config, "base_model_pp_plan", None) or {}
    for name in plan:
        row = getattr(base, name, None)
        if isinstance(row, nn.ModuleList):
            return f"{prefix}.{name}" if base is not model else str(name)
    rows = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) in (depth, decoders)
    }
    for usual in ROWS_OF_LAYERS:
        fitting = [path for path in rows if path.rpartition(".")[2] == usual]
        if fitting:
            return str(min(fitting, key=len))
    raise UserError(
        f"{type(model).__name__} has no row of {depth} layers under a usual name "
        f"({', '.join(ROWS_OF_LAYERS)}) and no pp_plan; give its layers yourself: everstep.Model(layers=...)."
    )


def _parts(model: nn.Module, row: str) -> Iterator[str]:
    """The largest modules with parameters that are neither the row nor around it."""
    around = {"", *(row[:i] for i, c in enumerate(row) if c == ".")}
    for path in sorted(around, key=len):
        module = model.get_submodule(path) if path else model
        if direct := [name for name, _ in module.named_parameters(recurse=False)]:
            raise UserError(
                f"{type(model).__name__} has the parameter {direct[0]!r} outside all modules; it belongs "
                "to no stage."
            )
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            if full not in around and full != row and next(child.parameters(), None) is not None:
                yield full


def _check_sharing(model: Any, names: tuple[str, ...]) -> None:
    """Parameters in two parts must be a pair that the model says is tied."""
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    seen: dict[int, str] = {}
    for part in names:
        for name, parameter in model.get_submodule(part).named_parameters():
            full, other = f"{part}.{name}", seen.get(id(parameter))
            if other is not None and not (full in tied and other in tied):
                raise UserError(
                    f"{type(model).__name__} shares the parameter {other} with {full}, and what shares "
                    "parameters cannot be on two stages; leave adapters of embed_tokens and lm_head out, "
                    "or set tie_word_embeddings=False in everstep.hf."
                )
            seen[id(parameter)] = full
