"""Playing jobs: by hand, against all schedules there are, and over many seeds."""

import functools
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.spill.makespan import Disk, Load, ShardLoad, lower_bound_ms, play
from plait.spill.policies import ShardedLRTF, Sticky

POLICIES = [ShardedLRTF(), Sticky()]


def job(name, *shards, steps=1, nbytes=0):
    made = tuple(ShardLoad(forward_ms=ms, backward_ms=2 * ms, weight_bytes=nbytes) for ms in shards)
    return Load(name=name, steps=steps, shards=made)


def computed(played):
    return [
        (span.track, span.name, span.start_ms, span.end_ms)
        for span in played.timeline.spans
        if span.track.startswith("device")
    ]


def test_a_job_by_itself():
    played = play([job("a", 1, 2)], 1, ShardedLRTF())
    assert computed(played) == [
        ("device0", "a forward 0", 0, 1),
        ("device0", "a turn 1", 1, 7),
        ("device0", "a backward 0", 7, 9),
    ]
    assert played.makespan_ms == played.lower_bound_ms == 9
    assert played.over == 1
    assert played.stall_ms == 0


def test_lrtf_changes_the_job_with_every_unit_and_sticky_does_not():
    jobs = [job("a", 1, 1, steps=9), job("b", 1, 1, steps=9)]
    changes = {}
    for policy in POLICIES:
        names = [name.split()[0] for _, name, _, _ in computed(play(jobs, 1, policy))]
        changes[type(policy)] = sum(a != b for a, b in itertools.pairwise(names))
    assert changes[ShardedLRTF] > 40
    assert changes[Sticky] < 15


def test_transfers_hide_behind_computing_where_they_can():
    # 10 bytes a shard at 1 byte a millisecond; the first load has nothing to hide behind.
    slow = Disk(memory_bytes=30, read_bytes_per_s=1e3, write_bytes_per_s=1e3)
    hidden = play([job("a", 20, 20, nbytes=10)], 1, Sticky(), slow)
    assert (hidden.stall_ms, hidden.read_bytes, hidden.written_bytes) == (10, 20, 0)
    bare = play([job("a", 1, 1, nbytes=10)], 1, Sticky(), slow)
    assert bare.makespan_ms == 10 + 10 + 3 + 2  # the second load takes longer than the first unit computes


def test_memory_that_is_too_small_moves_more():
    jobs = [job(name, 1, 1, 1, steps=3, nbytes=10) for name in "abc"]
    moved = [
        play(jobs, 1, ShardedLRTF(), Disk(memory_bytes=memory, read_bytes_per_s=1e4, write_bytes_per_s=1e4))
        for memory in (30, 60, 90)
    ]
    assert moved[0].read_bytes > moved[1].read_bytes > moved[2].read_bytes == 90
    assert moved[0].written_bytes > 0
    assert moved[2].written_bytes == 0


def test_memory_holds_no_more_than_it_can():
    source = random.Random(0)
    jobs = [job(f"j{i}", *[source.uniform(1, 5)] * 4, steps=4, nbytes=100) for i in range(5)]
    for policy in POLICIES:
        played = play(jobs, 2, policy, Disk(memory_bytes=800, read_bytes_per_s=1e5, write_bytes_per_s=1e5))
        # Bytes in memory: what was read less what had to leave; a segment that leaves comes back by a read.
        reads = [span for span in played.timeline.spans if span.track == "read"]
        assert played.read_bytes == 100 * len(reads)
        assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in itertools.pairwise(reads))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_runs_one_unit_at_a_time_in_order(policy):
    source = random.Random(1)
    jobs = [
        job(f"j{i}", *(source.uniform(1, 5) for _ in range(3)), steps=source.randint(1, 5)) for i in range(6)
    ]
    played = play(jobs, 3, policy)
    for load in jobs:
        own = [span for span in computed(played) if span[1].split()[0] == load.name]
        assert [name.split()[1:] for _, name, _, _ in own] == load.steps * [
            [phase, str(shard)] for phase, shard, _ in load.units
        ]
        assert all(a[3] <= b[2] + 1e-9 for a, b in itertools.pairwise(own))
    for device in range(3):
        own = [span for span in computed(played) if span[0] == f"device{device}"]
        assert all(a[3] <= b[2] + 1e-9 for a, b in itertools.pairwise(own))


def shortest(jobs, devices):
    """The shortest of all schedules in which no device waits without need, by trying every choice."""
    units = [[ms for _ in range(load.steps) for _, _, ms in load.units] for load in jobs]

    @functools.cache
    def rest(done, running):
        """From a moment at which some units run (job, time left), the time until all is done."""
        busy = {index for index, _ in running}
        ready = [i for i in range(len(jobs)) if i not in busy and done[i] < len(units[i])]
        if not ready and not running:
            return 0.0
        options = []
        if len(running) < devices:
            for i in ready:
                started = tuple(sorted((*running, (i, units[i][done[i]]))))
                options.append(rest(done, started))
        if running and (len(running) == devices or not ready):
            passed = min(left for _, left in running)
            after = list(done)
            for index, left in running:
                after[index] += left == passed
            going = tuple((index, left - passed) for index, left in running if left > passed)
            options.append(passed + rest(tuple(after), going))
        return min(options)

    return rest((0,) * len(jobs), ())


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=4
    ),
    devices=st.integers(1, 3),
)
def test_against_all_schedules(sizes, devices):
    jobs = [job(f"j{i}", *[ms] * shards, steps=steps) for i, (shards, ms, steps) in enumerate(sizes)]
    best = shortest(jobs, devices)
    assert best >= lower_bound_ms(jobs, devices) - 1e-9
    for policy in POLICIES:
        took = play(jobs, devices, policy).makespan_ms
        assert took >= best - 1e-9
        # Choosing ahead is not quite choosing when idle, so Graham's bound gets a unit more.
        longest = max(ms for load in jobs for _, _, ms in load.units)
        assert took <= (2 - 1 / devices) * best + longest


def unequal(seed, count=8):
    source = random.Random(seed)
    jobs = []
    for i in range(count):
        nbytes, factor = source.uniform(2e7, 8e7), source.uniform(6, 12)
        jobs.append(
            Load(
                name=f"job{i}",
                steps=source.randint(3, 12),
                shards=tuple(
                    ShardLoad(
                        forward_ms=nbytes / 1e6 * factor * source.uniform(0.8, 1.2),
                        backward_ms=2 * nbytes / 1e6 * factor,
                        weight_bytes=int(nbytes),
                        moment_bytes=int(2 * nbytes),
                    )
                    for _ in range(source.randint(2, 5))
                ),
            )
        )
    return jobs


@pytest.mark.parametrize("seed", range(6))
def test_sticky_is_near_the_bound_and_moves_less(seed):
    jobs = unequal(seed)
    state = sum(shard.weight_bytes + shard.moment_bytes for load in jobs for shard in load.shards)
    disk = Disk(memory_bytes=0.35 * state, read_bytes_per_s=1.5e9, write_bytes_per_s=1.2e9)
    lrtf, sticky = (play(jobs, 2, policy, disk) for policy in POLICIES)
    assert sticky.over <= 1.05
    assert sticky.read_bytes + sticky.written_bytes < lrtf.read_bytes + lrtf.written_bytes
    # Where transfers hide altogether both end within a unit of the bound, and of each other.
    unit = max(ms for load in jobs for _, _, ms in load.units)
    assert sticky.makespan_ms <= lrtf.makespan_ms + 0.25 * unit


def test_what_cannot_be_played_is_refused():
    with pytest.raises(UsageError, match="0 devices"):
        play([job("a", 1)], 0, Sticky())
    with pytest.raises(UsageError, match="same name"):
        play([job("a", 1), job("a", 1)], 1, Sticky())


def test_nothing_to_do_takes_no_time():
    assert play([], 2, Sticky()).makespan_ms == 0
    assert play([job("a", 1, steps=0)], 2, Sticky()).over == 1
