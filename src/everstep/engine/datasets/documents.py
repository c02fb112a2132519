"""Rows that hold several documents, each as if it stood alone.

    tokens      a b c . d e . f g h      two documents that end with a full stop, and the beginning of a third
    positions   0 1 2 3 0 1 2 0 1 2      where they start again, a document begins
    targets     b c . - e . - g h i      what follows a document's end does not count (-100)

A model sees the documents by the positions alone: attention goes from a token to those of its own document.
A language model of Hugging Face does that by itself where it is given `position_ids` and no mask.

`PackedDocuments` puts the documents of a data set into rows of one length, as few as it can: the longest
first, each into the fullest row that still has room for it. Rows are fixed, and epochs shuffle them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everstep.engine.layers.boundary import described
from everstep.errors import UserError

UNCOUNTED = -100  # a target that no loss counts
_BATCH = 1 << 16  # documents whose lengths are read at once


def positions_in_documents(ends: Tensor) -> Tensor:
    """`ends`: rows x length, true at the last token of each document."""
    places = torch.arange(ends.shape[1]).expand(ends.shape)
    begins = torch.zeros_like(places)
    begins[:, 1:] = torch.where(ends[:, :-1], places[:, 1:], 0)
    return places - begins.cummax(1).values


class DocumentPiece(NamedTuple):
    """Of a document: all of it, unless it is longer than a row."""

    document: int
    start: int
    stop: int


class PackedDocuments:
    """A data set whose rows hold several documents of another: dicts with `input_ids`, maybe `labels`."""

    def __init__(self, documents: Any, sequence: int) -> None:
        self.documents, self.sequence = documents, sequence
        lengths = _lengths(documents)
        pieces = [
            DocumentPiece(document, start, min(start + sequence, length))
            for document, length in enumerate(lengths)
            for start in range(0, length, sequence)
        ]
        if not pieces:
            raise UserError("pack was asked for, and no row of the data set holds a token.")
        self._lengths = lengths
        self.rows = packed(pieces, sequence)
        self.filled = sum(p.stop - p.start for p in pieces) / (len(self.rows) * sequence)  # 1: no padding

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`targets` are shifted already. What is left of a row is one more document that counts nowhere."""
        tokens, positions = torch.zeros(2, self.sequence, dtype=torch.int64)
        targets = torch.full((self.sequence,), UNCOUNTED)
        at = 0
        for piece in self.rows[index]:
            row = self.documents[piece.document]
            own = _column(row, "input_ids", piece.document)
            labels = _column(row, "labels", piece.document) if "labels" in row else own
            length = self._lengths[piece.document]
            if not len(own) == len(labels) == length:
                raise UserError(
                    f"row {piece.document} of the data set had {length} tokens and now "
                    f"has {len(own)}, with {len(labels)} labels; rows that are packed keep their lengths."
                )
            size = piece.stop - piece.start
            tokens[at : at + size] = own[piece.start : piece.stop]
            following = labels[
                piece.start + 1 : piece.stop + 1
            ]  # also where it is cut: no token goes unlearned
            targets[at : at + len(following)] = following
            positions[at : at + size] = torch.arange(size)
            at += size
        positions[at:] = torch.arange(self.sequence - at)
        return {"input_ids": tokens, "position_ids": positions, "targets": targets}


def stacked_documents(given: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """A batch of rows of `PackedDocuments`."""
    inputs = {key: torch.stack([row[key] for row in given]) for key in ("input_ids", "position_ids")}
    return inputs, torch.stack([row["targets"] for row in given])


def packed(pieces: Sequence[DocumentPiece], sequence: int) -> list[list[DocumentPiece]]:
    """Into rows, each piece into the fullest row that has room. Nothing at random: all workers pack alike."""
    rows: list[list[DocumentPiece]] = []
    by_room: dict[int, list[int]] = {}  # rows that have just this much room left
    rooms: list[int] = []  # the keys, in order
    for piece in sorted(pieces, key=lambda p: (p.start - p.stop, p)):
        size = piece.stop - piece.start
        found = bisect_left(rooms, size)
        if found < len(rooms):
            room = rooms[found]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[found]
        else:
            room, row = sequence, len(rows)
            rows.append([])
        rows[row].append(piece)
        left = room - size
        if left:
            if left not in by_room:
                insort(rooms, left)
            by_room.setdefault(left, []).append(row)
    return rows


def _lengths(documents: Any) -> list[int]:
    if "input_ids" in getattr(documents, "column_names", ()):  # of Hugging Face: without decoding the tokens
        from pyarrow import compute

        batches = documents.select_columns(["input_ids"]).with_format("arrow").iter(_BATCH)
        with suppress(NotImplementedError):  # no lists; the look at the first document says so
            return [
                length or 0
                for batch in batches
                for length in compute.list_value_length(batch.column(0)).to_pylist()
            ]
    return [len(_column(documents[index], "input_ids", index)) for index in range(len(documents))]


def _column(row: Any, name: str, index: int) -> Tensor:
    if not isinstance(row, Mapping) or name not in row:
        raise UserError(
            f"row {index} of the data set is {described(row)}; pack takes rows that are dicts with input_ids."
        )
    try:
        found = torch.from_numpy(np.asarray(row[name], dtype=np.int64))
    except (TypeError, ValueError):
        found = torch.empty(0, 0)
    if found.ndim != 1:
        raise UserError(f"{name} of row {index} is {described(row[name])}; pack takes one line of tokens.")
    return found
