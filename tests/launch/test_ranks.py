"""Ranks of plain scripts, with real processes: who is named, what is kept, and that nobody stays behind."""

import ast
import importlib.util
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.errors import UserError
from everstep.launch.local import script_run
from everstep.launch.local.script_run import Ran, ScriptLaunch, ScriptRun
from everstep.protocol.messages import RankRules
from everstep.ranks import keeper, looks
from everstep.ranks.environment import RankPlace, rank_environment
from everstep.ranks.fork_server import imports_of
from everstep.ranks.output import OutputStream
from everstep.ranks.rank_main import PARENT
from tests.launch import stand_in_ras as stand_in
from tests.support.processes import lives, until

HEAD = """
import os, signal, sys, time
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


class Told:
    """A run, what it told, and what its ranks wrote."""

    def __init__(self, ran: Ran, launch: ScriptLaunch, said: list[str]) -> None:
        self.ran, self.launch, self.said = ran, launch, said
        self.output: str = launch.output.getvalue().decode()  # type: ignore[attr-defined]
        self.errors: str = launch.errors.getvalue().decode(errors="replace")  # type: ignore[attr-defined]

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(script_run.document(self.launch, self.ran)))
        return found

    @property
    def incident(self) -> dict[str, Any]:
        (found,) = self.document["incidents"]
        return dict(found)

    def file(self, life: int, rank: int, name: str) -> str:
        return (self.launch.logs / f"attempt_{life}" / str(rank) / name).read_text()


Run = Callable[..., Told]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script as ranks, to its end; afterwards none of its processes is there."""

    def go(script: str, *arguments: str, **rules: Any) -> Told:
        path = tmp_path / "script.py"
        path.write_text(HEAD + script)
        given = {"ranks": 2, "grace_s": 2.0, "run_id": "test", "logs": str(tmp_path / "logs"), **rules}
        launch = ScriptLaunch(
            rules=RankRules(command=(str(path), *arguments), folder=str(tmp_path), **given),
            output=io.BytesIO(),
            errors=io.BytesIO(),
        )
        said: list[str] = []
        ran = ScriptRun(launch, said.append).run()
        assert not [pid for pids in ran.pids for pid in pids.values() if lives(pid)]
        return Told(ran, launch, said)

    return go


# ------------------------------------------------------------------ what a rank finds


def test_a_rank_finds_every_variable_that_torchrun_sets() -> None:
    """The names are read from the installed torch, so that one which it adds is missed here."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(
        spec.submodule_search_locations[0], "distributed/elastic/agent/server/local_elastic_agent.py"
    )
    (table,) = [
        node.value
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and "worker_env" in ast.unparse(node.targets[0])
    ]
    names = {key.value for key in table.keys if isinstance(key, ast.Constant)}
    assert len(names) > 10
    names |= {"LOCAL_RANK", "OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE"}
    place = RankPlace(
        rank=1,
        ranks=2,
        life=3,
        restarts=3,
        max_restarts=4,
        run_id="x",
        master_address="a",
        master_port=5,
        folder=Path("f"),
    )
    found = rank_environment(place, {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "7", "RANK": "99"})
    assert names <= found.keys()
    assert (found["RANK"], found["WORLD_SIZE"], found["TORCHELASTIC_RESTART_COUNT"]) == ("1", "2", "3")
    assert (found["NCCL_DEBUG"], found["OMP_NUM_THREADS"]) == ("INFO", "7"), "the person's own stay"


@pytest.mark.parametrize(
    ("visible", "device"), [(None, "1"), ("4,5,6,7", "5"), ("GPU-a,GPU-b", "GPU-b"), ("3", None)]
)
def test_a_rank_with_a_device_of_its_own_is_local_rank_0_and_sees_no_other(
    visible: str | None, device: str | None
) -> None:
    place = RankPlace(
        rank=3,
        first_rank=2,
        ranks=4,
        group=1,
        num_groups=2,
        life=1,
        max_restarts=0,
        run_id="x",
        master_address="a",
        master_port=5,
        folder=Path("f"),
        has_own_device=True,
    )
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if device is None:
        with pytest.raises(UserError, match=r"needs a GPU for each of the 2 ranks.* is '3'; give fewer"):
            rank_environment(place, inherited)
        return
    found = rank_environment(place, inherited)
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"], found["RANK"]) == ("0", device, "3")


def test_a_script_runs_as_python_would_run_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'beside'\n")
    told = run(
        """
import beside, pickle
class Thing: pass
pickle.loads(pickle.dumps(Thing()))
print(__name__, __file__ == sys.argv[0], sys.argv[1:], beside.word, "EVERSTEP" in "".join(os.environ))
""",
        "--lr",
        "1",
        ranks=1,
    )
    assert told.ran.code == 0
    assert told.output == "[0] __main__ True ['--lr', '1'] beside False\n"


def test_what_ranks_write_is_passed_on_with_the_rank_and_kept_as_it_is(run: Run) -> None:
    told = run("print('one\\ntwo'); sys.stderr.write('no newline at the end'); print('x' * 200_000)")
    assert told.output.count("x") == 2 * 200_000
    lines = told.output.splitlines()  # the long one comes in parts
    assert {line for line in lines if line.strip("x")[4:]} == {"[0] one", "[0] two", "[1] one", "[1] two"}
    assert all(line.startswith(("[0] ", "[1] ")) for line in lines)
    assert sorted(told.errors.splitlines()) == ["[0] no newline at the end", "[1] no newline at the end"]
    assert told.file(0, 1, "stdout.log") == "one\ntwo\n" + "x" * 200_000 + "\n"


# ------------------------------------------------------------------ faults


@pytest.mark.alone
def test_a_killed_rank_is_named_and_all_start_again(run: Run) -> None:
    told = run("if life == 0 and rank == 1: os.kill(os.getpid(), 9)\nif life == 0: time.sleep(60)")
    assert told.ran.code == 0
    assert told.document["restarts"] == 1
    assert told.document["ranks"] == [
        {"rank": rank, "pid": told.ran.pids[1][rank], "exit_code": 0} for rank in (0, 1)
    ]
    assert (told.incident["rank"], told.incident["verdict"], told.incident["severity"]) == (
        1,
        "killed",
        "SEV2",
    )
    assert told.incident["because"].endswith(" SEV2."), "what is done about it is a line of its own"
    assert told.incident["restarted_ms"] < 10_000
    assert told.ran.seconds < 60, "the other rank of the first life was waited for"


@pytest.mark.alone
def test_an_exception_comes_with_its_traceback_and_without_our_frames(run: Run) -> None:
    told = run("def load(): raise OSError('no disk')\nif rank == 0: load()\ntime.sleep(60)", max_restarts=0)
    assert told.ran.code == 1
    incident = told.incident
    assert incident["what"] == "rank 0 raised OSError: no disk at script.py:4 in load"
    assert incident["remedy"] == "stop"
    assert 0 < incident["noticed_ms"] < 10_000
    assert "rank_main" not in incident["traceback"]
    assert incident["traceback"] in told.file(0, 0, "stderr.log"), "also printed, as always"
    assert told.ran.because.endswith("No restarts are allowed.")


def test_an_exception_of_any_length_in_any_script_is_told(run: Run) -> None:
    told = run("if rank == 1: raise OSError('\\x01Ω🏖' * 100_000)\ntime.sleep(60)", max_restarts=0)
    assert told.incident["rank"] == 1
    assert told.incident["what"].startswith("rank 1 raised OSError: \x01Ω🏖")


def test_a_rank_that_raised_but_cannot_end_does_not_hold_the_others(run: Run) -> None:
    told = run("""
import threading
if life == 0: threading.Thread(target=time.sleep, args=(60,)).start()
if life == 0 and rank == 0: raise RuntimeError("stuck at exit")
""")
    assert told.ran.code == 0
    assert told.ran.seconds < 60
    assert told.incident["rank"] == 0


def test_the_error_file_of_torchelastic_is_read(run: Run) -> None:
    told = run(
        """
import json
if rank == 1:
    extra = {"py_callstack": "Traceback: here"}
    error = "RuntimeError: CUDA error: an illegal memory access was encountered"
    told = {"message": {"message": error, "extraInfo": extra}}
    json.dump(told, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
    sys.stdout.flush(); os._exit(5)
time.sleep(60)
""",
        max_restarts=0,
    )
    assert told.incident["verdict"] == "illegal memory access"
    assert told.incident["traceback"] == "Traceback: here"
    assert told.ran.code == 5


def test_the_exit_code_and_the_last_words_of_a_rank_are_kept(run: Run) -> None:
    told = run("if rank == 1: sys.exit('the data is gone')\ntime.sleep(60)", max_restarts=0)
    assert told.ran.code == 1
    assert told.incident["what"] == "rank 1 exited with code 1"
    assert told.incident["evidence"][1] == "the last line of rank 1 on stderr: the data is gone"


def test_a_rank_that_will_not_go_is_killed_with_its_children(run: Run, tmp_path: Path) -> None:
    told = run(
        f"""
import subprocess
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"])
    open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
    time.sleep(60)
while not os.path.exists({str(tmp_path / "child")!r}): time.sleep(0.01)
os.kill(os.getpid(), signal.SIGSEGV)
""",
        max_restarts=0,
        grace_s=0.3,
    )
    assert told.ran.code == 128 + signal.SIGSEGV
    assert told.incident["rank"] == 1
    signals = [line.partition(" s  ")[2] for line in told.said if " to rank" in line]
    assert signals[0].startswith("SIGTERM to rank 0: rank 1 killed by SIGSEGV; all ranks end together.")
    assert signals[1:] == ["SIGKILL to rank 0: not gone when its grace was over."]
    until(lambda: not lives(int((tmp_path / "child").read_text())))


def test_a_stopped_rank_is_named_before_anything_is_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "STOPPED_PATIENCE_S", 0.2)
    told = run(
        """
if life == 0 and rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
if life == 0: time.sleep(60)
""",
        hang_after_s=60.0,
    )
    said = [line.partition(" s  ")[2] for line in told.said if "rank 1" in line or " to rank" in line]
    assert said[0].startswith("rank 1 is stopped (SIGSTOP); the others wait for it; it has 0.2 s")
    assert "SIGTERM to ranks 0, 1" in said[2]
    assert told.incident["rank"] == 1
    assert told.ran.code == 0


DAEMON = """
import subprocess
path = os.path.join(os.path.dirname(__file__), f"daemon-{life}")
if rank == 0 and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        said = f"echo $$ > '{path}.new' && mv '{path}.new' '{path}' && exec sleep 600"
        os.execvp("sh", ["sh", "-c", said])  # until here it has the environment of a fork server
    os._exit(0)
while not os.path.exists(path): time.sleep(0.01)
"""


@pytest.mark.parametrize("preload", [(), ("plistlib",)])
def test_a_daemon_of_a_script_ends_with_the_life_that_started_it(
    run: Run, tmp_path: Path, preload: tuple[str, ...]
) -> None:
    told = run(DAEMON + "if life == 0 and rank == 1: os.kill(os.getpid(), 9)", preload=preload)
    assert told.ran.code == 0
    pids = [int((tmp_path / f"daemon-{life}").read_text()) for life in (0, 1)]
    until(lambda: not any(lives(pid) for pid in pids))


def test_a_daemon_that_was_only_forked_ends_with_the_life_that_started_it(run: Run, tmp_path: Path) -> None:
    """It has the fork server's environment and a session of its own: nothing of its rank's."""
    told = run(
        """
import subprocess
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        child = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
        with open(f"daemon-{life}-{rank}.new", "w") as file: file.write(f"{os.getpid()} {child.pid}")
        os.rename(f"daemon-{life}-{rank}.new", f"daemon-{life}-{rank}")
        while True: time.sleep(600)
    os._exit(0)
while not all(os.path.exists(f"daemon-{life}-{each}") for each in (0, 1)): time.sleep(0.01)
if life == 0 and rank == 1: os.kill(os.getpid(), 9)
""",
        preload=("plistlib",),
    )
    assert told.ran.code == 0
    daemons = [tmp_path / f"daemon-{life}-{rank}" for life in (0, 1) for rank in (0, 1)]
    pids = [int(pid) for daemon in daemons for pid in daemon.read_text().split()]
    assert not [pid for pid in pids if lives(pid)]


def test_a_rank_that_is_ended_while_it_compiles_leaves_no_lock(run: Run, tmp_path: Path) -> None:
    """As torch's FileBaton makes it. With the lock left behind, every rank of the next life waited for it."""
    told = run(
        """
os.makedirs("torch_extensions/op", exist_ok=True)
if rank == 0:
    os.open("torch_extensions/op/lock", os.O_CREAT | os.O_EXCL)
    open(f"holds-{life}", "w")
    if life == 0: time.sleep(600)
    os.remove("torch_extensions/op/lock")
while not os.path.exists(f"holds-{life}"): time.sleep(0.01)
if life == 0: os.kill(os.getpid(), 9)
"""
    )
    assert (told.ran.code, told.ran.restarts) == (0, 1), told.said
    assert not (tmp_path / "torch_extensions/op/lock").exists()


def test_a_rank_that_writes_without_end_neither_fills_memory_nor_silences_others(tmp_path: Path) -> None:
    """A pipe that is never empty was read for ever, and all that was read was kept."""
    stream = OutputStream(0, tmp_path / "out.log", (tmp_path / "terminal").open("wb"))
    flood = subprocess.Popen(["cat", "/dev/zero"], stdout=stream.writer)
    stream.started()
    try:
        for _ in range(3):
            before = stream.num_bytes
            until(lambda: select.select([stream.reader], [], [], 0)[0])
            stream.take()
            assert 0 < stream.num_bytes - before <= 2 << 20
            stream.show()
    finally:
        flood.kill()
        flood.wait()
        stream.close()
        os.close(stream.reader)


@pytest.fixture
def waiting(tmp_path: Path) -> str:
    """Source that imports `waiting`, from a folder called torch: what counts is where stacks say they are."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "waiting.py").write_text("import time\ndef all_reduce(): time.sleep(60)\n")
    return f"sys.path.insert(0, {str(tmp_path / 'torch')!r}); import waiting\n"


def test_a_hang_is_blamed_on_the_rank_outside_torch(run: Run, waiting: str) -> None:
    told = run(
        waiting
        + """
def read_batch(): time.sleep(60)
if life == 0: read_batch() if rank == 1 else waiting.all_reduce()
""",
        hang_after_s=3.0,
    )
    assert told.ran.code == 0
    incident = told.incident
    assert incident["rank"] == 1
    assert incident["verdict"] == "task hang"
    found = "ank 1 is at script.py:6 in read_batch, outside torch; the others wait inside it"
    assert incident["because"].startswith(f"R{found}. SEV")
    assert f"r{found}" in incident["evidence"]
    assert any("their stacks show which one waits" in line for line in told.said)
    assert "rank 0 is at script.py:7 in <module>, in torch's all_reduce" in incident["evidence"]
    assert "read_batch" in told.file(0, 1, "stacks.txt")


def test_a_hang_in_which_all_wait_alike_is_blamed_on_the_rank_that_nccl_has_counted_least(
    run: Run, waiting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are inside torch, which has no record of what they do there; NCCL's RAS has."""

    def status() -> bytes:
        pids = {rank: int((tmp_path / f"{rank}.pid").read_text()) for rank in range(3)}
        return stand_in.status(stand_in.communicator({0: 13, 1: 12, 2: 13}, pids))

    with stand_in.ras([stand_in.never, stand_in.answer(status)]) as address:
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        told = run(
            waiting + "open(f'{rank}.pid', 'w').write(str(os.getpid()))\nif life == 0: waiting.all_reduce()",
            ranks=3,
            hang_after_s=3.0,
        )
    assert told.ran.code == 0
    assert told.incident["rank"] == 1
    found = "has not launched operation 13 of NCCL communicator 0x5bf1 (AllReduce), in which 2 ranks wait"
    assert f"rank 1 {found}, by NCCL's RAS" in told.incident["evidence"]
    early = next(n for n, line in enumerate(told.said) if found in line and "Nothing is ended" in line)
    assert early < next(n for n, line in enumerate(told.said) if "SIGTERM" in line)


def test_a_spinning_rank_is_found_by_the_collectives_that_none_enters(run: Run, tmp_path: Path) -> None:
    """A folder `torch` beside the script stands for PyTorch: it counts collectives as process groups do."""
    inside = tmp_path / "torch" / "distributed"
    inside.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("")
    (inside / "__init__.py").write_text("")
    (inside / "distributed_c10d.py").write_text(
        "import time, types\nclass Group:\n    entered = 0\n"
        "    def _get_sequence_number_for_group(self): return self.entered\n"
        "group = Group()\n_world = types.SimpleNamespace(pg_names={group: '0'})\n"
        "def all_reduce():\n    group.entered += 1\n    time.sleep(0.05 if group.entered < 9 else 60)\n"
    )
    told = run(
        "import torch.distributed.distributed_c10d as dist\n"
        "def spin():\n    while True: pass\n"
        "while life == 0: spin() if rank == 1 and dist.group.entered == 8 else dist.all_reduce()\n",
        hang_after_s=3.0,
    )
    assert told.ran.code == 0
    assert told.incident["rank"] == 1
    assert told.incident["verdict"] == "task hang"
    assert "ank 1 is at script.py:6 in spin, outside torch" in told.incident["because"]
    first = next(n for n, line in enumerate(told.said) if "Nothing is ended" in line)
    ended = next(n for n, line in enumerate(told.said) if "SIGTERM" in line)
    assert first < ended
    assert "rank 1 is at script.py" in told.said[first]


def test_a_rank_that_leaves_early_is_named_by_those_who_wait_for_it(run: Run, waiting: str) -> None:
    told = run(waiting + "if rank == 0 and life == 0: waiting.all_reduce()", hang_after_s=3.0)
    assert told.incident["rank"] == 1
    assert "ank 1 ended with code 0 while the others still wait" in told.incident["because"]


@pytest.mark.slow
def test_a_slow_rank_is_found_by_when_it_enters_collectives_and_nothing_is_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "FIRST_PACE_S", 2.0)
    monkeypatch.setattr(keeper, "PACE_EVERY_S", 2.0)
    told = run(
        """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(500):
    if rank == 1: time.sleep(0.03)
    dist.all_reduce(torch.ones(10))
""",
        ranks=3,
    )
    assert told.ran.code == 0
    assert told.incident["what"] == "rank 1 is slow"
    assert told.incident["rank"] == 1
    assert told.incident["verdict"] == "slow worker"
    assert "collectives last" in told.incident["because"]
    assert told.incident["remedy"] == "none: an operator can help"
    assert told.ran.restarts == 0
    assert any("rank 1 is slow" in line for line in told.said)


@pytest.mark.slow
def test_a_rank_that_came_to_the_end_of_its_script_before_the_others_is_named(run: Run) -> None:
    """It closes its connections, and its process is still there when the others fail for it."""
    told = run(
        """
import atexit, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(5 - (rank == 2 and life == 0)): dist.all_reduce(torch.ones(10))
dist.destroy_process_group()
atexit.register(time.sleep, 2)
""",
        ranks=3,
    )
    assert told.ran.code == 0
    assert told.incident["rank"] == 2
    assert "Rank 2 came to the end of the script before the others" in told.incident["because"]


def test_the_same_mistake_twice_is_not_tried_again(run: Run) -> None:
    told = run("undefined_name", max_restarts=9)
    assert told.document["restarts"] == 1
    assert "The same error twice at the same line" in told.ran.because
    assert told.ran.code == 1


# ------------------------------------------------------------------ ports, and forks


def test_every_life_has_a_port_of_its_own_that_is_open_before_its_ranks_begin(run: Run) -> None:
    told = run("""
import socket
socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])), timeout=60).close()
print(os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_USE_AGENT_STORE"], flush=True)
if life == 0: sys.exit(3) if rank == 0 else time.sleep(60)  # the first exit ends the other, printed or not
""")
    first, second = (told.file(life, 0, "stdout.log").split() for life in (0, 1))
    assert first[0] != second[0]
    assert first[1] == "True"


def test_a_port_that_is_taken_is_a_sentence(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            UserError, match=r"cannot be used for .* leave --rdzv-port \(torchrun: --master-port\) out"
        ):
            run("", port=taken.getsockname()[1])


def test_ranks_can_be_forked_from_a_process_that_has_loaded_their_modules(run: Run) -> None:
    told = run(
        "print('plistlib' in sys.modules, __name__, os.getsid(0) == os.getpid(), flush=True)\n"
        "if life == 0 and rank == 1: os.kill(os.getpid(), 9)\nif life == 0: time.sleep(60)\nsys.exit(0)",
        preload=("plistlib",),
    )
    assert told.ran.code == 0
    assert told.incident["what"] == "rank 1 killed by SIGKILL"
    assert told.file(1, 0, "stdout.log") == "True __main__ True\n"


def test_what_a_script_imports_is_loaded_once_and_what_cannot_be_shared_is_left_to_its_ranks(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks print which process has loaded each module: theirs, or the one they were forked from."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "heavy.py").write_text("import os\npid = os.getpid()\n")
    (installed / "broken.py").write_text("raise RuntimeError('not here')\n")
    threaded = "import os, threading, time\npid = os.getpid()\n"
    threaded += "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (installed / "threaded.py").write_text(threaded)
    (tmp_path / "own.py").write_text("import os\npid = os.getpid()\n")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]))
    told = run(
        "import heavy, threaded, own\n"
        "print([module.pid == os.getpid() for module in (heavy, threaded, own)], flush=True)\n"
        "try:\n    import broken\nexcept RuntimeError as error:\n    print(error)\n"
    )
    assert told.ran.code == 0
    assert told.file(0, 0, "stdout.log") == "[False, True, True]\nnot here\n"


def test_a_run_can_be_stopped_while_it_loads_what_its_script_imports(tmp_path: Path) -> None:
    """The order to begin came after the order to end, and was obeyed."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    mark = tmp_path / "loading"
    (installed / "slow.py").write_text(f"import time\nopen({str(mark)!r}, 'w').close()\ntime.sleep(600)\n")
    (tmp_path / "script.py").write_text("import slow\n")
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "everstep.run", "--nproc-per-node", "1", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
    )
    until(mark.exists)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Stopped by SIGINT" in said


def test_imports_are_read_up_to_where_the_script_changes_what_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from __future__ import annotations\nimport os\nimport numpy as np\nfrom torch import nn\n"
        "from . import near\nlog = print\ndef main():\n    os.environ['A'] = '1'\n"
        "os.environ.setdefault('X', '1')\nimport safetensors\n"
    )
    assert imports_of([str(script)], str(tmp_path)) == ["numpy", "torch:nn"]
    script.write_text("import os, everstep\n")
    assert imports_of([str(script)], str(tmp_path)) == []
    script.write_text("import torch\nthis is no Python\n")
    assert imports_of([str(script)], str(tmp_path)) == []
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text("import torch.distributed\n")
    (package / "__init__.py").write_text("raise RuntimeError('it is not imported')\n")
    assert imports_of(["-m", "package"], str(tmp_path)) == ["torch.distributed"]


def test_a_module_that_cannot_be_preloaded_is_left_to_the_script(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("", preload=("no_such_module",)).ran.code == 0
    said = capfd.readouterr().err
    assert "ModuleNotFoundError" in said
    assert "--preload no_such_module has failed; what it said is above. Ranks are started without" in said


def test_broken_hardware_is_not_tried_again_on_the_only_machine(run: Run) -> None:
    words = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    told = run(f"if rank == 1: sys.exit({words!r})\ntime.sleep(60)")
    assert told.ran.code == 1
    assert (told.incident["severity"], told.incident["remedy"]) == ("SEV1", "stop")
    assert told.ran.because.endswith("it is not restarted here; run it on another one.")


def test_a_state_that_was_handed_over_is_given_back_after_a_kill(run: Run) -> None:
    told = run(
        """
import everstep
found = everstep.restore()
print("from", found and (found.step, found.state["w"].item()), flush=True)
import torch
if life == 0:
    everstep.snapshot(3, lambda: {"w": torch.tensor(7.5)})
    everstep.ranks.snapshots._writing.join()
    while not [f for _, _, files in os.walk("kept") for f in files if f.endswith(".pt")]: time.sleep(0.01)
    os.kill(os.getpid(), 9)
""",
        ranks=1,
        preload=("torch",),
        snapshots="kept",
        copy_every=1,
    )
    assert told.ran.code == 0
    assert told.file(1, 0, "stdout.log") == "from (3, 7.5)\n"
    (written,) = (told.launch.logs.parent.parent / "kept" / "test").glob("step-3/rank-0*.pt")
    assert written.stat().st_size > 0


# ------------------------------------------------------------------ the end


def test_a_rank_whose_keeper_died_before_it_could_ask_to_die_with_it_ends(tmp_path: Path) -> None:
    """The kernel tells of a death that comes after the question, not of one that came before."""
    (tmp_path / "script.py").write_text("open('ran', 'w')")
    command = [sys.executable, "-m", "everstep.ranks.rank_main", "script.py"]
    gone = subprocess.Popen(["true"])
    gone.wait()
    ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, PARENT: str(gone.pid)})
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGQUIT, 131), (signal.SIGKILL, -9)]
)
def test_nobody_stays_behind_when_the_supervisor_ends(sent: int, code: int, tmp_path: Path) -> None:
    """Ctrl-C, and the worst case: the supervisor is killed and can do nothing any more."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + "open(f'{sys.argv[1]}/{rank}', 'w').write(str(os.getpid()))\ntime.sleep(600)")
    command = [sys.executable, "-m", "everstep.cli.main", "run", "--nproc", "2", str(script), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        files = [tmp_path / "0", tmp_path / "1"]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        process.send_signal(sent)
        assert process.wait(timeout=120) == code
        pids = [int(file.read_text()) for file in files]
        until(lambda: not any(lives(pid) for pid in pids))
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert os.getpid() not in pids


def test_a_run_under_nohup_outlives_its_terminal_and_the_warnings_of_a_scheduler(tmp_path: Path) -> None:
    """`nohup … &` and a logout ended it, and so did Slurm's --signal=USR1@120; ranks are warned with it."""
    (tmp_path / "script.py").write_text(
        HEAD + "open(f'{rank}', 'w')\nwhile not os.path.exists('done'): time.sleep(0.01)"
    )
    command = ["nohup", sys.executable, "-m", "everstep.cli.main", "run", "--nproc", "2", "script.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        until(lambda: all((tmp_path / str(rank)).exists() for rank in (0, 1)))
        family = [process.pid, *looks.family(process.pid)]
        for sent in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            for pid in family:
                os.kill(pid, sent)
        (tmp_path / "done").touch()
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "restarted" not in said


def test_a_progress_bar_is_a_line_now_and_then_and_its_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tqdm's bars of two ranks came out as `[0] [0]   5%|▌ … [0]  10%|█`."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("everstep.ranks.output.time", SimpleNamespace(monotonic=lambda: clock.now))
    with (tmp_path / "terminal").open("wb") as terminal:
        stream = OutputStream(0, tmp_path / "out.log", terminal)
        for percent in range(0, 101, 5):
            os.write(stream.writer, f"\r{percent:3d}%|{'#' * (percent // 10)}".encode())
            stream.take()
            clock.now += 0.3
        os.write(stream.writer, b"\nepoch 1 is over\r\n\nloss 2\rloss 1")
        stream.take()
        stream.started()
        stream.close()
        stream.show()
    os.close(stream.reader)
    lines = (tmp_path / "terminal").read_text().splitlines()
    assert lines[0] == "[0]   0%|"
    assert [line for line in lines if "%" in line][-1] == "[0] 100%|##########"
    assert 5 <= sum("%" in line for line in lines) <= 8, "about one per second, and the last"
    assert lines[-3:] == ["[0] epoch 1 is over", "[0] ", "[0] loss 1"]
    assert (tmp_path / "out.log").read_bytes().startswith(b"\r  0%|\r  5%|"), "the file has every byte"
