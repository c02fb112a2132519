"""Training that heals itself: no microbatch is lost, no step is repeated, losses are a failure-free run's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep import exact
    from everstep.engine.datasets.blend import blend
    from everstep.engine.datasets.rows import rows
    from everstep.engine.datasets.stream import stream
    from everstep.engine.datasets.table_rows import table
    from everstep.engine.datasets.tokens import tokens
    from everstep.engine.hf.model import hf
    from everstep.engine.layers.model import Model, token_loss
    from everstep.engine.prepare.context import in_worker
    from everstep.errors import EverstepError, UserError
    from everstep.launch.local.api import Result, train
    from everstep.launch.local.export import export, load
    from everstep.launch.local.lightning import fit
    from everstep.launch.local.loggers import CsvLog, EarlyStop, JsonlLog, MlflowLog, TensorBoardLog, WandbLog
    from everstep.ranks.line import progress
    from everstep.ranks.snapshots import restore, snapshot

__all__ = [
    "CsvLog",
    "EarlyStop",
    "EverstepError",
    "JsonlLog",
    "MlflowLog",
    "Model",
    "Result",
    "TensorBoardLog",
    "UserError",
    "WandbLog",
    "__version__",
    "blend",
    "exact",
    "export",
    "fit",
    "hf",
    "in_worker",
    "load",
    "progress",
    "restore",
    "rows",
    "snapshot",
    "stream",
    "table",
    "token_loss",
    "tokens",
    "train",
]
__version__ = "0.2.0"

_LOGGERS = "everstep.launch.local.loggers"
_HOMES = {
    "EarlyStop": _LOGGERS,
    "CsvLog": _LOGGERS,
    "JsonlLog": _LOGGERS,
    "WandbLog": _LOGGERS,
    "MlflowLog": _LOGGERS,
    "TensorBoardLog": _LOGGERS,
    "train": "everstep.launch.local.api",
    "Result": "everstep.launch.local.api",
    "fit": "everstep.launch.local.lightning",
    "Model": "everstep.engine.layers.model",
    "token_loss": "everstep.engine.layers.model",
    "hf": "everstep.engine.hf.model",
    "in_worker": "everstep.engine.prepare.context",
    "blend": "everstep.engine.datasets.blend",
    "rows": "everstep.engine.datasets.rows",
    "tokens": "everstep.engine.datasets.tokens",
    "table": "everstep.engine.datasets.table_rows",
    "stream": "everstep.engine.datasets.stream",
    "load": "everstep.launch.local.export",
    "progress": "everstep.ranks.line",
    "snapshot": "everstep.ranks.snapshots",
    "restore": "everstep.ranks.snapshots",
    "export": "everstep.launch.local.export",
    "UserError": "everstep.errors",
    "EverstepError": "everstep.errors",
}


def __getattr__(name: str) -> Any:
    """Loaded when first used: torch takes seconds, and `everstep --help` needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    from importlib import import_module

    if name not in _HOMES:  # a module of its own
        return import_module(f"everstep.{name}")
    return getattr(import_module(_HOMES[name]), name)
