"""Every mistake: exit 2, one sentence that names it, nothing on stdout, nothing started."""

import asyncio
import re
import socket
import string
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from everstep.cli import main
from everstep.cli.agent import check_host
from everstep.errors import UserError
from everstep.launch.client import Client, in_path
from everstep.server.serve import ServerSettings, serve

CHANGES = {
    "unknown key": ("steps = 6", "stepz = 6", "stepz is not a key of a job; did you mean 'steps'?"),
    "unknown preset": ('"gpt-tiny"', '"gpt-tinny"', "model preset 'gpt-tinny' is not known"),
    "more stages than layers": ("stages = 2", "stages = 9", "stages is 9, more stages than layers"),
    "no replica": ("replicas = 2", "replicas = 0", "replicas is 0; it must be at least 1"),
    "wrong type": ("steps = 6", 'steps = "6"', "steps is '6'; it must be a whole number"),
    "no such module": ('preset = "gpt-tiny"\ndepth = 2', 'build = "nowhere:model"', "no module 'nowhere'"),
    "no such device": ("steps = 6", 'steps = 6\ndevice = "tpu"', "device"),
    "data file away": ('kind = "synthetic"', 'kind = "tokens"\npath = "away.bin"', "away.bin' is not a file"),
    "not toml": ("steps = 6", "steps = ", "is not TOML"),
}
KILLS = {
    "stage=2,replica=0,step=3": "worker 0:2 (replica:stage); the job has replicas 0 to 1 and stages 0 to 1.",
    "stage=0,replica=0,step=7": "--kill names step 7; the job has steps 1 to 6.",
    "stage=0,replica=0,step=3,op=F2": "--kill names F2; microbatches of a replica are 0 to 1.",
    "stage=0,replica=0,step=3,op=X": "op is F3, I2",
    "stage=0,replica=0": "give step as a number",
}


def assert_refused(ran: Any, sentence: str) -> None:
    assert ran.code == 2, ran.err
    assert sentence in ran.err
    assert ran.out == ""
    assert ran.err.startswith("everstep: ")
    assert len(ran.err.splitlines()) == 1
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("name", CHANGES)
def test_a_mistake_in_the_job_file_is_one_sentence(
    name: str, idle_everstep: Callable[..., Any], job_file: Path
) -> None:
    before, after, sentence = CHANGES[name]
    text = job_file.read_text()
    assert before in text
    job_file.write_text(text.replace(before, after))
    assert_refused(idle_everstep("train", job_file, "--json"), sentence)


@pytest.mark.parametrize("kill", KILLS)
def test_a_kill_that_can_never_strike_is_a_mistake(
    kill: str, idle_everstep: Callable[..., Any], job_file: Path
) -> None:
    assert_refused(idle_everstep("train", job_file, "--kill", kill), KILLS[kill])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "away.toml"], "job file 'away.toml' is not there."),
        (["run", "away.py"], "script 'away.py' is not a file."),
        (["run", 300 * "a"], "aaa cannot be used: File name too long."),
        (["ckpt", "prune", "/dev/null"], "/dev/null cannot be used: Not a directory."),
        (["ckpt", "verify", "http://127.0.0.1:1"], "http://127.0.0.1:1 cannot be used: Connect call failed"),
        (["ckpt", "verify", "http://[::1"], "http://[::1 is not a place fsspec knows: Invalid IPv6 URL."),
        (["demo", "--replicas", "1"], "--replicas is 1; give at least 2"),
        (["demo", "--stages", "9"], "--stages is 9; the demo's model has 8 layers"),
        (["demo", "--steps", "3"], "--steps is 3; give at least"),
        (["demo", "--replicas", "9999", "--stages", "8"], "GiB are free; use fewer."),
        (["demo", "--replicas", "two"], "--replicas"),
        (["train"], "JOB.TOML"),
        (["tarin"], "tarin"),
        (["demo", "--colour"], "--colour"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(
    arguments: list[str], sentence: str, idle_everstep: Callable[..., Any]
) -> None:
    assert_refused(idle_everstep(*arguments), sentence)


SCRIPT = """
import torch, everstep
from torch import nn
everstep.train(model=[lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 2)], replicas=2, stages=2, steps=3,
               microbatches=2, loss=nn.functional.mse_loss, data={data}{more})
"""


GOOD = "(torch.ones(3, 4), torch.ones(3, 2))"


@pytest.mark.parametrize(
    ("data", "more", "sentence"),
    [
        (
            "lambda s, m: (torch.ones(3, 5), torch.ones(3, 2))",
            "",
            "layer '0' cannot take what the data gives",
        ),
        (
            "lambda s, m: torch.ones(3, 4)",
            "",
            "data batch(1, 0) gave a tensor of shape (3, 4);",
        ),
        ("lambda s, m: (torch.rand(3, 4), torch.ones(3, 2))", "", "two different answers to two calls"),
        ("lambda step: 1", "", "data batch(1, 0) raised TypeError"),
        ("7", "", "data is a int; give a function of (step, microbatch)"),
        (
            "lambda s, m: (torch.ones(3, 4), torch.ones(3, 2))",
            ", colour=1",
            "colour is not an argument of everstep.train",
        ),
        (
            "lambda s, m: (torch.ones(3, 4), torch.ones(3, 2))",
            ", optimizer=lambda named: 7",
            "return a torch.optim.Optimizer",
        ),
        (
            f"lambda s, m: {GOOD}",
            ", optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)",
            "optimizer is a SGD already built, and every stage makes its own; give a function: "
            "optimizer=lambda named: torch.optim.SGD(named, lr=...).",
        ),
        (
            f"lambda s, m: {GOOD}",
            ", optimizer='sgd'",
            "optimizer 'sgd' is not one of torch.optim; did you mean 'SGD'?",
        ),
        (f"lambda s, m: {GOOD}", ", lr=lambda step: 0.1", "optimizer.lr is a function, and a job travels"),
        (
            f"lambda s, m: {GOOD}",
            ", clipp=1.0",
            "clipp is not an argument of everstep.train; did you mean 'clip'?",
        ),
        (
            f"lambda s, m: {GOOD}",
            ", checkpoint_interval=25",
            "checkpoint_interval is not an argument of everstep.train; write it as a key of checkpoint: "
            'checkpoint={"folder": "checkpoints", "interval": ...}.',
        ),
        ("lambda s, m: [1, 2, 3]", "", "gave a list of 3: int, int, int; return (inputs, targets)"),
        ("lambda s, m: (torch.ones(3, 4).numpy(), torch.ones(3, 2))", "", "torch.from_numpy"),
        (None, "", "everstep.train takes named arguments, and needs model and data"),
    ],
)
def test_a_mistake_in_a_script_is_one_sentence(
    data: str, more: str, sentence: str, tmp_path: Path, idle_everstep: Callable[..., Any]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(data=data, more=more) if data else "import everstep; everstep.train([], 3)")
    assert_refused(idle_everstep("run", "--json", path), sentence)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            "nn.Sequential(nn.Linear(4, 2))",
            "model is a Sequential already built, and every worker builds",
        ),
        ("[nn.Linear(4, 2)]", "layer '0' is a module already built; give a factory"),
        ("[lambda: one, lambda: one]", "layers '0' and '1' are one module; build a new one in each"),
        (
            "[lambda: nn.Sequential(one), Shared]",
            "layers '0' and '1' share the parameter 'inner.weight'",
        ),
        (
            "[lambda: nn.LSTM(4, 4), lambda: nn.Linear(4, 2)]",
            "layer '1' cannot take what layer '0' gives, a ",
        ),
        (
            "[lambda: nn.LSTM(4, 2)]",
            "the loss cannot take what layer '0' gives, a tuple of 2: Tensor[3",
        ),
    ],
)
def test_a_mistake_in_a_model_is_one_sentence(
    model: str, sentence: str, tmp_path: Path, idle_everstep: Callable[..., Any]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"""
import torch, everstep
from torch import nn
one = nn.Linear(4, 4)
class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = one
everstep.train(model={model}, loss=nn.functional.mse_loss, data=lambda s, m: {GOOD})
"""
    )
    assert_refused(idle_everstep("run", "--json", path), sentence)


def test_a_script_that_never_trains_is_told_so(tmp_path: Path, idle_everstep: Callable[..., Any]) -> None:
    path = tmp_path / "train.py"
    path.write_text("x = 1\n")
    assert_refused(
        idle_everstep("run", path), "has ended without calling everstep.train; a script for torchrun"
    )


def test_an_override_that_does_not_fit_the_model_is_a_mistake(
    tmp_path: Path, idle_everstep: Callable[..., Any]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(more="", data="lambda s, m: (torch.ones(3, 4), torch.ones(3, 2))"))
    assert_refused(idle_everstep("run", "--stages", "3", path), "stages is 3, more stages than layers")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("shards = 2\nmin_shards = 4", "min_shards is 4, more than shards, which is 2"),
        ("min_stages = 3", "min_stages is 3, more than stages, which is 1"),
    ],
)
def test_plan_memory_refuses_what_a_start_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, words: str
) -> None:
    """It said that the job fits."""
    file = tmp_path / "job.toml"
    file.write_text(f'{lines}\n[model]\npreset = "gpt-tiny"\n')
    assert main.run(["plan", "--memory", str(file)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("host", "coordinator", "sentence"),
    [
        ("203.0.113.7", "http://127.0.0.1:7077", "--host 203.0.113.7 cannot be bound on this machine"),
        ("127.0.0.1", "https://203.0.113.9:7077", "--host 127.0.0.1 is loopback, and the coordinator"),
        ("localhost", "203.0.113.9:7077", "is loopback (it means "),
        ("0.0.0.0", "http://127.0.0.1:7077", "is not an address that others can reach"),
        ("no.such.name.invalid", "http://127.0.0.1:7077", "is not an address of this machine"),
    ],
)
def test_an_address_at_which_no_peer_reaches_the_workers_is_refused(
    host: str, coordinator: str, sentence: str
) -> None:
    """An agent that could not bind its address never connected and never ended; with loopback all workers
    started and waited for each other, 600 s to the first incident.
    """
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_host(host, [coordinator])


def test_addresses_of_this_machine_are_taken() -> None:
    check_host("127.0.0.1", ["http://localhost:7077", "@coordinator.txt"])
    check_host("localhost", ["127.0.0.1:7077"])
    check_host("203.0.113.7", ["https://203.0.113.9:7077"], bind="0.0.0.0")  # behind NAT
    if socket.has_dualstack_ipv6():
        check_host("::1", ["http://[::1]:7077"])


def test_an_address_to_listen_at_that_is_not_here_is_refused() -> None:
    with pytest.raises(UserError, match=re.escape("--bind 203.0.113.7 cannot be bound on this machine")):
        check_host("203.0.113.8", ["http://127.0.0.1:7077"], bind="203.0.113.7")


def test_an_agent_with_an_address_that_cannot_be_bound_ends_with_a_sentence(
    idle_everstep: Callable[..., Any],
) -> None:
    ran = idle_everstep("agent", "--slots", "1", "--host", "203.0.113.7")
    assert ran.code == 2
    assert "--host 203.0.113.7 cannot be bound on this machine (Cannot assign requested address)" in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["a b", "é💥", "x/../../y", "j?x=1", "j#x", "%2e"])
def test_a_name_goes_into_a_path_as_it_was_typed(name: str) -> None:
    """With a space it was a traceback, with a slash another path."""
    assert set(in_path(name)) <= set(string.ascii_letters + string.digits + "%.-_~")
    assert unquote(in_path(name)) == name


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_would_be_another_path_is_refused(name: str, idle_everstep: Callable[..., Any]) -> None:
    assert_refused(idle_everstep("cancel", name), f"{name!r} is not a name of a task or node")


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:x", "http://127.0.0.1:70000", "http://a b", "http://[::1", "http://é..:1"]
)
def test_an_address_of_nothing_is_one_sentence(address: str) -> None:
    with pytest.raises(
        UserError, match=r"is not the address of a coordinator|no coordinator at|is not of the"
    ):
        Client(address=address).get("/v1/status")


def test_what_does_not_speak_http_is_no_coordinator() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            sock, _ = other.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                sock.recv(1000)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(UserError, match=r"is not the address of a coordinator \(SSH-2.0"):
            Client(address=f"http://127.0.0.1:{other.getsockname()[1]}").get("/v1/status")
        thread.join()


def test_a_state_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--state \S+file/x cannot be made: Not a directory; name another"):
        asyncio.run(serve(ServerSettings(folder=tmp_path / "file" / "x", token="t")))
