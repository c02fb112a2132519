"""Texts of public lists (Xid catalogue, CUDA, NCCL, InfiniBand, Linux), and what `judge` makes of them.

`error_texts.tsv` was written first. A third of it, by the hash of the text, is held out: patterns are written
for the other two thirds, and for the public lists themselves. `unseen_texts.tsv` was collected from issues
after that; `docs/lessons.md` says how many of them were named rightly at first sight. When you add a text,
add its origin; if it lands in the held-out third, leave the patterns alone.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from everstep.core.faults.severity import TABLE, ErrorKind, Source, judge


class Text(NamedTuple):
    kind: ErrorKind
    source: Source
    origin: str
    text: str

    @property
    def is_held_out(self) -> bool:
        return int(hashlib.sha256(self.text.encode()).hexdigest(), 16) % 3 == 0


def read_texts(name: str) -> list[Text]:
    lines = (Path(__file__).parent / name).read_text().splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [Text(ErrorKind[kind], cast(Source, source), origin, text) for kind, source, origin, text in rows]


TEXTS = read_texts("error_texts.tsv")
LATER = [t for name in ("unseen", "third", "pattern") for t in read_texts(f"{name}_texts.tsv")]
SEEN = [text for text in TEXTS if not text.is_held_out]
HELD_OUT = [text for text in TEXTS if text.is_held_out]


@pytest.mark.parametrize("text", SEEN, ids=lambda text: text.text[:60])
def test_a_text_that_patterns_were_written_for(text: Text) -> None:
    assert judge(text.source, text.text).kind is text.kind


def test_texts_that_were_held_out() -> None:
    kinds = [text for text in HELD_OUT if judge(text.source, text.text).kind is text.kind]
    severities = [text for text in HELD_OUT if judge(text.source, text.text).severity == TABLE[text.kind]]
    assert len(HELD_OUT) >= 90
    assert len(kinds) >= 0.9 * len(HELD_OUT)
    assert len(severities) >= 0.95 * len(HELD_OUT)


def test_texts_that_came_later() -> None:
    """Issues read after the patterns were written, and one text for each pattern that has no other."""
    wrong = [text.text for text in LATER if judge(text.source, text.text).kind is not text.kind]
    assert wrong == [text.text for text in LATER if "SXid (PCI:0000:84:00.0): 12028" in text.text]


def test_texts_have_an_origin_and_are_not_repeated() -> None:
    assert len(TEXTS) >= 250
    assert len({text.text for text in TEXTS}) == len(TEXTS)
    assert all(text.origin for text in TEXTS)


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: invalid DMA mapping",
        "subprocess.CalledProcessError: Command '['nvidia-smi']' returned non-zero exit status 255.",
        "RuntimeError: NCCL communicator was aborted",
    ],
)
def test_what_machines_do_is_not_user_code(text: str) -> None:
    assert judge("exception", text).kind is not ErrorKind.USER_CODE
