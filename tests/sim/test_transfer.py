"""Bytes on their way."""

import math

import pytest

from plait.cluster import Cluster
from plait.sim import Simulation
from plait.sim.route import Routes
from plait.sim.transfer import Transfer


@pytest.fixture
def scene():
    simulation = Simulation()
    route = Routes(Cluster.uniform(hosts=2, memory=1, bandwidth=1.0), {}, {}).way("node0", "node1")
    ends = []

    def make(size):
        made = Transfer(
            simulation, "a", route, size, lambda: None, lambda _: ends.append(simulation.now_ms), track="wire"
        )
        made.begin()
        return made

    return simulation, make, ends


def test_it_leaves_when_its_bytes_have_gone_at_the_rates_that_it_had(scene):
    simulation, make, ends = scene
    one = make(100)
    one.change(1000)
    simulation.at(30, lambda: one.change(500))
    simulation.at(50, lambda: one.change(0))
    simulation.at(80, lambda: one.change(2000))
    simulation.run()
    assert ends == [80 + 60 / 2]
    assert not one.moving


def test_a_rate_without_end_takes_no_time_and_no_bytes_take_none_either(scene):
    simulation, make, ends = scene
    make(100).change(math.inf)
    make(0).change(0)
    make(math.inf).change(1000)
    simulation.run()
    assert ends == [0, 0]


def test_the_dust_of_rounding_waits_for_no_link_that_comes_back(scene):
    simulation, make, ends = scene
    one = make(1)
    one.change(1000 / 3 * (1 - 1e-14))
    simulation.at(3, lambda: one.change(0))
    simulation.run()
    assert ends == [3]


def test_it_can_stand_still(scene):
    simulation, make, ends = scene
    one = make(100)
    one.change(1000)
    stopped = []
    simulation.at(40, lambda: stopped.append(one.stop()))
    simulation.at(90, one.begin)
    simulation.at(90, lambda: one.change(1000))
    simulation.at(150, lambda: stopped.append(one.stop()))
    simulation.run()
    assert (ends, stopped) == ([150], [True, False])
    assert [(span.start_ms, span.end_ms) for span in simulation.timeline.spans] == [(0, 40)]
