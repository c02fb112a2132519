"""What is wrong with a job is said before anything is started."""

from pathlib import Path

import pytest
import torch
from torch import nn

from everstep.engine.layers.model import Model
from everstep.engine.prepare.preflight import preflight
from everstep.errors import UserError
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec, OptimizerSpec

MINE = """
import itertools
import torch
from torch import nn
from everstep.engine.layers.model import Model

def layers(width=4):
    return {"in": lambda: nn.Linear(3, width), "act": nn.Tanh, "out": lambda: nn.Linear(width, 1)}

def model(width=4):
    return Model(layers=layers(width), loss=nn.functional.mse_loss)

def wrong_shapes(): return [lambda: nn.Linear(3, 4), lambda: nn.Linear(5, 1)]
def in_place(): return [lambda: nn.Linear(3, 4), lambda: nn.ReLU(inplace=True)]
def two_outputs(): return [lambda: nn.GRU(3, 4)]
def statistics(): return [lambda: nn.BatchNorm1d(3)]
class Looks(nn.Linear):
    def forward(self, x): return super().forward(x) if bool(x.detach().isfinite().all()) else x
def normed(): return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
def statistics_behind(): return [lambda: Looks(3, 3), normed]
def rows(): return nn.InstanceNorm1d(3, track_running_stats=True)
def per_row(): return [lambda: nn.Unflatten(1, (3, 1)), rows]
def spectral(): return {"first": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))}
class Biased(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("load", torch.zeros(1))
    def forward(self, x):
        self.load = self.load + 0.1
        return super().forward(x) + self.load
def biased(): return [Biased]
class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(normed().requires_grad_(False).eval(), nn.Linear(3, 1))
def frozen_statistics(): return Model(layers=[Frozen], loss=nn.functional.mse_loss)
class Caches(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("table", torch.zeros(1), persistent=False)
    def forward(self, x):
        self.table = torch.arange(x.shape[0], dtype=x.dtype, device=x.device)
        return super().forward(x) + self.table[:, None]
def caches(): return Model(layers=[Caches], loss=nn.functional.mse_loss)
def broken(): return [lambda: nn.Linear("3", 4)]
def still(): return nn.Linear(3, 1).requires_grad_(False)
def frozen(): return Model(layers=[still], loss=nn.functional.mse_loss)
def vector_loss(): return Model(layers=[lambda: nn.Linear(3, 1)], loss=lambda y, t: (y - t).flatten())
def bad_loss(): return Model(layers=[lambda: nn.Linear(3, 1)], loss=lambda y, t: y @ t)
def raises(): raise ValueError("no such thing.\\nmore")
not_a_function = 3

class Data:
    def batch(self, step, microbatch):
        x = torch.arange(6.0).reshape(2, 3) + step + microbatch
        return x, x.sum(1, keepdim=True)

def data(): return Data()
def no_batch(): return 3
counter = itertools.count()
class Made:
    def __init__(self, batch): self.batch = batch
def arrays(): return Made(lambda s, m: (torch.zeros(2, 3).numpy(), torch.zeros(2, 1)))
def numbers(): return Made(lambda s, m: {"ids": 3, "labels": 4})
def changing(): return Made(lambda s, m: (torch.zeros(*[2] * min(s, 3), 3)[0], torch.zeros(2, 1)))
def masked(): return Made(lambda s, m: (torch.zeros(2, 3), torch.tensor([1, -100])))
def tokens(): return [lambda: nn.Linear(3, 4)]
class Odd(nn.Linear):
    def forward(self, x): return {x}
def odd_output(): return [lambda: Odd(3, 4)]
def one_tensor(): return Made(lambda s, m: torch.zeros(3))
def impure(): return Made(lambda s, m: (torch.full((2, 3), next(counter)), torch.zeros(2, 1)))
def short(): return Made(lambda s, m: [Data().batch(s, m)][m])

def sgd(named, momentum=0.0): return torch.optim.SGD(named, lr=0.1, momentum=momentum)
def no_optimizer(named): return "sgd"
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "needs.py").write_text("import surely_not_installed")
    (tmp_path / "wrong.py").write_text("1 / 0")
    (tmp_path / "script.py").write_text(
        "import everstep\nlayers = list\ntry:\n    everstep.train()\nexcept Exception:\n    pass\n"
    )
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(sys.argv[1:])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)


def users(model: str = "mine:model", data: str = "mine:data", optimizer: str | None = None, **job) -> Job:
    return Job(
        model=ModelSpec(build=model),
        data=DataSpec(build=data),
        optimizer=OptimizerSpec(build=optimizer),
        **job,
    )


def tiny(**job) -> Job:
    return Job(model=ModelSpec(preset="gpt-tiny"), **job)


def test_a_good_job_comes_back_as_things() -> None:
    checked = preflight(
        Job(
            model=ModelSpec(preset="gpt-7b", options={"dropout": 0.1}),
            stages=8,
            precision="bf16",
            memory_gib=80.0,  # more than this machine may have
            data=DataSpec(kind="synthetic", rows=1),
        )
    )
    assert checked.parameters == 6_738_415_616
    assert len(checked.parts) == 8
    assert checked.batch[0].shape == (1, 2048)


def test_a_users_own_job_does_too(tmp_path: Path) -> None:
    job = Job(
        model=ModelSpec(build="mine:model", options={"width": 5}),
        data=DataSpec(build="mine:data"),
        optimizer=OptimizerSpec(build="mine:sgd", options={"momentum": 0.9}),
        stages=3,
        base=str(tmp_path),
    )
    checked = preflight(job)
    assert checked.parameters == 26
    assert checked.model.names == ["in", "act", "out"]
    assert checked.optimizer([("w", nn.Parameter(torch.zeros(1)))]).defaults["momentum"] == 0.9


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not where the first save fails, maybe hours later."""
    monkeypatch.setattr("everstep.engine.prepare.preflight.os.access", lambda path, mode: False)
    job = tiny(checkpoint=CheckpointSpec(folder="new/ckpt"), base=str(tmp_path))
    with pytest.raises(UserError, match=f"checkpoint.folder 'new/ckpt': {tmp_path} is not writable for you"):
        preflight(job)


def test_a_script_gives_its_things_itself() -> None:
    model = Model(layers=[lambda: nn.Linear(3, 1)], loss=nn.functional.mse_loss)

    class Data:
        def batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ones(2, 3), torch.ones(2, 1)

    checked = preflight(
        users("unused:unused", "unused:unused"),
        model=model,
        data=Data(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    assert checked.model is model


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (lambda: tiny(stages=7), "stages is 7, more stages than layers; the model has 6 layers."),
        (lambda: tiny(device="gpu"), "device 'gpu' is not known"),
        (lambda: tiny(data=DataSpec(kind="tokens", path="no")), "is not a file"),
        (lambda: tiny(data=DataSpec(build="mine:data")), "a GPT takes token numbers"),
        (lambda: tiny(log="mine.py"), "log 'mine.py' is there and is not a folder"),
        (lambda: tiny(log="mine.py/runs"), "log 'mine.py/runs': mine.py is there and is not a folder"),
        (lambda: tiny(log="circle/runs"), "log 'circle/runs' cannot be used: circle: Too many levels of"),
        (
            lambda: tiny(checkpoint=CheckpointSpec(folder="/proc/nope")),
            "checkpoint.folder '/proc/nope': no file can be made in /proc (No such file or directory)",
        ),
        (lambda: tiny(log="/dev/full/runs"), "log '/dev/full/runs': /dev/full is there and is not a folder"),
        (lambda: users("mine"), "model.build is 'mine'; write it as \"module:function\""),
        (lambda: users("nowhere:layers"), "there is no module 'nowhere' beside the job file"),
        (lambda: users("needs:layers"), "imports 'surely_not_installed', which is not installed"),
        (lambda: users("wrong:layers"), "cannot be imported: ZeroDivisionError: division by zero (line 1)."),
        (
            lambda: users("script:layers"),
            "module 'script' calls everstep.train while it is imported (line 4); put",
        ),
        (lambda: users("exits:layers"), "module 'exits' ends Python while it is imported (line 2); put that"),
        (lambda: users("mine:layer"), "module 'mine' has no 'layer'; did you mean 'layers'?"),
        (lambda: users("mine:not_a_function"), "is a int; it must be a function"),
        (lambda: users("mine:raises"), "model.build raised ValueError: no such thing."),
        (lambda: users("mine:broken"), "layer '0' cannot be built: TypeError"),
        (
            lambda: users("mine:wrong_shapes"),
            "layer '1' cannot take what layer '0' gives, a tensor of shape (2, 4): Runtime",
        ),
        (lambda: users("mine:in_place"), "layer '1' changes its input in place; use inplace=False"),
        (
            lambda: users("mine:two_outputs"),
            "the loss cannot take what layer '0' gives, a tuple of 2: Tensor[2, 4], Tensor[1, 4]",
        ),
        (lambda: users("mine:two_outputs"), "; return one tensor, or give a loss that takes them all."),
        (lambda: users("mine:odd_output"), "layer '0' gives a set; a layer gives a tensor, or tuples"),
        (lambda: users("mine:statistics"), "layer '0' keeps running statistics"),
        (lambda: users("mine:statistics_behind"), r"layer '1' keeps running statistics (BatchNorm1d in 1)"),
        (lambda: users("mine:per_row"), "layer '1' keeps running statistics (InstanceNorm1d)"),
        (lambda: users("mine:spectral"), "layer 'first' changes its buffer 'parametrizations.weight.0._u'"),
        (lambda: users("mine:biased"), "layer '0' changes its buffer 'load' in its forward"),
        (lambda: users("mine:frozen"), "no parameter to train"),
        (lambda: users("mine:vector_loss"), "loss gives a tensor of shape (2,); it must be a tensor of one"),
        (
            lambda: users("mine:bad_loss"),
            "the loss cannot take what layer '0' gives, a tensor of shape (2, 1), and the targets",
        ),
        (lambda: users(data="mine:no_batch"), "data.build 'mine:no_batch' gave a int without batch"),
        (
            lambda: users(data="mine:one_tensor"),
            "data batch(1, 0) gave a tensor of shape (3,); return (inputs",
        ),
        (lambda: users(data="mine:arrays"), "gave a ndarray where a tensor belongs; turn arrays into"),
        (lambda: users(data="mine:numbers"), "gave a dict with the keys ids, labels without a tensor"),
        (lambda: users(data="mine:changing"), "data gives 1-D float32, 2-D float32 at first and 3-D float32"),
        (lambda: users("mine:tokens", "mine:masked"), "some targets are -100, which do not count"),
        (lambda: users(data="mine:impure"), "gave two different answers"),
        (lambda: users(data="mine:short"), "data batch(100, 3) raised IndexError: list index out of range"),
        (lambda: users(optimizer="mine:no_optimizer"), "optimizer.build gave a str"),
        (lambda: Job(model=ModelSpec(build="mine:model")), "data.sequence is missing"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        preflight(job())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["mine:frozen_statistics", "mine:caches"])
def test_statistics_that_stay_and_tables_are_accepted(model: str) -> None:
    assert preflight(users(model)).parameters == 4


def test_tokens_beyond_the_vocabulary_are_found(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes([200]) * 100)
    job = Job(
        model=ModelSpec(preset="gpt-tiny", options={"vocab": 128}),
        data=DataSpec(kind="tokens", path="text"),
        base=str(tmp_path),
    )
    with pytest.raises(UserError, match=r"tokens 200 to 200 and the model knows 0 to 127; raise model.vocab"):
        preflight(job)


class Looks(nn.Module):
    """Decides by values, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        match self.how:
            case "item":
                return y * (2.0 if x.detach().max().item() > 0 else 1.0)
            case "if":
                return y if (x > -100).any() else x
            case "list":
                return torch.cat(y.split([1] * int(torch.ones(len(x), device=x.device).sum())))
            case "numpy":
                return y * float(x.detach().numpy().max())
            case _:
                kept = x[:, 0] > -100
                z = x.clone()
                z[kept] = y[kept]
                return z


@pytest.mark.parametrize("how", ["item", "if", "list", "numpy", "mask"])
def test_a_layer_that_looks_at_values_is_accepted(how: str) -> None:
    job = Job(model=ModelSpec(build="mine:model"), data=DataSpec(kind="synthetic"))
    model = Model(
        layers=[lambda: nn.Linear(3, 3), lambda: Looks(how), lambda: nn.Linear(3, 1)], loss=looking_loss
    )
    assert preflight(job, model=model, data=Sums()).parameters == 12 + 12 + 4


def looking_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, targets) * (2.0 if targets.max().item() > 3 else 1.0)


class Sums:
    def batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(6.0).reshape(2, 3) + step + microbatch
        return x, x.sum(1, keepdim=True)


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": self.linear(x), "mask": torch.ones_like(x)}


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = given["mask"]
        mask *= 0.5
        return self.linear(given["hidden"] * mask)


def test_a_layer_that_changes_what_it_is_given_is_refused_by_name() -> None:
    job = Job(model=ModelSpec(build="mine:model"), data=DataSpec(kind="synthetic"))
    with pytest.raises(UserError, match=r"^layer '1' changes a tensor in place that the layer before gives"):
        preflight(job, model=Model(layers=[Masks, Halves], loss=nn.functional.mse_loss), data=Sums())


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=3))


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ({"spectrum": Fourier}, r"^parameter spectrum\.weight is complex, and only real numbers are trained"),
        (
            {"a": Holds, "a.b": lambda: nn.Linear(3, 3), "c": lambda: nn.Linear(3, 1)},
            r"^layers 'a' and 'a\.b' both have a parameter a\.b\.weight",
        ),
    ],
)
def test_parameters_that_cannot_be_kept_are_refused_by_name(layers, says: str) -> None:
    job = Job(model=ModelSpec(build="mine:model"), data=DataSpec(kind="synthetic"))
    with pytest.raises(UserError, match=says):
        preflight(job, model=Model(layers=layers, loss=nn.functional.mse_loss), data=Sums())
