"""Checkpoints in figures: convert, read a part, save, load, stall, and die while saving. Ratios from one run.

    python bench/checkpoint.py                                      2 GB, all sections
    python bench/checkpoint.py --only kill --kills 100

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

from everstep.layout.box import Box
from everstep.store import folder
from everstep.store.parts import PlannedSlice, plan_whole, stored_of
from everstep.store.places import place_of
from everstep.store.saver import AsyncSaver
from everstep_convert.conversion import Target, read_state, write_state
from everstep_convert.formats import universal
from everstep_convert.state import TrainingState

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

SECTIONS = ("convert", "part", "save", "load", "stall", "kill")


# ------------------------------------------------------------------ what is saved


def weights(gib: float) -> dict[str, torch.Tensor]:
    """Matrices of a transformer of such a size that weights and Adam's two moments fill `gib`."""
    width = 1024
    shapes = {"q": (width, width), "up": (4 * width, width), "down": (width, 4 * width), "norm": (width,)}
    layer = sum(torch.Size(shape).numel() for shape in shapes.values()) * 12
    found = {}
    for i in range(max(1, round(gib * 2**30 / layer))):
        for name, shape in shapes.items():
            found[f"layers.{i}.{name}.weight"] = torch.empty(shape).normal_()
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


def convert_here(source: Path, target: Path) -> None:
    """In a process of its own, which tells its time and its memory."""
    before = peak_rss()
    started = time.perf_counter()
    state = read_state(source)
    write_state(target, state, Target(format="universal"))
    seconds = time.perf_counter() - started
    told = {"seconds": seconds, "idle_rss": before, "peak_rss": peak_rss(), "bytes": state.num_bytes()}
    print(json.dumps(told))


def peak_rss() -> int:
    """Of this program alone: getrusage would count what the process was before it became this program."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def bench_convert(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A checkpoint of torch's DCP to universal, beside `cp`."""
    source = root / "dcp"
    _save_dcp(source, with_moments(weights(options.gib)))
    num_bytes = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    ours, whole, copies, flushed = [], [], [], []
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
    shutil.rmtree(source)
    return {
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
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kill-within", type=float, default=0.3, help="seconds of saving before the kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=None, help="where to write; a temporary folder if not given")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--convert-here", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert_here:
        convert_here(*map(Path, options.convert_here))
        return 0
    benches = {
        "convert": bench_convert,
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
    sys.exit(main())
