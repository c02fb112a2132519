"""Planted bugs in the shells: the code around the machines, where storms do not reach.

    python -m tests.storms.shell_mutants                   every bug: is it seen, by which tests, how soon
    python -m tests.storms.shell_mutants --names a,b       these only
    python -m tests.storms.shell_mutants --list            what is planted where

Storms run the machines that decide, and `seek_mutants` plants bugs in those. Agents, worker
processes, links, stages, the keeper of states and the coordinator's term talk to a kernel, a disk or torch.
Each bug here changes the text of one file in a copy of the tree, and the named tests must then fail. They
are run once without any bug first: a copy in which they fail anyway would prove nothing.

Exit code 1 if a bug was not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "harness", "tools", "pyproject.toml")
MOST_S = 600.0  # a bug that hangs its tests is seen, too


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellMutant:
    """`right` stands once in the file, and becomes `wrong`. One of `tests` must then fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


def _mutant(name: str, file: str, right: str, wrong: str, *tests: str) -> ShellMutant:
    return ShellMutant(name=name, file=f"src/everstep/{file}", right=right, wrong=wrong, tests=tests)


AGENT, LINE = "node/agent.py", "tests/node/test_agent_line.py"
LINKS, OF_LINKS = "net/links.py", "tests/engine/test_frames_and_links.py"
STAGE, OF_STAGE = "engine/stage/stage.py", "tests/engine/test_stage.py"
KEEPER, COPIED_STATE = "store/state_keeper.py", "tests/node/test_copied_state.py"
TERM, OF_TERM = "server/term.py", "tests/server/test_terms.py"

MUTANTS = [
    # ------------------------------------------------------------------ agent
    _mutant(
        "notice_counts_twice",
        AGENT,
        "            self._noticed = True\n",
        "",
        f"{LINE}::test_a_warning_by_a_signal_is_reported_once",
    ),
    _mutant(
        "agent_gives_up_after_a_refusal",
        AGENT,
        "                except Exception as error:  # the main loop: whatever it is, the workers train on\n",
        "                except aiohttp.ClientConnectorError as error:\n",
        f"{LINE}::test_whatever_a_coordinator_does_the_agent_tries_again_and_says_why_once",
    ),
    _mutant(
        "trouble_is_said_at_every_try",
        AGENT,
        "        if self._troubles.get(address) == reason:\n            return\n",
        "",
        f"{LINE}::test_whatever_a_coordinator_does_the_agent_tries_again_and_says_why_once",
    ),
    _mutant(
        "agent_alone_uses_up_its_grace",
        AGENT,
        "            if self._line is None and now > self._alone_since + ALONE_S:\n                break\n",
        "",
        f"{LINE}::test_an_agent_without_a_coordinator_does_not_use_up_its_grace",
    ),
    _mutant(
        "agent_leaves_without_a_word",
        AGENT,
        '                await self._line.send_str(json.dumps({"left": True}))\n',
        "",
        f"{LINE}::test_an_agent_that_is_told_to_end_announces_it_and_says_when_it_has_left",
    ),
    # ------------------------------------------------------------------ lines to worker processes
    _mutant(
        "last_words_of_the_dead_are_lost",
        "node/worker_lines.py",
        "            for fd in list(self._callers):\n                self._greet(fd)\n        while",
        "        while",
        "tests/node/test_worker_lines.py",
    ),
    # ------------------------------------------------------------------ links
    _mutant(
        "broken_link_not_reported",
        LINKS,
        "            self.events.broken(link.address)\n",
        "",
        f"{OF_LINKS}::test_a_peer_that_is_gone_is_reported_and_the_others_go_on",
    ),
    _mutant(
        "rest_of_a_sent_buffer_is_sent_whole",
        LINKS,
        "                if sent:\n                    link.ready[0] = link.ready[0][sent:]\n",
        "",
        f"{OF_LINKS}::test_messages_of_any_size_arrive_in_the_order_they_were_sent",
    ),
    _mutant(
        "opened_before_the_peer_answers",
        LINKS,
        "        link.socket.sendall(link.handshake.hello())",
        "        self.events.opened(link.address)\n        link.socket.sendall(link.handshake.hello())",
        f"{OF_LINKS}::test_a_connection_counts_as_open_when_the_peer_has_answered",
    ),
    _mutant(
        "no_descriptor_left_ends_the_thread",
        LINKS,
        "            if error.errno not in _FULL:\n                raise\n",
        "            raise\n",
        f"{OF_LINKS}::test_idle_connections_until_no_descriptor_is_left_do_not_end_a_worker",
    ),
    _mutant(
        "opener_believes_any_acceptor",
        "net/handshake.py",
        'b"acceptor", self._nonce + theirs, said)):',
        'b"acceptor", self._nonce + theirs, said)) and False:',
        f"{OF_LINKS}::test_who_listens_at_an_old_address_is_not_sent_the_secret",
    ),
    _mutant(
        "acceptor_believes_any_opener",
        "net/handshake.py",
        'b"opener", self._nonces, chosen)):',
        'b"opener", self._nonces, chosen)) and False:',
        f"{OF_LINKS}::test_a_stranger_without_the_token_is_shown_the_door",
        "tests/engine/test_protected_links.py::test_a_peer_of_another_task_is_refused_by_either_end",
    ),
    # ------------------------------------------------------------------ stage
    _mutant(
        "discarded_work_stays",
        STAGE,
        "            del self._stashes[key]\n",
        "            pass\n",
        f"{OF_STAGE}::test_discarded_work_leaves_no_trace",
        f"{OF_STAGE}::test_discarding_a_step_keeps_what_an_earlier_one_has_stashed",
    ),
    _mutant(
        "discarded_gradients_stay",
        STAGE,
        "        self._numbers.discard(from_step)\n        self.sums.restart()\n",
        "        self._numbers.discard(from_step)\n",
        f"{OF_STAGE}::test_discarded_work_leaves_no_trace",
    ),
    _mutant(
        "changes_to_received_tensors_unseen",
        STAGE,
        "        if any(tensor._version != version for tensor, version in self._received):\n",
        "        if False:\n",
        f"{OF_STAGE}::test_a_layer_that_changes_what_was_received_is_named",
    ),
    _mutant(
        "weight_gradient_of_another_step",
        STAGE,
        "        if self.sums.step not in (None, step):\n",
        "        if False:\n",
        f"{OF_STAGE}::test_sums_that_begin_anew_are_empty_and_refuse_another_step",
        f"{OF_STAGE}::test_ops_out_of_turn_are_refused",
    ),
    _mutant(
        "layers_change_the_data",
        STAGE,
        "            return there.to(dtype, copy=there.device == tensor.device)\n",
        "            return there.to(dtype)\n",
        f"{OF_STAGE}::test_what_layers_and_loss_do_to_a_batch_is_not_done_to_the_data",
    ),
    # ------------------------------------------------------------------ the keeper of states
    _mutant(
        "next_holder_never_asked",
        KEEPER,
        "                if not self._ask_another(error):\n",
        "                if True:\n",
        f"{COPIED_STATE}::test_a_damaged_copy_is_read_from_the_next_holder",
    ),
    _mutant(
        "silent_node_counts_as_damaged",
        KEEPER,
        '        reached = error.kind != "unreadable"\n',
        "        reached = True\n",
        f"{COPIED_STATE}::test_a_node_that_does_not_answer_is_asked_once_not_once_per_part",
    ),
    _mutant(
        "bytes_read_not_counted",
        KEEPER,
        "            self.bytes_elsewhere += elsewhere\n",
        "",
        COPIED_STATE,
    ),
    # ------------------------------------------------------------------ the coordinator's term
    _mutant(
        "failed_event_never_set_aside",
        TERM,
        "            self._aside[failed.number] = failed.error\n",
        "            pass\n",
        f"{OF_TERM}::test_after_an_internal_error_the_state_is_read_back_and_an_event_that_fails_again_is_set_aside",
    ),
    _mutant(
        "clock_behind_the_journals",
        TERM,
        "        self._began_at, self._began = max(self._clock(), self.driver.now), time.monotonic()\n",
        "        self._began_at, self._began = self._clock(), time.monotonic()\n",
        f"{OF_TERM}::test_a_clock_that_is_behind_the_last_coordinators_delays_no_timer",
    ),
    _mutant(
        "full_journal_ends_the_coordinator",
        TERM,
        "            except JournalFull as error:\n                if",
        "            except ZeroDivisionError as error:\n                if",
        f"{OF_TERM}::test_a_journal_without_room_ends_nothing_and_is_written_when_there_is_some",
    ),
    _mutant(
        "returning_node_is_silent",
        TERM,
        "        for node in self._missing:\n            self._hearts.heard(node, now)\n\n\ndef _set_aside",
        "\n\ndef _set_aside",
        "tests/server/test_returns.py::test_nobody_is_silent_while_several_are_still_on_their_way",
    ),
    _mutant(
        "snapshot_without_the_rows",
        TERM,
        "return freeze(self.machine), self.record.snapshot(),",
        "return freeze(self.machine), None,",
        f"{OF_TERM}::test_a_snapshot_keeps_the_rows_that_are_shown",
    ),
    _mutant(
        "orders_pile_up_for_a_deaf_worker",
        "node/worker_lines.py",
        "        if len(line.unsent) > MOST_UNSENT:\n",
        "        if False:\n",
        "tests/node/test_worker_lines.py::test_orders_that_a_process_never_reads_are_bounded",
    ),
]


def applied(mutants: Iterable[ShellMutant], tree: Path) -> None:
    for mutant in mutants:
        path = tree / mutant.file
        text = path.read_text()
        found = text.count(mutant.right)
        if found != 1:
            sys.exit(f"{mutant.name}: its text stands {found} times in {mutant.file}: update `right`.")
        path.write_text(text.replace(mutant.right, mutant.wrong))


def tests_pass(tree: Path, tests: Iterable[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    path = os.pathsep.join([str(tree / "src"), str(tree)])
    try:
        ran = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=MOST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0


def copied(folder: Path) -> Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def looked_at(mutants: list[ShellMutant], *, quiet: bool) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-mutants-") as home:
        tree = copied(Path(home))
        if not tests_pass(tree, dict.fromkeys(test for mutant in mutants for test in mutant.tests)):
            sys.exit("the tests fail without any bug planted: see them fail with pytest first.")
        for mutant in mutants:
            began = time.monotonic()
            right = (tree / mutant.file).read_text()
            applied([mutant], tree)
            seen = not tests_pass(tree, mutant.tests)
            (tree / mutant.file).write_text(right)
            rows[mutant.name] = {
                "file": mutant.file,
                "seen": seen,
                "seconds": round(time.monotonic() - began, 1),
            }
            if not quiet:
                found = f"{'seen' if seen else 'NOT SEEN':8s} {rows[mutant.name]['seconds']:6.1f} s"
                print(f"{mutant.name:40s} {mutant.file:40s} {found}", flush=True)
    return {"seen": sum(row["seen"] for row in rows.values()), "of": len(rows), "mutants": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", default="", help="planted bugs, by name, with commas")
    parser.add_argument("--list", action="store_true", help="names, files and tests")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    names = args.names.split(",") if args.names else list(known)
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no planted bug is named {', '.join(unknown)}; --list names them.")
    if args.list:
        for mutant in MUTANTS:
            print(f"{mutant.name:40s} {mutant.file:40s} {' '.join(mutant.tests)}")
        return
    found = looked_at([known[name] for name in names], quiet=args.json)
    print(
        json.dumps(found, indent=1)
        if args.json
        else f"{found['seen']} of {found['of']} planted bugs are seen"
    )
    sys.exit(found["seen"] != found["of"])


if __name__ == "__main__":
    main()
