"""Loading a checkpoint: peak host memory, bytes read from storage per stage, seconds.

    python bench/restore.py                                1 GiB of state, 1, 2 and 4 replicas
    python bench/restore.py --gib 20 --replicas 1 2        20 GiB
    python bench/restore.py --device cuda --gib 36         a state of 3 B parameters on a GPU
    python bench/restore.py --shard --json                 with sharded optimizer states
    python bench/restore.py --drop --gib 20                tensors are read and dropped, for large states
    python bench/restore.py --apart                        each replica reads all of it, for comparison
    python bench/restore.py --at-once                      all tensors read before the first is put in place

A checkpoint of one stage (weights and AdamW's two moments, fp32) is written once. Then the replicas load it
at the same time, each in a process of its own and with links to the others, as workers do. `read_gib`: what
they have read from storage together. `above_state_gib`: the peak of a replica's resident memory without what
was resident before and without the state. `load_s`: of the slowest replica. `start_s`: what a search for the
newest checkpoint takes before any worker loads; `verify_s`: the same with all bytes verified, as it is done
after a failed load.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.core.worker.control import StateDirections
from everstep.engine.layers.model import Model
from everstep.engine.stage.stage import Stage, StageSettings
from everstep.engine.state.optimizer import Updater, adamw
from everstep.engine.state.sharded import ShardedUpdater
from everstep.job.job import CheckpointSpec, Job, ModelSpec, OptimizerSpec
from everstep.layout.box import Box
from everstep.net.links import Address
from everstep.net.plane import DataPlane, PlaneSettings
from everstep.net.shared_reads import SharedReads
from everstep.protocol.messages import Sender
from everstep.protocol.ops import Worker
from everstep.store import folder
from everstep.store.ranges import LocalFile
from everstep.store.search import newest_to_use
from everstep.store.state_keeper import StateKeeper

WIDTH = 2048
MOST_ABOVE_GIB = 0.5  # of host memory beside the state, whatever its size: some tensors, units, free heap
STATE_BYTES = 12  # per parameter: fp32 weights and two moments
SWITCHES = ("shard", "at_once", "drop", "apart")


class NoData:
    def batch(self, step: int, microbatch: int) -> Any:
        raise AssertionError("nothing is trained here")


def model(gib: float) -> Model:
    count = max(2, round(gib * 2**30 / (STATE_BYTES * WIDTH * WIDTH)))
    layers = {f"layer-{i}": lambda: nn.Linear(WIDTH, WIDTH, bias=False) for i in range(count)}
    return Model(layers=layers, loss=nn.functional.mse_loss)


def stage(options: argparse.Namespace) -> Stage:
    whole = model(options.gib)
    device = torch.device(options.device)
    return Stage(
        whole,
        range(len(whole.layers)),
        data=NoData(),
        device=device,
        settings=StageSettings(accumulate="fp32", sharded=options.shard),
    )


def write(options: argparse.Namespace, root: Path) -> None:
    """All layers have the same values, once in memory: they do not matter."""
    shape = (WIDTH, WIDTH)
    values = torch.rand(shape)
    slices: list[tuple[str, tuple[int, ...], Box, Tensor]] = []
    for layer in model(options.gib).layers:
        name = f"{layer}.weight"
        for full in (f"model/{name}", f"optimizer/{name}/exp_avg", f"optimizer/{name}/exp_avg_sq"):
            slices.append((full, shape, Box((0, 0), shape), values))
        slices.append((f"optimizer/{name}/step", (), Box((), ()), torch.tensor(1.0)))
    parts = [folder.write_slices(root, 1, "stage-0", slices)]
    folder.commit(root, 1, parts, {})


def load(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """One replica, in this process."""
    updater, arguments = (None, ()) if options.drop else made(options)
    job = Job(
        model=ModelSpec(preset="gpt-tiny"),
        base=str(root),
        checkpoint=CheckpointSpec(folder=str(root)),
        optimizer=OptimizerSpec(shard=options.shard),
    )
    sender = Sender("bench", Worker(0, 0), 1)
    states = StateKeeper(sender, job, node="a", memory_root=root, secret="", say=lambda report: None)
    links, peers = linked(options)
    together = partial(links.begin, 1, options.index, peers) if peers and not options.apart else None
    read = counted()
    Path("/proc/self/clear_refs").write_text("5")  # from now on the peak counts
    before, began = status("VmRSS"), time.monotonic()
    owned = {} if options.shard or options.drop else {"owned": not options.at_once}
    held = dict if options.at_once else (lambda state: state)

    def take(state: Any) -> None:
        if updater is not None:
            updater.load(held(state), *arguments, **owned)
        else:
            for name in state:
                state[name]

    names = [f"{layer}.weight" for layer in model(options.gib).layers]
    assert states.load(1, names, StateDirections(), take, together)
    if options.device != "cpu":
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    peak = status("VmHWM")
    tell({"loaded": True})  # and others may still ask for bytes
    heard()
    return {"seconds": seconds, "read": sum(read), "before": before, "peak": peak, "kept": kept(updater)}


def made(options: argparse.Namespace) -> tuple[Updater | ShardedUpdater, tuple[Any, ...]]:
    """A stage's updater, and what it is given beside a state to load."""
    one = stage(options)
    if not options.shard:
        return Updater(one, adamw()), (1,)
    count = 2 * options.of  # a replica owns its chunks and guards those of the next
    holders = {options.index, (options.index + 1) % options.of}
    chunks = [chunk for chunk in range(count) if chunk // 2 in holders]
    return ShardedUpdater(one, adamw(), chunks=count), (1, chunks)


def linked(options: argparse.Namespace) -> tuple[SharedReads, dict[int, Address]]:
    """This replica's links, and where the others are: the bench itself tells each of the rest."""
    settings = PlaneSettings(secret=b"b" * 32, host="127.0.0.1", device=torch.device(options.device))
    plane = DataPlane(settings)
    plane.start()
    tell({"at": plane.links.address})
    at = [Address(*address) for address in heard()]
    return plane.reads, {i: address for i, address in enumerate(at) if i != options.index}


def tell(what: Any) -> None:
    print(json.dumps(what), flush=True)


def heard() -> Any:
    return json.loads(sys.stdin.readline())


def kept(updater: Any) -> int:
    """What a load adds to host memory: on the CPU the optimizer's states and, sharded, the masters."""
    if updater is None or updater.stage.device.type != "cpu":
        return 0
    optimizers = (
        [updater.optimizer] if isinstance(updater, Updater) else [h.optimizer for h in updater.held.values()]
    )
    tensors = [t for one in optimizers for state in one.state.values() for t in state.values()]
    masters = [] if isinstance(updater, Updater) else [h.masters for h in updater.held.values()]
    return sum(tensor.nbytes for tensor in [*tensors, *masters])


def counted() -> list[int]:
    read: list[int] = []
    real = LocalFile.read

    def seen(file: LocalFile, offset: int, out: memoryview) -> None:
        read.append(len(out))
        real(file, offset, out)

    LocalFile.read = seen  # type: ignore[method-assign]
    return read


def status(key: str) -> int:
    """Bytes of resident memory of this process: now, or at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def loaded_at_once(options: argparse.Namespace, root: Path, replicas: int) -> list[dict[str, Any]]:
    processes = []
    for index in range(replicas):
        command = [sys.executable, __file__, "--one", str(root), "--gib", str(options.gib)]
        command += ["--device", options.device, "--index", str(index), "--of", str(replicas)]
        command += [f"--{word.replace('_', '-')}" for word in SWITCHES if getattr(options, word)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))

    def ask() -> list[Any]:
        return [json.loads(one.stdout.readline()) for one in processes if one.stdout]

    def answer(what: Any) -> None:
        for one in processes:
            assert one.stdin is not None
            print(json.dumps(what), file=one.stdin, flush=True)

    answer([said["at"] for said in ask()])
    answer([said["loaded"] for said in ask()])
    found = ask()
    assert not any(one.wait() for one in processes)
    return found


def measured(options: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    rows = []
    began = time.monotonic()
    newest_to_use(root)
    start_s, began = time.monotonic() - began, time.monotonic()
    newest_to_use(root, verify=True)
    verify_s = time.monotonic() - began
    state = sum(path.stat().st_size for path in root.rglob("*.safetensors"))
    for replicas in options.replicas:
        each = loaded_at_once(options, root, replicas)
        rows.append(
            {
                "replicas": replicas,
                "state_gib": state / 2**30,
                "read_gib": sum(one["read"] for one in each) / 2**30,
                "peak_gib": max(one["peak"] for one in each) / 2**30,
                "above_state_gib": max(one["peak"] - one["before"] - one["kept"] for one in each) / 2**30,
                "load_s": max(one["seconds"] for one in each),
                "start_s": start_s,
                "verify_s": verify_s,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="of state: 12 bytes per parameter")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shard", action="store_true", help="sharded optimizer states")
    parser.add_argument("--at-once", action="store_true", help="hold the whole state, for comparison")
    parser.add_argument("--drop", action="store_true", help="read all tensors, and keep none")
    parser.add_argument("--apart", action="store_true", help="no replica gives another what it has read")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; default: temporary")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    for inner, kind in (("--one", Path), ("--index", int), ("--of", int)):
        parser.add_argument(inner, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(load(options, options.one)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        write(options, Path(root))
        rows = measured(options, Path(root))
    if options.json:
        print(json.dumps({"rows": rows}))
    for row in () if options.json else rows:
        print("  ".join(f"{key} {round(value, 2)}" for key, value in row.items()))
    above = max(row["above_state_gib"] for row in rows)
    return 1 if above > MOST_ABOVE_GIB and not options.at_once else 0


if __name__ == "__main__":
    sys.exit(main())
