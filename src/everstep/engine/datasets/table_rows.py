"""`everstep.table`: parquet, Arrow, or a folder that Hugging Face `datasets` has saved, as rows.

All of them are opened by `datasets` (the extra `data`), which maps Arrow into memory, so that a row costs its
own bytes. Parquet becomes Arrow in its cache when it is first opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everstep.engine.datasets.data import named_arguments
from everstep.engine.datasets.rows import Collate, Rows, rows
from everstep.engine.layers.model import in_short
from everstep.errors import UserError


@named_arguments
def table(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    rows: int = 4,
    pack: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    collate: Collate | None = None,
) -> Rows:
    """A .parquet or .arrow file, a folder of them, or a folder written by `Dataset.save_to_disk`.

    columns   those a batch has; all that are numbers, if not given
    The rest is that of `everstep.rows`.
    """
    return _rows(opened(path, columns), rows=rows, pack=pack, shuffle=shuffle, seed=seed, collate=collate)


_rows = rows


def opened(path: str | Path, columns: Sequence[str] | None) -> Any:
    """A data set with `len` and `[index]`."""
    path = Path(path)
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir()))
        raise UserError(f"{str(path)!r} has several splits; name one of its folders: {splits}.")
    is_saved = (path / "dataset_info.json").is_file()
    files = sorted(path.glob("*")) if path.is_dir() else [path]
    files = [file for file in files if file.suffix in (".parquet", ".arrow") and file.is_file()]
    kinds = {file.suffix.removeprefix(".") for file in files}
    if not is_saved and len(kinds) != 1:
        raise UserError(
            f"{str(path)!r} is not a .parquet or .arrow file, nor a folder of files of one of these kinds."
        )
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError("everstep.table needs Hugging Face datasets; pip install datasets.") from None
    try:
        if is_saved:
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(
                kinds.pop(), data_files=[str(file) for file in files], split="train"
            )
    except Exception as error:  # whatever is in the files
        raise UserError(f"{str(path)!r} cannot be read: {in_short(error.__cause__ or error)}.") from error
    if columns is None:
        return found
    if missing := [column for column in columns if column not in found.column_names]:
        raise UserError(f"{path} has no column {missing[0]!r}; it has {', '.join(found.column_names)}.")
    return found.select_columns(list(columns))
