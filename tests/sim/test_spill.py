"""Spilled jobs, played: as the scheduler's own model has it if undisturbed, and sane if disturbed."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.profile import BlockProfile, Profile, Times
from plait.sim.background import Background
from plait.sim.played import Played
from plait.sim.spill import play_spill
from plait.sim.spilled_job import SpilledJob
from plait.sim.trace import Trace
from plait.spill.forecast import Machine
from plait.spill.makespan import Disk, Load, ShardLoad, lower_bound_ms, play
from plait.spill.partition import best_cut
from plait.spill.plan import Forecast, Shard, SpillPlan
from plait.spill.policies import Policy, ShardedLRTF, Sticky, View
from plait.strategy.demand import Demand
from plait.strategy.spilled import spill_intervals
from plait.timeline import Timeline
from plait.units import parse_bytes

MB = 10**6

shards = st.builds(
    ShardLoad,
    forward_ms=st.floats(0.0, 9.0),
    backward_ms=st.floats(0.0, 20.0),
    weight_bytes=st.integers(0, 40 * MB),
    moment_bytes=st.integers(0, 80 * MB),
)
loads = st.lists(
    st.tuples(st.integers(0, 4), st.lists(shards, min_size=1, max_size=4)), min_size=1, max_size=6
).map(
    lambda found: [
        Load(name=f"job{place}", steps=steps, shards=tuple(its)) for place, (steps, its) in enumerate(found)
    ]
)
policies = st.sampled_from([Sticky(), ShardedLRTF()])


def two_jobs(steps: int = 3) -> list[Load]:
    shard = ShardLoad(forward_ms=2.0, backward_ms=4.0, weight_bytes=10 * MB, moment_bytes=20 * MB)
    return [Load(name=name, steps=steps, shards=(shard,) * 3) for name in ("a", "b")]


def spans(timeline: Timeline, track: str) -> list[tuple[str, float, float]]:
    """Those that take time."""
    return sorted(
        (s.name, s.start_ms, s.end_ms) for s in timeline.spans if s.track == track and s.end_ms > s.start_ms
    )


def enough(jobs: list[Load], devices: int) -> float:
    sizes = sorted((s.weight_bytes + s.moment_bytes for job in jobs for s in job.shards), reverse=True)
    return max(1, 2 * devices * sizes[0])


@given(
    jobs=loads,
    devices=st.integers(1, 4),
    policy=policies,
    room=st.sampled_from([1.0, 1.7, math.inf]),
    rates=st.tuples(*[st.sampled_from([1e8, 1.5e9, math.inf])] * 2),
)
@settings(max_examples=80, deadline=None)
def test_undisturbed_it_is_what_the_schedulers_own_model_says(
    jobs: list[Load], devices: int, policy: Policy, room: float, rates: tuple[float, float]
) -> None:
    disk = Disk(
        memory_bytes=room * enough(jobs, devices), read_bytes_per_s=rates[0], write_bytes_per_s=rates[1]
    )
    wanted, found = play(jobs, devices, policy, disk), play_spill(jobs, devices, policy, disk)
    assert found.makespan_ms == pytest.approx(wanted.makespan_ms, rel=1e-9)
    assert found.disk_bytes == (wanted.read_bytes, wanted.written_bytes)
    for track in (*(f"device{index}" for index in range(devices)), "read", "write"):
        assert spans(found.timeline, track) == spans(wanted.timeline, track)


@given(
    jobs=loads,
    devices=st.integers(1, 3),
    policy=policies,
    jitter=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_work_is_neither_lost_nor_made_and_no_device_does_two_things(
    jobs: list[Load], devices: int, policy: Policy, jitter: float, seed: int
) -> None:
    disk = Disk(memory_bytes=enough(jobs, devices), read_bytes_per_s=1e9, write_bytes_per_s=1e9)

    def asked() -> Played:
        return play_spill(jobs, devices, policy, disk, jitter=jitter, seed=seed)

    found = asked()
    assert found.to_json() == asked().to_json()
    for job in jobs:
        assert found.work_ms[job.name] == pytest.approx(job.work_ms)
        assert len(found.steps_ms[job.name]) == job.steps
    assert found.peak_bytes["memory"] <= disk.memory_bytes
    for track in found.timeline.tracks:
        its = sorted((start, end) for _, start, end in spans(found.timeline, track))
        assert all(b[0] >= a[1] for a, b in pairwise(its))
    if not jitter:
        assert found.makespan_ms >= lower_bound_ms(jobs, devices) * (1 - 1e-12)
        assert sum(found.busy_ms.values()) == pytest.approx(sum(job.work_ms for job in jobs))


def test_the_policy_is_asked_at_the_same_moments() -> None:
    class Noting(Sticky):
        def __init__(self) -> None:
            self.views: list[View] = []

        def choose(self, view: View) -> str | None:
            self.views.append(view)
            return super().choose(view)

    disk = Disk(memory_bytes=150 * MB, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    theirs, ours = Noting(), Noting()
    play(two_jobs(), 2, theirs, disk)
    play_spill(two_jobs(), 2, ours, disk)
    assert ours.views == theirs.views
    assert len(ours.views) > 20


def test_steps_of_a_job_add_up_to_its_end() -> None:
    found = play_spill(two_jobs(), 1, ShardedLRTF())
    assert max(sum(steps) for steps in found.steps_ms.values()) == pytest.approx(found.makespan_ms)


def test_a_device_of_half_the_speed_takes_twice_as_long() -> None:
    alone = play_spill(two_jobs()[:1], 1, Sticky())
    slow = play_spill(two_jobs()[:1], 1, Sticky(), speeds={0: 0.5})
    assert slow.makespan_ms == pytest.approx(2 * alone.makespan_ms)
    later = play_spill(two_jobs()[:1], 1, Sticky(), speeds={0: Trace.of([(0, 1.0), (18, 0.5)])})
    assert later.makespan_ms == pytest.approx(18 + 2 * (alone.makespan_ms - 18))


def test_a_disk_that_others_use_is_waited_for() -> None:
    disk = Disk(memory_bytes=120 * MB, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    steady = play_spill(two_jobs(), 1, ShardedLRTF(), disk)
    same = play_spill(two_jobs(), 1, ShardedLRTF(), disk, read=Trace.constant(1e9), write=Trace.constant(1e9))
    assert same.makespan_ms == pytest.approx(steady.makespan_ms)
    shared = play_spill(two_jobs(), 1, ShardedLRTF(), disk, read=Trace.of([(0, 1e9), (50, 1e8)]))
    assert shared.makespan_ms > steady.makespan_ms
    assert shared.disk_bytes == steady.disk_bytes


def test_background_works_while_devices_wait_for_the_disk() -> None:
    disk = Disk(memory_bytes=120 * MB, read_bytes_per_s=2e8, write_bytes_per_s=2e8)
    alone = play_spill(two_jobs(), 1, ShardedLRTF(), disk)
    beside = play_spill(
        two_jobs(), 1, ShardedLRTF(), disk, background=[Background(name="sweep", unit_ms=3.0)]
    )
    assert beside.makespan_ms == pytest.approx(alone.makespan_ms)
    assert beside.work_ms["sweep"] == pytest.approx(alone.makespan_ms - alone.busy_ms["device0"])


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"devices": 0}, "devices"),
        ({"jobs": two_jobs() + two_jobs()}, "jobs"),
        ({"background": [Background(name="a", unit_ms=1.0)]}, "jobs"),
        ({"speeds": {2: 0.5}}, "speeds"),
        ({"below": Disk(read_bytes_per_s=0.0)}, "read"),
        ({"jitter": -1.0}, "jitter"),
    ],
)
def test_bad_input_is_refused(wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        play_spill(**{"jobs": two_jobs(), "devices": 2, "policy": Sticky(), **wrong})
    assert caught.value.setting == what


def test_too_little_memory_is_refused_with_one_that_works() -> None:
    with pytest.raises(UsageError) as caught:
        play_spill(two_jobs(), 2, Sticky(), Disk(memory_bytes=50 * MB))
    assert caught.value.setting == "memory_bytes"
    assert caught.value.works is not None
    play_spill(two_jobs(), 2, Sticky(), Disk(memory_bytes=parse_bytes(caught.value.works)))


def test_what_is_to_come_waits_where_memory_is_just_enough_for_what_is_at_work() -> None:
    rates = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}
    tight = play_spill(two_jobs(), 2, Sticky(), Disk(memory_bytes=60 * MB, **rates))
    roomy = play_spill(two_jobs(), 2, Sticky(), Disk(memory_bytes=120 * MB, **rates))
    assert tight.peak_bytes["memory"] <= 60 * MB
    assert tight.makespan_ms >= roomy.makespan_ms
    assert tight.work_ms == roomy.work_ms


def profile(batch: tuple[int, ...] = (4, 8)) -> Profile:
    return Profile(
        blocks=tuple(
            BlockProfile(
                name=f"b{place}",
                parameter_bytes=1000 * (place + 1),
                optimizer_bytes=2000 * (place + 1),
                output_bytes_per_sample=10,
                milliseconds={rows: Times(forward=1.0 * rows, backward=2.0 * rows) for rows in batch},
                optimizer_milliseconds=0.5,
            )
            for place in range(4)
        )
    )


def spill_plan(*modes: str) -> SpillPlan:
    forecast = Forecast(
        arena_peak_bytes=0, private_peak_bytes=0, kept_bytes=0, disk_bytes=0, read_bytes=0, written_bytes=0,
        compute_ms=0.0, read_ms=0.0, write_ms=0.0, step_ms=0.0,
    )  # fmt: skip
    cut = tuple(
        Shard(first=2 * place, end=2 * place + 2, activations=mode, saved_bytes=70)  # type: ignore[arg-type]
        for place, mode in enumerate(modes)
    )
    return SpillPlan(shards=cut, arena_bytes=1, private_bytes=1, window_bytes=1, forecast=forecast)


@pytest.mark.parametrize(
    ("mode", "again_ms", "spilled"), [("keep", 0.0, 0), ("recompute", 16.0, 0), ("spill", 0.0, 140)]
)
def test_a_job_is_made_from_a_plan_and_a_profile(mode: str, again_ms: float, spilled: int) -> None:
    job = SpilledJob(
        name="a",
        plan=spill_plan(mode, mode),
        profile=profile(),
        batch=8,
        steps=2,
        micro_batches=2,
        unit_ms=0.25,
    )
    first, last = job.load.shards
    assert first.forward_ms == 2 * 8.0 + 0.25
    assert first.backward_ms == again_ms + 2 * 16.0 + 2 * 0.5 + 2 * 0.25
    assert (first.weight_bytes, first.moment_bytes) == (3000, 6000 + spilled)
    assert last == ShardLoad(forward_ms=16.0, backward_ms=33.5, weight_bytes=7000, moment_bytes=14000)
    found = play_spill([job], 1, Sticky())
    assert found.makespan_ms == pytest.approx(job.load.work_ms)
    assert found.decisions == ()


@pytest.mark.parametrize("unit_ms", [0.5, 3.0])
def test_a_job_that_moves_nothing_takes_what_its_plan_forecasts(unit_ms: float) -> None:
    demand = Demand(name="a", profile=profile(), batch=8)
    machine = Machine(
        arena_bytes=1 << 30,
        private_bytes=1 << 30,
        read_bytes_per_s=1e9,
        write_bytes_per_s=1e9,
        unit_ms=unit_ms,
    )
    plan = best_cut(spill_intervals(demand), machine, steps=2)
    assert plan.forecast.read_bytes == 0
    job = SpilledJob(name="a", plan=plan, profile=profile(), batch=8, steps=2, unit_ms=unit_ms)
    found = play_spill([job], 1, Sticky())
    assert found.steps_ms["a"] == pytest.approx([plan.forecast.step_ms] * 2)


def test_a_batch_that_was_not_measured_is_said() -> None:
    job = SpilledJob(name="a", plan=spill_plan("keep", "keep"), profile=profile(), batch=32, steps=1)
    (remark,) = play_spill([job], 1, Sticky()).decisions
    assert remark == "a: batch 32 lies beyond the measured 4 to 8 of block 'b0'"


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"plan": spill_plan("keep")}, "profile"),
        ({"micro_batches": 9}, "micro_batches"),
        ({"steps": 0}, "steps"),
        ({"batch": 0}, "batch"),
        ({"unit_ms": -0.1}, "unit_ms"),
        ({"unit_ms": math.nan}, "unit_ms"),
    ],
)
def test_a_job_that_does_not_fit_its_profile_is_refused(wrong: dict[str, Any], setting: str) -> None:
    fine = {"name": "a", "plan": spill_plan("keep", "keep"), "profile": profile(), "batch": 8, "steps": 1}
    with pytest.raises(UsageError) as caught:
        SpilledJob(**{**fine, **wrong})
    assert caught.value.setting == setting
