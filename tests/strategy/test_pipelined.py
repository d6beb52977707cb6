"""A pipeline as an option, beside its own planner."""

import pytest
from chains import MIB, chain, cluster, demand

from plait.pipeline.planning import plan
from plait.strategy.pipelined import pipelined
from plait.strategy.site import Site


def test_it_is_the_planners_step_and_the_optimizer():
    on = cluster(3, bandwidth="4gbit")
    option = pipelined(demand(), Site(cluster=on), exactly=True)
    own = plan(chain(), 3, global_batch=16, cluster=on)
    assert option.plan.forecast.step_ms <= 1.01 * own.forecast.step_ms
    own = option.plan
    assert option.step_ms == pytest.approx(own.forecast.step_ms + 2 * 0.2)
    assert tuple(option.memory_bytes.values()) == own.forecast.peak_bytes
    assert option.wire_bytes == 2 * 16 * 2 * (64 << 10)
    assert sum(option.parts_ms.values()) == pytest.approx(option.step_ms)


def test_as_many_stages_as_pay():
    options = [pipelined(demand(), Site(cluster=cluster(n)), exactly=True) for n in (2, 3, 4)]
    best = pipelined(demand(), Site(cluster=cluster(4)))
    assert best.step_ms == min(option.step_ms for option in options)
    slow = pipelined(demand(), Site(cluster=cluster(4, bandwidth="20mbit")), exactly=True)
    plain = plan(chain(), 4, global_batch=16, cluster=cluster(4, bandwidth="20mbit"), families=())
    assert slow.plan.forecast.step_ms < plain.forecast.step_ms  # another order than 1F1B


def test_memory_that_one_device_lacks_four_have():
    of = demand(profile=chain(parameters=100 * MIB))
    site = Site(cluster=cluster(4, memory="1200MiB"))
    option = pipelined(of, site)
    assert option.feasible
    assert option.peak_bytes <= 1200 * MIB
    refused = pipelined(of, Site(cluster=cluster(2, memory="300MiB")))
    assert "no cut" in refused.why_not


def test_two_stages_need_two_of_everything():
    assert "1, 6 and 16" in pipelined(demand(), Site(cluster=cluster(1))).why_not
    assert not pipelined(demand(profile=chain(1)), Site(cluster=cluster(2))).feasible
    assert "8 stages" in pipelined(demand(), Site(cluster=cluster(8)), exactly=True).why_not
