"""Workers of two owners as two Unix users: what one must not read of the other or do to it, each tried by a
process of the other user. The same is tried with both owners under one user, where all of it works: so the
attempts are real ones. Needs root, and two users that every system has.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import UserError
from everstep.store import unix_users
from everstep.store.unix_users import UserTable, acting_as
from tests.node.two_users import two_users

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starts processes as other users: needs root")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """As other users reach it; pytest's own are root's alone."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def tried(folder: Path, *options: str) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.node.two_users", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=600)
    assert done.returncode == 0, "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    told: dict[str, str] = json.loads(done.stdout)
    return told


@pytest.mark.slow
def test_one_owner_can_neither_read_nor_harm_the_other(open_folder: Path) -> None:
    told = tried(open_folder)
    assert len(told) >= 12
    assert [name for name, why in told.items() if not why] == []


@pytest.mark.slow
def test_under_one_user_all_of_it_works(open_folder: Path) -> None:
    """So the attempts are what they are called."""
    told = tried(open_folder, "--together")
    assert {name: why for name, why in told.items() if why} == {}


def test_the_agent_follows_no_link_to_the_file_of_another(open_folder: Path) -> None:
    alice, bob = two_users()
    hers = alice.make_folder(open_folder / "hers") / "log"
    hers.write_text("her secret")
    os.chown(hers, alice.uid, alice.gid)
    hers.chmod(0o600)
    link = bob.make_folder(open_folder / "his") / "worker-0-0.log"
    link.symlink_to(hers)
    with acting_as(bob), pytest.raises(PermissionError):
        link.read_text()
    assert link.read_text() == "her secret", "root would have followed it"
    with acting_as(alice):
        with acting_as(bob), pytest.raises(PermissionError):
            hers.read_text()
        assert os.stat(hers).st_size, "one inside the other"
        made = open_folder / "hers" / "made"
        made.write_text("")
    assert made.stat().st_uid == alice.uid
    assert (open_folder / "root").write_text("") == 0
    assert (open_folder / "root").stat().st_uid == 0, "and afterwards it is root again"


class DeafKernel:
    """Its calls change nothing, and as the real ones they do not say so."""

    def __init__(self, deaf: str) -> None:
        self._deaf, self._now = deaf, {"setfsuid": 0, "setfsgid": 0}

    def __getattr__(self, name: str) -> Any:
        def call(number: int) -> int:
            before = self._now[name]
            if name != self._deaf and number != -1:
                self._now[name] = number
            return before

        return call

    def syscall(self, *ignored: object) -> int:
        return 0


@pytest.mark.parametrize("deaf", ["setfsuid", "setfsgid"])
def test_without_the_rights_of_the_user_nothing_is_opened(deaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group was never looked at, the user by an assert: with `python -O` an agent went on as root."""
    alice, _ = two_users()
    monkeypatch.setattr(unix_users, "_LIBC", DeafKernel(deaf))
    opened = []
    with pytest.raises(PermissionError, match="the kernel did not change"), acting_as(alice):
        opened.append("a file that a job names")
    assert opened == []


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ('alice = "nobody-of-this-name"', 0o600, "no Unix user nobody-of-this-name"),
        ('alice = "root"', 0o600, "alice may not be root"),
        ("alice = 3", 0o600, "alice must be the name of a Unix user"),
        ("alice =", 0o600, "is not TOML"),
        ('alice = "daemon"', 0o666, "can be changed by others than root"),
    ],
)
def test_a_table_of_users_that_cannot_be_used_is_named(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    table = tmp_path / "users.toml"
    table.write_text(text)
    table.chmod(mode)
    with pytest.raises(UserError, match=why):
        UserTable(table)


def test_an_owner_without_a_user_is_refused_unless_the_table_names_others(tmp_path: Path) -> None:
    alice, bob = two_users()
    table = tmp_path / "users.toml"
    table.write_text(f'alice = "{alice.name}"\n')
    users = UserTable(table)
    assert users.of("alice") == alice
    with pytest.raises(UserError, match='no Unix user for carol; add "carol" = "USER"'):
        users.of("carol")
    table.write_text(f'alice = "{alice.name}"\n"*" = "{bob.name}"\n')
    assert users.of("carol") == bob, "the file is read again"


def test_workers_of_a_user_have_a_cgroup_of_their_own(tmp_path: Path) -> None:
    """Whatever cgroup this test is in itself: on some machines a container does not even see its own."""
    alice, _ = two_users()
    top, membership = tmp_path / "cgroup", tmp_path / "membership"
    (top / "pod/agent").mkdir(parents=True)
    membership.write_text("4:memory:/elsewhere\n0::/pod/agent\n")

    assert unix_users.own_cgroup(alice, 1, top, membership) is None, "no cgroup v2 is mounted"
    (top / "cgroup.procs").touch()
    group = unix_users.own_cgroup(alice, 4711, top, membership)
    assert group == top / f"pod/agent/everstep-{alice.name}"
    assert (group / "cgroup.procs").read_text() == "4711"

    membership.write_text("0::/the/host/s/name/for/it\n")
    assert unix_users.own_cgroup(alice, 4711, top, membership) is None, "the agent's cgroup is not shown here"
    membership.write_text("4:memory:/elsewhere\n")
    assert unix_users.own_cgroup(alice, 4711, top, membership) is None, "cgroup v1 alone"
