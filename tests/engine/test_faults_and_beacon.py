from pathlib import Path

import pytest

from everstep.engine.telemetry.beacon import SIZE, Beacon
from everstep.engine.telemetry.faults import PlantedFault, check_fault, parse_fault
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec
from everstep.protocol.ops import Worker


@pytest.mark.parametrize(
    "text",
    [
        "stage=1,replica=0,step=7",
        "stage=1,replica=0,step=7,op=F3",
        "stage=0,replica=1,step=2,op=R,when=during",
        "stage=0,replica=1,step=2,op=U,when=after,how=raise",
        "stage=0,replica=1,step=2,op=W0.3",
    ],
)
def test_a_fault_has_a_text_form_with_an_exact_inverse(text: str) -> None:
    assert parse_fault(text).text() == text


def test_a_fault_strikes_its_own_microbatch() -> None:
    fault = PlantedFault(worker=Worker(1, 0), step=3, op="I2")
    assert fault.strikes(3, "I1.2", "before")
    assert not fault.strikes(3, "I0.2", "before")
    assert not fault.strikes(3, "W1.2", "before")
    assert not fault.strikes(4, "I1.2", "before")
    assert not fault.strikes(3, "I1.2", "after")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("stage=1", "replica"),
        ("stage=x,replica=0,step=1", "stage"),
        ("stage=0,replica=0,step=1,op=Q1", "op is"),
        ("stage=0,replica=0,step=1,when=never", "when is"),
        ("stage=0,replica=0,step=1,how=gently", "how is"),
        ("worker=1", "worker=1"),
    ],
)
def test_a_fault_that_is_not_one_is_explained_in_a_sentence(text: str, names: str) -> None:
    with pytest.raises(UserError, match=names):
        parse_fault(text)


@pytest.mark.parametrize(
    "text",
    [
        "stage=2,replica=0,step=1",
        "stage=0,replica=2,step=1",
        "stage=0,replica=0,step=9",
        "stage=0,replica=0,step=1,op=F4",
        "stage=0,replica=0,step=0",
        "stage=0,replica=0,step=1,shard=1",
    ],
)
def test_a_fault_that_can_never_strike_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--kill names"):
        check_fault(parse_fault(text), Job(model=ModelSpec(preset="gpt-tiny"), replicas=2, stages=2, steps=8))


def test_a_beacon_tells_the_last_words_of_a_worker_and_knows_a_torn_one(tmp_path: Path) -> None:
    reader = Beacon(tmp_path / "beacon", create=True)
    writer = Beacon(tmp_path / "beacon")
    assert reader.read() is None
    writer.write(at_ns=5, epoch=2, step=7, done=3, num_ops=9, busy=True, doing="1F0.3" + "x" * 99)
    reading = reader.read()
    assert reading is not None
    assert (reading.at_ns, reading.epoch, reading.step, reading.done, reading.busy) == (5, 2, 7, 3, True)
    assert reading.doing.startswith("1F0.3x")
    data = bytearray((tmp_path / "beacon").read_bytes())
    assert len(data) == SIZE
    data[0] = 3  # odd: its writer died inside
    (tmp_path / "beacon").write_bytes(data)
    assert Beacon(tmp_path / "beacon").read() is None
