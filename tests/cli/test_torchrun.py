"""torchrun's command line: what it says is what is run."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.cli import scripts, torchrun
from everstep.errors import UserError


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a command line; what would be started."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("PET_NNODES", "PET_NODE_RANK", "OMPI_COMM_WORLD_RANK", "SKYPILOT_NODE_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    found: dict[str, Any] = {}

    def here(run: scripts.ScriptCommand, **given: Any) -> int:
        found.update(run=run, **given)
        return 0

    def on_nodes(run: scripts.ScriptCommand, at: scripts.Rendezvous, **given: Any) -> int:
        found.update(run=run, at=at, **given)
        return 0

    monkeypatch.setattr(scripts, "run_here", here)
    monkeypatch.setattr(scripts, "run_on_nodes", on_nodes)

    def go(*arguments: str, **variables: str) -> dict[str, Any]:
        found.clear()
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert torchrun.run(torchrun.parse(arguments)) == 0
        for name in variables:
            monkeypatch.delenv(name)
        return dict(found)

    return go


# A value of each option's own kind, where one word would not do.
SAMPLES = {
    "nnodes": "1:2",
    "nproc_per_node": "3",
    "rdzv_conf": "timeout=900,join_timeout=7,is_host=1",
    "max_restarts": "5",
    "monitor_interval": "0.5",
    "start_method": "fork",
    "redirects": "0:1,1:2",
    "tee": "3",
    "local_ranks_filter": "0,2",
    "node_rank": "1",
    "master_port": "4000",
    "numa_binding": "node",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "60",
}


def torchruns_options() -> list[Any]:
    from torch.distributed.run import get_args_parser

    return [each for each in get_args_parser()._actions if each.option_strings and each.dest != "help"]


@pytest.mark.parametrize("how", ["separate", "equals", "variable", "abbreviated"])
def test_every_option_of_the_installed_torchrun_is_read_as_torchrun_reads_it(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both parsers are given the same line, so that an option which torch adds is missed here."""
    from torch.distributed.run import get_args_parser

    options = torchruns_options()
    assert len(options) > 25
    lines = 0
    for action in options:
        value = [] if action.nargs == 0 else [SAMPLES.get(action.dest, "word")]
        for name in action.option_strings:
            match how:
                case "separate":
                    line = [name, *value]
                case "equals" if value and name.startswith("--"):
                    line = [f"{name}={value[0]}"]
                case "variable" if action.dest not in ("logs_specs", "numa_binding"):  # torch reads none
                    monkeypatch.setenv(f"PET_{action.dest.upper()}", value[0] if value else "1")
                    line = []
                case "abbreviated" if len(name) > 6 and name[:-1] not in action.option_strings:
                    line = [name[:-1], *value]
                case _:
                    continue
            line += ["train.py", name, "--lr", "1"]  # what follows the script is the script's
            theirs, ours = get_args_parser().parse_args(line), torchrun.parse(line)
            assert ours.training_script == theirs.training_script == "train.py"
            assert ours.training_script_args == theirs.training_script_args
            found, expected = getattr(ours, action.dest), getattr(theirs, action.dest)
            if isinstance(expected, list):
                expected = ",".join(expected)
            assert found == (expected if isinstance(expected, bool) else str(expected)), line
            monkeypatch.delenv(f"PET_{action.dest.upper()}", raising=False)
            lines += 1
    assert lines > 15


@pytest.mark.parametrize("word", ["--snapshot", "--log", "--r", "--node=3", "-m", "--help", "--", "--nproc"])
def test_what_follows_the_script_is_no_abbreviation_of_our_options(word: str) -> None:
    for options in (["--nproc", "2"], ["--standalone", "-r3"], ["--rdzv-conf", "", "--role=-x"], []):
        given = torchrun.parse([*options, "train.py", word, "1", "--lr=1"])
        assert given.training_script == "train.py"
        assert given.training_script_args == [word, "1", "--lr=1"]


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        ("", {}),
        ("-r 3", {0: 3, 1: 3, 2: 3}),
        ("--tee 3", {}),
        ("--redirects 3 --tee 1", {0: 2, 1: 2, 2: 2}),
        ("-r 0:1,1:2", {0: 1, 1: 2}),
        ("-r 3 -t 0:3", {1: 3, 2: 3}),
        ("--local-ranks-filter 0", {1: 3, 2: 3}),
        ("--local_ranks_filter=0,1 -r 1:3", {1: 3, 2: 3}),
        ("-r 7:3", {}),
    ],
)
def test_the_terminal_gets_what_torchrun_would_give_it(ran: Any, line: str, hidden: dict[int, int]) -> None:
    assert ran("--nproc-per-node", "3", *line.split(), "train.py")["run"].hidden == hidden


def test_the_grace_is_torchruns_timeout_unless_it_is_given(ran: Any) -> None:
    assert ran("train.py")["run"].grace_s == 5.0
    assert ran("--shutdown-timeout", "60", "train.py")["run"].grace_s == 60.0
    assert ran("--shutdown-timeout", "60", "--grace", "2", "train.py")["run"].grace_s == 2.0


def test_one_machine_is_run_here(ran: Any) -> None:
    found = ran("--standalone", "--nproc_per_node=2", "--max-restarts", "3", "train.py", "--lr", "1", "-m")
    assert found["run"].command == ["train.py", "--lr", "1", "-m"]
    assert (found["run"].ranks, found["run"].max_restarts, found["run"].most) == (2, 3, 1)
    assert ran("-m", "train", "x")["run"].command == ["-m", "train", "x"]
    assert ran("--no-python", "sh", "-c", "true")["run"].is_program
    assert ran("train.py")["run"].max_restarts == 0, "as torchrun"


def test_a_static_rendezvous_is_at_the_master(ran: Any) -> None:
    found = ran(
        "--nnodes", "2", "--node-rank", "1", "--master-addr", "head", "--master-port", "4", "train.py"
    )
    assert found["at"].endpoint == ("head", 4)
    assert found["at"].node_rank == 1
    assert (found["run"].least, found["run"].most) == (2, 2)


@pytest.mark.parametrize(
    ("line", "ranks", "script"),
    [
        # Megatron-LM's examples
        (
            "--nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000 train.py",
            8,
            [],
        ),
        # torchtitan's run_train.sh
        (
            "--nproc_per_node=8 --rdzv_backend c10d --rdzv_endpoint=localhost:0 --local-ranks-filter 0 "
            "--role rank --tee 3 train.py --job.config_file x.toml",
            8,
            ["--job.config_file", "x.toml"],
        ),
        # transformers' and accelerate's examples
        ("--nproc_per_node 4 train.py --bf16 --nnodes 3", 4, ["--bf16", "--nnodes", "3"]),
        ("--standalone --nnodes=1 --nproc-per-node=2 --redirects 3 -t 0:1,1:2 --log-dir l train.py", 2, []),
    ],
)
def test_command_lines_as_they_are_found(ran: Any, line: str, ranks: int, script: list[str]) -> None:
    found = ran(*line.split())
    assert found["run"].ranks == ranks
    assert found["run"].command[1:] == script


def test_an_elastic_rendezvous_is_at_the_endpoint(ran: Any) -> None:
    found = ran(
        *("--nnodes=2:4", "--rdzv-backend=c10d", "--rdzv-endpoint=head", "--rdzv_id=job7"),
        *("--rdzv-conf", "is_host=0,last_call_timeout=7", "train.py"),
    )
    assert found["at"].endpoint == ("head", 29400)
    assert (found["at"].run_id, found["at"].is_endpoint, found["at"].last_call_s) == ("job7", False, 7.0)


@pytest.mark.parametrize(
    "variables",
    [
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "head", "PET_NPROC_PER_NODE": "4"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
        {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "head\nother"},
        {"PMI_SIZE": "2", "PMI_RANK": "1"},
    ],
    ids=["kubeflow", "openmpi", "skypilot", "pmi"],
)
def test_launchers_say_which_node_this_is(ran: Any, variables: dict[str, str]) -> None:
    address = () if any("ADDR" in name or "IPS" in name for name in variables) else ("--master-addr", "head")
    found = ran(*address, "train.py", **variables)
    assert found["at"].endpoint == ("head", 29500)
    assert (found["at"].node_rank, found["run"].most) == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nnodes", "x", "train.py"], "--nnodes is 'x'; give a number of nodes, or MIN:MAX."),
        (["--nnodes", "4:2", "train.py"], "--nnodes is '4:2'; give MIN from 1, and MAX at least MIN."),
        (["--nnodes", "2", "train.py"], "--node-rank is missing; give the number of this node, from 0."),
        (
            ["--nnodes", "2", "--rdzv-backend", "c10d", "train.py"],
            "--rdzv-endpoint is missing; give HOST:PORT",
        ),
        (["--nnodes", "2", "--rdzv-backend", "etcd", "train.py"], "--rdzv-backend is 'etcd'; give c10d"),
        (["absent.py"], "script 'absent.py' is not a file."),
        (["--nope", "3", "train.py"], "unrecognized arguments: --nope"),
        (["--standalone"], "the script is missing"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node is '0'; give a number from 1, gpu or cpu."),
        (["--max-restarts", "-1", "train.py"], "--max-restarts is '-1'; give a whole number."),
        (["--redirects", "4", "train.py"], "--redirects is '4'; give 0, 1, 2 or 3, or RANK:NUMBER"),
        (["-t", "1,2", "train.py"], "--tee is '1,2'; give 0, 1, 2 or 3, or RANK:NUMBER"),
        (["--local-ranks-filter", "a", "train.py"], "--local-ranks-filter is 'a'; give a whole number."),
        (["--shutdown-timeout", "x", "train.py"], "--shutdown-timeout is 'x'; give seconds."),
        (
            ["--standalone", "--nnodes", "2", "train.py"],
            "--standalone is for one machine, and --nnodes is '2'",
        ),
        (["-m", "--no-python", "train.py"], "--module and --no-python contradict each other; remove one."),
    ],
)
def test_a_mistake_is_one_sentence(ran: Any, arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        torchrun.run(torchrun.parse(arguments))
    assert str(error.value).startswith(sentence)


def test_python_m_everstep_run_runs_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys; print(os.environ['ROLE_NAME'], sys.argv[1:])")
    options = [
        "--role",
        "trainer",
        "--nproc-per-node",
        "2",
        "--local-ranks-filter",
        "0",
        "--start-method",
        "fork",
    ]
    command = [sys.executable, "-m", "everstep.run", *options, "--log-dir", "logs", "train.py", "--nnodes"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] trainer ['--nnodes']\n"
    assert [path.read_text() for path in tmp_path.rglob("stdout.log")] == ["trainer ['--nnodes']\n"] * 2
    assert "--start-method has no effect" in done.stderr


def test_an_endpoint_whose_port_is_taken_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was three sentences in one, with an option that the person had not given."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        assert torchrun.main([*options, "--rdzv-conf", "is_host=1", "train.py"]) == 2
    said = capfd.readouterr().err
    assert f"the rendezvous endpoint {endpoint} cannot be used (" in said
    assert "in use); give another port." in said
    assert "--port" not in said


@pytest.mark.parametrize(
    ("text", "found"),
    [("head", ("head", 7)), ("head:9", ("head", 9)), ("::1", ("::1", 7)), ("[::1]", ("::1", 7)),
     ("[fe80::2]:9", ("fe80::2", 9))],
)  # fmt: skip
def test_an_endpoint_may_be_an_address_of_ipv6(text: str, found: tuple[str, int]) -> None:
    assert scripts.endpoint(text, 7) == found


@pytest.mark.parametrize("text", ["[::1:29400", "::1:x", "[head:1", "head]:1", "http://head:1", "[head/x]:1"])
def test_an_endpoint_that_is_none_is_one_sentence(text: str) -> None:
    with pytest.raises(UserError, match=r"--rdzv-endpoint is .*; give HOST:PORT"):
        scripts.endpoint(text, 7)


def test_machines_meet_at_an_endpoint_of_ipv6(tmp_path: Path) -> None:
    """The coordinator was at 127.0.0.1 then, and everyone looked for it elsewhere for ten minutes."""
    try:
        with socket.socket(socket.AF_INET6) as free:
            free.bind(("::1", 0))
            port = free.getsockname()[1]
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(dist.get_rank(), dist.get_world_size())\n"
        "dist.destroy_process_group()\n"
    )
    options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-conf", "last_call_timeout=1"]
    options += ["--rdzv-endpoint", f"[::1]:{port}"]
    command = [sys.executable, "-m", "everstep.run", *options, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] 0 1\n"
    assert f"coordinator: http://[::1]:{port}" in done.stderr
