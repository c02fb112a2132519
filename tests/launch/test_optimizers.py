"""Optimizers that are not torch's, trained by real workers: clean, healed and resumed runs end with the bits
of a plain loop of torch, or the job is refused.
"""

import importlib.util
from pathlib import Path

import pytest

from everstep.node.fork_server import ForkServer
from harness.sweep import Sweep
from tests.launch import foreign_optimizers
from tests.launch.optimizer_runs import compared, job_of

TOYS = Path(__file__).parents[1] / "engine"
EQUAL = {"clean": 0.0, "healed": 0.0, "resumed": 0.0}
COUPLED = {"prodigy", "dadaptation"}  # one number from all parameters
AROUND = {"lookahead"}


@pytest.fixture(scope="module")
def sweep(fork_server: ForkServer) -> Sweep:
    return Sweep(fork_server=fork_server)


@pytest.mark.parametrize(
    ("toy", "stages"),
    [
        ("GroupCount", 2),
        # What these keep is cut, saved and moved in `tests/engine/test_optimizer_state.py`.
        pytest.param("ListInState", 2, marks=pytest.mark.slow),
        pytest.param("Coupled", 1, marks=pytest.mark.slow),
        pytest.param("ObjectInState", 2, marks=pytest.mark.slow),
    ],
)
def test_a_toy_in_the_shape_of_one_from_pypi_trains_as_a_plain_loop_does(
    sweep: Sweep, toy: str, stages: int
) -> None:
    assert compared(job_of(f"toy_optimizers:{toy}", TOYS, stages=stages), sweep) == EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 1])
@pytest.mark.parametrize("name", foreign_optimizers.PACKAGES)
def test_one_from_pypi_trains_as_a_plain_loop_does_or_is_refused(
    sweep: Sweep, name: str, stages: int
) -> None:
    package = foreign_optimizers.PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    base = Path(foreign_optimizers.__file__).parent
    found = compared(job_of(f"foreign_optimizers:{name}", base, stages=stages), sweep)
    if name in AROUND:
        assert "its attribute 'optimizer' (AdamW)" in found["refused"]
    elif name in COUPLED and stages > 1:
        assert "use stages = 1" in found["refused"]
    else:
        assert found == EQUAL
