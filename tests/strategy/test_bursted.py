"""Burst parallelism as an option, beside its own planner and events."""

from dataclasses import replace

import pytest
from chains import CODECS, FREE, MIB, chain, cluster, demand

from plait.burst.costs import Costs
from plait.burst.events import predict
from plait.burst.memory import Memory
from plait.profile import Profile
from plait.sim.burst import play_burst
from plait.strategy.bursted import burst_bytes, bursted
from plait.strategy.site import Site

UNEVEN = Profile(
    blocks=tuple(
        replace(
            block,
            parameter_bytes=MIB if i < 3 else 24 * MIB,
            output_bytes_per_sample=32 << 10,
        )
        for i, block in enumerate(chain(6, scale=0.6, fixed=0.3).blocks)
    )
)


@pytest.mark.parametrize("devices", [2, 4, 7])
def test_it_is_the_planners_fastest_plan(devices):
    site = Site(cluster=cluster(devices, bandwidth="4gbit"))
    option = bursted(demand(profile=UNEVEN, batch=24), site)
    played = predict(option.plan, UNEVEN, site.network)
    assert option.step_ms == pytest.approx(option.plan.forecast.step_ms, rel=1e-9)
    assert option.step_ms == pytest.approx(played.step_ms, rel=1e-9)
    assert sum(option.parts_ms.values()) == pytest.approx(option.step_ms)
    assert len(set(option.plan.widths)) > 1


def test_memory_is_what_the_planner_counts():
    option = bursted(demand(profile=UNEVEN, batch=24), Site(cluster=cluster(4)))
    widths = sorted(set(option.plan.widths))
    costs = Costs(UNEVEN, widths, batch=24, network=Site(cluster=cluster(4)).network)
    memory = Memory(costs, [1.0] * 4)  # too little, so that every device is looked at
    import numpy as np

    places = np.array([[widths.index(width) for width in option.plan.widths]])
    held = burst_bytes(option.plan, UNEVEN)
    for column, rank in enumerate(memory.ranks):
        assert held[rank] == int(memory.bytes(places)[0, column])
    assert list(option.memory_bytes.values()) == held[: option.plan.width]
    assert held == sorted(held, reverse=True)


def test_packing_that_costs_nothing_is_the_planners_figure_and_real_packing_is_more():
    site = Site(cluster=cluster(4))
    free = bursted(demand(profile=UNEVEN, batch=24), site, FREE)
    assert free.step_ms == pytest.approx(free.plan.forecast.step_ms, rel=1e-9)
    real = bursted(demand(profile=UNEVEN, batch=24), site, CODECS)
    assert real.step_ms > free.step_ms
    assert real.name == "burst, 4 bits"
    assert real.wire_bytes < bursted(demand(profile=UNEVEN, batch=24), site).wire_bytes or real.devices == 1


def test_idle_time_is_what_is_neither_computed_nor_packed():
    option = bursted(demand(profile=UNEVEN, batch=24), Site(cluster=cluster(4)))
    assert len(option.idle_ms) == 4
    assert all(0 <= idle <= option.step_ms for idle in option.idle_ms.values())
    assert list(option.idle_ms.values()) == sorted(option.idle_ms.values())


def test_unequal_devices_count_as_the_slowest():
    two = cluster(2)
    devices = tuple(replace(d, gflops=g) for d, g in zip(two.devices, (100.0, 50.0), strict=True))
    slow = bursted(demand(), Site(cluster=replace(two, devices=devices)))
    assert slow.step_ms > bursted(demand(), Site(cluster=two)).step_ms
    assert any("0.5 times" in remark for remark in slow.remarks)


def test_one_device_has_no_widths():
    assert "two devices" in bursted(demand(), Site(cluster=cluster(1))).why_not


@pytest.mark.parametrize("codecs", [None, CODECS], ids=["fp32", "4 bits"])
@pytest.mark.parametrize("bandwidth", ["1gbit", "40gbit"])
@pytest.mark.parametrize("devices", [2, 4])
def test_the_simulator_comes_to_the_same_figures(codecs, bandwidth, devices):
    on = cluster(devices, bandwidth=bandwidth)
    option = bursted(demand(profile=UNEVEN, batch=24), Site(cluster=on), codecs)
    played = play_burst(option.plan, UNEVEN, on, collective=option.collective)
    assert option.step_ms == pytest.approx(played.step_ms(), rel=1e-9)
    assert option.wire_bytes == pytest.approx(sum(played.wire_bytes.values()) / 3)
    assert list(option.memory_bytes.values()) == list(played.peak_bytes.values())[: option.devices]
