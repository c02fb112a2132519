"""The pages that say "copy and paste", copied and pasted: a shell, an empty folder, the blocks as they stand.

Figures differ from run to run; what must not differ is compared: losses with and without a death, what was
healed, exit codes.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools.pages import DOCS, ROOT, blocks

BIN = Path(sys.executable).parent


class Shell:
    """A folder like a checkout after its first `make`: the blocks of a page, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "activate").write_text(f'PATH="{BIN}:$PATH"\n')

    def start(self, *commands: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
            cwd=self.folder,
            env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *commands: str) -> str:
        return ended(self.start(*commands))


def ended(process: "subprocess.Popen[str]") -> str:
    try:
        said, _ = process.communicate(timeout=300)
    finally:  # nothing that a page has put into the background outlives its test
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{process.args}\n{said}"
    return said


def shell_blocks(page: str, *, slow: bool = False) -> list[str]:
    return [b.text for b in blocks(DOCS / page) if b.language == "bash" and slow >= (b.rest == "slow")]


def losses(said: str) -> list[str]:
    return re.findall(r"step +(\d+/\d+  loss [\d.]+)", said)


def test_the_quick_start_trains_through_a_death(tmp_path: Path) -> None:
    prepare, _, train_with_a_death = shell_blocks("quickstart.md")
    healed = Shell(tmp_path / "struck").run(prepare, train_with_a_death)
    assert len(losses(healed)) == 20
    assert "worker 0:1 killed by SIGKILL; noticed in" in healed
    assert "1 incident healed; microbatches: 160 issued, 160 committed once" in healed
    said = [block.text for block in blocks(DOCS / "quickstart.md") if block.language == "text"]
    assert last_loss(said[0]) == last_loss(said[1]), "the page shows what it claims"
    assert float(last_loss(said[0])) == pytest.approx(float(last_loss(healed)), rel=1e-3), "and what is so"


# By default `tests/cli/test_commands.py` compares the losses of two runs, in processes that are warm.
@pytest.mark.slow
def test_the_quick_start_has_the_same_losses_with_and_without_a_death(tmp_path: Path) -> None:
    prepare, train, train_with_a_death = shell_blocks("quickstart.md")
    calm, struck = Shell(tmp_path / "calm"), Shell(tmp_path / "struck")
    runs = [calm.start(prepare, train), struck.start(prepare, train_with_a_death)]
    in_peace, healed = (ended(run) for run in runs)
    assert losses(healed) == losses(in_peace)
    assert "no incident; microbatches: 160 issued, 160 committed once" in in_peace


# By default `test_blocks.py` runs the block, and `tests/cli/test_broken_pipe.py` a script through a death.
@pytest.mark.slow
def test_fifteen_lines_train_and_train_through_a_death(tmp_path: Path) -> None:
    script = next(block.text for block in blocks(DOCS / "own-model.md") if block.language == "python")
    assert len(script.splitlines()) <= 15
    runs = []
    for name, block in zip(("calm", "struck"), shell_blocks("own-model.md"), strict=True):
        shell = Shell(tmp_path / name)
        (shell.folder / "train.py").write_text(script)
        runs.append(shell.start(block))
    in_peace, healed = (ended(run) for run in runs)
    assert len(losses(in_peace)) == 40
    assert losses(healed) == losses(in_peace)
    last = re.compile(r"^last loss (\S+) incidents healed (\d)$", re.MULTILINE)
    assert last.findall(in_peace) == [(last.findall(healed)[0][0], "0")]
    assert last.findall(healed)[0][1] == "1"
    shown = [block.text for block in blocks(DOCS / "own-model.md") if block.language == "text"]
    assert [last.findall(text)[0][1] for text in shown] == ["0", "1"]
    losses_shown = {last.findall(text)[0][0] for text in shown}
    assert len(losses_shown) == 1
    assert float(losses_shown.pop()) == pytest.approx(float(last.findall(in_peace)[0][0]), rel=1e-3)


def test_a_torchrun_script_is_restarted_and_goes_on(tmp_path: Path) -> None:
    (block,) = shell_blocks("own-script.md")
    said = Shell(tmp_path / "script").run(block)
    assert "rank 1 killed by SIGKILL" in said
    assert "all ranks restarted" in said
    assert len(re.findall(r"processes by rank  0: \d+, 1: \d+", said)) == 2, "of both lives"
    steps = [(int(step), loss) for step, loss in re.findall(r"\[0\] step (\d+) loss (\S+)", said)]
    assert {step for step, _ in steps} == set(range(1, 51))
    assert len(steps) > 50, "from its checkpoint on, steps are done again"
    assert len(set(steps)) == 50, "and have the losses they had"


def test_the_readme_and_the_quick_start_begin_alike() -> None:
    first = re.search(r"^    (make \w+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert first is not None
    assert shell_blocks("quickstart.md", slow=True)[0] == first[1]


@pytest.mark.slow
def test_the_quick_start_has_a_cluster(tmp_path: Path) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 7077)) == 0:
            pytest.skip("somebody else's coordinator listens on port 7077")
    _, prepare, _, _, cluster = shell_blocks("quickstart.md", slow=True)
    said = Shell(tmp_path / "cluster").run(prepare, cluster)
    assert "task job is finished" in said
    assert re.search(r"evidence\s+exit: killed by SIGKILL", said)
    assert re.search(r"verdict\s+killed, SEV2", said)
    assert "the incident is closed" in said


def last_loss(text: str) -> str:
    return re.findall(r"loss ([\d.]+)", text)[-1]
