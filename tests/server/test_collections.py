"""Garbage is collected in idle moments, and only what is new: a full collection stopped decisions for 60 ms
with a task of 512 workers, in the middle of a recovery.
"""

import subprocess
import sys

# In a process of its own: what is set apart stays so.
SCRIPT = """
import gc, weakref
from everstep.server import term

class Knot:
    pass

def knot():
    one = Knot()
    one.self = one
    return weakref.ref(one)

apart = gc.get_freeze_count()  # Python 3.12 and its libraries may have some
term.collect_new()
assert gc.get_freeze_count() == apart, "a process that does not lead is left alone"
state = [[number] for number in range(100_000)]
term.keep_collections_short()
young, middle, full = (kind["collections"] for kind in gc.get_stats())
more = [[number] for number in range(500_000)]
assert gc.get_stats()[2]["collections"] == full, "a full collection in the middle of decisions"
assert gc.get_stats()[1]["collections"] == middle, "one of all that is new"
assert gc.get_stats()[0]["collections"] <= young + 11, "hundreds of small ones"
lost = knot()
apart = gc.get_freeze_count()
term.collect_new()
assert lost() is None, "new cycles are freed"
assert gc.get_freeze_count() > apart + 400_000
assert gc.get_count()[0] < 1000 and len(gc.get_objects()) < 10_000, "what survived is not looked at again"
"""


def test_only_what_is_new_is_collected_and_only_in_idle_moments() -> None:
    told = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
