"""The third act: that its models do not fit in its budget, so that there is something to see."""

import math

import pytest

from plait.demo import spill
from plait.spill.describe import construct
from plait.units import parse_bytes

LEAST_PROCESS_BYTES = 200 << 20
"""Of an interpreter with torch and transformers; there are three."""


def test_what_the_jobs_hold_is_more_than_the_processes_leave_of_the_budget():
    pytest.importorskip("transformers")
    weights, moments = 1, 2
    held = sum(
        (weights + moments) * 4 * sum(math.prod(p.shape) for p in construct(job).parameters())
        for job in spill.jobs()
    )
    assert held > parse_bytes(spill.MEMORY, setting="memory") - 3 * LEAST_PROCESS_BYTES
