"""A transfer whose other end does not come, between two real processes: over a socket, and on a GPU, where
a call of another thread waits for the device meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from everstep.net import frames, nccl
from everstep.net import plane as net_plane
from everstep.net.envelope import Envelope
from everstep.net.links import Address
from everstep.net.nccl import NcclWire
from everstep.net.plane import DataPlane, PlaneSettings
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.work import LinkBroke
from harness.transports import PipeWire, use_pipe

NUMBERS = 300_000
BEHIND_S = 9.0  # the sender's device comes to a transfer that it has announced


def plane_of(transport: str) -> DataPlane:
    device = torch.device("cuda", 0) if transport == "nccl" else torch.device("cpu")
    if transport == "pipe":
        use_pipe()
    return DataPlane(
        PlaneSettings(secret=b"s" * 32, host="127.0.0.1", device=device, transport=transport, waits=True)
    )


def send_late(transport: str, to: Address, ended: Connection) -> None:
    """The first message by the lane, the second once the lane broke. The lane's opening is in time."""
    if transport == "nccl":
        os.environ["NCCL_HOSTID"] = "a sender"
        nccl.prepare("127.0.0.1", alone=True)
    wire: Any = NcclWire if transport == "nccl" else PipeWire
    begin, count = wire.begin, [0]

    def late(self: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        count[0] += 1
        if count[0] == 2:
            time.sleep(BEHIND_S)
        begin(self, tensors)

    wire.begin = late
    plane = plane_of(transport)
    plane.start()
    plane.links.connect(to)
    while plane.links.identity(to) is None:
        time.sleep(0.01)
    sent = torch.arange(NUMBERS, dtype=torch.float32, device=plane.device)
    plane.post(to, Parcel(ParcelKind.WEIGHTS, 0, 1, 0), Envelope(beside=1), (sent,))
    while not isinstance(plane.inbox.get(timeout=60), LinkBroke):
        pass
    plane.post(to, Parcel(ParcelKind.WEIGHTS, 0, 2, 0), Envelope(beside=2), (sent,))
    ended.recv()
    plane.stop()


def wait_for_the_device() -> float:
    """How long a call takes that waits for all that the device does. Memory is freed under the lock of the
    context, which the thread that launches needs as well.
    """
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    began = time.monotonic()
    torch.cuda.empty_cache()
    return time.monotonic() - began


@pytest.mark.parametrize("transport", ["pipe", "nccl"])
def test_a_transfer_that_does_not_come_on_is_interrupted_and_sent_again(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "nccl":
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        monkeypatch.setenv("NCCL_HOSTID", "a receiver")  # two ranks of one GPU
    monkeypatch.setattr(net_plane, "_memory_and_lanes", net_plane._memory_and_lanes)  # as it was, afterwards
    plane = plane_of(transport)
    plane.start()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=send_late, args=(transport, plane.links.address, theirs))
    sender.start()
    try:
        lanes = plane._lanes
        assert lanes is not None
        until = time.monotonic() + 120
        while not any(lane.moving and lane.wire.waits_since() for lane in list(lanes._wired)):
            assert time.monotonic() < until
            time.sleep(0.01)
        if transport == "nccl":
            assert 1.0 < wait_for_the_device() < 5.0, "longer, and the coordinator ends the worker"
        got = _next_frame(plane.inbox)
        assert got.envelope.beside == 2
        (tensor,) = plane.opened(got)
        assert torch.equal(tensor.cpu(), torch.arange(NUMBERS, dtype=torch.float32))
        ours.send("over")
        sender.join(timeout=BEHIND_S + 30)
        assert sender.exitcode == 0
    finally:
        sender.kill()
        plane.stop()


def _next_frame(inbox: queue.SimpleQueue[Any]) -> frames.Incoming:
    while True:
        item = inbox.get(timeout=60)
        if isinstance(item, frames.Incoming):
            return item
