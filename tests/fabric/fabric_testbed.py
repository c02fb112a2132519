"""A leaf-spine network of namespaces on one machine: real TCP, real ECMP, links of a set rate.

    h1 ── l1 ──┬── s1 ──┬── l2 ── h2      every leaf has a cable to every spine, `rate` each way; hosts have
               ├── s2 ──┤                 as much as all spines together. Switches hash by policy 3
               ├── s3 ──┤                 (addresses and ports), answer from the interface a packet came in
               └── s4 ──┘                 by, and take their seed from us.

With two planes every host has a second port, at leaf l1p1 with spines s1p1, s2p1, ...: another network, which
shares nothing with the first.

It needs root, and only for making it. Everything lives in a mount and a network namespace of its own: when
the process ends, however it ends, the kernel removes all of it. Threads enter a host by `setns`, so one
process can hold sockets in every host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from everstep_fabric.topology import FabricNode, Link, Port, Switch, Topology

_CLONE_NEWNET = 0x40000000
_MARK = "--inside-the-testbed"
_FIELDS = "55"  # addresses, protocol, ports
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    leaves: int
    spines: int
    rate_mbit: float
    mtu: int = 1500
    planes: int = 1

    def host(self, number: int, plane: int = 0) -> str:
        return f"10.{1 + plane}.{number}.2"

    def topology(self) -> Topology:
        """What a user would write into the fabric file."""
        gbps = self.rate_mbit / 1e3
        cables = [(leaf, spine, p) for p in self._planes for leaf in self._leaves for spine in self._spines]
        return Topology(
            name="testbed",
            nodes=tuple(
                FabricNode(
                    name=f"h{n}",
                    ports=tuple(
                        Port(
                            nic=0,
                            plane=p,
                            leaf=_switch("l", n, p),
                            gbps=gbps * self.spines,
                            address=self.host(n, p),
                        )
                        for p in self._planes
                    ),
                )
                for n in self._leaves
            ),
            leaves=tuple(
                Switch(name=_switch("l", n, p), plane=p) for p in self._planes for n in self._leaves
            ),
            spines=tuple(
                Switch(name=_switch("s", n, p), plane=p) for p in self._planes for n in self._spines
            ),
            fabric_links=tuple(
                link
                for n, s, p in cables
                for up, down in [(_switch("l", n, p), _switch("s", s, p))]
                for link in (
                    Link(sender=up, receiver=down, gbps=gbps, address=f"{_cable_net(n, s, p)}.2"),
                    Link(sender=down, receiver=up, gbps=gbps, address=f"{_cable_net(n, s, p)}.1"),
                )
            ),
        )

    # ------------------------------------------------------------------ making and breaking it

    @property
    def _leaves(self) -> range:
        return range(1, self.leaves + 1)

    @property
    def _spines(self) -> range:
        return range(1, self.spines + 1)

    @property
    def _planes(self) -> range:
        return range(self.planes)

    def namespaces(self) -> list[str]:
        switches = [("l", n) for n in self._leaves] + [("s", n) for n in self._spines]
        return [f"h{n}" for n in self._leaves] + [_switch(k, n, p) for p in self._planes for k, n in switches]

    @contextlib.contextmanager
    def up(self) -> Iterator[Testbed]:
        """Made on the way in, removed on the way out, whatever happens in between."""
        os.makedirs("/run/netns", exist_ok=True)
        _call("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
        try:
            self._build()
            yield self
        finally:
            for name in self.namespaces():
                subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
            _call("umount", "-l", "/run/netns")

    def _build(self) -> None:
        for name in self.namespaces():
            _call("ip", "netns", "add", name)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            for key, value in _SETTINGS.items():
                self.sysctl(name, key, value)
        for plane in self._planes:
            self._build_plane(plane)

    def _build_plane(self, p: int) -> None:
        hosts = f"10.{1 + p}"
        for n in self._leaves:
            leaf = _switch("l", n, p)
            self._cable(f"h{n}", f"e{p}", f"{hosts}.{n}.2/24", leaf, f"h{n}", f"{hosts}.{n}.1/24")
            beyond = "default" if p == 0 else f"{hosts}.0.0/16"
            _call("ip", "-n", f"h{n}", "route", "add", beyond, "via", f"{hosts}.{n}.1")
            for s in self._spines:
                spine, net = _switch("s", s, p), _cable_net(n, s, p)
                self._cable(leaf, f"s{s}", f"{net}.1/24", spine, f"l{n}", f"{net}.2/24")
                for name, device in ((leaf, f"s{s}"), (spine, f"l{n}")):
                    self.set_rate(name, device, self.rate_mbit, "add")
        for n in self._leaves:
            for s in self._spines:
                via = f"{_cable_net(n, s, p)}.1"
                _call("ip", "-n", _switch("s", s, p), "route", "add", f"{hosts}.{n}.0/24", "via", via)
            for other in self._leaves:
                if other != n:
                    ways = [
                        word
                        for s in self._spines
                        for word in (
                            "nexthop",
                            "via",
                            f"{_cable_net(n, s, p)}.2",
                            "dev",
                            f"s{s}",
                            "weight",
                            "1",
                        )
                    ]
                    _call("ip", "-n", _switch("l", n, p), "route", "add", f"{hosts}.{other}.0/24", *ways)

    def _cable(self, one: str, device: str, address: str, other: str, far: str, far_address: str) -> None:
        _call("ip", "-n", one, "link", "add", device, "type", "veth", "peer", "name", far, "netns", other)
        for name, link, addr in ((one, device, address), (other, far, far_address)):
            _call("ip", "-n", name, "addr", "add", addr, "dev", link)
            _call("ip", "-n", name, "link", "set", link, "mtu", str(self.mtu), "up")

    def set_rate(self, switch: str, device: str, mbit: float, verb: str = "change") -> None:
        burst = max(2 * self.mtu, int(mbit * 1e6 / 8 / 250))  # 4 ms of it
        shape = ["rate", f"{mbit:g}mbit", "burst", str(burst), "latency", "40ms"]
        _call("tc", "-n", switch, "qdisc", verb, "dev", device, "root", "tbf", *shape)

    def cut(self, leaf: int, spine: int, mbit: float) -> None:
        """A cable that still carries a little, both ways."""
        self.set_rate(f"l{leaf}", f"s{spine}", mbit)
        self.set_rate(f"s{spine}", f"l{leaf}", mbit)

    def kill(self, leaf: int, spine: int) -> None:
        """A cable that swallows everything while both ends think it is up: no switch routes around it."""
        for switch, device in ((f"l{leaf}", f"s{spine}"), (f"s{spine}", f"l{leaf}")):
            _call("ip", "-n", switch, "rule", "add", "iif", device, "blackhole", "pref", "1")

    def heal(self, leaf: int, spine: int) -> None:
        self.cut(leaf, spine, self.rate_mbit)
        for switch, device in ((f"l{leaf}", f"s{spine}"), (f"s{spine}", f"l{leaf}")):
            rule = ["ip", "-n", switch, "rule", "del", "iif", device, "pref", "1"]
            subprocess.run(rule, stderr=subprocess.DEVNULL, check=False)

    def seed(self, number: int) -> None:
        """Another hash on every switch. One seed for all, so that both directions of a connection agree."""
        for name in self.namespaces():
            if name[0] in "ls":
                self.sysctl(name, "net.ipv4.fib_multipath_hash_seed", str(number))

    def sysctl(self, name: str, key: str, value: str) -> None:
        path = "/proc/sys/" + key.replace(".", "/")
        self.inside(name, lambda: _write(path, value))

    # ------------------------------------------------------------------ being there

    def inside(self, name: str, work: Callable[[], T]) -> T:
        """Run `work` in a namespace; sockets it opens stay there."""
        outcome: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                enter(name)
                outcome.append(work())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failure:
            raise failure[0]
        return outcome[0]


def _switch(kind: str, number: int, plane: int) -> str:
    return f"{kind}{number}" if plane == 0 else f"{kind}{number}p{plane}"


def _cable_net(leaf: int, spine: int, plane: int) -> str:
    return f"10.{10 + 100 * plane + leaf}.{spine}"


_SETTINGS = {
    "net.ipv4.ip_forward": "1",
    "net.ipv4.conf.all.rp_filter": "0",
    "net.ipv4.conf.default.rp_filter": "0",
    "net.ipv4.icmp_ratelimit": "0",
    "net.ipv4.icmp_ratemask": "0",
    "net.ipv4.icmp_errors_use_inbound_ifaddr": "1",
    "net.ipv4.fib_multipath_hash_policy": "3",
    "net.ipv4.fib_multipath_hash_fields": _FIELDS,
}


def enter(name: str) -> None:
    """Put the calling thread into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name}")


def why_not() -> str | None:
    """One sentence if the testbed cannot be made here."""
    if os.geteuid() != 0:
        return "the testbed makes network namespaces, which needs root"
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"the testbed needs the {tool} command (Debian: apt-get install iproute2 util-linux)"
    if subprocess.run(["unshare", "-m", "-n", "true"], capture_output=True, check=False).returncode != 0:
        return "this machine does not let us make namespaces"
    probe = ["unshare", "-m", "-n", "sh", "-c", _CAN_SHAPE]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        return "this kernel lacks veth, tbf or fib_multipath_hash_fields"
    return None


_CAN_SHAPE = (
    "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root tbf rate 1mbit burst 16kb latency 9ms "
    "&& test -e /proc/sys/net/ipv4/fib_multipath_hash_fields"
)


def move_into_own_namespaces() -> None:
    """Start this program again, in a mount and a network namespace that end with it. Returns inside."""
    if _MARK in sys.argv:
        sys.argv.remove(_MARK)
        return
    os.execvp(
        "unshare",
        ["unshare", "-m", "-n", "--propagation", "private", sys.executable, *sys.argv, _MARK],
    )


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _write(path: str, value: str) -> None:
    with open(path, "w") as handle:
        handle.write(value)
