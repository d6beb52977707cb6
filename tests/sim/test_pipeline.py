"""Pipelines as they are played: exactly the planner's prediction where nothing else is there."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.cluster import Cluster, Device, Host, Link
from plait.errors import UsageError
from plait.pipeline.events import Load, predict
from plait.pipeline.orders import depth, gpipe, kfkb, listed, one_f_one_b, per_link_depth, work_conserving
from plait.pipeline.placement import placement
from plait.pipeline.plan import Forecast, PipelinePlan, Stage
from plait.pipeline.planning import plan as planned
from plait.profile import BlockProfile, Profile, Times
from plait.sim.background import Background
from plait.sim.network import Cross
from plait.sim.pipeline import play_pipeline
from plait.sim.staging import Staging
from plait.sim.trace import Trace


def plan_of(order, batch=None):
    """A stage for every block."""
    stages = tuple(Stage(first=i, end=i + 1) for i in range(order.stages))
    nothing = Forecast(step_ms=0.0, busy_ms=(0.0,) * order.stages, peak_bytes=(0,) * order.stages)
    return PipelinePlan(
        stages=stages, order=order, global_batch=batch or order.micro_batches, forecast=nothing
    )


def chain(stages, forward_ms=1.0, backward_ms=2.0, size=0, **more):
    times = {1: Times(forward=forward_ms, backward=backward_ms)}
    return Profile(
        blocks=tuple(
            BlockProfile(
                name=f"b{i}", parameter_bytes=0, output_bytes_per_sample=size, milliseconds=times, **more
            )
            for i in range(stages)
        )
    )


def uniform(stages, rate=1e6, **more):
    return Cluster.uniform(hosts=stages, memory="1TiB", bandwidth=rate, **more)


def predicted(plan, profile, cluster):
    """The planner's own prediction of the same step."""
    there = placement(cluster, plan.order.stages)
    loads = [
        Load(
            forward_ms=load.forward_ms / speed,
            backward_ms=load.backward_ms / speed,
            output_bytes=load.output_bytes,
            gradient_bytes=load.gradient_bytes,
        )
        for load, speed in zip(
            Staging.of(plan, profile).loads(plan.candidate.rows), there.speeds, strict=True
        )
    ]
    return predict(plan.order, loads, there.network, shares=plan.candidate.shares)


@st.composite
def orders(draw):
    stages, count = draw(st.integers(1, 6)), draw(st.integers(1, 10))
    family = draw(st.sampled_from(["kfkb", "depth", "per link", "capped", "listed"]))
    if family == "kfkb":
        return kfkb(stages, count, draw(st.integers(1, count)))
    if family == "depth":
        return depth(stages, count, draw(st.integers(0, 3)))
    if family == "per link":
        return per_link_depth(stages, count, [draw(st.integers(0, 3)) for _ in range(stages - 1)])
    if family == "listed":
        return listed(kfkb(stages, count, draw(st.integers(1, count))).steps)
    return work_conserving(stages, count, [draw(st.integers(1, 6)) for _ in range(stages)])


def drawn_chain(source, stages, *, whole):
    """Times and sizes; whole numbers make many things happen at one moment."""

    def number(low, high):
        return float(source.randint(low, high)) if whole else source.uniform(low, high)

    blocks = []
    for i in range(stages):
        times = {
            1: Times(forward=number(0, 5), backward=number(0, 8)),
            4: Times(forward=number(5, 9), backward=number(8, 19)),
        }
        size = source.choice([0, 1000 * source.randint(1, 3) if whole else source.randint(1, 5000)])
        blocks.append(
            BlockProfile(name=f"b{i}", parameter_bytes=0, output_bytes_per_sample=size, milliseconds=times)
        )
    return Profile(blocks=tuple(blocks))


def drawn_cluster(source, places, *, whole):
    """Hosts with links of their own each way; some send less than their fastest, some devices are slower."""
    hosts = sorted({f"h{place}" for place in places})

    def rate():
        return 1e6 * source.randint(1, 3) if whole else source.uniform(2e5, 4e6)

    def latency():
        return source.choice([0.0, float(source.randint(1, 3)) if whole else source.uniform(0, 3)])

    links = [
        Link(source=a, target=b, bandwidth_bytes_per_s=rate(), latency_ms=latency())
        for a in hosts
        for b in hosts
    ]
    rated = not whole and source.random() < 0.5
    return Cluster(
        hosts=tuple(Host(name=host, egress_bytes_per_s=source.choice([None, rate()])) for host in hosts),
        devices=tuple(
            Device(
                name=f"d{i}",
                host=f"h{place}",
                memory_bytes=2**40,
                gflops=source.uniform(0.5, 2) if rated else None,
            )
            for i, place in enumerate(places)
        ),
        links=tuple(links),
    )


@settings(max_examples=250, deadline=None)
@given(orders(), st.integers(0, 2**30), st.booleans(), st.data())
def test_alone_it_is_the_prediction_whatever_stages_share(order, seed, whole, data):
    places = data.draw(st.lists(st.integers(0, 3), min_size=order.stages, max_size=order.stages))
    # Two stages may not have the same way between two hosts: there the planner gives each the whole link.
    ways = [way for a, b in pairwise(places) if a != b for way in ((a, b, "F"), (b, a, "B"))]
    assume(len({way[:2] for way in ways}) == len(ways))
    source = random.Random(seed)
    profile, cluster = (
        drawn_chain(source, order.stages, whole=whole),
        drawn_cluster(source, places, whole=whole),
    )
    plan = plan_of(order, data.draw(st.integers(order.micro_batches, 3 * order.micro_batches)))
    wanted = predicted(plan, profile, cluster)
    found = play_pipeline(plan, profile, cluster, steps=2)
    assert found.steps_ms["job"] == pytest.approx((wanted.step_ms,) * 2, rel=1e-9, abs=1e-9)
    assert tuple(found.busy_ms.values()) == pytest.approx([2 * busy for busy in wanted.busy_ms], abs=1e-9)


def shape(timeline, until_ms):
    """What is on the timeline up to a time, but for what takes none."""
    return sorted(
        (span.track, span.name, round(span.start_ms, 6), round(span.end_ms, 6))
        for span in timeline.spans
        if span.start_ms < until_ms and span.end_ms > span.start_ms
    )


@pytest.mark.parametrize(
    "order",
    [one_f_one_b(3, 6), kfkb(3, 6, 2), depth(3, 6, 2), gpipe(3, 6), work_conserving(3, 6, 3)],
    ids=str,
)
def test_its_timeline_is_that_of_the_prediction(order):
    plan, profile, cluster = plan_of(order), chain(3, 1.3, 2.1, 1700), uniform(3, latency=3e-4)
    wanted = predicted(plan, profile, cluster)
    found = play_pipeline(plan, profile, cluster, steps=2)
    assert shape(found.timeline, wanted.step_ms) == shape(wanted.timeline, math.inf)


@pytest.mark.parametrize(("stages", "k"), [(1, 1), (2, 1), (2, 2), (5, 1), (5, 2), (5, 10), (64, 1), (64, 4)])
def test_with_free_links_a_step_has_the_period_of_the_formula(stages, k):
    count = 2 * stages
    found = play_pipeline(plan_of(kfkb(stages, count, k)), chain(stages), uniform(stages), steps=1)
    assert found.step_ms() == pytest.approx((count + stages - 1) * (1 + 2), rel=1e-9)


def test_a_planned_step_takes_its_forecast():
    cluster = uniform(4, 2e6, latency=1e-4)
    blocks = tuple(
        BlockProfile(
            name=f"b{i}",
            parameter_bytes=100,
            output_bytes_per_sample=900,
            milliseconds={1: Times(forward=1 + 0.2 * i, backward=2 + 0.1 * i)},
        )
        for i in range(9)
    )
    profile = Profile(blocks=blocks)
    made = planned(profile, 4, global_batch=16, cluster=cluster)
    found = play_pipeline(made, profile, cluster, steps=2)
    assert found.steps_ms["job"] == pytest.approx((made.forecast.step_ms,) * 2, rel=1e-9)
    assert tuple(found.peak_bytes.values()) == made.forecast.peak_bytes


def test_the_first_stage_s_update_is_between_its_steps_and_the_others_have_time():
    profile = chain(3, optimizer_milliseconds=0.5)
    found = play_pipeline(plan_of(one_f_one_b(3, 4)), profile, uniform(3), steps=3)
    assert found.steps_ms["job"] == pytest.approx((3 * 6 + 0.5,) * 3, rel=1e-9)
    assert found.work_ms["job"] == pytest.approx(3 * 3 * (4 * 3 + 0.5), rel=1e-9)


def test_a_long_update_of_a_later_stage_holds_up_the_next_step():
    blocks = (*chain(1).blocks, BlockProfile(
        name="last",
        parameter_bytes=0,
        output_bytes_per_sample=0,
        milliseconds={1: Times(forward=1.0, backward=2.0)},
        optimizer_milliseconds=10.0,
    ))  # fmt: skip
    found = play_pipeline(plan_of(one_f_one_b(2, 2)), Profile(blocks=blocks), uniform(2), steps=2)
    # The last stage ends its backwards at 7 and its update at 17; the first begins at 9, and waits.
    assert found.steps_ms["job"] == (9.0, 17.0 + 3 + 3 + 2 - 9.0)


def test_a_constant_trace_is_a_slower_network():
    plan, profile = plan_of(kfkb(4, 8, 2)), chain(4, size=3000)
    slow = play_pipeline(plan, profile, uniform(4, 2.5e5, latency=1e-4), steps=2)
    traced = play_pipeline(
        plan,
        profile,
        uniform(4, latency=1e-4),
        steps=2,
        traces={f"node{i}": Trace.constant(0.25) for i in range(4)},
    )
    assert traced.steps_ms["job"] == pytest.approx(slow.steps_ms["job"], rel=1e-9)


def test_others_on_a_wire_take_half_of_it():
    plan, profile = plan_of(one_f_one_b(2, 1)), chain(2, size=3000)
    alone = play_pipeline(plan, profile, uniform(2), steps=1)
    shared = play_pipeline(plan, profile, uniform(2), steps=1, cross=[Cross(source="node0", target="node1")])
    assert (alone.step_ms(), shared.step_ms()) == pytest.approx((6 + 3 + 3, 6 + 6 + 3), rel=1e-9)


def test_bytes_sent_are_those_of_every_micro_batch():
    plan, profile = plan_of(kfkb(3, 4, 2), batch=10), chain(3, size=70)
    found = play_pipeline(plan, profile, uniform(3), steps=3)
    assert found.wire_bytes == pytest.approx(
        {"node0": 3 * 10 * 70, "node1": 3 * 2 * 10 * 70, "node2": 3 * 10 * 70}, rel=1e-9
    )


@settings(max_examples=60, deadline=None)
@given(orders(), st.integers(0, 2**30), st.floats(1.0, 10.0))
def test_a_faster_link_is_never_slower(order, seed, faster):
    # Of lists: a rule may be led to another choice by a message that comes earlier.
    assume(order.steps is not None)
    profile = drawn_chain(random.Random(seed), order.stages, whole=False)
    plan = plan_of(order)
    slow, fast = (
        play_pipeline(plan, profile, uniform(order.stages, rate, latency=1e-4), steps=2)
        for rate in (1e6, 1e6 * faster)
    )
    assert fast.makespan_ms <= slow.makespan_ms * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(orders(), st.integers(0, 2**30))
def test_work_in_is_work_out_and_a_stage_does_one_thing_at_a_time(order, seed):
    profile = drawn_chain(random.Random(seed), order.stages, whole=False)
    background = [Background(name="sweep", unit_ms=1.5)]
    found = play_pipeline(
        plan_of(order), profile, uniform(order.stages), steps=2, seed=seed, background=background
    )
    alone = play_pipeline(plan_of(order), profile, uniform(order.stages), steps=2)
    assert found.steps_ms["job"] == pytest.approx(alone.steps_ms["job"], rel=1e-9)
    assert found.work_ms["job"] == pytest.approx(2 * order.micro_batches * profile.step_ms(1), rel=1e-9)
    idle_ms = order.stages * found.makespan_ms - found.work_ms["job"]
    assert found.work_ms["sweep"] == pytest.approx(idle_ms, rel=1e-9, abs=1e-6)
    for stage in range(order.stages):
        spans = [span for span in found.timeline.spans if span.track == f"stage{stage}"]
        assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in pairwise(spans))


def test_equal_seeds_give_equal_timelines():
    plan, profile = plan_of(work_conserving(3, 6, 3)), chain(3, size=800)
    runs = [play_pipeline(plan, profile, uniform(3), jitter=0.3, seed=s).to_json() for s in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_stage_that_does_not_fit_is_refused():
    profile = chain(2, saved_bytes_per_sample=1000)
    small = Cluster.uniform(hosts=2, memory=1500, bandwidth=1e6)
    with pytest.raises(UsageError, match="would hold") as error:
        play_pipeline(plan_of(one_f_one_b(2, 4)), profile, small)
    assert error.value.setting == "devices.memory"


def test_an_order_that_never_ends_is_refused():
    with pytest.raises(UsageError, match="wait for each other"):
        play_pipeline(
            plan_of(listed(["FBFB", "FFBB"])),
            chain(2),
            uniform(2),
            background=[Background(name="sweep", unit_ms=1.0)],
        )


@pytest.mark.parametrize(
    ("wrong", "what"),
    [({"steps": 0}, "steps"), ({"speeds": {"x": 2.0}}, "no device 'x'"), ({"jitter": math.nan}, "jitter")],
)
def test_bad_input_is_refused(wrong, what):
    with pytest.raises(UsageError, match=what):
        play_pipeline(plan_of(one_f_one_b(2, 4)), chain(2), uniform(2), **wrong)


def test_fewer_devices_than_stages_are_refused():
    with pytest.raises(UsageError, match="3 devices were asked of a cluster of 2"):
        play_pipeline(plan_of(one_f_one_b(3, 4)), chain(3), uniform(2))


def test_rows_are_cut_into_micro_batches_as_in_a_run():
    found = play_pipeline(plan_of(one_f_one_b(2, 3), batch=7), chain(2), uniform(2), steps=1)
    lengths = [
        s.end_ms - s.start_ms for s in found.timeline.spans if s.track == "stage0" and s.name[0] == "F"
    ]
    assert lengths == pytest.approx([3.0, 2.0, 2.0])
