"""What `everstep.hf` was given: a folder, a config file or a config object; and the config it comes to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.job.presets import closest

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def transformers(module: str = "") -> Any:
    """The package, or one of its modules; a sentence if it is not installed."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        return import_module(f"transformers{'.' * bool(module)}{module}")
    except ImportError as error:
        raise UserError(
            f"a Hugging Face model needs transformers ({error}); pip install 'transformers>=5.18,<6'."
        ) from None


def config_of(source: Any, changes: Mapping[str, Any]) -> Any:
    """The config of a folder, a config.json, a dict, or a config object, with some of its values changed."""
    auto = transformers().AutoConfig
    if isinstance(source, Mapping):
        if "model_type" not in source:
            raise UserError("the model's config has no model_type; give the config of a transformers model.")
        config = auto.for_model(**_decoded(source))
    elif isinstance(source, str | Path):
        folder = folder_of(source)
        try:
            config = auto.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"model folder {str(source)!r} cannot be read: {first.rstrip('.')}.") from None
    elif hasattr(source, "to_dict") and hasattr(source, "model_type"):
        config = auto.for_model(**source.to_dict())
    else:
        raise UserError(
            f"hf was given a {type(source).__name__}; give a folder with a config.json, or a config object."
        )
    for name in changes:
        if name != "attn_implementation" and not hasattr(config, name):
            known = closest(name, config.to_dict())
            raise UserError(f"{name!r} is not a value of a {type(config).__name__}; {known}")
    return auto.for_model(**{**config.to_dict(), **changes})


def _decoded(value: Any) -> Any:
    """JSON has no infinity: transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def folder_of(source: str | Path) -> Path:
    """The folder with config.json in it."""
    path = Path(source)
    if path.name == "config.json" and path.is_file():
        return path.parent
    if not path.is_dir():
        raise UserError(
            f"model {str(source)!r} is not a folder; download it first, with hf download {source} "
            "--local-dir FOLDER, and name the folder."
        )
    if not (path / "config.json").is_file():
        raise UserError(f"model folder {str(source)!r} has no config.json.")
    return path


def weight_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor in a folder; empty if it has no safetensors."""
    from safetensors import safe_open

    index = folder / INDEX
    if index.is_file():
        try:
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise UserError(f"{index} cannot be read: {type(error).__name__}: {error}.") from None
        files = {name: folder / file for name, file in names.items()}
        if missing := sorted({file.name for file in files.values() if not file.is_file()}):
            raise UserError(f"model folder {str(folder)!r} lacks {missing[0]}; download it again.")
        return files
    if not (folder / SINGLE).is_file():
        return {}
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)


def plain_config(config: Any) -> dict[str, Any]:
    """A config as JSON has it."""
    table: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return table


@contextmanager
def quietly() -> Iterator[None]:
    """Without a progress bar for every layer of every worker."""
    logging = transformers("utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
