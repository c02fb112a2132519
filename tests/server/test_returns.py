"""After a restart agents come back one after the other; who is still on the way is not dead."""

from __future__ import annotations

import asyncio
from pathlib import Path

from everstep.core.words import cluster_messages as msg
from everstep.server import daemon as module
from everstep.server.daemon import Daemon
from everstep.server.journal import SqliteJournal


async def _daemon(folder: Path) -> Daemon:
    journal = SqliteJournal(folder / "journal.sqlite")
    await journal.open()
    return Daemon(journal, folder=folder, say=lambda line: None)


def _restarted(folder: Path, nodes: str) -> Daemon:
    """A coordinator that knew these nodes, started again."""

    async def play() -> Daemon:
        first = await _daemon(folder)
        await first.start()
        running = asyncio.create_task(first.run())
        for node in nodes:
            await first.told(msg.NodeJoined(node=node, boot="1", slots=1, host=node))
        running.cancel()
        await first.journal.close()
        second = await _daemon(folder)
        await second.start()
        await second.journal.close()
        return second

    return asyncio.run(play())


def _silent(daemon: Daemon, now: float) -> set[str]:
    daemon._wait_for_returns(now)
    return {node for node, _ in daemon.hearts.fell_silent(now)}


def _joins(daemon: Daemon, node: str, now: float) -> None:
    daemon.hearts.heard(node, now)
    daemon._apply(msg.NodeJoined(node=node, boot="1", slots=1, host=node), now)


def test_nobody_is_silent_while_several_are_still_on_their_way(tmp_path: Path) -> None:
    daemon = _restarted(tmp_path, "abc")
    now = daemon._returned_by - module.RETURN_S
    assert _silent(daemon, now + 3.0) == set()
    _joins(daemon, "a", now + 3.5)
    assert _silent(daemon, now + 4.0) == set(), "b and c are still missing"


def test_the_last_one_missing_is_silent_as_soon_as_any_other_node_would_be(tmp_path: Path) -> None:
    daemon = _restarted(tmp_path, "abc")
    now = daemon._returned_by - module.RETURN_S
    assert _silent(daemon, now + 3.0) == set()
    _joins(daemon, "a", now + 3.5)
    _joins(daemon, "b", now + 3.5)
    assert _silent(daemon, now + 3.6) == set()
    _joins(daemon, "a", now + 4.5)
    _joins(daemon, "b", now + 4.5)
    assert _silent(daemon, now + 4.7) == {"c"}


def test_two_that_never_come_are_silent_in_the_end(tmp_path: Path) -> None:
    daemon = _restarted(tmp_path, "abc")
    now = daemon._returned_by - module.RETURN_S
    for second in range(1, 16):
        _joins(daemon, "a", now + second)
        assert _silent(daemon, now + second) == set()
    _joins(daemon, "a", now + 17)
    assert _silent(daemon, now + 17) == {"b", "c"}
