"""A pipeline as an option, beside its own planner."""

from dataclasses import replace

import pytest
from chains import MIB, chain, cluster, demand

from plait.pipeline.planning import plan
from plait.sim.pipeline import play_pipeline
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


def changed(profile, **at):
    """With other fields of single blocks: ``first=`` and ``last=``."""
    places = {"first": 0, "last": len(profile.blocks) - 1}
    blocks = list(profile.blocks)
    for name, fields in at.items():
        blocks[places[name]] = replace(blocks[places[name]], **fields)
    return replace(profile, blocks=tuple(blocks))


TIED = changed(
    chain(parameters=40 * MIB),
    first={"tied": ("w",)},
    last={"tied": ("w",), "parameter_bytes": 0, "optimizer_bytes": 0, "optimizer_milliseconds": 0.0},
)
SLOW_END = changed(chain(), last={"optimizer_milliseconds": 60.0})


@pytest.mark.parametrize("profile", [chain(), TIED, SLOW_END], ids=["alike", "tied", "slow end"])
@pytest.mark.parametrize("bandwidth", ["100mbit", "1gbit", "40gbit"])
@pytest.mark.parametrize("devices", [2, 3])
def test_the_simulator_comes_to_the_same_figures(profile, bandwidth, devices):
    of, on = demand(profile=profile, batch=13), cluster(devices, bandwidth=bandwidth)
    option = pipelined(of, Site(cluster=on), exactly=True)
    played = play_pipeline(option.plan, profile, on, steps=8)
    assert option.step_ms == pytest.approx(played.steps_ms["job"][-1], rel=1e-9)
    assert dict(option.memory_bytes) == dict(played.peak_bytes)
    assert option.wire_bytes == pytest.approx(sum(played.wire_bytes.values()) / 8)
    if profile is not SLOW_END:  # then every step is like the first
        assert option.step_ms == pytest.approx(played.step_ms(), rel=1e-9)
    assert sum(option.parts_ms.values()) == pytest.approx(option.step_ms)
    assert all(0 <= idle <= option.step_ms for idle in option.idle_ms.values())


def test_later_stages_update_while_earlier_ones_go_back():
    late = changed(chain(), last={"optimizer_milliseconds": 5.0})  # less than the drain
    on = cluster(3, bandwidth="40gbit")
    option, plain = (pipelined(demand(profile=p), Site(cluster=on), exactly=True) for p in (late, chain()))
    assert option.step_ms == pytest.approx(plain.step_ms, rel=1e-9)
    assert option.step_ms == pytest.approx(option.plan.forecast.step_ms + 2 * 0.2)


def test_an_update_that_is_longer_than_the_drain_holds_up_the_next_step():
    option = pipelined(demand(profile=SLOW_END), Site(cluster=cluster(3, bandwidth="40gbit")), exactly=True)
    assert option.step_ms > option.plan.forecast.step_ms + 2 * 0.2 + 1


def test_shared_weights_cost_a_sum_and_a_copy():
    site = Site(cluster=cluster(2))
    tied, free = (
        pipelined(demand(profile=profile), site, exactly=True)
        for profile in (TIED, changed(TIED, first={"tied": ()}, last={"tied": ()}))
    )
    assert tied.plan.cuts == free.plan.cuts
    assert tied.step_ms > free.step_ms + 1e3 * 40 * MIB / 125e6  # the sum crosses when all is done
    assert tied.wire_bytes == pytest.approx(free.wire_bytes + 2 * 40 * MIB)
    (_, ours), (_, theirs) = (option.memory_bytes.values() for option in (tied, free))
    assert ours - theirs > 3 * 40 * MIB  # weights, gradients and two moments, in whatever order is best
    assert any("share weights" in remark for remark in tied.remarks)
    assert free.remarks == ()


def test_what_would_fit_is_said_in_mebibytes():
    of = demand(profile=chain(parameters=100 * MIB))
    refused = pipelined(of, Site(cluster=cluster(2, memory="300MiB")))
    need = refused.works.split(",")[0]
    assert need.endswith("MiB")
    assert pipelined(of, Site(cluster=cluster(2, memory=need))).feasible
