"""Jobs that take turns, shard by shard."""

import pytest
from chains import MIB, chain, cluster, demand, spilling, with_disk

from plait.strategy import plan
from plait.strategy.alternated import alternated
from plait.strategy.site import Site


def host(devices=2, *, memory="4GiB", rate=1.5e9):
    on = cluster(devices, memory=memory, per_host=devices, bandwidth="40gbit")
    return with_disk(on, read=rate, write=rate)


QUICK, SLOW = chain(2, scale=0.1, fixed=0.1), chain(4, scale=20.0)


@pytest.mark.parametrize(("short_steps", "devices"), [(1, 2), (100, 1)])
def test_jobs_of_very_unequal_length_end_no_sooner_than_they_can(short_steps, devices):
    demands = [
        demand("long", QUICK, batch=1, steps=1_000_000, strategy="spill"),
        demand("short", SLOW, batch=32, steps=short_steps, strategy="spill"),
    ]
    made = alternated(demands, Site(cluster=host()), range(devices))
    assert made.played_share < 1
    work_ms = [
        one.steps * option.plan.forecast.compute_ms for one, option in zip(demands, made.options, strict=True)
    ]
    assert made.lower_bound_ms == pytest.approx(max(*work_ms, sum(work_ms) / devices))
    for end_ms, its_ms in zip(made.ends_ms, work_ms, strict=True):
        assert end_ms >= its_ms * (1 - 1e-9)
    assert made.makespan_ms == max(made.ends_ms) >= made.lower_bound_ms


def test_a_plan_of_such_jobs_is_not_below_what_no_schedule_beats():
    long = demand("long", QUICK, batch=1, steps=1_000_000, strategy="spill")
    short = demand("short", SLOW, batch=32, steps=1, strategy="spill")
    made = plan([long, short], host())
    for way in made.ways:
        assert way.makespan_ms >= made.bound_ms * (1 - 1e-9)


@pytest.mark.parametrize("lengths", [(30_010, 1, 2, 29_999), (9001, 30, 7)])
def test_jobs_whose_shares_are_rounded_in_different_ways_stay_above_the_bound(lengths):
    demands = [demand(f"j{i}", QUICK, batch=1, steps=steps) for i, steps in enumerate(lengths)]
    made = alternated(demands, Site(cluster=host(1)), [0])
    assert made.played_share < 1
    assert made.makespan_ms >= made.lower_bound_ms


def test_units_cost_what_they_cost_in_the_forecast():
    large = demand(profile=chain(4, parameters=64 * MIB), batch=8, steps=3)
    made = alternated([large], Site(cluster=host(1, memory=spilling(360))), [0])
    (option,) = made.options
    assert len(option.plan.shards) > 1
    assert made.lower_bound_ms == pytest.approx(3 * option.plan.forecast.compute_ms)


def test_activations_that_are_spilled_cross_the_disk():
    many = demand(profile=chain(parameters=16 * MIB, saved=16 * MIB, scale=5.0), batch=8, steps=20)
    rate = 1e9
    made = alternated([many], Site(cluster=host(1, memory=spilling(600), rate=rate)), [0])
    (option,) = made.options
    spilled = sum(shard.saved_bytes for shard in option.plan.shards)
    assert spilled > 500 * MIB
    # At least one way they wait for the disk, which has no time for them while other state crosses it.
    assert made.makespan_ms > made.lower_bound_ms + 20 * 1e3 * spilled / rate
