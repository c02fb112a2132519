"""`everstep.table`: parquet, Arrow, or a folder that Hugging Face `datasets` has saved, as rows.

pyarrow and datasets are extras: each is imported by the reader that needs it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from everstep.engine.datasets.data import named_arguments
from everstep.engine.datasets.rows import Collate, Rows, rows
from everstep.errors import UserError

TOKENS = "input_ids"
_KEPT_GROUPS = 8  # row groups of parquet files that are held decoded


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
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return _hugging_face(path, columns)
    files = (
        sorted(p for p in path.glob("*") if p.suffix in (".parquet", ".arrow")) if path.is_dir() else [path]
    )
    if not files or not files[0].is_file():
        raise UserError(f"{str(path)!r} is not a .parquet or .arrow file, nor a folder of them.")
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        raise UserError("everstep.table needs pyarrow; pip install pyarrow.") from None
    if any(file.suffix == ".parquet" for file in files):
        return ParquetRows(files, columns)
    return ArrowRows(files, columns)


def _hugging_face(path: Path, columns: Sequence[str] | None) -> Any:
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir()))
        raise UserError(f"{str(path)!r} has several splits; name one of its folders: {splits}.")
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError("a folder of Hugging Face datasets needs pip install datasets.") from None
    found = datasets.load_from_disk(str(path))
    return found if columns is None else found.select_columns(_known(columns, found.column_names, path))


class ParquetRows:
    """Row groups are decoded when first asked for, and the last few are kept."""

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None) -> None:
        import pyarrow.parquet as parquet

        self._files = [parquet.ParquetFile(file, memory_map=True) for file in files]
        names = self._files[0].schema_arrow.names
        self.columns = _known(columns, names, files[0]) if columns is not None else names
        self._groups = [(f, g) for f, file in enumerate(self._files) for g in range(file.num_row_groups)]
        self._ends = list(accumulate(self._files[f].metadata.row_group(g).num_rows for f, g in self._groups))
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = bisect_right(self._ends, index)
        start = self._ends[group - 1] if group else 0
        return _row(self._group(group), index - start)

    def lengths(self) -> list[int]:
        """Of the documents, without the documents themselves staying in memory."""
        columns = (self._files[f].read_row_group(g, columns=[TOKENS]).column(TOKENS) for f, g in self._groups)
        return [length for column in columns for length in _lengths(column)]

    def _group(self, group: int) -> Any:
        if group not in self._kept:
            file, number = self._groups[group]
            self._kept[group] = self._files[file].read_row_group(number, columns=list(self.columns))
            if len(self._kept) > _KEPT_GROUPS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return self._kept[group]


class ArrowRows:
    """Memory-mapped: a row costs its own bytes."""

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None) -> None:
        self._tables = [_arrow(file) for file in files]
        if columns is not None:
            self._tables = [t.select(_known(columns, t.column_names, files[0])) for t in self._tables]
        self._ends = list(accumulate(t.num_rows for t in self._tables))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def lengths(self) -> list[int]:
        return [length for table in self._tables for length in _lengths(table.column(TOKENS))]

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = bisect_right(self._ends, index)
        return _row(self._tables[number], index - (self._ends[number - 1] if number else 0))


def _lengths(column: Any) -> list[int]:
    import pyarrow as arrow
    from pyarrow import compute

    if not arrow.types.is_list(column.type) and not arrow.types.is_large_list(column.type):
        raise UserError(f"the column {TOKENS} holds {column.type}; pack takes lists of tokens.")
    return [length or 0 for length in compute.list_value_length(column).to_pylist()]


def _arrow(file: Path) -> Any:
    import pyarrow as arrow

    for reader in (arrow.ipc.open_file, arrow.ipc.open_stream):
        try:
            return reader(arrow.memory_map(str(file))).read_all()
        except arrow.ArrowInvalid:
            continue
    raise UserError(f"{file} is not an Arrow file.")


def _row(table: Any, index: int) -> dict[str, Any]:
    one: dict[str, Any] = table.slice(index, 1).to_pylist()[0]
    return one


def _known(columns: Sequence[str], names: Sequence[str], where: Path) -> list[str]:
    if missing := [column for column in columns if column not in names]:
        raise UserError(f"{where} has no column {missing[0]!r}; it has {', '.join(names)}.")
    return list(columns)
