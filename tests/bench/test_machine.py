"""The machine and what else it does."""

import os
import platform

import pytest

from plait.bench import machine
from plait.bench.machine import Moment


def test_the_machine_is_described() -> None:
    found = machine.describe()
    assert found["cores"] == os.cpu_count()
    assert 1 <= found["cores_usable"] <= found["cores"]
    assert found["memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert platform.release() in found["kernel"]
    assert found["cpu"]


def test_versions_are_read_without_importing() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from plait.bench.machine import versions; print(versions()['torch']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == machine.versions()["torch"]


def test_processor_time_is_shared_out() -> None:
    cores = os.cpu_count() or 1
    before = Moment(busy=10, idle=20, steal=1, own=5)
    after = Moment(busy=10 + 60, idle=20 + 30, steal=1 + 10, own=5 + 40)
    found = after.since(before)
    assert found.steal == pytest.approx(0.1)
    assert found.others == pytest.approx(0.2, abs=0.01 * cores / 100 + 1e-9)
    assert found.seconds == pytest.approx(100 / cores)
    assert found.disturbed


@pytest.mark.parametrize(
    ("steal", "others", "disturbed"), [(0.0, 0.0, False), (0.03, 0.0, True), (0.01, 0.2, True)]
)
def test_a_measurement_is_disturbed_by_steal_or_by_others(
    steal: float, others: float, disturbed: bool
) -> None:
    assert machine.Activity(seconds=1, steal=steal, others=others).disturbed is disturbed


def test_a_tick_in_the_wrong_column_disturbs_nothing() -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    before = Moment(busy=0, idle=0, steal=0, own=0)
    assert Moment(busy=tick, idle=3 * tick, steal=0, own=0).since(before).others == 0


def test_own_work_is_not_held_against_the_machine() -> None:
    before = Moment.now()
    while Moment.now().own - before.own < 0.05:
        sum(range(10_000))
    after = Moment.now()
    assert after.own > before.own
    assert 0 <= after.since(before).others <= 1


def test_what_the_hypervisor_left_is_a_share_of_what_was_wanted() -> None:
    before = Moment(busy=10, idle=20, steal=1, own=5)
    assert Moment(busy=10 + 30, idle=99, steal=1 + 10, own=5).left(before) == 0.75
    assert Moment(busy=10 + 30, idle=99, steal=1, own=5).left(before) == 1
    assert before.left(before) == 1
