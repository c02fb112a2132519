"""Storms by seed: they hold, they repeat exactly, they shrink, and they see planted bugs."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

import pytest

from everstep.core.cluster import fences
from everstep.core.cluster.node import Node
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.silence import Silence
from everstep.protocol import messages as msg
from everstep.protocol.actions import ComputePlan
from everstep.protocol.events import ChunksFilled, PlanComputed
from everstep.protocol.shape import Shape
from everstep.schedule.cache import PlanCache
from everstep.schedule.recovery_answer import plain_answer
from everstep_lab.draw import Draw
from tests.storms import (
    StormKind,
    cluster_world,
    draw_spec,
    draw_storm,
    is_of_cluster,
    run_storm,
    with_sharded_states,
)
from tests.storms.agent_mutants import CANCEL_MUTANTS, CLUSTER_MUTANTS, MEMORY_MUTANTS, TIMER_MUTANTS
from tests.storms.faults import OF_AGENTS, OF_CLUSTERS, OF_HANGS
from tests.storms.mutants import MUTANTS, planted
from tests.storms.shrink import shrink
from tests.storms.spec import OF_TASKS

SEEDS = Path(__file__).parent / "seeds.txt"
# Of each planted bug a seed at which it is seen; `tests/storms/seek_mutants.py` looks for them from 0 on.
SEEN_AT = {
    "outbox_dropped_too_early": 25,
    "reduce_sealed_too_early": 55,
    "reduce_sums_two_rounds": 11,
    "stale_epoch_accepted": 66,
    "ledger_without_done_before": 176,
    "joiner_admitted_a_step_early": 10,
    "ghosts_dropped": 115,
    "attempts_not_counted": 20,
    "undo_forgotten": 115,
    "commit_forgotten": 0,
    "gradients_released_when_sent": 25,
    "sum_released_before_its_seal": 60,
    "mended_link_sends_nothing_again": 25,
    "group_kept_after_a_death": 11,
    "feed_ends_a_step_early": 1,
    "copy_counts_without_a_source": 11,
}
SHARDED_SEEN_AT = {
    "lost_chunk_unnoticed": 43,
    "guard_makes_no_update": 0,
    "one_holder_of_a_sum_is_enough": 200,
    "sharded_update_before_its_seal": 117,
    "fill_sent_a_step_early": 15,
    "new_map_for_a_step_that_is_summed": 37,
    "stale_chunk_counts_as_held": 1,
    "unfilled_holder_owns": 1,
}
SEEN_IN_GROUPS = {
    "counts_without_every_slice": 0,
    "state_counts_without_every_slice": 8,
    "end_of_a_shard_is_not_named": 4,
}
SEEN_ON_CROWDED_NODES = {"part_of_a_node_counts_for_two_rounds": 19}
SEEN_IN_MOVES = {"one_holder_is_asked": 41}
SEEN_WITH_HANGS = {
    "no_timer_of_silent_node": 2,
    "no_timer_of_isolated_node": 5,
    "no_timer_of_leaving_node": 32,
    "no_timer_of_start_put_off": 5,
    "no_timer_of_start": 0,
    "no_timer_of_copy_of_a_state": 1,
    "no_timer_of_next_search": 14,
    "no_timer_of_search": 0,
    "no_timer_of_commit": 0,
}
SEEN_WITH_FLIPS = {"no_timer_of_isolated_slot": 0}
SEEN_WITH_CUTS = {"no_timer_of_broken_links": 1}
SEEN_WITH_PLANS = {"no_timer_of_review_of_a_plan": 0, "no_timer_of_state_that_is_held": 0}
SEEN_WITH_CANCELS = {"cancel_does_not_close": 3, "cancel_of_a_task_that_stops_is_lost": 42}
SEEN_IN_TESTS = {"no_timer_of_network_check"}  # core/test_network_checks.py: storms have no networks to check
SEEN_IN_A_CLUSTER = {
    "beacon_written_at_every_wake_up": 752,
    "unwanted_start_stays": 1972,
    "reports_forgotten_when_sent": 131,
    "start_does_not_wait": 4,
    "over_with_the_last_seal": 16,
    "broken_link_opened_at_once": 25,
    "kill_of_a_starting_process_is_lost": 46,
    "no_escalation": 2,
    "exit_not_reported": 5,
    "deaf_worker_is_patient": 1,
    "order_carried_out_twice": 5,
    "silence_counts_as_mended": 2,
    "leaves_with_work_in_hand": 2,
    "late_reports_count": 566,
    "drained_node_not_given_up": 20,
    "dead_fork_server_stays": 13,
    "elected_one_starts_from_nothing": 5,
    "old_term_obeyed": 30,
    "killed_for_ever": 1,
    "closed_line_ends_workers": 5,
}


# Enough seeds that every kind of fault strikes; `make storms` (`.ci/run`) has hundreds of each kind.
def test_thirty_storms_break_nothing() -> None:
    struck = set()
    for seed in range(30):
        report = run_storm(draw_spec(seed))
        assert report.violation is None, f"python -m tests.storms --seeds {seed}: {report.violation}"
        struck |= {fault.split()[0] for fault in report.faults_struck}
    assert struck == set(OF_TASKS), "some kind of fault never struck"


def listed_seeds() -> list[tuple[StormKind, int]]:
    lines = [line for line in SEEDS.read_text().splitlines() if line and not line.startswith("#")]
    found = []
    for line in lines:
        kind, _, seed = line.split()[0].rpartition(":")
        found.append((cast(StormKind, kind), int(seed)))
    return found


def violation_of(kind: StormKind, seed: int) -> str | None:
    """What goes wrong in this storm, with the command that replays it."""
    found = run_storm(draw_storm(seed, kind), cluster=is_of_cluster(kind)).violation
    command = f"python -m tests.storms --kind {kind or 'task'} --seeds {seed}"
    return None if found is None else f"{command}: {found}"


@pytest.mark.parametrize(("kind", "seed"), listed_seeds())
def test_a_seed_that_once_failed(kind: StormKind, seed: int) -> None:
    assert violation_of(kind, seed) is None


@pytest.mark.parametrize(
    ("kind", "count"), [("", 20), ("cluster", 10), ("moves", 10), ("sharded", 10), ("groups", 5)]
)
def test_seeds_from_all_over_break_nothing(
    kind: StormKind, count: int, request: pytest.FixtureRequest
) -> None:
    """The same in every run: what fails once fails again. New ones with `--fresh`; a failure names its seed,
    which then joins seeds.txt.
    """
    draw = random.SystemRandom() if request.config.getoption("--fresh") else random.Random(f"seeds {kind}")
    for _ in range(count):
        assert violation_of(kind, draw.randrange(1 << 40)) is None


def test_fresh_seeds_are_printed() -> None:
    command = [sys.executable, "-m", "tests.storms", "--kind", "cluster", "--json", "--seeds"]
    done = subprocess.run([*command, "fresh:2"], capture_output=True, text=True, check=True)
    first, last = json.loads(done.stdout)["seeds"]
    assert last == first + 2
    assert subprocess.run([*command, "fresh:x"], capture_output=True, check=False).returncode == 2


def test_the_same_seed_gives_the_same_hash_in_another_process_with_other_hashes() -> None:
    """Python's string hashes differ from process to process; the trace must not."""
    program = (
        "import json; from tests.storms import draw_spec, run_storm;"
        "print(json.dumps([run_storm(draw_spec(s)).hash for s in range(12)]))"
    )
    found = []
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout))
    assert found[0] == found[1] == [run_storm(draw_spec(seed)).hash for seed in range(12)]
    assert len(set(found[0])) == 12


def test_what_is_drawn_is_the_same_on_every_machine() -> None:
    """Written down once: the sequence that Python promises to keep, and whole numbers made of it."""
    draw = Draw(7, "stream")
    assert [draw.below(1000) for _ in range(5)] == [872, 570, 925, 663, 485]


def test_a_recorded_storm_is_the_same_storm() -> None:
    spec = draw_spec(3)
    quiet, told = run_storm(spec), run_storm(spec, record=True)
    assert quiet.hash == told.hash
    assert not quiet.transcript
    assert len(told.transcript) > 50


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_seen(name: str) -> None:
    with planted(name):
        assert run_storm(draw_spec(SEEN_AT[name])).violation is not None
    assert run_storm(draw_spec(SEEN_AT[name])).violation is None


def test_a_third_holder_of_a_chunk_that_is_never_let_go_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence had forgotten `ChunksFilled`: after every heal, memory stayed above what was promised."""
    right = fences.refused

    def forgetful(node: Node, report: msg.NodeReport, sender: msg.Sender | None, tasks: Any) -> str:
        is_filled = isinstance(report, msg.TaskEvent) and isinstance(report.event, ChunksFilled)
        return "forgotten" if is_filled else right(node, report, sender, tasks)

    spec = draw_storm(13, "sharded-cluster")
    assert run_storm(spec, cluster=True).violation is None
    monkeypatch.setattr(fences, "refused", forgetful)
    assert "keeps its three holders" in str(run_storm(spec, cluster=True).violation)


@pytest.mark.parametrize("kind", ["cluster", "sharded-cluster"])
def test_with_plain_schedules_alone_every_storm_still_ends(
    kind: StormKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is used when the scheduler raises: nobody waits for a worker that waits for it."""

    def plain(question: ComputePlan, plans: PlanCache, mode: str) -> PlanComputed:
        healthy = plans.healthy
        return plain_answer(question, Shape(healthy.replicas, healthy.stages, healthy.microbatches))

    monkeypatch.setattr(cluster_world, "answer", plain)
    for seed in range(15):
        violation = run_storm(draw_storm(seed, kind), cluster=True).violation
        assert violation is None, f"{kind} {seed} with plain schedules: {violation}"


@pytest.mark.parametrize("name", SHARDED_SEEN_AT)
def test_a_planted_bug_of_sharded_states_is_seen(name: str) -> None:
    spec = with_sharded_states(draw_spec(SHARDED_SEEN_AT[name]))
    with planted(name):
        assert run_storm(spec).violation is not None
    assert run_storm(spec).violation is None


@pytest.mark.parametrize("name", SEEN_IN_GROUPS)
def test_a_planted_bug_of_shards_is_seen(name: str) -> None:
    spec = draw_storm(SEEN_IN_GROUPS[name], "groups")
    with planted(name):
        assert run_storm(spec, cluster=True).violation is not None
    assert run_storm(spec, cluster=True).violation is None


def test_fifteen_storms_with_shards_break_nothing() -> None:
    """Every shard in lockstep with its leader, whichever process or connection of it fails."""
    struck = set()
    for seed in range(15):
        report = run_storm(draw_storm(seed, "groups"), cluster=True)
        assert report.violation is None, f"{seed} of groups: {report.violation}"
        struck |= {fault.split()[0] for fault in report.faults_struck}
    assert "shard" in struck


def test_votes_break_nothing_in_twenty_storms() -> None:
    """Replicas check each other while workers die and links break: no vote hangs or raises an alarm."""
    for seed in range(20):
        violation = run_storm(draw_storm(seed, "votes"), cluster=True).violation
        assert violation is None, f"{seed} of votes: {violation}"


def test_no_wrong_number_is_ever_used_and_no_healthy_slot_isolated() -> None:
    for seed in range(30):
        violation = run_storm(draw_storm(seed, "flips"), cluster=True).violation
        assert violation is None, f"{seed} of flips: {violation}"


def test_steps_with_a_nan_are_computed_again_and_nothing_breaks() -> None:
    """Of the data and of machines, with and without votes, while workers die."""
    found = set()
    for seed in (*range(8), 18, 21):
        spec = draw_storm(seed, "spikes")
        found.add((spec.spike is not None, spec.rules.vote_every > 0))
        violation = run_storm(spec, cluster=True).violation
        assert violation is None, f"{seed} of spikes: {violation}"
    assert len(found) == 4


def test_a_machine_that_computes_wrong_numbers_is_named_and_what_it_spoiled_is_done_again() -> None:
    """While workers die and links break, and with votes on some steps only."""
    in_a_broken_step = 15  # its checkpoint was committed, and the task went back to it
    for seed in (*range(6), in_a_broken_step):
        violation = run_storm(draw_storm(seed, "corruption"), cluster=True).violation
        assert violation is None, f"{seed} of corruption: {violation}"


def test_without_votes_wrong_numbers_are_used() -> None:
    """The checkers see what votes prevent."""
    spec = draw_storm(0, "flips")
    blind = replace(spec, rules=replace(spec.rules, vote_every=0))
    assert "exactly once" in (run_storm(blind, cluster=True).violation or "")


def test_twenty_five_storms_with_sharded_states_break_nothing() -> None:
    mended_after_an_update = (99, 110)  # weights of the step before were sent again, and were gone
    for seed in (*range(25), *mended_after_an_update):
        violation = run_storm(with_sharded_states(draw_spec(seed))).violation
        assert violation is None, f"seed {seed}, sharded: {violation}"


def test_a_failing_storm_shrinks_to_fewer_faults() -> None:
    with planted("ledger_without_done_before"):
        spec = draw_spec(SEEN_AT["ledger_without_done_before"])
        few = shrink(spec)
        assert run_storm(spec.keep(few)).violation is not None
        assert len(few) < len(spec.faults)
        for i in few:
            rest = tuple(j for j in few if j != i)
            assert run_storm(spec.keep(rest)).violation is None


@pytest.mark.parametrize("name", SEEN_IN_A_CLUSTER)
def test_a_bug_planted_in_an_agent_or_a_worker_s_loop_is_seen(name: str) -> None:
    spec = draw_storm(SEEN_IN_A_CLUSTER[name], "cluster")
    with planted(name):
        assert run_storm(spec, cluster=True).violation is not None
    assert run_storm(spec, cluster=True).violation is None


@pytest.mark.parametrize("name", SEEN_IN_MOVES)
def test_a_bug_planted_in_states_in_memory_is_seen(name: str) -> None:
    with planted(name):
        assert violation_of("moves", SEEN_IN_MOVES[name]) is not None
    assert violation_of("moves", SEEN_IN_MOVES[name]) is None


@pytest.mark.parametrize("name", SEEN_WITH_CANCELS)
def test_a_cancel_that_is_lost_is_seen(name: str) -> None:
    with planted(name):
        assert violation_of("plans", SEEN_WITH_CANCELS[name]) is not None
    assert violation_of("plans", SEEN_WITH_CANCELS[name]) is None


@pytest.mark.parametrize("name", sorted(set(TIMER_MUTANTS) - SEEN_IN_TESTS))
def test_a_timer_that_is_removed_is_seen(name: str) -> None:
    """As a state without a deadline, before anything comes to wait for it."""
    kinds: dict[StormKind, dict[str, int]] = {
        "hangs": SEEN_WITH_HANGS,
        "flips": SEEN_WITH_FLIPS,
        "cuts": SEEN_WITH_CUTS,
        "plans": SEEN_WITH_PLANS,
    }
    ((kind, seed),) = ((kind, seen[name]) for kind, seen in kinds.items() if name in seen)
    with planted(name):
        assert "has no timer" in (violation_of(kind, seed) or "")
    assert violation_of(kind, seed) is None


def test_twenty_five_storms_with_hangs_break_nothing() -> None:
    """Processes that never start, disks that never answer, copies that never end, nodes that leave."""
    struck = set()
    for seed in range(25):
        report = run_storm(draw_storm(seed, "hangs"), cluster=True)
        assert report.violation is None, f"{seed} of hangs: {report.violation}"
        struck |= {fault.split()[0] for fault in report.faults_struck}
    assert set(OF_HANGS) <= struck, "some kind of fault never struck"


def test_twenty_storms_with_agents_that_are_replaced_break_nothing() -> None:
    """The next agent has the record of the one before; workers train on meanwhile, and some die."""
    struck = set()
    for seed in range(20):
        report = run_storm(draw_storm(seed, "agents"), cluster=True)
        assert report.violation is None, f"{seed} of agents: {report.violation}"
        struck |= {fault.split()[0] for fault in report.faults_struck}
    assert set(OF_AGENTS) <= struck


def test_fifteen_storms_with_a_dead_data_network_leave_that_node_and_no_other() -> None:
    """For good, with the agent's line intact; that no healthy node is isolated is checked in every storm."""
    left = 0
    for seed in range(15):
        report = run_storm(draw_storm(seed, "cuts"), cluster=True, record=True)
        assert report.violation is None, f"{seed} of cuts: {report.violation}"
        left += any("on the data network, though its agent is heard" in line for line in report.transcript)
    assert left >= 5


def test_fifteen_storms_with_a_planner_and_pauses_break_nothing() -> None:
    """It gives the task fewer workers or none, takes them back, and an operator pauses and resumes it."""
    paused = 0
    for seed in range(15):
        report = run_storm(draw_storm(seed, "plans"), cluster=True, record=True)
        assert report.violation is None, f"{seed} of plans: {report.violation}"
        paused += any("TaskEnded" in line and "paused" in line for line in report.transcript)
    assert paused >= 3


def test_twelve_storms_in_which_an_operator_cancels_leave_nothing_behind() -> None:
    """At any moment: before its first worker, in a recovery, while it is paused."""
    cancelled = 0
    storms = (draw_storm(seed, "plans") for seed in count())
    for spec in islice((spec for spec in storms if spec.cancel_us is not None), 12):
        report = run_storm(spec, cluster=True, record=True)
        assert report.violation is None, f"{spec.seed} of plans: {report.violation}"
        cancelled += any("TaskEnded" in line and "cancelled" in line for line in report.transcript)
    assert cancelled >= 6


def test_storms_beside_other_tasks_break_nothing() -> None:
    """They compete for slots with the task that is simulated in full, and die and are cancelled meanwhile."""
    seen = Counter[str]()
    for seed in range(28):
        report = run_storm(draw_storm(seed, "tasks"), cluster=True, record=True)
        assert report.violation is None, f"{seed} of tasks: {report.violation}"
        ended = [line for line in report.transcript if "TaskEnded(task='other-" in line]
        seen.update(state for state in ("finished", "cancelled") for line in ended if state in line)
        seen["died"] += any("the worker of other-" in line for line in report.transcript)
    assert seen["finished"] >= 25
    assert seen["cancelled"] >= 2
    assert seen["died"] >= 5


def test_fifteen_storms_on_crowded_nodes_break_nothing() -> None:
    """With several replicas of a stage per node, whose gradients are added up there."""
    seen = Counter[str]()
    for seed in range(15):
        spec = draw_storm(seed, "crowded")
        report = run_storm(spec, cluster=True, record=True)
        assert report.violation is None, f"{seed} of crowded: {report.violation}"
        seen["gathered"] += any("GatherParts" in line for line in report.transcript)
        seen["sharded"] += bool(spec.rules.chunks)
    assert seen["gathered"] >= 10
    assert seen["sharded"] >= 2


def test_twenty_storms_around_a_deaf_coordinator_break_nothing() -> None:
    """In half of them nothing else goes wrong: no worker is ended, and no step done again."""
    seen = Counter[str]()
    for seed in range(20):
        spec = draw_storm(seed, "deaf")
        report = run_storm(spec, cluster=True)
        assert report.violation is None, f"{seed} of deaf: {report.violation}"
        struck = [fault for fault in report.faults_struck if fault.startswith("deaf")]
        seen["alone"] += bool(struck) and spec.is_deaf_only
        seen["to all"] += any("to all" in fault for fault in struck)
        seen["to one task"] += any("to one task" in fault for fault in struck)
    assert min(seen["alone"], seen["to all"], seen["to one task"]) >= 3


@pytest.mark.parametrize(
    ("name", "wrong", "seed"),
    [("_trains_unheard", lambda self, task: False, 33), ("_is_anyone_heard", True, 52)],
)
def test_a_listener_that_is_not_in_doubt_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any, seed: int
) -> None:
    monkeypatch.setattr(Silence, name, wrong)
    assert violation_of("deaf", seed) is not None
    monkeypatch.undo()
    assert violation_of("deaf", seed) is None


@pytest.mark.parametrize("name", SEEN_ON_CROWDED_NODES)
def test_a_planted_bug_of_crowded_nodes_is_seen(name: str) -> None:
    with planted(name):
        assert violation_of("crowded", SEEN_ON_CROWDED_NODES[name]) is not None
    assert violation_of("crowded", SEEN_ON_CROWDED_NODES[name]) is None


def test_a_lost_node_of_which_only_one_task_hears_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Roster.on_node

    def of_one_task(self: Roster, node: str) -> Any:
        return [(task, worker) for task, worker in right(self, node) if not task.name.startswith("other-")]

    monkeypatch.setattr(Roster, "on_node", of_one_task)
    found = (run_storm(draw_storm(seed, "tasks"), cluster=True).violation for seed in range(40))
    assert any(violation is not None for violation in found)


def test_a_snapshot_that_forgets_something_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cluster_world.thaw

    def forgetful(coordinator: Any, frozen: Any) -> None:
        right(coordinator, frozen)
        for node in coordinator.nodes.values():
            node.heard = 0

    monkeypatch.setattr(cluster_world, "thaw", forgetful)
    assert "a snapshot at entry" in (violation_of("cluster", 9) or "")


def test_every_planted_bug_has_a_seed() -> None:
    with_timers = set(SEEN_WITH_HANGS | SEEN_WITH_FLIPS | SEEN_WITH_CUTS | SEEN_WITH_PLANS)
    assert with_timers | SEEN_IN_TESTS == set(TIMER_MUTANTS)
    assert set(SEEN_WITH_CANCELS) == set(CANCEL_MUTANTS)
    assert set(SEEN_IN_MOVES) == set(MEMORY_MUTANTS)
    assert set(SEEN_AT) == set(MUTANTS)
    assert set(SEEN_IN_A_CLUSTER) == set(CLUSTER_MUTANTS)


def test_forty_storms_around_the_whole_cluster_break_nothing() -> None:
    """No slot owned twice, the journal replays, every incident closes, no node is isolated for nothing."""
    struck = set()
    for seed in range(40):
        report = run_storm(draw_storm(seed, "cluster"), cluster=True)
        assert report.violation is None, f"{seed} of cluster: {report.violation}"
        struck |= {fault.split()[0] for fault in report.faults_struck}
    assert struck >= set(OF_CLUSTERS), "some kind of fault never struck"


def test_twelve_storms_with_states_in_memory_and_other_shapes_break_nothing() -> None:
    for seed in range(12):
        assert violation_of("moves", seed) is None


def test_the_cluster_s_storm_is_the_same_twice() -> None:
    hashes = [run_storm(draw_storm(seed, "cluster"), cluster=True).hash for seed in (3, 3, 4)]
    assert hashes[0] == hashes[1] != hashes[2]
