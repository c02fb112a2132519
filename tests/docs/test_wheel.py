"""A wheel and a source archive can be built, and what is in the wheel works without the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import everstep
from tools.pages import ROOT

BUILD = "import sys, setuptools.build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
DATA = ("py.typed", "server/web/index.html", "server/web/app.js", "launch/slurm/everstep.sbatch")


@pytest.mark.slow
def test_a_wheel_has_all_it_needs_and_runs_without_the_tree(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    tree, made, there = (tmp_path / name for name in ("tree", "made", "there"))
    tree.mkdir()
    made.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    subprocess.run([sys.executable, "-c", BUILD, str(made)], cwd=tree, check=True, capture_output=True)
    assert (made / f"everstep-{everstep.__version__}.tar.gz").is_file()
    wheel = made / f"everstep-{everstep.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(there)
    assert {f"everstep/{name}" for name in DATA} <= names
    packages = (
        "everstep_lab/study/study",
        "everstep_convert/conversion",
        "everstep_diagnose/verdict",
        "everstep_fabric/port",
    )
    assert {f"{name}.py" for name in packages} <= names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "harness/"))]
    environment = {**os.environ, "PYTHONPATH": str(there)}
    for command in (["--version"], ["train", "--help"], ["simulate", "--help"], ["diagnose", "--help"]):
        ran = subprocess.run(
            [sys.executable, "-m", "everstep.cli.main", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert command != ["--version"] or ran.stdout == f"everstep {everstep.__version__}\n"
