"""Attacks on what we convert: hostile pickles run nothing, false indexes lead nowhere, claims are checked."""

import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from everstep.cli.main import run
from everstep.errors import UserError
from everstep.store.index import Refused
from everstep_convert.conversion import read_state
from everstep_convert.formats import pickles
from everstep_convert.values import Encoder
from tests.store.states import REAL


class Runs:
    """What a pickle of an attacker does when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def torch_file(path: Path, value: Any) -> None:
    """As torch.save lays it out, with a pickle of our own making."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", value if isinstance(value, bytes) else pickle.dumps(value, protocol=2))
        archive.writestr("x/version", b"3\n")


def test_a_pickle_that_calls_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch_file(tmp_path / "a.pt", {"module": Runs(mark), "x": 1})
    found = pickles.load(tmp_path / "a.pt")
    assert found["x"] == 1
    assert found["module"].name == "system"
    assert not mark.exists()


@pytest.mark.parametrize(
    "code",
    [
        b'cbuiltins\neval\n(S\'open("MARK","w")\'\ntR.',
        b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR.",
        b"c__main__\nMARK\n.",
        b"ctorch.serialization\nload\n(S'MARK'\ntR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(S'MARK'\nI0\n(I4\nt(I1\nttR.",
        b"\x80\x02}q\x00(X\x01\x00\x00\x00aX",
        b"",
    ],
)
def test_odd_pickles_are_refused_or_inert(tmp_path: Path, code: bytes) -> None:
    mark = tmp_path / "mark"
    torch_file(tmp_path / "a.pt", code.replace(b"MARK", str(mark).encode()))
    said = str(tmp_path / "a.pt")
    try:
        pickles.load(tmp_path / "a.pt")
    except UserError as error:
        said = str(error)
    assert str(tmp_path / "a.pt") in said
    assert "\n" not in said
    assert not mark.exists()


def rewritten(path: Path, change: Any) -> None:
    """A torch file with its pickle changed, its storages kept."""
    data = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(data) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, change(content) if info.filename.endswith("data.pkl") else content)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(7)}, path)
    rewritten(path, lambda data: data.replace(b"K\x07", b"K\x70"))
    with pytest.raises(UserError, match=r"claims more than the file has|outside its storage"):
        pickles.load(path)


def test_a_storage_that_is_missing_or_packed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(1000)}, path)
    data = io.BytesIO(path.read_bytes())
    for packed in (True, False):
        with zipfile.ZipFile(data) as old, zipfile.ZipFile(path, "w") as new:
            for info in old.infolist():
                if "/data/" not in info.filename:
                    new.writestr(info.filename, old.read(info))
                elif packed:
                    new.writestr(info.filename, old.read(info), zipfile.ZIP_DEFLATED)
        with pytest.raises(UserError, match="missing or packed"):
            pickles.load(path)


@pytest.mark.parametrize("cut", [10, 1000, 20_000])
def test_a_truncated_deepspeed_file_is_refused_by_name(tmp_path: Path, cut: int) -> None:
    shutil.copytree(REAL / "deepspeed-zero1", tmp_path / "z")
    victim = next((tmp_path / "z").glob("*/*rank_1_*optim_states.pt"))
    os.truncate(victim, cut)
    with pytest.raises(UserError, match=victim.name):
        read_state(tmp_path / "z")


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    shutil.copytree(REAL / "deepspeed-zero3", tmp_path / "z")
    next((tmp_path / "z").glob("*/bf16_zero_pp_rank_0_*")).unlink()
    with pytest.raises(UserError, match="are not 0 to 1"):
        read_state(tmp_path / "z")


def test_latest_cannot_lead_outside(tmp_path: Path) -> None:
    shutil.copytree(REAL / "deepspeed-zero1", tmp_path / "z")
    (tmp_path / "z" / "latest").write_text("../../etc")
    with pytest.raises(UserError, match="which is not a folder here"):
        read_state(tmp_path / "z")


def hf_folder(path: Path) -> Path:
    path.mkdir()
    save_file({"w": torch.arange(6.0), "v": torch.ones(2)}, path / "model.safetensors")
    return path


def header(path: Path, change: Any) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    change(table)
    text = json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


HF = {
    "lies outside the file, or is not as long": lambda t: t["w"].update(shape=[1 << 60]),
    "lies outside the file": lambda t: t["w"].update(shape=[600], data_offsets=[0, 2400]),
    "lie on one place": lambda t: t["v"].update(data_offsets=[4, 12]),
    "is not described": lambda t: t["w"].update(data_offsets="0"),
    "which we do not know": lambda t: t["w"].update(dtype="F33"),
}


@pytest.mark.parametrize("says", HF)
def test_a_false_safetensors_header_is_refused(tmp_path: Path, says: str) -> None:
    folder = hf_folder(tmp_path / "a")
    header(folder / "model.safetensors", HF[says])
    with pytest.raises(UserError, match=says):
        read_state(folder)


def test_a_hugging_face_index_cannot_lead_outside(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "a")
    for name in ("../b.safetensors", "/etc/passwd", "x/y.safetensors"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(UserError, match="which is not a file of this folder"):
            read_state(folder)


def test_dcp_metadata_cannot_run_or_lead_outside(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    mark = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    with pytest.raises(UserError, match="not the metadata of a distributed checkpoint"):
        read_state(folder)
    assert not mark.exists()
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=str(folder), no_dist=True)
    whole = (folder / ".metadata").read_bytes()
    for false in (b"/etc/passwd.x", b"../__0_.dstcp"):
        assert len(false) == 13
        name = b"__0_0.distcp"
        padded = whole.replace(bytes([len(name)]) + b"\x00\x00\x00" + name, b"\x0d\x00\x00\x00" + false)
        padded = padded.replace(b"\x8c\x0c" + name, b"\x8c\x0d" + false)
        (folder / ".metadata").write_bytes(padded)
        with pytest.raises(UserError, match="cannot be read"):
            read_state(folder)


NAMES = ("a\x1b[2J", "b\x1b]0;mine\x07", "c\x9b2J", "d\u202etxt", "e[/bold]", "f[red]")


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "A"),
        ("inspect", "A", "--match", "."),
        ("diff", "A", "B"),
        ("convert", "A", "C", "--to", "hf"),
        ("verify", "A"),
    ],
    ids=lambda command: command[0],
)
def test_names_of_tensors_do_nothing_to_a_terminal(
    tmp_path: Path, command: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """They were printed as they are: one could clear the screen, or set its title. Brackets are shown too."""
    for folder, value in (("A", 0.0), ("B", 1.0)):
        (tmp_path / folder).mkdir()
        save_file({name: torch.full((3,), value) for name in NAMES}, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text('{"model_type": "llama"}')
    run(["ckpt", *(str(tmp_path / word) if word in ("A", "B", "C") else word for word in command)])
    said = "".join(capfd.readouterr())
    assert not set(said) & set("\x1b\x07\x9b\u202e")
    if command[0] in ("inspect", "diff"):
        assert all(shown in said for shown in (r"a\x1b[2J", r"d\u202etxt", "e[/bold]", "f[red]")), said


def test_values_that_are_the_same_list_a_million_times_are_refused() -> None:
    """Thirty levels of ten: a few hundred bytes in a file, and no end as a table."""
    value: Any = "x"
    for _ in range(30):
        value = [value] * 10
    deep: Any = None
    for _ in range(1000):
        deep = [deep]
    for odd in (value, deep, {"a": value}):
        with pytest.raises(Refused, match="nested without end"):
            Encoder().encode(odd, "client")
