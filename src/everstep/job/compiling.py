"""Whether the layers of a task are compiled: what `compile = "auto"` means, decided once per task.

Compiled layers have other last bits than eager ones (`engine.layers.regions`). So all workers of a task,
those that replace them, and every later run from its checkpoints must do the same. It is decided before the
first worker starts, from the job alone, and goes to the workers as true or false; checkpoints say which. A
run that resumes keeps what its checkpoint says. Nothing is measured: two nodes could measure differently.

True is what was measured to be faster after the first steps, and what cannot end a run that works without it:

    GPUs                      on CPUs compiling takes minutes
    many steps                compiling takes about 10 s
    models that were tried    another one's layers may have code that cannot be compiled
    rows of one length        each length is compiled by itself, up to a limit that ends the run
    large microbatches        otherwise the host is the limit, and compiled layers cost it more time
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from everstep.errors import UserError
from everstep.job.job import DataSpec, Job
from everstep.job.tables import shown

LEAST_STEPS = 200
# Numbers in what a microbatch hands from layer to layer. Compiled, on an H200: a GPT of width 1024
# is slower at 4 M and as fast at 8 M, one of 2048 a fifth faster at 32 M; a Llama of 2048 is a fifth faster
# at 16 M, a Qwen3-MoE of 1024 three times as fast at 8 M.
LEAST_NUMBERS = {"preset": 16 << 20, "hf": 8 << 20}
TRIED = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss")  # of Hugging Face, on a GPU, killed and healed


class CompileChoice(NamedTuple):
    compile: bool
    because: str  # empty: the job says it

    def __str__(self) -> str:
        return f'compile = "auto" is {str(self.compile).lower()}: {self.because}'


def choice_for(
    job: Job, *, kept: bool | None = None, unable: str = "", microbatch: int | None = None
) -> CompileChoice:
    """`kept`: what the checkpoint that it resumes from says; None: there is none. `unable`: why a machine
    that it runs on cannot compile. `microbatch`: tokens in each, of data of a script; None: not known.
    """
    if job.compile != "auto":
        return CompileChoice(job.compile, "")
    if job.recompute_part == "attention":  # which goes with eager layers only: so the job says it
        return CompileChoice(False, "")
    if kept is not None:
        return CompileChoice(kept, f"the run that it resumes was {'compiled' if kept else 'not compiled'}")
    against = _against(job, microbatch or _tokens(job))
    because = next((sentence for holds, sentence in against if holds), unable)
    if because:
        return CompileChoice(False, because)
    return CompileChoice(True, f"fused layers are faster, and {job.steps} steps are worth compiling them")


def settled(job: Job, choice: CompileChoice, *, unable: str = "") -> Job:
    """The job as its workers get it."""
    if choice.compile and unable:
        said = f" ({choice.because})" if choice.because else ""
        raise UserError(refusal(unable, said))
    return replace(job, compile=choice.compile)


def refusal(unable: str, said: str = "") -> str:
    return (
        f"compile = true{said} cannot be done on this machine: {unable}; install what is missing, or set "
        "compile = false."
    )


def _against(job: Job, tokens: int | None) -> list[tuple[bool, str]]:
    """What speaks against it, and whether it holds."""
    theirs = job.hf_kind()
    kind = "hf" if theirs is not None else "preset" if job.model.preset else None
    width, least = job.width(), LEAST_NUMBERS.get(kind or "", 0)
    numbers = None if tokens is None or width is None else tokens * width
    small = numbers is not None and numbers < least
    return [
        (job.device != "cuda", "on CPUs compiling takes minutes and saves little"),
        (job.steps < LEAST_STEPS, f"compiling is not worth it for less than {LEAST_STEPS} steps"),
        (job.python is not None, "it is not known whether the Python of its workers can compile"),
        (job.shards > 1, "layers that are split over shards are not compiled"),
        (kind is None, "the layers are your own, and may have code that cannot be compiled"),
        (kind == "hf" and theirs not in TRIED, f"it has not been tried with {theirs} models; true tries it"),
        (tokens is None, "the rows of the data may have many lengths, and each is compiled by itself"),
        (numbers is None, "the width of the model is not known"),
        (
            small,
            f"a microbatch has {(numbers or 0) / 2**20:.3g} M numbers per layer, and with less than "
            f"{least >> 20} M compiled layers are not faster",
        ),
    ]


def _tokens(job: Job) -> int | None:
    """In every microbatch, where a job file says that they are alike."""
    language = job.language()
    specs = [job.data, *([] if job.evaluation is None else [job.evaluation.data])]
    length = job.data.sequence or (None if language is None else language[1])
    return job.data.rows * length if length and all(map(_is_even, specs)) else None


def _is_even(data: DataSpec) -> bool:
    """Have all its rows one length?"""
    return data.kind in ("synthetic", "tokens") or (data.kind == "table" and data.pack)


# ------------------------------------------------------------------ what this machine can do


def why_unable(device: str, environment: Mapping[str, str] = os.environ) -> str:
    """Why torch.compile cannot make code for this device here; empty: nothing is known to be missing."""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    language, named, usual = ("C", "CC", "gcc clang cc") if device == "cuda" else ("C++", "CXX", "g++")
    given = environment.get(named, "").split()[:1]  # ccache gcc: the first word is what is started
    wanted = given or usual.split()
    if not any(shutil.which(name, path=environment.get("PATH")) for name in wanted):
        return f"there is no {language} compiler ({' or '.join(map(shown, wanted))})"
    has_header = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
    if not has_header and not environment.get("CPATH") and not environment.get("C_INCLUDE_PATH"):
        return "Python's headers are not installed (package python3-dev or python3-devel)"
    return ""
