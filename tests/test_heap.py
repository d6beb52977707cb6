import subprocess
import sys

import pytest

SCRIPT = """
import resource
import sys

from plait import heap

getattr(heap, sys.argv[1])()


def step() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [bytearray(b"x" * (8 << 20)) for _ in range(4)]
    del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


step()
print(step())
"""
PAGES = 4 * (8 << 20) // 4096


@pytest.mark.parametrize(("choice", "least", "most"), [("keep_freed", 0, 100), ("return_freed", PAGES, 1e9)])
def test_the_next_step_faults_only_on_what_was_given_back(choice, least, most):
    done = subprocess.run([sys.executable, "-c", SCRIPT, choice], capture_output=True, text=True, check=True)
    assert least <= int(done.stdout) <= most
