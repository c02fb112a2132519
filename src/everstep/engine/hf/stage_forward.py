"""One stage of a causal LM: the model's own forward, around the modules that are here.

    batch or boundary ──► frame.forward ──► stand-ins ──► own layers ──► boundary, by leaving the forward
                                                                    └──► logits, on the last stage

The frame makes masks and rotary tables from the shape of what it is given; on later stages that is the hidden
states themselves, as `inputs_embeds`. Whatever it does to them ahead of the layers (Gemma scales, GPT-2 adds
positions) is of no account: the first layer that is here gets the hidden states as they arrived.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine.hf.anatomy import Anatomy, StandIn, frame_of, given_to, replaced
from everstep.engine.hf.source import transformers
from everstep.engine.layers.boundary import Value
from everstep.engine.layers.model import evaluating

Run = Callable[..., Any]  # (index of a layer, function, *args, **kwargs): seeds, and recomputes if asked to
_KEPT_APART = ("self", "input_ids", "inputs_embeds", "labels", "use_cache")
_OF_LAYERS = ("hidden", "router", "tokens", "passed_on")  # in what a stage sends the next: not for the frame
# Of rows that hold several documents: what attention takes as further keywords.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def taken_by(kind: type) -> set[str]:
    """The keys of a batch, besides input_ids and labels, that the forward of a model does something with."""
    parameters = inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    named = {name for name, one in parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    return (named if len(named) == len(parameters) else named | set(_PACKED)) - set(_KEPT_APART)


class _Reached(Exception):
    """The end of this stage, inside the model's forward."""

    def __init__(self, hidden: Tensor, passed_on: dict[str, Any]) -> None:
        self.hidden, self.passed_on = hidden, passed_on


class StageModel:
    """Called with what the stage before has sent, or with a batch; gives what the next one gets."""

    def __init__(
        self,
        model: Any,
        anatomy: Anatomy,
        layers: range,
        modules: list[nn.Module],
        device: torch.device,
    ) -> None:
        """`model`: all of it, on the meta device. `layers`: which of `anatomy.names` are `modules`."""
        self.anatomy, self.layers = anatomy, layers
        names = anatomy.names
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(names)
        self._first_layer = len(anatomy.before)
        self._end = self._first_layer + len(anatomy.layers)  # the first of `after`
        self._run: Run = lambda index, function, *args, **kwargs: function(*args, **kwargs)
        self._given: dict[str, Any] = {}
        acts = {
            name: self._foreign(index) if self._is_layer(index) else _pass for index, name in enumerate(names)
        }
        self.frame = frame_of(model, acts).to(device)
        for index, module in zip(layers, modules, strict=True):
            module.forward = self._own(index, module.forward)
            _put(self.frame, names[index], module)
        self._takes = taken_by(type(model))

    def __call__(self, value: Value, run: Run) -> Value:
        self._run = run
        if self.is_first:
            batch = value if isinstance(value, Mapping) else {"input_ids": value}
            self._given = {key: item for key, item in batch.items() if key in self._takes}
            source = {"input_ids": batch["input_ids"]}
            self._tokens = batch["input_ids"]
        else:
            self._given = {key: item for key, item in value.items() if key not in _OF_LAYERS}
            self._hidden, self._router, self._tokens, self._passed = (value.get(key) for key in _OF_LAYERS)
            whole = self._hidden.detach()
            whole = whole.flatten(2, -2)[:, :, 0] if whole.ndim > 3 else whole  # of several streams one
            source = {"inputs_embeds": whole}
        try:
            with nullcontext() if torch.is_grad_enabled() else evaluating([self.frame]):
                output = self.frame(**source, **self._given, use_cache=False)
        except _Reached as reached:
            tokens = {"tokens": self._tokens} if self.anatomy.takes_tokens else {}
            passed = {"passed_on": reached.passed_on} if reached.passed_on else {}
            return {**self._given, **tokens, **passed, "hidden": reached.hidden, "router": self._routed}
        finally:
            self._run = _no_run
        logits = {"logits": output.logits}
        aux = getattr(output, "aux_loss", None)
        return logits if aux is None else logits | {"aux": aux}

    # -------------------------------------------------------------- in the place of modules

    def _foreign(self, index: int) -> Callable[..., Any]:
        """A decoder layer of another stage: before ours, it gives what has arrived; behind, it is the end."""

        def act(*args: Any, **kwargs: Any) -> Any:
            hidden, rest = given_to(args, kwargs)
            if index >= self.layers.stop:
                raise self._leave(hidden, {key: rest[key] for key in self.anatomy.passed_on})
            if index == self.layers.start - 1:
                hidden = self._entered()
            return self.anatomy.as_given(hidden)

        return act

    def _own(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            if not self.is_first and index == self.layers.start == self._first_layer:
                args, kwargs = replaced(args, kwargs, self._entered())
            if self.anatomy.takes_tokens and self._is_layer(index):
                kwargs = {**kwargs, "input_ids": self._tokens}
            if not self.is_first and index == self.layers.start and self._passed:
                args = tuple(self._passed.get(str(at), value) for at, value in enumerate(args))
                kwargs = {
                    **kwargs,
                    **{key: value for key, value in self._passed.items() if not key.isdigit()},
                }
            output = self._run(index, forward, *args, **kwargs)
            if not self.is_last and index == self.layers.stop - 1 == self._end - 1:
                raise self._leave(output[0] if self.anatomy.given else output, {})
            return output

        return act

    def _entered(self) -> Any:
        """The hidden states that the stage before has sent; what its routers said is put on record."""
        record = _router_record()
        if record is not None:
            record.extend(self._router)
        return self._hidden

    def _leave(self, hidden: Tensor, passed_on: dict[str, Any]) -> _Reached:
        self._routed = list(_router_record() or ())
        return _Reached(hidden, {key: value for key, value in passed_on.items() if value is not None})

    def _is_layer(self, index: int) -> bool:
        return self._first_layer <= index < self._end


def _no_run(index: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Outside a forward of ours: a recompute in the backward calls `function` itself."""
    return function(*args, **kwargs)


def _pass(*args: Any, **kwargs: Any) -> Any:
    """In the place of an embedding or a projection of another stage: something of a fitting type. What has
    no width is no hidden state: OPT gives its positions a mask of ones.
    """
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    numbers = [value for value in given if value.is_floating_point() and value.ndim > 2]
    return numbers[0] if numbers else torch.zeros((), device=given[0].device)


def _router_record() -> list[Tensor] | None:
    """Where transformers collects the logits of routers during a forward, if it does."""
    collector = transformers("utils.output_capturing")._active_collector.get()
    return None if collector is None else collector.get("router_logits")


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, last = name.rpartition(".")
    parent = model.get_submodule(path) if path else model
    assert isinstance(parent._modules[last], StandIn)
    parent._modules[last] = module
