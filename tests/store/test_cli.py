"""The ckpt commands: one document each, sentences for mistakes."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from everstep.store.folder import commit, write_part
from everstep_convert.formats.known_formats import FORMATS
from tests.store.states import REAL, save


def test_inspect_tells_tensors_groups_and_who_holds_what(everstep: Callable, tmp_path: Path) -> None:
    save(tmp_path, 10)
    told = everstep("ckpt", "inspect", tmp_path, "--json").document()
    assert (told["format"], told["step"]) == ("universal", 10)
    assert [group["lr"] for group in told["groups"]] == [0.1, 0.01]
    assert {row["name"] for row in told["tensors"]} >= {"model/embed.weight", "flag"}
    assert [part["file"] for part in told["parts"]] == ["part-0.safetensors", "part-1.safetensors"]
    shown = everstep("ckpt", "inspect", tmp_path)
    assert "group 1: 1 parameters, lr=0.01" in shown.out
    few = everstep("ckpt", "inspect", tmp_path, "--match", "exp_avg", "--json").document()
    assert [row["name"] for row in few["tensors"]] == ["optimizer/embed.weight/exp_avg"]


def test_deepspeed_to_universal_to_hugging_face_and_diff(everstep: Callable, tmp_path: Path) -> None:
    source = REAL / "deepspeed-zero1"
    told = everstep("ckpt", "convert", source, tmp_path / "u", "--json").document()
    assert (told["source_format"], told["target_format"], told["step"]) == ("deepspeed", "universal", 2)
    back = everstep("ckpt", "convert", tmp_path / "u", tmp_path / "hf", "--to", "hf")
    assert back.code == 0
    assert "hf, step 2" in back.out
    ours = load_file(tmp_path / "hf" / "model.safetensors")
    theirs = torch.load(next(source.glob("*/mp_rank_00_model_states.pt")), weights_only=False)["module"]
    assert all(torch.equal(ours[name].to(tensor.dtype), tensor) for name, tensor in theirs.items())
    same = everstep("ckpt", "diff", source, tmp_path / "hf", "--json")
    assert same.code == 0
    assert same.document()["same"]
    other = everstep("ckpt", "diff", source, REAL / "deepspeed-zero3")
    assert other.code == 1
    assert re.search(r"model/up.weight: \d+ of \d+ elements differ, by [\d.e-]+ at most", other.out)


def test_verify_and_prune(everstep: Callable, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert everstep("ckpt", "verify", tmp_path, "--all", "--json").document()["ok"]
    part = tmp_path / "step-00000030" / "part-0.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    ran = everstep("ckpt", "verify", tmp_path, "--all", "--json")
    assert ran.code == 1
    assert [row["ok"] for row in ran.document()["checkpoints"]] == [True, True, False]
    assert "fails its checksum" in ran.document()["checkpoints"][2]["because"]
    dry = everstep("ckpt", "prune", tmp_path, "--keep", "1", "--dry-run", "--json").document()
    assert (dry["removed"], dry["kept"]) == ([10], [20, 30])  # 20 is the newest that is whole
    assert everstep("ckpt", "prune", tmp_path, "--keep", "1").out == "removed: 10\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


def test_mistakes_are_sentences(everstep: Callable, tmp_path: Path) -> None:
    save(tmp_path / "u", 10)
    for arguments, says in (
        (("inspect", tmp_path / "nowhere"), "is not a directory"),
        (("inspect", tmp_path / "u", "--match", "("), "is not a regular expression"),
        (("convert", tmp_path / "u", tmp_path / "x", "--to", "gguf"), "'gguf' is not one of"),
        (("convert", tmp_path / "u", tmp_path / "x", "--names", "bert"), "--names bert is not keep"),
        (("convert", tmp_path / "u", tmp_path / "x", "--names", "llama"), "none of llama"),
        (("prune", tmp_path / "u", "--keep", "0"), "--keep must be at least 1"),
        (("verify", tmp_path), "has no universal checkpoint"),
        (("convert", tmp_path / "u", tmp_path / "x", "--patterns", tmp_path / "p"), "cannot be read"),
    ):
        ran = everstep("ckpt", *arguments)
        assert ran.code == 2, arguments
        assert says in ran.err
        assert ran.err.count("\n") == 1
        assert ran.out == ""


def test_looking_at_a_checkpoint_waits_for_no_torch(tmp_path: Path) -> None:
    part = write_part(tmp_path, 3, "all", {"model/w": torch.arange(6.0)})
    commit(tmp_path, 3, [part], {})
    code = (
        "import sys; from everstep.cli import main;"
        f"root, to = {str(tmp_path)!r}, {str(tmp_path / 'hf')!r};"
        "asked = (['inspect', root], ['verify', root], ['convert', root, to, '--to', 'hf']);"
        "codes = [main.run(['ckpt', *words]) for words in asked];"
        "sys.exit(codes != [0, 0, 0] or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_formats_are_listed_as_the_table_has_them(everstep: Callable) -> None:
    rows = everstep("ckpt", "formats", "--json").document()["formats"]
    assert [row["name"] for row in rows] == list(FORMATS)
    page = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()
    for row in FORMATS.values():
        line = f"| {row.title} (`{row.name}`) | {row.reads} | {row.writes} | {row.optimizer} |"
        assert line in page.splitlines()
    assert all(name in everstep("ckpt", "convert", "--help").out for name in ("universal", "hf", "dcp"))
