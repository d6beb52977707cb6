"""Data-parallel training as it is played: the closed form where it is alone, and the laws elsewhere."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.burst.costs import evaluate
from plait.burst.network import Network
from plait.cluster import Cluster, Device, Host, Link
from plait.compress.codec import Quantizer
from plait.compress.price import Speed
from plait.errors import UsageError
from plait.profile import BlockProfile, Profile, Times
from plait.sim.background import Background
from plait.sim.data import held_bytes, play_data, ring_link
from plait.sim.data_plan import DataPlan, buckets
from plait.sim.network import Cross
from plait.sim.reduction import Coded, Ring, codec_of
from plait.sim.trace import Trace

SPEED = Speed(pack_s_per_byte=3e-10, add_s_per_byte=2e-10, decode_s_per_byte=1e-10)


def block(place, size, forward_ms=1.0, backward_ms=2.0, optimizer_ms=0.0, **more):
    return BlockProfile(
        name=f"b{place}",
        parameter_bytes=size,
        output_bytes_per_sample=4,
        milliseconds={
            1: Times(forward=forward_ms, backward=backward_ms),
            8: Times(forward=3 * forward_ms, backward=3 * backward_ms),
        },
        optimizer_milliseconds=optimizer_ms,
        **more,
    )


def uniform(hosts=4, rate=1e6, latency=0.0, **more):
    return Cluster.uniform(hosts=hosts, memory="1TiB", bandwidth=rate, latency=latency, **more)


@st.composite
def profiles(draw):
    times = st.floats(0.01, 10)
    return Profile(
        blocks=tuple(
            block(
                place,
                4 * draw(st.sampled_from([0, 1, 1000, 50_000])),
                draw(times),
                draw(times),
                draw(st.floats(0, 1)),
            )
            for place in range(draw(st.integers(1, 6)))
        )
    )


def closed_form_ms(plan, profile, cluster, reduction):
    """Forward, backward, what is then left on the wire, and the optimizer."""
    # Shares whose micro-batches differ are left out: whoever is last may be another at every bucket.
    (*before, rows), world = plan.micro_batches[0], plan.devices
    link = ring_link(cluster, [device.name for device in cluster.devices[:world]])
    total = sum(b.forward_ms(rows) + b.optimizer_milliseconds for b in profile.blocks)
    total += sum(b.forward_ms(n) + b.backward_ms(n) for b in profile.blocks for n in before)
    left = 0.0
    for bucket in buckets(plan, profile):
        backward_ms = sum(b.backward_ms(rows) for b in profile.blocks[bucket.first : bucket.end])
        total, left = total + backward_ms, max(0.0, left - backward_ms)
        if world > 1 and bucket.gradient_bytes:
            left += reduction.estimate_ms(bucket.gradient_bytes, world, link)
    return total + left


@settings(max_examples=150, deadline=None)
@given(profiles(), st.integers(1, 6), st.sampled_from([1, 3]), st.floats(1e5, 1e9), st.data())
def test_alone_it_is_the_closed_form(profile, world, per_host, rate, data):
    cluster = uniform(6, rate, data.draw(st.floats(0, 1e-3)), devices_per_host=per_host)
    rows, accumulate = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    plan = DataPlan(
        devices=world,
        accumulate=accumulate,
        batch=world * rows + (data.draw(st.integers(0, world - 1)) if accumulate == 1 else 0),
        bucket_bytes=data.draw(st.sampled_from([1, 10_000, 10**9])),
        first_bucket_bytes=data.draw(st.sampled_from([1, 5_000])),
    )
    reduction = data.draw(
        st.sampled_from([Ring(), Coded(codec=Quantizer(bits=4), speed=SPEED, shares_device=False)])
    )
    found = play_data(plan, profile, cluster, steps=3, collective=reduction)
    wanted = closed_form_ms(plan, profile, cluster, reduction)
    assert found.steps_ms["job"] == pytest.approx((wanted,) * 3, rel=1e-9)
    assert found.makespan_ms == pytest.approx(3 * wanted, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(profiles(), st.integers(2, 6), st.floats(1e5, 1e9))
def test_block_by_block_it_is_a_burst_plan_of_one_width(profile, world, rate):
    plan = DataPlan(devices=world, batch=2 * world, bucket_bytes=1, first_bucket_bytes=1)
    found = play_data(plan, profile, uniform(6, rate, 1e-4), steps=1)
    wanted, _ = evaluate(
        profile, [world] * len(profile.blocks), batch=2 * world, network=Network.of(rate, 1e-4)
    )
    assert found.step_ms() == pytest.approx(wanted, rel=1e-9)


def test_exposed_is_what_the_last_bucket_takes():
    # Two buckets of 3000 bytes at 1 MB/s: 3 ms each. The first goes while block 0 is computed.
    profile = Profile(blocks=(block(0, 3000), block(1, 3000)))
    plan = DataPlan(devices=2, batch=2, bucket_bytes=1, first_bucket_bytes=1)
    found = play_data(plan, profile, uniform(2), steps=1)
    assert found.steps_ms["job"] == (2 + 4 + 1 + 3,)
    wire = [(s.name, s.start_ms, s.end_ms) for s in found.timeline.spans if s.track == "wire"]
    assert wire == [("bucket 0", 4.0, 7.0), ("bucket 1", 7.0, 10.0)]


def test_gradients_of_micro_batches_are_averaged_once():
    profile = Profile(blocks=(block(0, 3000), block(1, 3000)))
    plan = DataPlan(devices=2, batch=4, bucket_bytes=1, first_bucket_bytes=1, accumulate=2)
    found = play_data(plan, profile, uniform(2), steps=1)
    assert found.steps_ms["job"] == (2 + 4 + 2 + 4 + 1 + 3,)
    assert found.wire_bytes["node0"] == 2 * 3000
    names = [span.name for span in found.timeline.spans if span.track == "node0/0" and span.end_ms > 0]
    assert names[:5] == ["forward", "backward", "forward", "backward 0", "backward 1"]
    whole = replace(plan, accumulate=1)
    assert found.work_ms["job"] > play_data(whole, profile, uniform(2), steps=1).work_ms["job"]


def test_a_codec_takes_the_device_from_backward():
    profile = Profile(blocks=(block(0, 4_000_000, 10, 20), block(1, 4_000_000, 10, 20)))
    plan = DataPlan(devices=2, batch=2, bits=4, bucket_bytes=1, first_bucket_bytes=1)
    coded = Coded(codec=Quantizer(bits=4), speed=SPEED)
    cluster = uniform(2, 1e9)
    link = ring_link(cluster, ["node0/0", "node1/0"])
    busy_ms, alone_ms = coded.busy_ms(4_000_000, 2), coded.estimate_ms(4_000_000, 2, link)
    assert busy_ms < alone_ms < 20  # it is through before backward is; the last waits for its own time alone
    found = play_data(plan, profile, cluster, steps=2, collective=coded)
    assert found.steps_ms["job"] == pytest.approx((60 + busy_ms + alone_ms,) * 2, rel=1e-9)
    assert found.work_ms["job"] == pytest.approx(2 * 2 * 60, rel=1e-9)
    assert found.busy_ms["node0/0"] == pytest.approx(2 * (60 + 2 * busy_ms), rel=1e-9)


@pytest.mark.parametrize(("bits", "packed"), [(None, 8000), (32, 8000), (16, 4000), (8, 2000 + 16 * 8)])
def test_bytes_on_the_wire_are_those_of_the_codec(bits, packed):
    profile = Profile(blocks=(block(0, 8000),))
    plan = DataPlan(devices=4, batch=4, bits=bits)
    collective = None if bits is None else Ring(codec=codec_of(bits))
    found = play_data(plan, profile, uniform(4), steps=2, collective=collective)
    assert found.wire_bytes == {f"node{i}": 2 * 2 * 3 / 4 * packed for i in range(4)}


def test_a_straggler_holds_up_everybody():
    profile = Profile(blocks=(block(0, 3000),))
    plan = DataPlan(devices=2, batch=2)
    found = play_data(plan, profile, uniform(2), steps=3, speeds={"node1/0": 0.5})
    assert found.steps_ms["job"] == (9.0, 9.0, 9.0)  # (1 + 2) / 0.5 + 3
    assert found.busy_ms == {"node0/0": 9.0, "node1/0": 18.0}


def test_devices_of_other_speed_are_known_by_their_figures():
    devices = tuple(
        Device(name=f"d{i}", host=f"h{i}", memory_bytes=2**40, gflops=gflops)
        for i, gflops in enumerate((50, 25))
    )
    cluster = Cluster(
        hosts=(Host(name="h0"), Host(name="h1")), devices=devices, links=(Link(bandwidth_bytes_per_s=1e6),)
    )
    found = play_data(DataPlan(devices=2, batch=2), Profile(blocks=(block(0, 3000),)), cluster, steps=1)
    assert found.step_ms() == 9.0


def test_a_trace_of_one_host_slows_the_ring():
    profile = Profile(blocks=(block(0, 3000),))
    plan = DataPlan(devices=2, batch=2)
    # From 4 ms on, in the middle of the reduction, the other 2000 bytes go at half the rate.
    found = play_data(plan, profile, uniform(2), steps=1, traces={"node0": Trace.of([(0, 1.0), (4, 0.5)])})
    assert found.step_ms() == pytest.approx(3 + 1 + 4, rel=1e-9)


def test_others_on_the_wire_take_their_share():
    profile = Profile(blocks=(block(0, 3000),))
    plan = DataPlan(devices=2, batch=2)
    found = play_data(plan, profile, uniform(2), steps=1, cross=[Cross(source="node0", target="node1")])
    assert found.step_ms() == pytest.approx(3 + 6, rel=1e-9)
    assert found.wire_bytes["node0"] >= 3000


def test_a_ring_shares_the_egress_of_a_host():
    hosts = (Host(name="a"), Host(name="b", egress_bytes_per_s=5e5))
    devices = tuple(Device(name=f"{h}{i}", host=h, memory_bytes=1) for i in range(2) for h in "ab")
    links = (
        Link(bandwidth_bytes_per_s=1e6, latency_ms=2),
        Link(source="a", target="a", bandwidth_bytes_per_s=1e9),
    )
    cluster = Cluster(hosts=hosts, devices=devices, links=links)
    found = ring_link(cluster, ["a0", "b0", "a1", "b1"])
    assert (found.bandwidth_bytes_per_s, found.latency_ms) == (2.5e5, 2)
    assert ring_link(cluster, ["a0", "a1"]).bandwidth_bytes_per_s == 1e9


def test_background_gets_the_waiting_time_and_takes_none_of_the_foreground_s():
    profile = Profile(blocks=(block(0, 3000),))
    plan = DataPlan(devices=2, batch=2)
    alone = play_data(plan, profile, uniform(2), steps=4)
    beside = play_data(plan, profile, uniform(2), steps=4, background=[Background(name="sweep", unit_ms=0.7)])
    assert beside.steps_ms == alone.steps_ms
    assert beside.work_ms["sweep"] == pytest.approx(2 * 4 * 3.0, rel=1e-9)  # both devices, each reduction
    assert beside.work_ms["job"] == pytest.approx(alone.work_ms["job"], rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(profiles(), st.integers(2, 5), st.floats(1e5, 1e8), st.floats(1.0, 8.0), st.floats(0, 0.3))
def test_a_faster_link_is_never_slower(profile, world, rate, faster, jitter):
    plan = DataPlan(devices=world, batch=world, bucket_bytes=10_000)
    slow, fast = (
        play_data(plan, profile, uniform(6, each, 1e-4), steps=2, jitter=jitter, seed=3)
        for each in (rate, rate * faster)
    )
    assert fast.makespan_ms <= slow.makespan_ms * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(profiles(), st.integers(1, 5), st.integers(0, 2**20))
def test_work_in_is_work_out_and_a_device_does_one_thing_at_a_time(profile, world, seed):
    plan, steps = DataPlan(devices=world, batch=2 * world, bucket_bytes=10_000), 3
    coded = Coded(codec=Quantizer(bits=4), speed=SPEED)
    found = play_data(plan, profile, uniform(6), steps=steps, collective=coded, seed=seed)
    assert found.work_ms["job"] == pytest.approx(steps * world * profile.step_ms(2), rel=1e-9)
    for name in found.busy_ms:
        spans = [span for span in found.timeline.spans if span.track == name]
        assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in pairwise(spans))
        assert math.fsum(s.end_ms - s.start_ms for s in spans) == pytest.approx(found.busy_ms[name], rel=1e-9)


def test_equal_seeds_give_equal_timelines():
    profile = Profile(blocks=(block(0, 3000), block(1, 3000)))
    plan = DataPlan(devices=3, batch=6)
    runs = [play_data(plan, profile, uniform(3), jitter=0.2, seed=seed).to_json() for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_memory_counts_weights_gradients_buckets_state_and_activations():
    profile = Profile(
        blocks=(
            block(0, 100, optimizer_bytes=200, saved_bytes_per_sample=7, transient_bytes=5),
            block(1, 50, saved_bytes_per_sample=1, transient_bytes_per_sample=4),
        )
    )
    assert held_bytes(DataPlan(devices=2, batch=3), profile) == (
        3 * 150 + 200 + 2 * 8 + 8,
        3 * 150 + 200 + 8 + 5,
    )
    assert held_bytes(DataPlan(devices=2, batch=8, accumulate=3), profile) == (3 * 150 + 200 + 2 * 8 + 8,) * 2
    assert held_bytes(DataPlan(devices=1, batch=1), profile) == (2 * 150 + 200 + 8 + 5,)


def test_what_does_not_fit_is_refused_with_what_would():
    profile = Profile(blocks=(block(0, 1000),))
    cluster = Cluster.uniform(hosts=2, memory=2999, bandwidth=1e6)
    with pytest.raises(UsageError, match="would hold") as error:
        play_data(DataPlan(devices=2, batch=2), profile, cluster)
    assert error.value.setting == "devices.memory"
    assert error.value.works.startswith("1MiB, ")
    play_data(DataPlan(devices=2, batch=2), profile, Cluster.uniform(hosts=2, memory=3000, bandwidth=1e6))


def test_a_batch_beyond_the_profile_is_said():
    profile = Profile(blocks=(block(0, 1000),))
    found = play_data(DataPlan(devices=2, batch=32), profile, uniform(2))
    assert found.decisions == ("batch 16 lies beyond the measured 1 to 8 of block 'b0'",)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"steps": 0}, "steps"),
        ({"speeds": {"node7/0": 1.0}}, "node7/0"),
        ({"speeds": {"node0/0": 0.0}}, "speed"),
        ({"traces": {"node7": Trace.of([(0, 1.0)])}}, "node7"),
        ({"jitter": -1.0}, "jitter"),
        ({"collective": 3}, "says nothing"),
        ({"background": [Background(name="job", unit_ms=1.0)]}, "both called 'job'"),
    ],
)
def test_bad_input_is_refused(wrong, what):
    with pytest.raises(UsageError, match=what):
        play_data(DataPlan(devices=2, batch=2), Profile(blocks=(block(0, 3000),)), uniform(2), **wrong)


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(UsageError, match="4 devices were asked of a cluster of 2"):
        play_data(DataPlan(devices=4, batch=4), Profile(blocks=(block(0, 3000),)), uniform(2))
