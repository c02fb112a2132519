"""One module of a model with its values: those of its own tensors in a folder of safetensors, or drawn anew.

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
from everstep.engine.hf.source import transformers, weight_files
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

    @property
    def is_there(self) -> bool:
        return bool(self._files)

    def load(self, holder: Any, name: str) -> nn.Module:
        """The module `name` of a model in which only that one is real."""
        module: nn.Module = holder.get_submodule(name)
        inside = [f"{name}.{key}" for key in module.state_dict()]
        wanted = {source for key in inside for source in self._sources.get(key, ())}
        missing = self._read(holder, wanted)
        lacking = sorted(missing & set(inside) - set(self._tied))
        if lacking:
            raise UserError(
                f"model folder {str(self.path)!r} has no weights for {lacking[0]}; are config.json and the "
                "safetensors of one model?"
            )
        return drawn(holder, name)  # tables, and the second of a tied pair, whose values come with the first

    def _read(self, holder: Any, wanted: set[str]) -> set[str]:
        """Values for all that `wanted` has; the names that are left without."""
        loading, utils = transformers("core_model_loading"), transformers("modeling_utils")
        with self._open(wanted) as tensors:
            info, _ = loading.convert_and_load_state_dict_in_model(
                model=holder,
                state_dict=tensors,
                load_config=utils.LoadStateDictConfig(
                    dtype=torch.float32, weight_mapping=self._mapping(holder), device_map={"": "cpu"}
                ),
            )
        if info.mismatched_keys:
            name, there, here = sorted(info.mismatched_keys)[0]
            raise UserError(
                f"{name} has shape {tuple(there)} in {str(self.path)!r} and {tuple(here)} by its config.json."
            )
        if info.conversion_errors:
            name, why = sorted(info.conversion_errors.items())[0]
            raise UserError(f"{name} of {str(self.path)!r} cannot be converted: {why}.")
        return set(info.missing_keys)

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
