"""Checkpoints in figures: convert, convert in shares, read a part, save, load, stall, and die while saving.
Ratios from one run.

    python bench/checkpoint.py                                      2 GB, everything but DeepSpeed
    python bench/checkpoint.py --deepspeed ds/bin/python            with `ds_to_universal` beside us
    python bench/checkpoint.py --only kill --kills 100
    python bench/checkpoint.py --only shares --processes 1,2,4,8,16 --gib 16
    python bench/checkpoint.py --only sparse --processes 8 --gib 93      100 GB of holes to 50 GB of bfloat16
    python bench/checkpoint.py --only stall --device cuda --gib 8   the stall of a snapshot of a GPU's state
    python -m bench.checkpoint matrix --cases 300 --seed 7          odd checkpoints, every pair of formats

Contestants take turns, `--turns` times, and each starts with nothing left to flush (`sync`); the median
counts. Page cache is warm for all alike. Peak memory is that of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from everstep.convert.conversion import Target, read_state, write_state
from everstep.convert.formats import universal
from everstep.convert.state import TrainingState, scalar
from everstep.layout.box import Box
from everstep.store import folder
from everstep.store.parts import PlannedSlice, plan_whole, stored_of
from everstep.store.places import place_of
from everstep.store.saver import AsyncSaver

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

SECTIONS = ("convert", "shares", "part", "save", "load", "stall", "kill")
FILE_BYTES, SIDE = 1 << 30, 8192  # of `sparse`: a file, and a matrix of float32


# ------------------------------------------------------------------ what is saved


def weights(gib: float, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Matrices of a transformer of such a size that weights and Adam's two moments fill `gib`."""
    width = 1024
    shapes = {"q": (width, width), "up": (4 * width, width), "down": (width, 4 * width), "norm": (width,)}
    layer = sum(torch.Size(shape).numel() for shape in shapes.values()) * 12
    found = {}
    for i in range(max(1, round(gib * 2**30 / layer))):
        for name, shape in shapes.items():
            found[f"layers.{i}.{name}.weight"] = torch.empty(shape, device=device).normal_()
    return found


def with_moments(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {}
    for name, tensor in parameters.items():
        state[f"model/{name}"] = tensor
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer/{name}/{key}"] = torch.randn_like(tensor)
    return state


def size_of(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def timed(work: Callable[[], Any], *, settle: bool = True) -> float:
    if settle:
        os.sync()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def median(values: list[float]) -> float:
    return statistics.median(values)


def save_ours(root: Path, step: int, state: dict[str, torch.Tensor]) -> None:
    """Two threads, a file each."""
    tensors = {name: stored_of(name, tensor) for name, tensor in state.items()}
    staging = universal.UniversalStaging(root)
    staging.write(TrainingState(step=step, tensors=tensors), Target(format="universal"), lambda count: None)
    staging.commit()


# ------------------------------------------------------------------ convert


def make_deepspeed(path: Path, gib: float, world: int) -> int:
    """A ZeRO-1 checkpoint of that size, as DeepSpeed would have written it; its bytes."""
    state = TrainingState(step=1, meta={"precision": "bf16"})
    flat = with_moments(weights(gib))
    state.tensors = {name: stored_of(name, tensor) for name, tensor in flat.items()}
    names = [name[6:] for name in flat if name.startswith("model/")]
    for name in names:
        state.tensors[f"optimizer/{name}/step"] = scalar(1.0)
    state.groups = [{"params": names, "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}]
    write_state(path, state, Target(format="deepspeed", stage=1, world=world))
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def convert_here(source: Path, target: Path, share: tuple[int, int] | None, dtype: str) -> None:
    """In a process of its own, which tells its time and its memory; a share is written by one thread."""
    before = peak_rss()
    started = time.perf_counter()
    state = read_state(source)
    write_state(
        target, state, Target(format="universal", share=share, threads=1 if share else 2, dtype=dtype or None)
    )
    seconds = time.perf_counter() - started
    told = {"seconds": seconds, "idle_rss": before, "peak_rss": peak_rss(), "bytes": state.num_bytes()}
    print(json.dumps(told))


def peak_rss() -> int:
    """Of this program alone: getrusage would count what the process was before it became this program."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def bench_convert(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    source = root / "zero1"
    num_bytes = make_deepspeed(source, options.gib, world=2)
    ours, whole, copies, flushed, theirs, starts = [], [], [], [], [], []
    told: dict[str, Any] = {}
    for _ in range(options.turns):
        target = root / "universal"
        command = [sys.executable, __file__, "--convert-here", str(source), str(target)]
        os.sync()
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        ours.append(told["seconds"])
        shutil.rmtree(target)
        everstep = [sys.executable, "-m", "everstep.cli.main", "ckpt", "convert", str(source), str(target)]
        whole.append(timed(lambda: subprocess.run([*everstep, "--json"], check=True, capture_output=True)))  # noqa: B023
        shutil.rmtree(target)
        copies.append(timed(lambda: subprocess.run(["cp", "-r", source, root / "copy"], check=True)))
        flushed.append(copies[-1] + timed(os.sync, settle=False))
        shutil.rmtree(root / "copy")
        if options.deepspeed:
            starts.append(timed(lambda: _ds_to_universal(options.deepspeed, source, root, "--help")))
            theirs.append(timed(lambda: _ds_to_universal(options.deepspeed, source, root)))
            shutil.rmtree(root / "theirs")
    shutil.rmtree(source)
    found = {
        "source_bytes": num_bytes,
        "state_bytes": told["bytes"],
        "ours_s": median(ours),
        "ours_with_start_s": median(whole),
        "cp_s": median(copies),
        "cp_flushed_s": median(flushed),
        "of_cp": median(copies) / median(ours),
        "of_cp_flushed": median(flushed) / median(ours),
        "peak_rss_bytes": told["peak_rss"],
        "rss_before_bytes": told["idle_rss"],
    }
    if theirs:
        found |= {
            "ds_to_universal_s": median(theirs),
            "ds_to_universal_start_s": median(starts),
            "times_ds_to_universal": (median(theirs) - median(starts)) / median(ours),
            "times_ds_to_universal_with_start": median(theirs) / median(whole),
        }
    return found


def make_sparse(path: Path, gib: float) -> int:
    """Weights of a Hugging Face model in files of holes, which read as zeros; its bytes."""
    path.mkdir()
    each = 4 * SIDE * SIDE
    files = max(1, round(gib * 2**30 / FILE_BYTES))
    places: dict[str, str] = {}
    for number in range(files):
        names = [f"model.layers.{number}.{i}.weight" for i in range(FILE_BYTES // each)]
        header = json.dumps(
            {
                name: {"dtype": "F32", "shape": [SIDE, SIDE], "data_offsets": [i * each, (i + 1) * each]}
                for i, name in enumerate(names)
            }
        ).encode()
        file = path / f"model-{number + 1:05}-of-{files:05}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(file, file.stat().st_size + FILE_BYTES)
        places |= dict.fromkeys(names, file.name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return files * FILE_BYTES


def bench_sparse(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A checkpoint larger than the disk has room for twice, as bfloat16, by several processes."""
    source = root / "sparse"
    num_bytes = make_sparse(source, options.gib)
    return {"source_bytes": num_bytes} | _in_shares(source, root / "universal", options, dtype="BF16")


def bench_shares(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    source = root / "zero1"
    num_bytes = make_deepspeed(source, options.gib, world=2)
    return {"source_bytes": num_bytes} | _in_shares(source, root / "universal", options)


def _in_shares(source: Path, target: Path, options: argparse.Namespace, dtype: str = "") -> dict[str, Any]:
    """One conversion by several processes of one thread each, from the first read to the commit."""
    found: dict[str, Any] = {}
    counts = [int(text) for text in options.processes.split(",")]
    for count in counts:
        seconds, peaks = [], []
        for _ in range(options.turns):
            os.sync()
            words = [sys.executable, __file__, "--convert-here", str(source), str(target)]
            words += ["--dtype", dtype, "--share"]
            running = [
                subprocess.Popen([*words, f"{i}/{count}"], stdout=subprocess.PIPE, text=True)
                for i in range(1, count + 1)
            ]
            told = [json.loads(process.communicate()[0]) for process in running]
            seconds.append(max(row["seconds"] for row in told))
            peaks.append(max(row["peak_rss"] for row in told))
            assert len(folder.complete_steps(target)) == 1
            found["target_bytes"] = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
            shutil.rmtree(target)
        found |= {f"processes_{count}_s": median(seconds), f"processes_{count}_peak_bytes": max(peaks)}
    first, last = (found[f"processes_{count}_s"] for count in (counts[0], counts[-1]))
    return found | {"times_faster": first / last}


def _ds_to_universal(python: str, source: Path, root: Path, *more: str) -> None:
    command = [
        python, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
        "--input_folder", str(source / "global_step1"), "--output_folder", str(root / "theirs" / "u"), *more,
    ]  # fmt: skip
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# ------------------------------------------------------------------ a part of it


def bench_part(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rank 3 of 8 reads its rows of every matrix: bytes asked of the system, against bytes needed."""
    parameters = weights(options.gib * 3)  # without moments: `gib` of weights
    save_ours(root / "u", 1, {f"model/{name}": t for name, t in parameters.items()})
    _save_dcp(root / "d", parameters)
    needed = sum(t.numel() // 8 * t.element_size() for t in parameters.values() if t.ndim > 1)
    found: dict[str, Any] = {"needed_bytes": needed}
    for access in ("pread", "mmap"):
        checkpoint = folder.open_checkpoint(root / "u" / "step-00000001", access)  # type: ignore[arg-type]
        before, seconds = checkpoint.bytes_read, 0.0
        for name, tensor in parameters.items():
            if tensor.ndim > 1:
                box = Box((3 * tensor.shape[0] // 8, 0), (tensor.shape[0] // 8, tensor.shape[1]))
                started = time.perf_counter()
                read = checkpoint.read_box(f"model/{name}", box)
                seconds += time.perf_counter() - started
                assert torch.equal(read, tensor[box.slices()])
        found[f"ours_{access}_ratio"] = (checkpoint.bytes_read - before) / needed
        found[f"ours_{access}_s"] = seconds
    found |= _read_dcp_part(root / "d", parameters, needed)
    shutil.rmtree(root / "u")
    shutil.rmtree(root / "d")
    return found


def _save_dcp(path: Path, state: dict[str, torch.Tensor], threads: int = 1) -> None:
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(str(path), thread_count=threads)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)


def _read_dcp_part(path: Path, parameters: dict[str, torch.Tensor], needed: int) -> dict[str, Any]:
    """The same rows by DCP, as DTensors of a world of eight of which this process is rank 3."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (8,))
        state = {
            name: DTensor.from_local(
                torch.empty(tensor.shape[0] // 8, tensor.shape[1]), mesh, [Shard(0)], run_check=False
            )
            for name, tensor in parameters.items()
            if tensor.ndim > 1
        }
        before, started = _asked_of_the_system(), time.perf_counter()
        dcp.load(state, checkpoint_id=str(path), no_dist=True)
        seconds = time.perf_counter() - started
        read = _asked_of_the_system() - before
    finally:
        dist.destroy_process_group()
    return {"dcp_ratio": read / needed, "dcp_s": seconds}


def _asked_of_the_system() -> int:
    """Bytes this process has read by system calls."""
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar:")[1].split()[0])


# ------------------------------------------------------------------ save


def bench_save(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    state = with_moments(weights(options.gib))
    rows: dict[str, list[float]] = {"ours": [], "dcp": [], "dcp_2_threads": [], "torch_save": []}
    for _ in range(options.turns):
        rows["ours"].append(timed(lambda: save_ours(root / "o", 1, state)))
        rows["dcp"].append(timed(lambda: _save_dcp(root / "d", state)))
        rows["dcp_2_threads"].append(timed(lambda: _save_dcp(root / "d2", state, 2)))
        rows["torch_save"].append(timed(lambda: _torch_save(root / "t.pt", state)))
        for name in ("o", "d", "d2"):
            shutil.rmtree(root / name)
        (root / "t.pt").unlink()
    found: dict[str, Any] = {f"{name}_s": median(times) for name, times in rows.items()}
    return {
        "bytes": size_of(state),
        **found,
        "times_dcp": found["dcp_s"] / found["ours_s"],
        "times_dcp_2_threads": found["dcp_2_threads_s"] / found["ours_s"],
    }


def bench_load(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All of a state into tensors that are there: ours with every hash checked, DCP, torch.load."""
    import torch.distributed.checkpoint as dcp

    state = with_moments(weights(options.gib))
    save_ours(root / "o", 1, state)
    _save_dcp(root / "d", state)
    _torch_save(root / "t.pt", state)
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    def ours() -> None:
        found = folder.open_checkpoint(root / "o" / "step-00000001")
        for name, tensor in into.items():
            tensor.copy_(found.read_box(name))

    def theirs() -> None:
        for name, tensor in torch.load(root / "t.pt").items():
            into[name].copy_(tensor)

    contestants = {
        "ours": ours,
        "dcp": lambda: dcp.load(into, checkpoint_id=str(root / "d"), no_dist=True),
        "torch_load": theirs,
    }
    rows: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.turns):
        for name, load in contestants.items():
            rows[name].append(timed(load))
            assert all(torch.equal(into[key], tensor) for key, tensor in state.items()), name
    found: dict[str, Any] = {f"{name}_s": median(times) for name, times in rows.items()}
    return {"bytes": size_of(state), **found, "of_dcp": found["ours_s"] / found["dcp_s"]}


def _torch_save(path: Path, state: dict[str, torch.Tensor]) -> None:
    with open(path, "wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())


# ------------------------------------------------------------------ stall


def bench_stall(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    if options.device != "cpu":
        return _stall_on_gpu(root, options)
    state = with_moments(weights(options.gib))
    synchronous = [timed(lambda: save_ours(root / "s", 1, state)) for _ in range(options.turns)]
    saver = AsyncSaver(lambda step, tensors: save_ours(root / "a", step, tensors))
    stalls = []
    for step in range(1, options.turns + 3):  # the first two fill their buffers for the first time
        stalls.append(timed(lambda step=step: saver.save(step, state)))
        saver.finish()
    shutil.rmtree(root / "s")
    shutil.rmtree(root / "a")
    steady = median(stalls[2:])
    return {
        "bytes": size_of(state),
        "synchronous_s": median(synchronous),
        "first_stall_s": stalls[0],
        "stall_s": steady,
        "stall_of_synchronous": steady / median(synchronous),
        "copy_gb_per_s": size_of(state) / steady / 1e9,
    }


def _stall_on_gpu(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Matrix products as forward and backward, then an update in place; a snapshot in one of the steps.

    The update must wait for the copy. `held at once` lets nothing run beside the copy; `overlapped` lets the
    products of the step, and holds the update back.
    """
    state = with_moments(weights(options.gib, options.device))
    a = torch.randn(8192, 8192, device=options.device, dtype=torch.bfloat16)
    steps = 10
    saver = AsyncSaver(lambda step, tensors: save_ours(root / "a", step, tensors) if options.write else None)
    calls: list[float] = []

    def train(snapshot: bool = False, hold: bool = False) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for step in range(steps):
            if snapshot and step == steps // 2:
                calls.append(timed(lambda: saver.save(len(calls) + 1, state, hold=hold), settle=False))
            for _ in range(options.products):
                a @ a
            saver.before_update()
            torch._foreach_mul_(list(state.values()), 1.0)
            torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(2):  # both buffers are pinned and touched
        saver.save(0, state)
        saver.finish()
    train()
    runs: dict[str, list[float]] = {"plain": [], "held": [], "overlapped": []}
    for _ in range(options.turns):
        runs["plain"].append(train())
        for name, hold in (("held", True), ("overlapped", False)):
            runs[name].append(train(snapshot=True, hold=hold))
            saver.finish()
    num_bytes = size_of(state)
    snapshots = saver._buffers[0]
    torch.cuda.synchronize()
    started = time.perf_counter()
    snapshots.take(state)
    snapshots.wait_copied()
    copy = time.perf_counter() - started
    plain = median(runs["plain"])
    return {
        "bytes": num_bytes,
        "device": torch.cuda.get_device_name(),
        "step_ms": plain / steps * 1e3,
        "call_ms": median(calls) * 1e3,
        "stall_held_at_once_ms": (median(runs["held"]) - plain) * 1e3,
        "stall_overlapped_ms": (median(runs["overlapped"]) - plain) * 1e3,
        "copy_ms": copy * 1e3,
        "copy_gb_per_s": num_bytes / copy / 1e9,
        "at_54_gb_per_s_ms": num_bytes / 54e9 * 1e3,
    }


# ------------------------------------------------------------------ kill


def save_for_ever(root: Path, ready: int) -> None:
    """Steps one after the other, some of them again, until someone kills this."""
    torch.set_num_threads(1)  # the pool of threads did not come along with the fork
    draw = random.Random(os.getpid())
    state = {f"w{i}": torch.zeros(1 << 18) for i in range(4)}
    done = folder.complete_steps(root)
    step = done[-1] if done else 0
    folder.clean(root)
    os.write(ready, b"!")
    while True:
        step += draw.random() < 0.7  # else the same step again, as after going back
        step = max(step, 1)
        for tensor in state.values():
            tensor.fill_(step)
        parts = [
            place_of(root).write_part(step, f"part-{i}", _planned({name: tensor}))
            for i, (name, tensor) in enumerate(state.items())
        ]
        folder.commit(root, step, parts, {"step": step}, keep=2)


def _planned(tensors: dict[str, torch.Tensor]) -> list[PlannedSlice]:
    return plan_whole({name: stored_of(name, tensor) for name, tensor in tensors.items()})


def bench_kill(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """SIGKILL at random moments; after each the folder holds a whole checkpoint of the right values."""
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    root = root / "k"
    _one_step(root)
    good, refused, half_written, steps = 0, 0, 0, []
    for _ in range(options.kills):
        hears, ready = os.pipe()
        saver = os.fork()
        if saver == 0:
            try:
                save_for_ever(root, ready)
            finally:
                os._exit(1)
        os.read(hears, 1)
        time.sleep(draw.uniform(0.0, options.kill_within))
        os.kill(saver, signal.SIGKILL)
        os.waitpid(saver, 0)
        os.close(hears)
        os.close(ready)
        half_written += any(root.glob("*.partial"))
        found, why = folder.newest_valid(root)
        refused += len(why)
        if found is not None and all((t == found.step).all() for t in found.read().values()):
            good += 1
            steps.append(found.step)
    return {
        "kills": options.kills,
        "whole_and_right_after": good,
        "complete_but_refused": refused,
        "kills_that_left_half_written": half_written,
        "steps_saved": steps[-1] if steps else 0,
        "never_went_back": steps == sorted(steps),
    }


def _one_step(root: Path) -> None:
    state = {f"w{i}": torch.ones(1 << 18) for i in range(4)}
    save_ours(root, 1, state)


# ------------------------------------------------------------------ all of it


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=(*SECTIONS, "sparse"), action="append")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--products", type=int, default=150, help="with --device cuda: of a step")
    parser.add_argument("--write", action="store_true", help="with --device cuda: also write to disk")
    parser.add_argument("--deepspeed", default="", help="the Python of a venv with deepspeed")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kill-within", type=float, default=0.3, help="seconds of saving before the kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=None, help="where to write; a temporary folder if not given")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--processes", default="1,2", help="of `shares`")
    parser.add_argument("--convert-here", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert_here:
        index, _, count = options.share.partition("/")
        source, target = map(Path, options.convert_here)
        convert_here(source, target, (int(index), int(count)) if count else None, options.dtype)
        return 0
    benches = {
        "convert": bench_convert,
        "shares": bench_shares,
        "sparse": bench_sparse,
        "part": bench_part,
        "save": bench_save,
        "load": bench_load,
        "stall": bench_stall,
        "kill": bench_kill,
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as name:
        for section in options.only or SECTIONS:
            print(f"{section} …", file=sys.stderr, flush=True)
            found[section] = benches[section](Path(name), options)
            print(json.dumps({section: found[section]}), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


def show(found: dict[str, Any]) -> None:
    for section, table in found.items():
        print(section)
        for key, value in table.items():
            text = f"{value:,.4g}" if isinstance(value, float) else value
            text = f"{value / 2**20:,.0f} MiB" if key.endswith("bytes") else text
            print(f"  {key:32} {text}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["matrix"]:
        from bench.checkpoint_matrix import main as matrix

        sys.exit(matrix(sys.argv[2:]))
    sys.exit(main())
