"""Burst plans, played: as their own event model has it if undisturbed, and sane if something disturbs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.burst.burst_plan import BurstPlan
from plait.burst.controller import LADDER, Control, Controller
from plait.burst.costs import Costs
from plait.burst.events import predict
from plait.cluster import Cluster
from plait.cluster import Link as Wire
from plait.collective import Link
from plait.errors import UsageError
from plait.profile import BlockProfile, Profile, Times
from plait.sim.background import Background
from plait.sim.between import between
from plait.sim.burst import held_bytes, play_burst
from plait.sim.network import Cross
from plait.sim.reduction import Ring
from plait.sim.trace import Trace
from plait.strategy.overlap import Piece, overlap

SWEEP = Background(name="sweep", unit_ms=7.0)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    blocks = []
    for place in range(draw(st.integers(1, 7))):
        fixed, each = draw(st.floats(0.0, 1.0)), draw(st.floats(0.0, 0.3))
        back = draw(st.sampled_from([0.0, 2.0]))
        inputs = None
        if place and draw(st.booleans()):
            inputs = tuple(f"b{k}" for k in draw(st.sets(st.integers(0, place - 1), max_size=2)))
        blocks.append(
            BlockProfile(
                name=f"b{place}",
                parameter_bytes=draw(st.sampled_from([0, 10**4, 3 * 10**6])),
                output_bytes_per_sample=draw(st.sampled_from([0, 500, 10**5])),
                milliseconds={
                    rows: Times(forward=fixed + each * rows, backward=back * (fixed + each * rows))
                    for rows in (1, 4, 16)
                },
                optimizer_milliseconds=draw(st.sampled_from([0.0, 0.3])),
                tied=("shared",) if draw(st.booleans()) else (),
                inputs=inputs,
            )
        )
    return Profile(blocks=tuple(blocks))


@st.composite
def plans(draw: st.DrawFn, profile: Profile) -> BurstPlan:
    batch = draw(st.integers(1, 20))
    devices = draw(st.integers(1, min(batch, 6)))
    widths = [draw(st.integers(1, devices)) for _ in profile.blocks]
    return BurstPlan.of([block.name for block in profile.blocks], widths, batch=batch, devices=devices)


def cluster_of(
    devices: int, bandwidth: str = "1gbit", latency: str | float = "40us", **given: Any
) -> Cluster:
    return Cluster.uniform(hosts=devices, memory="1GiB", bandwidth=bandwidth, latency=latency, **given)


def chain(*, blocks: int = 4, parameters: int = 10**6) -> Profile:
    return Profile(
        blocks=tuple(
            BlockProfile(
                name=f"b{place}",
                parameter_bytes=parameters,
                output_bytes_per_sample=10**4,
                saved_bytes_per_sample=10,
                transient_bytes=7,
                milliseconds={rows: Times(forward=1.0 * rows, backward=2.0 * rows) for rows in (1, 8)},
                optimizer_milliseconds=0.5,
            )
            for place in range(blocks)
        )
    )


def narrow() -> BurstPlan:
    """Blocks 2 and 3 leave three of four devices free."""
    return BurstPlan.of([f"b{place}" for place in range(4)], [4, 4, 1, 1], batch=8)


@given(data=st.data(), latency=st.sampled_from([0.0, "1ms"]), bandwidth=st.sampled_from(["1gbit", "100mbit"]))
@settings(max_examples=80, deadline=None)
def test_undisturbed_a_step_takes_what_the_event_model_says(
    data: st.DataObject, latency: str | float, bandwidth: str
) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    cluster = cluster_of(plan.devices, bandwidth, latency)
    wanted = predict(plan, profile, between(cluster, plan.devices))
    found = play_burst(plan, profile, cluster, steps=2, background=[SWEEP])
    assert found.steps_ms["job"] == pytest.approx([wanted.step_ms] * 2, rel=1e-9)
    computing = [phase for phase in wanted.phases if phase.kind in ("forward", "backward", "optimizer")]
    work_ms = 2 * sum(phase.width * (phase.end_ms - phase.start_ms) for phase in computing)
    assert found.work_ms["job"] == pytest.approx(work_ms)
    assert found.work_ms["sweep"] == pytest.approx(plan.devices * found.makespan_ms - work_ms, abs=1e-6)
    for device in cluster.devices:
        its = sorted((s.start_ms, s.end_ms) for s in found.timeline.spans if s.track == device.name)
        assert all(b[0] >= a[1] - 1e-9 for a, b in pairwise(its))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_so_it_does_on_links_that_are_all_different(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    names = [f"node{i}" for i in range(plan.devices)]
    uniform = cluster_of(plan.devices)
    rates = st.integers(10**6, 10**9)
    links = tuple(
        Wire(source=a, target=b, bandwidth_bytes_per_s=float(data.draw(rates)), latency_ms=0.1)
        for a in names
        for b in names
        if a != b
    )
    cluster = Cluster(hosts=uniform.hosts, devices=uniform.devices, links=links)
    wanted = predict(plan, profile, between(cluster, plan.devices))
    found = play_burst(plan, profile, cluster, steps=1)
    assert found.steps_ms["job"] == pytest.approx([wanted.step_ms], rel=1e-9)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_so_it_does_where_hosts_cannot_send_what_their_links_take(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    uniform = cluster_of(plan.devices)
    rates = st.one_of(st.none(), st.floats(1e6, 2e8))
    hosts = tuple(replace(host, egress_bytes_per_s=data.draw(rates)) for host in uniform.hosts)
    cluster = replace(uniform, hosts=hosts)
    wanted = predict(plan, profile, between(cluster, plan.devices))
    found = play_burst(plan, profile, cluster, steps=1)
    assert found.steps_ms["job"] == pytest.approx([wanted.step_ms], rel=1e-9)


class HalfTime:
    """Gradients in half the time, whatever they travel in."""

    def estimate_ms(self, bytes: int, world: int, link: Link) -> float:
        return bytes / link.bandwidth_bytes_per_s * 500.0

    def all_reduce(self, tensor: object, group: object = None) -> Any:
        raise AssertionError("a simulation moves no tensor")


def test_any_collective_can_be_passed_in() -> None:
    cluster, plan, profile = cluster_of(4, "100mbit"), narrow(), chain()
    wanted = predict(plan, profile, between(cluster, 4), collective=HalfTime())
    found = play_burst(plan, profile, cluster, steps=2, collective=HalfTime())
    assert found.steps_ms["job"] == pytest.approx([wanted.step_ms] * 2, rel=1e-9)
    assert found.step_ms() < play_burst(plan, profile, cluster, steps=2).step_ms()


@dataclass(frozen=True)
class Packing(Ring):
    """A ring that takes the device for a share of its time on a link of 125 MB/s."""

    share: float = 0.5

    def busy_ms(self, bytes: int, world: int) -> float:
        return self.share * self.wire_bytes(bytes, world) / 125e3


def test_a_codec_takes_the_devices_that_reduce_and_delays_what_they_compute() -> None:
    profile, names = chain(), [f"b{place}" for place in range(4)]
    plan = BurstPlan.of(names, [2] * 4, batch=4)
    cluster = cluster_of(2, latency=0.0)
    found = play_burst(plan, profile, cluster, steps=2, collective=Packing())
    # Each of four reductions takes 8 ms, 4 of them on the device: backward of b3 ends at 4, then
    #   device  pack 3 to 8, backward 2 to 12 (sync 3 ends), pack 2 to 16, ...
    forward_ms, backward_ms = 4 * 2.0, 4.0 + 3 * (4.0 + 4.0)
    assert found.steps_ms["job"] == pytest.approx([forward_ms + backward_ms + 8.0 + 4 * 0.5] * 2)
    assert found.busy_ms["node0/0"] == pytest.approx(2 * (8.0 + 16.0 + 2.0 + 4 * 4.0))
    assert found.work_ms["job"] == pytest.approx(2 * 2 * (8.0 + 16.0 + 2.0))
    slow = play_burst(plan, profile, cluster, steps=1, collective=Packing(), speeds={"node1/0": 0.5})
    assert slow.busy_ms["node1/0"] == pytest.approx(found.busy_ms["node0/0"])


def test_only_the_devices_that_reduce_pack() -> None:
    found = play_burst(narrow(), chain(), cluster_of(4), steps=1, collective=Packing())
    packed = {span.name for span in found.timeline.spans if span.name.startswith("codec")}
    assert packed == {"codec sync b0", "codec sync b1"}


@given(data=st.data(), share=st.sampled_from([0.1, 0.5, 0.9]))
@settings(max_examples=60, deadline=None)
def test_packing_and_computing_interleave_as_planning_takes_it(data: st.DataObject, share: float) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    cluster, reduction = cluster_of(plan.devices, latency=0.0), Packing(share=share)
    network, widths = between(cluster, plan.devices), sorted(set(plan.widths))
    costs = Costs(profile, widths, batch=plan.batch, network=network)
    at = [widths.index(width) for width in plan.widths]
    before_ms, pieces = 0.0, []
    for place, block in enumerate(profile.blocks):
        users = (place, *costs.sharers.get(place, ()))
        wide = max(plan.widths[user] for user in users)
        size = block.parameter_bytes if wide > 1 else 0
        pieces.append(
            Piece(
                costs.backward[place, at[place]],
                reduction.estimate_ms(size, wide, network.ring(wide)) if size else 0.0,
                reduction.busy_ms(size, wide),
                costs.one_way[place, at[place], at[place - 1]] if place else 0.0,
            )
        )
        before_ms += costs.forward[place, at[place]]
        before_ms += costs.one_way[place, at[place - 1], at[place]] if place else 0.0
    wanted = before_ms + overlap(reversed(pieces)).end_ms + costs.optimizer.sum()
    found = play_burst(plan, profile, cluster, steps=2, collective=reduction, background=[SWEEP])
    assert found.steps_ms["job"] == pytest.approx([wanted] * 2, rel=1e-9)


@given(data=st.data(), rates=st.tuples(st.floats(1e6, 1e9), st.floats(1.0, 20.0)))
@settings(max_examples=25, deadline=None)
def test_a_faster_network_is_never_slower(data: st.DataObject, rates: tuple[float, float]) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    slow, fast = (
        play_burst(
            plan,
            profile,
            Cluster.uniform(hosts=plan.devices, memory="1GiB", bandwidth=rate, latency="40us"),
            steps=1,
        ).makespan_ms
        for rate in (rates[0], rates[0] * rates[1])
    )
    assert fast <= slow * (1 + 1e-9)


def test_rows_and_gradients_are_all_on_the_wire() -> None:
    found = play_burst(narrow(), chain(), cluster_of(4), steps=1)
    # Six rows go to device 0 in forward and come back in backward; two syncs are rings of four.
    assert found.wire_bytes["node0"] == pytest.approx(6 * 10**4 + 2 * 2 * 3 / 4 * 10**6)
    assert found.wire_bytes["node1"] == pytest.approx(2 * 10**4 + 2 * 2 * 3 / 4 * 10**6)


def test_memory_is_that_of_the_blocks_that_a_device_runs() -> None:
    assert held_bytes(narrow(), chain()) == (
        4 * 2 * 10**6 + 10 * (2 + 2 + 8 + 8) + 7,
        *(2 * 2 * 10**6 + 10 * 4 + 7,) * 3,
    )
    small = Cluster.uniform(hosts=4, memory=6 * 10**6, bandwidth="1gbit")
    with pytest.raises(UsageError, match="'node0/0' would hold"):
        play_burst(narrow(), chain(), small)


def test_a_straggler_holds_up_those_that_wait_for_it() -> None:
    cluster, plan, profile = cluster_of(4), narrow(), chain(parameters=0)
    even = play_burst(plan, profile, cluster, steps=1)
    slow = play_burst(plan, profile, cluster, steps=1, speeds={"node3/0": 0.5})
    # Two wide blocks forward and back: 2 rows each.
    assert slow.makespan_ms - even.makespan_ms == pytest.approx(2 * 2 * (1.0 + 2.0))
    # Device 1 has nothing to do in the narrow ones, and its optimizer ends before device 0's.
    hidden = play_burst(plan, profile, cluster, steps=1, speeds={"node0/0": 2.0})
    assert hidden.makespan_ms < even.makespan_ms


def test_other_peoples_traffic_makes_steps_longer() -> None:
    cluster, plan, profile = cluster_of(4, "100mbit"), narrow(), chain()
    alone = play_burst(plan, profile, cluster)
    crossed = play_burst(plan, profile, cluster, cross=[Cross(source="node1", target="node2")])
    throttled = play_burst(plan, profile, cluster, traces={"node1": Trace.of([(0, 1.0), (30, 0.25)])})
    assert crossed.step_ms() > 1.2 * alone.step_ms()
    assert throttled.step_ms() > 1.2 * alone.step_ms()
    assert throttled.wire_bytes == pytest.approx(alone.wire_bytes)


def test_other_peoples_traffic_may_come_from_hosts_that_are_not_used() -> None:
    plan, profile = narrow(), chain()
    alone = play_burst(plan, profile, cluster_of(6, "100mbit"))
    assert alone.steps_ms == play_burst(plan, profile, cluster_of(4, "100mbit")).steps_ms
    from_outside = [Cross(source="node5", target="node1")]
    crossed = play_burst(plan, profile, cluster_of(6, "100mbit"), cross=from_outside)
    assert crossed.step_ms() > 1.2 * alone.step_ms()
    # Where that host can send next to nothing, it disturbs nobody.
    slowed = {"node5": Trace.constant(1e-6)}
    held = play_burst(plan, profile, cluster_of(6, "100mbit"), cross=from_outside, traces=slowed)
    assert held.step_ms() == pytest.approx(alone.step_ms(), rel=1e-3)
    assert set(held.wire_bytes) == {f"node{place}" for place in range(4)}


def test_equal_seeds_give_equal_runs() -> None:
    cluster, plan, profile = cluster_of(4), narrow(), chain()

    def asked(seed: int) -> Any:
        return play_burst(
            plan, profile, cluster, steps=4, jitter=0.1, seed=seed, background=[SWEEP], switch_ms=0.1
        ).to_json()

    assert asked(1) == asked(1)
    assert asked(1) != asked(2)


def test_interrupting_the_background_costs_the_foreground() -> None:
    cluster, plan, profile = cluster_of(4), narrow(), chain()
    free = play_burst(plan, profile, cluster, background=[SWEEP])
    paid = play_burst(plan, profile, cluster, background=[SWEEP], switch_ms=0.2)
    assert free.step_ms() == pytest.approx(play_burst(plan, profile, cluster).step_ms())
    assert 0.2 < paid.step_ms() - free.step_ms() < 4.0


def test_the_controllers_own_code_holds_the_bound() -> None:
    """Beside its background, computing takes 30% longer: the controller must find out, and step down."""
    cluster, plan, profile = cluster_of(4), narrow(), chain()
    heavy = Background(name="sweep", unit_ms=20.0, drag=0.3)
    alone_ms = play_burst(plan, profile, cluster).step_ms()
    careless = play_burst(plan, profile, cluster, steps=200, background=[heavy])
    assert careless.step_ms() > 1.2 * alone_ms
    control = Control(max_slowdown=1.05)
    held = play_burst(plan, profile, cluster, steps=200, background=[heavy], control=control)
    assert held.makespan_ms / 200 < 1.05 * alone_ms
    assert held.work_ms["sweep"] > 0
    assert any("times what they take alone" in decision for decision in held.decisions)
    # The same steps, given to a controller of one's own, are decided in the same way.
    controller = Controller(control=control)
    for number, length_ms in enumerate(held.steps_ms["job"]):
        controller.observe(number, length_ms, controller.level)
    said = [f"step {d.step}: {LADDER[d.level].name}: {d.reason}" for d in controller.decisions]
    assert list(held.decisions) == said


def test_work_that_disturbs_nobody_is_let_run_by_the_controller() -> None:
    cluster, plan, profile = cluster_of(4), narrow(), chain()
    quiet = Background(name="sweep", unit_ms=20.0)
    freely = play_burst(plan, profile, cluster, steps=100, background=[quiet])
    held = play_burst(plan, profile, cluster, steps=100, background=[quiet], control=Control())
    assert held.makespan_ms == pytest.approx(freely.makespan_ms)
    assert held.work_ms["sweep"] > 0.85 * freely.work_ms["sweep"]


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"steps": 0}, "steps"),
        ({"cluster": cluster_of(3)}, "devices"),
        ({"profile": chain(blocks=3)}, "profile"),
        ({"speeds": {"nobody": 1.0}}, "devices"),
        ({"traces": {"nobody": Trace.constant(1.0)}}, "hosts"),
        ({"background": [SWEEP], "name": "sweep"}, "background"),
        ({"jitter": -0.1}, "jitter"),
    ],
)
def test_bad_input_is_refused(wrong: dict[str, Any], setting: str) -> None:
    with pytest.raises(UsageError) as caught:
        play_burst(**{"plan": narrow(), "profile": chain(), "cluster": cluster_of(4), **wrong})
    assert caught.value.setting == setting


def test_shares_that_were_not_measured_are_said() -> None:
    plan = BurstPlan.of([f"b{place}" for place in range(4)], [4, 4, 1, 1], batch=12)
    found = play_burst(plan, chain(), cluster_of(4), steps=1)
    assert found.decisions == ("batch 12 lies beyond the measured 1 to 8 of block 'b0'",)


def test_a_long_row_of_blocks_that_take_no_time_is_no_trouble() -> None:
    still = Times(forward=0.0, backward=0.0)
    profile = Profile(
        blocks=tuple(
            BlockProfile(
                name=f"b{place}", parameter_bytes=0, output_bytes_per_sample=0, milliseconds={1: still}
            )
            for place in range(2000)
        )
    )
    plan = BurstPlan.of([block.name for block in profile.blocks], [1, 2] * 1000, batch=2)
    assert play_burst(plan, profile, cluster_of(2), steps=1).makespan_ms == 0.0
