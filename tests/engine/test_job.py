"""A job file: every key has a meaning, every mistake one sentence."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.engine.prepare.preflight import preflight
from everstep.errors import PeerError, UserError
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec, OptimizerSpec, load_job
from everstep.job.worker_spec import WorkerSpec
from everstep.protocol.messages import Sender
from everstep.protocol.ops import Worker

FULL = """
steps = 50
seed = 7
replicas = 2
stages = 3
microbatches = 8
precision = "bf16"
accumulate = "fp32"
recompute = true
device = "cuda"
threads = 2
log = "runs"

[model]
preset = "gpt-1m"
dropout = 0.1
tied = true

[data]
kind = "tokens"
path = "corpus.bin"
rows = 2
sequence = 32
token = "uint16"

[optimizer]
lr = 1
betas = [0.9, 0.99]
weight_decay = 0.0
warmup = 5
decay = "linear"
clip = false
stagger = "never"

[checkpoint]
folder = "ckpt"
interval = 10
keep = 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_a_full_job_file_is_read(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, FULL))
    assert job == Job(
        model=ModelSpec(preset="gpt-1m", options={"dropout": 0.1, "tied": True}),
        data=DataSpec(kind="tokens", path="corpus.bin", rows=2, sequence=32, token="uint16"),
        optimizer=OptimizerSpec(
            lr=1.0, betas=(0.9, 0.99), weight_decay=0.0, warmup=5, decay="linear", clip=None, stagger="never"
        ),
        checkpoint=CheckpointSpec(folder="ckpt", interval=10, keep=2),
        steps=50,
        seed=7,
        replicas=2,
        stages=3,
        microbatches=8,
        precision="bf16",
        accumulate="fp32",
        recompute=True,
        device="cuda",
        threads=2,
        log="runs",
        base=str(tmp_path),
    )
    assert job.microbatches_in_step == 16
    assert job.path("corpus.bin") == tmp_path / "corpus.bin"


def test_two_lines_are_a_job(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, '[model]\npreset = "gpt-tiny"\n'))
    assert job.optimizer.clip == 1.0
    assert job.data == DataSpec(kind="synthetic")
    assert job.checkpoint is None


def test_a_job_travels_as_json(tmp_path: Path) -> None:
    mine = '[model]\nbuild = "mine:layers"\nwidth = [1, 2]\n[data]\nbuild = "mine:data"\nfast = true\n'
    for text in (FULL, mine):
        job = load_job(write(tmp_path, text))
        assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job


def test_the_users_optimizer_gets_what_the_file_says_of_lr_and_no_defaults(tmp_path: Path) -> None:
    table = '[optimizer]\nbuild = "mine:sgd"\nlr = 0.0003\nmomentum = 0.9\nclip = 2\n'
    job = load_job(write(tmp_path, MODEL + table))
    assert job.optimizer.options == {"lr": 0.0003, "momentum": 0.9}
    assert Job.from_dict(job.to_dict()).optimizer.options == job.optimizer.options
    assert load_job(write(tmp_path, MODEL + '[optimizer]\nbuild = "mine:sgd"\n')).optimizer.options == {}


def test_the_planner_does_not_cut_what_an_optimizer_of_the_users_may_need_in_one_stage() -> None:
    own, spec = OptimizerSpec(build="mine:sgd"), ModelSpec(preset="gpt-tiny")
    assert Job(model=spec, optimizer=own).most_stages() == 1
    assert Job(model=spec, optimizer=own, stages=2).most_stages() == Job(model=spec).most_stages() > 2


MODEL = '[model]\npreset = "gpt-tiny"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "model is missing"),
        ("model = 3", "model is 3; it is a table: write [model]"),
        (MODEL + "options = 3", "model.options is 3; it is a table."),
        ("memory_gib = 1e308\n" + MODEL, "memory_gib is 1e+308; it must be at most"),
        ("[model]", "model.preset, model.build or model.hf is missing; give one"),
        (
            '[model]\npreste = "gpt-1m"',
            "model.preste is not a key of [model]; did you mean 'preset'?",
        ),
        ('[model]\npreset = "a"\nbuild = "b:c"', "model.preset and model.build are both given"),
        ('[model]\npreset = "gpt-1n"', "model preset 'gpt-1n' is not known; did you mean 'gpt-1m'?"),
        (
            f"{MODEL}dropuot = 0.1",
            "model.dropuot is not a key of gpt-tiny; did you mean 'dropout'? Its keys: context,",
        ),
        (f'{MODEL}width = "64"', "model.width is '64'; it must be a whole number"),
        (f"{MODEL}heads = 7", "not an even head size"),
        (f"{MODEL}rope_base = 0", "model.rope_base is 0.0; it must be more than 0"),
        (f"callbacks = [1]\n{MODEL}", "callbacks is 1; it must be text in quotes"),
        (f'log = "a\\u0000"\n{MODEL}', "log has a null character; remove it."),
        (f'callbacks = ["a\\u0000"]\n{MODEL}', "callbacks has a null character; remove it."),
        (f"replicsa = 2\n{MODEL}", "replicsa is not a key of a job; did you mean 'replicas'?"),
        (f"stages = 2.0\n{MODEL}", "stages is 2.0; it must be a whole number"),
        (f"stages = true\n{MODEL}", "stages is True; it must be a whole number"),
        (f"stages = 0\n{MODEL}", "stages is 0; it must be at least 1"),
        (f"recompute = 1\n{MODEL}", "recompute is 1; it must be true or false"),
        (f'compile = "yes"\n{MODEL}', "compile is 'yes'; it must be true, false or \"auto\"."),
        (f"compile = 1\n{MODEL}", 'compile is 1; it must be true, false or "auto".'),
        (f"device = 1\n{MODEL}", "device is 1; it must be text in quotes"),
        (f'precision = "b16"\n{MODEL}', "precision is 'b16'; did you mean 'bf16'?"),
        (f"{MODEL}[data]", "data.kind or data.build is missing"),
        (f'{MODEL}[data]\nkind = "tokens"', "data.path is missing"),
        (f'{MODEL}[data]\nkind = "sinthetic"', "data.kind is 'sinthetic'; did you mean 'synthetic'?"),
        (
            f'{MODEL}[data]\nkind = "synthetic"\nrow = 2',
            "data.row is not a key of [data]; did you mean 'rows'? Its keys: build, columns, document_end,",
        ),
        (f"{MODEL}[optimizer]\nlr = 0", "optimizer.lr is 0.0; it must be more than 0"),
        (f"{MODEL}[optimizer]\nlr = nan", "optimizer.lr is nan; it must be a finite number"),
        (f'{MODEL}[optimizer]\nlr = "1e-3"', "optimizer.lr is '1e-3'; it must be a number"),
        (f"{MODEL}[optimizer]\nbetas = [0.9]", "optimizer.betas is [0.9]; it is a list of 2 numbers"),
        (f"{MODEL}[optimizer]\nbetas = [0.9, 1]", "optimizer.betas is [0.9, 1.0]; each must be"),
        (f"{MODEL}[optimizer]\nclip = -1", "optimizer.clip is -1.0; it must be more than 0"),
        (
            f"{MODEL}[optimizer]\nlearning_rate = 1",
            "learning_rate is not a key of [optimizer]; here it is called lr, a key of [optimizer].",
        ),
        (f"lr = 1\n{MODEL}", "lr is not a key of a job; it is a key of [optimizer]."),
        (f"{MODEL}batch_size = 8", "is not a key of gpt-tiny; here it is called rows, a key of [data]."),
        (
            f"{MODEL}steps = 8",
            "is not a key of gpt-tiny; it is a key of the job: move it above all tables.",
        ),
        (
            f'{MODEL}[data]\nkind = "synthetic"\npath = "x.bin"',
            'data.path is for data.kind = "tokens" or "table"',
        ),
        (f"{MODEL}[checkpoint]\ninterval = 3", "checkpoint.folder is missing"),
        (f'{MODEL}[checkpoint]\nfolder = "a"\nkeep = 0', "checkpoint.keep is 0; it must be at least 1"),
        ("steps = = 3", "is not TOML"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        load_job(write(tmp_path, text))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'nothing.toml' is not there"):
        load_job("nothing.toml")
    with pytest.raises(UserError, match="cannot be read"):
        load_job(tmp_path)


@given(
    st.integers(0, 400),
    st.integers(1, 300),
    st.integers(0, 50),
    st.sampled_from(["cosine", "linear", "constant"]),
    st.floats(0, 1),
)
def test_the_rate_is_within_bounds(step: int, steps: int, warmup: int, decay, floor: float) -> None:
    rate = OptimizerSpec(warmup=warmup, decay=decay, floor=floor).rate(step, steps)
    assert min(floor, 1 / max(1, warmup)) - 1e-12 <= rate <= 1


def test_the_rate_rises_then_falls_to_its_floor() -> None:
    spec = OptimizerSpec(warmup=4, floor=0.1)
    assert [spec.rate(step, 11) for step in (0, 3, 4)] == [0.25, 1.0, 1.0]
    assert spec.rate(7, 11) == pytest.approx(0.55)
    assert spec.rate(10, 11) == pytest.approx(0.1)
    assert spec.rate(20, 11) == pytest.approx(0.1)
    assert OptimizerSpec(decay="linear", floor=0.0).rate(5, 11) == pytest.approx(0.5)


def test_reading_a_job_needs_no_torch() -> None:
    code = "import sys; import everstep.job.job; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


TINY = 'steps = 4\n[model]\npreset = "gpt-tiny"\n[data]\nkind = "synthetic"\n'


@pytest.mark.parametrize(
    "text",
    [b"\xef\xbb\xbf" + TINY.encode(), TINY.replace("\n", "\r\n").encode(), f"# größe 训练\n{TINY}".encode()],
    ids=["a mark in front", "lines of Windows", "letters of other languages"],
)
def test_a_job_file_from_any_editor_is_read(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(text)
    assert load_job(tmp_path / "job.toml").steps == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TINY.encode("utf-16"), "is not UTF-8 text; save it as UTF-8."),
        (f"# größe\n{TINY}".encode("latin-1"), "is not UTF-8 text; save it as UTF-8."),
        (
            TINY.replace("steps = 4\n", "").encode() + b"steps = 4\n",
            "data.steps is not a key of [data]; it is a key of the job: move it above all tables.",
        ),
    ],
)
def test_a_job_file_that_cannot_be_read_says_what_to_do(text: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(text)
    with pytest.raises(UserError) as told:
        load_job(tmp_path / "job.toml")
    assert sentence in str(told.value)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    (tmp_path / "job.toml").write_text(f'log = "~/log"\n{TINY}[checkpoint]\nfolder = "~/runs/a"\n')
    job = load_job(tmp_path / "job.toml")
    assert job.checkpoint is not None
    assert (job.checkpoint.folder, job.log) == ("/home/ada/runs/a", "/home/ada/log")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shards": 2, "min_shards": 4}, "min_shards is 4, more than shards, which is 2; give at most 2"),
        ({"min_stages": 3}, "min_stages is 3, more than stages, which is 1; give at most 1"),
    ],
)
def test_settings_that_could_have_no_effect_are_refused_before_the_start(
    changes: dict[str, object], sentence: str
) -> None:
    job = Job.from_dict({"model": {"preset": "gpt-tiny"}, **changes})
    with pytest.raises(UserError) as told:
        preflight(job)
    assert sentence in str(told.value)


def test_a_change_of_shape_may_leave_the_smallest_number_of_shards_above_the_present_one() -> None:
    words = {"model": {"preset": "gpt-tiny"}, "shards": 2, "min_shards": 2}
    fewer = Job.from_dict(words).reshaped(1, 1, shards=1)
    assert Job.from_dict(fewer.to_dict()) == fewer


def test_a_worker_is_told_what_its_agent_says() -> None:
    spec = WorkerSpec(
        sender=Sender("t", Worker(1, 2), 3),
        job=Job(model=ModelSpec(preset="gpt-tiny")).to_dict(),
        secret="00",
        node="a",
        host="10.0.0.1",
        slots=(4, 5),
        slots_on_node=8,
        agent="/run/agent",
        memory="/dev/shm/a",
        beacon="/run/beacon-t",
        faults=("stage=2,replica=1,step=1",),
    )
    assert WorkerSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == replace(
        spec, job=json.loads(json.dumps(spec.job))
    )
    assert str(spec.lifeline) == "/run/beacon-t.life"


def test_workers_of_a_task_with_a_dot_in_its_name_have_lifelines_of_their_own() -> None:
    """`beacon-gpt-1.3b-0-0-1` became `beacon-gpt-1.life`, for every worker of the node."""
    spec = WorkerSpec(
        sender=Sender("gpt-1.3b", Worker(0, 0), 1),
        job={},
        secret="00",
        node="a",
        host="10.0.0.1",
        slots=(0,),
        slots_on_node=2,
        agent="/run/agent",
        memory="/dev/shm/a",
        beacon="/run/beacon-gpt-1.3b-0-0-1",
    )
    other = replace(spec, beacon="/run/beacon-gpt-1.3b-0-1-1")
    assert spec.lifeline != other.lifeline


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"slots": ["x"]}, "'x' is not int"), ({"secret": None}, "None is not str"), (None, "lacks 'secret'")],
)
def test_a_worker_says_what_is_wrong_with_what_it_is_told(
    change: dict[str, object] | None, sentence: str
) -> None:
    told = {
        "sender": ["t", "0:0", 1],
        "job": {},
        "secret": "00",
        "node": "a",
        "host": "h",
        "slots": [0],
        "slots_on_node": 1,
        "agent": "a",
        "memory": "m",
    }
    WorkerSpec.from_dict(told)
    told = {**told, **change} if change else {key: value for key, value in told.items() if key != "secret"}
    with pytest.raises(PeerError, match=f"not a WorkerSpec: .*{sentence}"):
        WorkerSpec.from_dict(told)
