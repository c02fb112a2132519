"""Checkpoints are committed without a coordinator: from what the parts say of themselves."""

import os
import threading
from pathlib import Path

import pytest

from everstep.core.agent.agent_messages import CommitWhole
from everstep.node.disk_orders import commit_whole as agent_commits
from everstep.node.disk_orders import work_on_disk
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.store.folder import (
    SavedPart,
    commit_whole,
    complete_steps,
    newest_valid,
    open_checkpoint,
    write_description,
    write_part,
)
from everstep.store.index import CannotRead
from everstep.store.parts import Label
from everstep.store.places import LocalPlace
from everstep.store.search import newest_to_use
from tests.store.states import all_of, same, tensors

RUN = "this-run"


def write(
    root: Path,
    step: int,
    *stages: int,
    run: str = RUN,
    attempt: int = 1,
    settled: bool = True,
    name: str = "",
) -> list[Label]:
    """These of two stages write their parts of a step."""
    labels = []
    for stage in stages or (0, 1):
        part = write_part(root, step, f"stage-{stage}{name}", tensors(step)[stage])
        if not stage:
            part |= {"meta": {"rows": step}, "groups": [{"params": ["embed.weight"], "lr": 0.1}]}
        save = SavedPart(run=run, attempt=attempt, stage=stage, stages=2, share=(0, 1), settled=settled)
        labels.append(write_description(root, step, f"stage-{stage}{name}", part, save))
    return labels


def partials(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*.partial"))


def test_what_is_whole_is_committed_and_keep_applies(tmp_path: Path) -> None:
    """78 whole folders lay beside the checkpoint of step 5 when the coordinator had been away for an hour."""
    for step in range(5, 45, 5):
        write(tmp_path, step)
    write(tmp_path, 45, 0)
    found = commit_whole(tmp_path, run=RUN, keep=3)
    assert (found.committed, found.left, found.kept) == ([30, 35, 40], [45], {})
    assert complete_steps(tmp_path) == [30, 35, 40]
    assert partials(tmp_path) == ["step-00000045.partial"]
    newest, refused = newest_valid(tmp_path)
    assert newest is not None
    assert not refused
    assert same(newest.read(), all_of(40))
    assert newest.meta == {"rows": 40}
    assert [group["lr"] for group in newest.index.groups] == [0.1]


def test_an_object_store_needs_no_coordinator_either() -> None:
    root = "memory://unattended"
    for step in (5, 10, 15, 20):
        write(root, step)
    write(root, 25, 0)
    found = commit_whole(root, run=RUN, keep=2)
    assert (found.committed, found.left, complete_steps(root)) == ([15, 20], [25], [15, 20])
    write(root, 30)
    assert newest_to_use(root, known=20, run=RUN, keep=2, live=True).step == 30


def test_parts_of_two_runs_or_of_two_attempts_are_not_one_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 5, 0)
    write(tmp_path, 5, 1, run="another-run")
    write(tmp_path, 10, 0, attempt=1)
    write(tmp_path, 10, 1, attempt=2)
    write(tmp_path, 15, run="another-run")
    assert commit_whole(tmp_path, run=RUN, keep=3).committed == []
    assert complete_steps(tmp_path) == []


def test_a_state_that_peers_have_not_compared_yet_waits(tmp_path: Path) -> None:
    write(tmp_path, 5, settled=False)
    assert commit_whole(tmp_path, run=RUN, keep=3, sealed=6).committed == []
    assert commit_whole(tmp_path, run=RUN, keep=3, sealed=7).committed == [5]
    write(tmp_path, 10, settled=False)
    write(tmp_path, 15, 0, settled=False)  # its stage has sealed step 15
    assert commit_whole(tmp_path, run=RUN, keep=3).committed == [10]


def test_a_description_that_a_crash_has_torn_is_no_part(tmp_path: Path) -> None:
    write(tmp_path, 5)
    path = tmp_path / "step-00000005.partial" / "stage-1.json"
    path.write_bytes(path.read_bytes()[:50])
    assert commit_whole(tmp_path, run=RUN, keep=3).committed == []


def test_a_restore_takes_a_whole_checkpoint_that_no_coordinator_committed(tmp_path: Path) -> None:
    write(tmp_path, 5)
    commit_whole(tmp_path, run=RUN, keep=3)
    write(tmp_path, 10)
    write(tmp_path, 15, 1)
    write(tmp_path, 20, run="another-run")
    found = newest_to_use(tmp_path, known=5, run=RUN, live=True)
    assert (found.step, found.refused) == (10, ())
    assert partials(tmp_path) == ["step-00000015.partial", "step-00000020.partial"]  # somebody may be writing
    assert newest_to_use(tmp_path, known=5, run=RUN).step == 10
    assert partials(tmp_path) == []


def test_what_could_not_be_read_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 5)
    plain, tries = LocalPlace.file, list[str]()

    def broken(self: LocalPlace, folder: str, name: str, *more: object) -> object:
        if folder.endswith(".partial"):
            tries.append(name)
            raise CannotRead(f"{name} cannot be read: EIO")
        return plain(self, folder, name, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(LocalPlace, "file", broken)
        found = newest_to_use(tmp_path, run=RUN, sleep=lambda seconds: None)
    assert found.step == 0
    assert "its files are kept" in found.refused[0]
    assert len(tries) == 4  # it was tried again
    assert partials(tmp_path) == ["step-00000005.partial"]
    assert newest_to_use(tmp_path, run=RUN).step == 5


@pytest.mark.parametrize("exchanged", [True, False])
def test_two_may_commit_one_step_at_one_time(
    exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that came second took the first one's checkpoint for an old one, and removed it."""
    if not exchanged:  # a file system that cannot do it
        monkeypatch.setattr("everstep.store.places._exchange", lambda a, b: False)
    for step in range(1, 31):
        write(tmp_path, step)
        start, errors = threading.Barrier(3), list[BaseException]()

        def commits(start: threading.Barrier = start, errors: list[BaseException] = errors) -> None:
            try:
                start.wait()
                commit_whole(tmp_path, run=RUN, keep=3)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=commits) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert complete_steps(tmp_path)[-1] == step
        assert same(open_checkpoint(tmp_path / f"step-{step:08d}").read(), all_of(step))


def test_an_order_to_commit_what_is_committed_already_succeeds(tmp_path: Path) -> None:
    """A coordinator that was away orders the commits of all it hears of, some of which `keep` has removed."""
    at = msg.CheckpointFolder(base=str(tmp_path), folder=".", keep=1)
    labels = {step: write(tmp_path, step) for step in (5, 10)}
    report, looked = agent_commits(CommitWhole("t", RUN, 12), at)
    assert report == msg.TaskEvent(task="t", event=ev.CheckpointCommitted(step=10))
    assert looked.committed
    assert not looked.left
    for step, parts in labels.items():
        order = msg.CommitCheckpoint(task="t", step=step, parts=tuple(parts))
        assert work_on_disk(order, at) == report
    assert complete_steps(tmp_path) == [10]
    labels[15] = write(tmp_path, 15)
    os.truncate(tmp_path / "step-00000015.partial" / "stage-0.safetensors", 20)
    order = msg.CommitCheckpoint(task="t", step=15, parts=tuple(labels[15]))
    assert isinstance(work_on_disk(order, at), msg.SaveFailed)  # not committed by anybody
