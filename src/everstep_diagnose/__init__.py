"""Who is hung, who is slow: from communication records to syndrome to suspects, with evidence.

    dump = read(name, content)          any file: Flight Recorder, NCCL Inspector, NCCL RAS, our ring
    diagnosis = analyse(dumps)          one job: hangs, slow links, slow ranks, imbalances

It needs numpy, and of `everstep` only what reads files and prints: neither torch nor a running job.
"""

from everstep_diagnose.case import Case, join
from everstep_diagnose.comm_record import Dump, Group, Log, Record
from everstep_diagnose.finding import Diagnosis, Finding, Imbalance, Suspect, Syndrome, Where
from everstep_diagnose.flight import UnusableFileError
from everstep_diagnose.sources import read
from everstep_diagnose.verdict import analyse

__all__ = [
    "Case",
    "Diagnosis",
    "Dump",
    "Finding",
    "Group",
    "Imbalance",
    "Log",
    "Record",
    "Suspect",
    "Syndrome",
    "UnusableFileError",
    "Where",
    "analyse",
    "join",
    "read",
]
