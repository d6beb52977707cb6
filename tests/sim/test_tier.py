"""Disk and memory."""

import math

import pytest

from plait.errors import UsageError
from plait.sim import Disk, Memory, Simulation, Trace
from plait.timeline import Span


def test_a_disk_reads_one_thing_at_a_time_and_writes_beside_that():
    simulation, ends = Simulation(), []
    disk = Disk(simulation, read=1000, write=500)
    assert disk.read("a", 100, lambda: ends.append(("read a", simulation.now_ms))) == 100
    assert disk.read("b", 50, lambda: ends.append(("read b", simulation.now_ms))) == 150
    assert disk.write("c", 100, lambda: ends.append(("write c", simulation.now_ms))) == 200
    simulation.run()
    assert ends == [("read a", 100), ("read b", 150), ("write c", 200)]
    assert simulation.timeline.spans == (
        Span("read", "a", 0, 100), Span("write", "c", 0, 200), Span("read", "b", 100, 150),
    )  # fmt: skip
    assert (disk.read_bytes, disk.written_bytes) == (150, 100)


def test_a_read_may_have_to_wait_for_a_write_and_holds_up_those_behind_it():
    simulation = Simulation()
    disk = Disk(simulation, read=1000, write=500, name="node0")
    written_ms = disk.write("a", 100)
    assert disk.read("b", 100, earliest_ms=written_ms) == 300
    assert disk.read("c", 100) == 400
    assert simulation.timeline.tracks == ("node0 read", "node0 write")
    simulation.run(until_ms=1000)
    assert disk.read("d", 10) == 1010


def test_a_disk_that_others_use_too():
    simulation = Simulation()
    disk = Disk(simulation, read=Trace.of([(0, 1000), (100, 250)]))
    assert disk.read("a", 150) == 300
    assert disk.write("b", 10**9) == 0
    assert [span.name for span in simulation.timeline.spans] == ["a"]


def test_memory_knows_what_it_held_at_most():
    memory = Memory("node0", 100)
    memory.hold(60)
    memory.hold(40)
    memory.free(50)
    memory.hold(10)
    assert (memory.used_bytes, memory.peak_bytes) == (60, 100)
    with pytest.raises(UsageError, match="node0 holds 60 B of 100 B, and 41 B more do not fit"):
        memory.hold(41)
    with pytest.raises(UsageError, match="61 bytes to free, and node0 holds 60"):
        memory.free(61)
    with pytest.raises(UsageError, match="-1 bytes to hold"):
        memory.hold(-1)
    assert (memory.used_bytes, memory.peak_bytes) == (60, 100)


@pytest.mark.parametrize("rates", [{"read": 0.0}, {"write": -1.0}, {"read": math.nan}])
def test_a_disk_has_a_rate(rates):
    with pytest.raises(UsageError, match="a disk with"):
        Disk(Simulation(), **rates)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="memory 'a' has 0 bytes"):
        Memory("a", 0)
    with pytest.raises(UsageError, match="'a' has -1 bytes"):
        Disk(Simulation()).read("a", -1)
