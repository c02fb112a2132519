"""Who is hung, who is slow: from communication records to syndrome to suspects, with evidence.

    dump = read(name, content)          any file: Flight Recorder, NCCL Inspector, NCCL RAS, our ring
    diagnosis = analyse(dumps)          one job: hangs, slow links, slow ranks, imbalances

`live_diagnosis.DiagnosisStream` is the same for a job that is running.
"""

from everstep.diagnose.case import Case, join
from everstep.diagnose.comm_record import Dump, Group, Log, Record
from everstep.diagnose.finding import Diagnosis, Finding, Imbalance, Suspect, Syndrome, Where
from everstep.diagnose.flight import UnusableFileError
from everstep.diagnose.sources import read
from everstep.diagnose.verdict import analyse

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
