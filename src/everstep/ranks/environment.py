"""What a rank finds in its environment: all that torchrun sets, and what makes PyTorch leave evidence.

A variable that the person has set is left alone, except those that say who a rank is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import UserError

# Only where unset. The flight recorder costs nothing measurable; a fault without it leaves no record.
FOR_DIAGNOSIS = {
    "TORCH_FR_BUFFER_SIZE": "2000",  # collectives remembered
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # NCCL's watchdog writes the record before it ends a rank
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun: a failed collective ends the rank
    "NCCL_DEBUG": "WARN",  # NCCL says on stderr what went wrong
}


MARK = "TORCHELASTIC_ERROR_FILE"  # no other rank, life or run has the same: whose child a process is


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank of one life. Without a word about its group, all ranks are on this machine."""

    rank: int
    ranks: int
    life: int
    restarts: int = 0  # after failures, before this life
    max_restarts: int
    run_id: str
    master_address: str
    master_port: int
    folder: Path  # of this rank in this life
    role: str = "default"
    group: int = 0  # the ranks of a machine
    num_groups: int = 1
    first_rank: int = 0  # of its group
    has_own_device: bool = False

    @property
    def local_rank(self) -> int:
        return self.rank - self.first_rank

    @property
    def ranks_here(self) -> int:
        return self.ranks // self.num_groups


def rank_environment(place: RankPlace, inherited: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in inherited.items() if name != "EVERSTEP_TOKEN"}
    return {**kept, **_unset(place, inherited), **_identity(place), **_own_device(place, inherited)}


def _identity(place: RankPlace) -> dict[str, str]:
    rank, ranks = str(place.rank), str(place.ranks)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(place.local_rank),
        "ROLE_RANK": rank,
        "GROUP_RANK": str(place.group),
        "ROLE_NAME": place.role,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": str(place.ranks_here),
        "ROLE_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": str(place.num_groups),
        "MASTER_ADDR": place.master_address,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        MARK: str(place.folder / "error.json"),
    }


def _own_device(place: RankPlace, inherited: Mapping[str, str]) -> dict[str, str]:
    """As torchrun's --virtual-local-rank: every rank is number 0, and sees one of the visible GPUs."""
    if not place.has_own_device:
        return {}
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    devices = [str(number) for number in range(place.ranks_here)] if visible is None else visible.split(",")
    if len(devices) < place.ranks_here:
        raise UserError(
            f"--virtual-local-rank needs a GPU for each of the {place.ranks_here} ranks, and "
            f"CUDA_VISIBLE_DEVICES is {visible!r}; give fewer ranks or more GPUs."
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[place.local_rank]}


def unset_by_user(inherited: Mapping[str, str], ranks_here: int) -> dict[str, str]:
    """What a process of this node's ranks gets besides, whichever rank it is."""
    wanted = dict(FOR_DIAGNOSIS)
    if ranks_here > 1:  # as torchrun: not every rank may take all cores
        wanted["OMP_NUM_THREADS"] = "1"
    return {name: value for name, value in wanted.items() if name not in inherited}


def _unset(place: RankPlace, inherited: Mapping[str, str]) -> dict[str, str]:
    wanted = unset_by_user(inherited, place.ranks_here)
    if "TORCH_FR_DUMP_TEMP_FILE" not in inherited:
        wanted["TORCH_FR_DUMP_TEMP_FILE"] = str(place.folder / "collectives_rank_")  # PyTorch adds it
    return wanted
