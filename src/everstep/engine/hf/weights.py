"""One module of a model with its values: those of its own tensors in a folder of safetensors, or drawn at
random.

A worker asks for its own modules and reads no other bytes: files are mapped, and a tensor is copied when it
is asked for. transformers keeps some weights under other names and in other pieces in files than in memory
(an expert a file entry, all experts one tensor); its own conversion rules say which, and are used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from everstep.engine.hf.anatomy import materialize
from everstep.engine.hf.source import quietly, transformers, weight_files
from everstep.errors import UserError


def drawn(holder: Any, name: str) -> nn.Module:
    """The module `name` of a model in which only that one is real, initialised as the model would."""
    module: nn.Module = holder.get_submodule(name)
    materialize(module)
    holder.initialize_weights()
    return module


class Folder:
    """The weights of a folder, by the names they have in the model."""

    def __init__(self, path: Path, model: Any) -> None:
        """`model`: the whole of it, on the meta device."""
        self.path = path
        self._files = weight_files(path)
        self._mapping = transformers("conversion_mapping").get_model_conversion_mapping
        self._tied = dict(model.all_tied_weights_keys)
        self._sources = self._sources_of(model)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        lacking = [name for name in self._shapes if name not in self._sources and name not in self._tied]
        if self._files and lacking:
            raise UserError(
                f"model folder {str(path)!r} has no weights for {lacking[0]}; are config.json and the "
                "safetensors of one model?"
            )

    @property
    def is_there(self) -> bool:
        return bool(self._files)

    def load(self, holder: Any, name: str) -> nn.Module:
        """The module `name` of a model in which only that one is real."""
        module: nn.Module = holder.get_submodule(name)
        inside = [f"{name}.{key}" for key in module.state_dict()]
        wanted = {source for key in inside for source in self._sources.get(key, ())}
        self._read(holder, wanted)
        return drawn(holder, name)  # tables, and the second of a tied pair, whose values come with the first

    def check(self) -> None:
        """Before any worker starts: has every tensor that is one entry of the files its shape?"""
        plain = {name: name for name, sources in self._sources.items() if sources == {name}}
        with self._open({name for name in plain if name in self._shapes}) as tensors:
            for name, entry in tensors.items():
                if (there := tuple(entry.get_shape())) != self._shapes[name]:
                    raise UserError(self._mismatch(name, there, self._shapes[name]))

    def _mismatch(self, name: str, there: tuple[int, ...], here: tuple[int, ...]) -> str:
        return f"{name} has shape {there} in {str(self.path)!r} and {here} by its config."

    def _read(self, holder: Any, wanted: set[str]) -> None:
        loading, utils = transformers("core_model_loading"), transformers("modeling_utils")
        with self._open(wanted) as tensors, quietly():
            info, _ = loading.convert_and_load_state_dict_in_model(
                model=holder,
                state_dict=tensors,
                load_config=utils.LoadStateDictConfig(
                    dtype=torch.float32, weight_mapping=self._mapping(holder), device_map={"": "cpu"}
                ),
            )
        if info.mismatched_keys:
            name, there, here = sorted(info.mismatched_keys)[0]
            raise UserError(self._mismatch(name, tuple(there), tuple(here)))
        if info.conversion_errors:
            name, why = sorted(info.conversion_errors.items())[0]
            raise UserError(f"{name} of {str(self.path)!r} cannot be converted: {why}.")

    @contextmanager
    def _open(self, wanted: set[str]) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in sorted({self._files[name] for name in wanted})
            }
            yield {name: files[self._files[name]].get_slice(name) for name in sorted(wanted)}

    def _sources_of(self, model: Any) -> dict[str, set[str]]:
        """For every tensor of the model the entries of the files that it is made of."""
        loading = transformers("core_model_loading")
        rules = self._mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        inside = model.state_dict()
        found: dict[str, set[str]] = {}
        prefix = model.base_model_prefix
        for source in self._files:
            name, pattern = loading.rename_source_key(source, renamings, converters, prefix, inside)
            if name not in inside and source in inside:
                name, pattern = source, None
            names = {name}
            if pattern is not None:  # one entry may become several tensors
                targets = by_pattern[pattern].target_patterns
                names |= {name.replace(targets[0], target) for target in targets}
            for one in names:
                found.setdefault(one, set()).add(source)
        return found
