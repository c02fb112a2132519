"""Who is named in a trial of `bench.script_faults`, by what the launchers of all machines have written."""

from harness.blame_in_logs import incident_names, torchelastic_names


def test_torchelastic_is_believed_on_the_machine_that_was_struck() -> None:
    """NVRx may keep the third machine as a spare: then another one is struck."""
    failed = "failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: python"
    assert torchelastic_names({"n1": "", "n2": failed, "n3": ""}, "n2", 1, "")
    assert not torchelastic_names({"n1": "", "n2": "", "n3": failed}, "n2", 1, "")
    assert not torchelastic_names({"n2": failed}, "n2", 1, "n2"), "of machines it says nothing"


def test_incidents_name_a_rank_or_a_machine_wherever_the_coordinator_is() -> None:
    logs = {"n1": "", "n4": "incident 1: rank 12 was killed\nincident 2: node n2 is lost"}
    assert incident_names(logs, "n2", 12, "")
    assert not incident_names(logs, "n2", 1, "")
    assert incident_names(logs, "n2", 1, "n2")
