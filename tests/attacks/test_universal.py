"""Attacks on a checkpoint folder: every one is refused by name, none crashes or reads outside."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from everstep.errors import UserError
from everstep.store import index as indexes
from everstep.store.folder import newest_valid, open_checkpoint, write_part
from tests.store.states import all_of, same, save, tensors


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    """Change the index as somebody would who also makes its hash right."""
    outer = json.loads((path / "index.json").read_text())
    change(outer["index"])
    outer["xxh3"] = indexes.digest(indexes.canonical(outer["index"]).encode())
    (path / "index.json").write_text(json.dumps(outer))


def row(path: Path, **changes: object) -> None:
    rewrite(path, lambda index: index["parts"][0]["slices"][0].update(changes))


def part(path: Path, **changes: object) -> None:
    rewrite(path, lambda index: index["parts"][0].update(changes))


def truncate(path: Path) -> None:
    os.truncate(path / "part-1.safetensors", 100)


def truncate_and_say_so(path: Path) -> None:
    truncate(path)
    rewrite(path, lambda index: index["parts"][1].update(bytes=100, slices=[]))


def flip(path: Path, file: str = "part-0.safetensors", at: int = -1) -> None:
    data = bytearray((path / file).read_bytes())
    data[at] ^= 1
    (path / file).write_bytes(data)


def link(path: Path) -> None:
    outside = path.parent / "outside.safetensors"
    (path / "part-0.safetensors").rename(outside)
    (path / "part-0.safetensors").symlink_to(outside)


def pipe(path: Path) -> None:
    """Whoever opens it waits for ever."""
    (path / "part-0.safetensors").unlink()
    os.mkfifo(path / "part-0.safetensors")


def pipe_for_index(path: Path) -> None:
    (path / "index.json").unlink()
    os.mkfifo(path / "index.json")


def added(path: Path, tensors: dict) -> dict:
    """A part written elsewhere, put into a finished folder."""
    made = write_part(path.parent, 77, "part-2", tensors)
    (path.parent / "step-00000077.partial" / "part-2.safetensors").rename(path / "part-2.safetensors")
    return made


def twice(path: Path) -> None:
    again = added(path, {"flag": torch.tensor(True)})
    rewrite(path, lambda index: index["parts"].append(again))


def swap(path: Path) -> None:
    write_part(path.parent, 78, "part-0", {**tensors(20)[0], "model/embed.weight": torch.zeros(3, 5)})
    (path.parent / "step-00000078.partial" / "part-0.safetensors").rename(path / "part-0.safetensors")


def same_key_twice(path: Path) -> None:
    text = (path / "index.json").read_text()
    (path / "index.json").write_text(text.replace('"step":20', '"step":20,"step":20'))


def huge_header(path: Path) -> None:
    data = bytearray((path / "part-0.safetensors").read_bytes())
    data[:8] = (1 << 62).to_bytes(8, "little")
    (path / "part-0.safetensors").write_bytes(data)


def header_key_twice(path: Path) -> None:
    """The first of two entries with one name is the one some parsers would believe."""
    file = path / "part-0.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].decode().rstrip()
    again = json.dumps(json.loads(header)["model/embed.weight"])
    header = '{"model/embed.weight":' + again + "," + header[1:]
    body = header.encode() + b" " * (-len(header) % 8)
    file.write_bytes(len(body).to_bytes(8, "little") + body + data[8 + length :])
    grown = file.stat().st_size - len(data)

    def shift(index: dict) -> None:
        index["parts"][0]["bytes"] += grown
        for one in index["parts"][0]["slices"]:
            one["at"] += grown

    rewrite(path, shift)


def overlap(path: Path) -> None:
    def change(index: dict) -> None:
        a, b = index["parts"][0]["slices"][:2]
        b["at"] = a["at"]

    rewrite(path, change)


def sparse_index(path: Path) -> None:
    os.truncate(path / "index.json", indexes.MAX_INDEX_BYTES + 1)


HUGE = 1 << 60
DAMAGE: dict[str, Callable[[Path], object]] = {
    # truncated
    "part-1.safetensors has 100 bytes, and": truncate,
    "part-1.safetensors cannot be read": truncate_and_say_so,
    "part-1.safetensors is missing": lambda path: (path / "part-1.safetensors").unlink(),
    "index.json is missing": lambda path: (path / "index.json").unlink(),
    "index.json is not JSON": lambda path: os.truncate(path / "index.json", 50),
    # bit-flipped
    "part-0.safetensors: tensor 'optimizer/embed.weight/step' fails its checksum": flip,
    "part-0.safetensors cannot be read": lambda path: flip(path, at=7),
    "index.json fails its checksum": lambda path: (path / "index.json").write_text(
        (path / "index.json").read_text().replace('"rows":20', '"rows":21')
    ),
    # pointing outside
    "lies outside part-0.safetensors or on another": lambda path: row(path, at=1 << 40),
    "'model/embed.weight' lies outside part-0.safetensors": lambda path: row(path, at=0),
    "on another tensor": overlap,
    "does not describe the tensors of part-0": lambda path: row(path, at=-8),
    "reaches outside it in index.json": lambda path: row(path, start=[1, 0]),
    # huge claims
    "does not have a hash for every chunk": lambda path: row(path, shape=[HUGE, HUGE], size=[HUGE, HUGE]),
    "elements of tensor 'model/embed.weight' are in no file": lambda path: row(path, shape=[HUGE, 3]),
    "part-0.safetensors has": lambda path: part(path, bytes=HUGE),
    "part-0.safetensors cannot be read: its header claims": huge_header,
    "has no sizes of part-0": lambda path: part(path, chunk_bytes=HUGE),
    "index.json has no sizes": lambda path: part(path, chunk_bytes=0),
    "index.json is larger than any we write": sparse_index,
    "index.json is not JSON: maximum recursion": lambda path: (path / "index.json").write_text("[" * 200_000),
    # path tricks
    "part-0.safetensors is not a plain file": link,
    "is not a plain file": pipe,
    "index.json is not a plain file": pipe_for_index,
    "index.json names '../step-00000010/part-0.safetensors', which is not in this folder": lambda path: part(
        path, file="../step-00000010/part-0.safetensors"
    ),
    "index.json names '/etc/passwd'": lambda path: part(path, file="/etc/passwd"),
    "index.json names '.safetensors'": lambda path: part(path, file=".safetensors"),
    "index.json names 'a\\x00.safetensors'": lambda path: part(path, file="a\0.safetensors"),
    # duplicate names
    "tensor 'flag' is in both part-1.safetensors and part-2.safetensors": twice,
    "index.json is not JSON: a key is there twice": same_key_twice,
    "index.json names part-0.safetensors twice": lambda path: rewrite(
        path, lambda index: index["parts"].append(index["parts"][0])
    ),
    "part-0.safetensors has 'model/embed.weight' twice": lambda path: rewrite(
        path, lambda index: index["parts"][0]["slices"][1].update(tensor="model/embed.weight")
    ),
    "part-0.safetensors cannot be read: its header is not JSON": header_key_twice,
    # other tensors, types, versions
    "part-0.safetensors holds other tensors than index.json says": swap,
    "'model/embed.weight' is of 'F31'": lambda path: row(path, dtype="F31"),
    "'model/embed.weight' is of ['F32']": lambda path: row(path, dtype=["F32"]),
    "index.json does not describe the tensors of part-0": lambda path: part(path, slices=["w"]),
    "describe the tensors of part-0": lambda path: row(path, shape=[True, 3]),
    "index.json is not the index of an Everstep": lambda path: (path / "index.json").write_text("[1, 2]"),
    "index.json is of version 3": lambda path: rewrite(path, lambda index: index.update(version=3)),
    "index.json has no parts": lambda path: rewrite(path, lambda index: index.pop("parts")),
    "index.json has a group of parameters without": lambda path: rewrite(
        path, lambda index: index.update(groups=[{"params": 3}])
    ),
    "index.json is of step 7, which is not the folder's": lambda path: rewrite(
        path, lambda index: index.update(step=7)
    ),
}


@pytest.mark.parametrize("says", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(tmp_path: Path, says: str) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    DAMAGE[says](tmp_path / "step-00000020")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found, refused = newest_valid(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB: no claim is believed
    assert found is not None
    assert found.step == 10
    assert same(found.read(), all_of(10))
    assert len(refused) == 1
    assert says in refused[0]
    assert "step-00000020" in refused[0]
    assert "\n" not in refused[0]


def test_any_flipped_bit_of_any_file_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for at in range(0, len(whole), 13):
            flip(path, file.name, at)
            found, refused = newest_valid(tmp_path)
            assert found is None, (file.name, at)
            assert len(refused) == 1
            file.write_bytes(whole)


def test_a_folder_that_is_a_link_is_no_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "a", 10)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / path.name).symlink_to(path)
    assert newest_valid(tmp_path / "b") == (None, [])
    with pytest.raises(UserError, match=r"index\.json is missing"):
        open_checkpoint(tmp_path / "b" / "step-00000011")
