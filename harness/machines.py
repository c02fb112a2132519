"""Several machines on one host, so that nothing but the network and one declared folder is common.

Each machine is a set of namespaces: network (its own address on a switch, see switch.py; with `data` another
one on a second switch, as where tensors have a network of their own), uts (its own
hostname), pid (its own process table; its first process is the machine: kill that and all of it is off), ipc,
and mounts: its own /tmp, /dev/shm, /run, home and names of hosts. Software is read where it is, also if that
is below /tmp; `shared` is the one other folder that all see, so the testbed itself must not be below /tmp.

It needs root, and only for making it; `absent` says why it cannot be made here. Run it inside a network
namespace of its own (`inside`), and the kernel removes everything when the process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.switch import UserSwitch

NETWORK, DATA_NETWORK = "10.77.0", "10.78.0"
HOST = f"{NETWORK}.254"
MTU = 9000
DISK = "256m"
_MARK = "EVERSTEP_MACHINES"
_UNSHARE = ["unshare", "-n", "-m", "-p", "-u", "-i", "-f", "--mount-proc", "--kill-child"]
_START = """
mount --make-rprivate / && hostname "$1"
mount -t tmpfs -o size=512m tmpfs /dev/shm
mount -t tmpfs -o size=16m tmpfs /run
mkdir -p "$2/tmp" && mount -t tmpfs -o size="$3" tmpfs "$2/tmp"
for folder in $4; do mkdir -p "$2$folder" && mount --bind "$folder" "$2$folder"; done
mount --move "$2/tmp" /tmp
mount --bind "$2/hosts" /etc/hosts
ip link set lo up
echo ready > "$2/ready"
while :; do sleep 1000 & wait $!; done
"""


def absent() -> str:
    """Why there can be no machines here; empty: there can."""
    if os.geteuid() != 0:
        return "machines are namespaces, and making them needs root"
    if not Path("/dev/net/tun").exists():
        return "machines need /dev/net/tun, which is not here"
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"machines need {tool}, which is not installed"
    made = subprocess.run(["unshare", "-n", "-m", "-p", "-u", "-i", "-f", "true"], capture_output=True)
    return "" if made.returncode == 0 else "this kernel, or container, allows no namespaces"


def inside(arguments: Sequence[str]) -> None:
    """Go on inside a network and mount namespace of our own; comes back only if we are there."""
    if os.environ.get(_MARK) != "1":
        os.environ[_MARK] = "1"
        os.execvp("unshare", ["unshare", "-n", "-m", sys.executable, *arguments])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _die_with_us() -> None:
    """In the child: the kernel kills it when we are gone, however we went."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _software() -> list[str]:
    """Folders below /tmp that this tree and this Python are in: a machine's own /tmp has them too."""
    python = Path(sys.executable)
    needed = {Path(__file__).resolve().parents[1], python.parent, python.resolve().parent, Path(sys.prefix)}
    needed |= {Path(folder) for folder in sys.path if folder}
    below = sorted(folder for folder in needed if folder.is_relative_to("/tmp") and folder.is_dir())
    return [
        str(folder)
        for folder in below
        if not any(folder != other and folder.is_relative_to(other) for other in below)
    ]


class Machine:
    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name, self.number, self.folder = name, number, folder
        self.address = f"{NETWORK}.{number + 1}"
        self.data_address = f"{DATA_NETWORK}.{number + 1}"
        self.mac, self.data_mac = bytes([2, 0, 0, 0, 0, number + 1]), bytes([2, 0, 0, 0, 1, number + 1])
        self.processes: list[subprocess.Popen[bytes]] = []
        self._shell: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def switch_on(self, hosts: str, disk: str = DISK) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "hosts").write_text(hosts)
        (self.folder / "ready").unlink(missing_ok=True)
        self._shell = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _START, "sh", self.name, str(self.folder), disk, " ".join(_software())],
            start_new_session=True,
            preexec_fn=_die_with_us,
        )
        deadline = time.monotonic() + 20
        while not (self.folder / "ready").exists():
            if time.monotonic() > deadline or self._shell.poll() is not None:
                raise RuntimeError(f"machine {self.name} did not start")
            time.sleep(0.01)
        children = Path(f"/proc/{self._shell.pid}/task/{self._shell.pid}/children").read_text().split()
        self.pid = int(children[0])

    def switch_off(self) -> None:
        """Everything in it is killed by the kernel, at once."""
        if self._shell is not None:
            if self.pid:
                self._kill(self.pid)
            else:  # it never started
                self._shell.kill()
            self._shell.wait()
            self.pid = 0
            self._shell = None
        for process in self.processes:
            process.wait()
        self.processes.clear()

    def _kill(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def run(self, *command: str) -> str:
        done = subprocess.run([*self._enter(), *command], capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def start(
        self, command: Sequence[str], log: str, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": "/tmp", "TMPDIR": "/tmp", **(more or {})}
        with (self.folder / log).open("ab") as out:
            process = subprocess.Popen(
                [*self._enter(), *command], stdout=out, stderr=out, env=environment, start_new_session=True
            )
        self.processes.append(process)
        return process

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", "-u", "-i", "--"]


class Machines:
    """A number of them on one switch, or on two; `with` makes and removes them."""

    def __init__(self, folder: Path, names: Sequence[str], seed: int = 0, *, data: bool = False) -> None:
        if folder.is_relative_to("/tmp"):
            raise ValueError(f"{folder} is below /tmp, of which every machine has its own; use /var/tmp")
        self.folder, self.shared = folder, folder / "shared"
        self.switch = UserSwitch(seed)
        self.data = UserSwitch(seed + 1) if data else None
        self.all = {name: Machine(name, number, folder / name) for number, name in enumerate(names)}

    def __enter__(self) -> Machines:
        self.shared.mkdir(parents=True, exist_ok=True)
        self.switch.plug_in("host", bytes([2, 0, 0, 0, 0, 254]), None, "ev-host")
        _configure([], "ev-host", HOST, bytes([2, 0, 0, 0, 0, 254]))
        self.switch.start()
        if self.data is not None:
            self.data.start()
        for name in self.all:
            self.switch_on(name)
        return self

    def __exit__(self, *error: object) -> None:
        for machine in self.all.values():
            machine.switch_off()
        self.switch.close()
        if self.data is not None:
            self.data.close()

    def __getitem__(self, name: str) -> Machine:
        return self.all[name]

    def hosts(self) -> str:
        lines = [f"{machine.address} {machine.name}" for machine in self.all.values()]
        return "127.0.0.1 localhost\n" + "\n".join(lines) + "\n"

    def switch_on(self, name: str) -> None:
        machine = self.all[name]
        machine.switch_on(self.hosts())
        self.switch.plug_in(name, machine.mac, machine.pid, "eth0")
        _configure(machine._enter(), "eth0", machine.address, machine.mac)
        if self.data is not None:
            self.data.plug_in(name, machine.data_mac, machine.pid, "eth1")
            _configure(machine._enter(), "eth1", machine.data_address, machine.data_mac)

    def switch_off(self, name: str) -> None:
        self.switch.unplug(name)
        if self.data is not None:
            self.data.unplug(name)
        self.all[name].switch_off()


def _configure(enter: Sequence[str], device: str, address: str, mac: bytes) -> None:
    text = ":".join(f"{byte:02x}" for byte in mac)
    for words in (
        ["link", "set", device, "address", text],
        ["link", "set", device, "mtu", str(MTU)],
        ["addr", "add", f"{address}/24", "dev", device],
        ["link", "set", device, "up"],
    ):
        subprocess.run([*enter, "ip", *words], check=True, capture_output=True)
