"""The smallest change that makes a job fit: what is named works, and a little less does not."""

from dataclasses import replace

import pytest
from chains import CODECS, MIB, chain, cluster, demand, spilling, with_disk

from plait.strategy.change import Change, changes, fits
from plait.strategy.comparison import compare, compare_demand
from plait.strategy.site import Site


def refused(of, on, strategies):
    site = Site(cluster=on)
    assert not any(fits(of, site, strategy) for strategy in strategies)
    return {change.setting: change for change in changes(of, site, strategies)}


def feasible(of, on, strategy):
    made = compare_demand(of, on, strategies=[strategy], codecs=CODECS)
    return any(option.feasible for option in made.options)


def test_micro_batches_come_first():
    of = demand(profile=chain(saved=32 * MIB), batch=32)
    on = cluster(1, memory="1GiB")
    found = changes(of, Site(cluster=on), ["data"])
    assert found[0].setting == "accumulate"
    assert feasible(replace(of, accumulate=found[0].value), on, "data")
    assert not feasible(replace(of, accumulate=found[0].value - 1), on, "data")


@pytest.mark.parametrize("strategy", ["data", "pipeline", "burst", "spill"])
def test_memory_that_is_named_works_and_less_does_not(strategy):
    of = demand(profile=chain(parameters=100 * MIB))
    on = with_disk(cluster(2, memory="128MiB"))
    change = refused(of, on, [strategy])["memory"]
    assert change.now == 128 * MIB
    assert feasible(of, with_disk(cluster(2, memory=change.value)), strategy)
    assert not feasible(of, with_disk(cluster(2, memory=int(change.value / 1.01))), strategy)


def test_devices_that_are_named_work():
    of = demand(profile=chain(parameters=100 * MIB))
    change = refused(of, cluster(2, memory="600MiB"), ["pipeline"])["devices"]
    assert feasible(of, cluster(change.value, memory="600MiB"), "pipeline")
    assert not feasible(of, cluster(change.value - 1, memory="600MiB"), "pipeline")


def test_the_batch_that_is_named_works_and_one_more_row_does_not():
    of = demand(profile=chain(saved=32 * MIB), batch=32)
    change = refused(of, cluster(1, memory="1GiB"), ["data"])["batch"]
    assert feasible(replace(of, batch=change.value), cluster(1, memory="1GiB"), "data")
    assert not feasible(replace(of, batch=change.value + 1), cluster(1, memory="1GiB"), "data")


def test_nothing_helps_a_strategy_that_cannot_run_at_all():
    of = demand(profile=chain(1, parameters=100 * MIB))
    assert changes(of, Site(cluster=cluster(1, memory="64MiB")), ["pipeline"]) == ()


def test_where_memory_suffices_nothing_of_it_is_to_be_changed():
    of = demand()
    assert fits(of, Site(cluster=cluster(2)), "data")
    assert changes(of, Site(cluster=cluster(2)), ["data"]) == ()


@pytest.mark.parametrize("capacity", [MIB, 1024 * MIB])
def test_a_disk_that_is_too_small_is_not_mended_by_memory(capacity):
    of = demand(profile=chain(parameters=16 * MIB, saved=16 * MIB, scale=5.0), batch=8)
    on = with_disk(cluster(1, memory=spilling(600)), read=4e9, write=4e9, capacity=capacity)
    made = compare_demand(of, on, strategies=["spill"])
    assert made.chosen is None
    assert "'disk' holds" in made.options[0].why_not
    for change in made.changes:
        assert feasible(replace(of, batch=change.value), on, "spill")
    # Not even the weights fit on the one; fewer rows save less, which helps on the other.
    assert [change.setting for change in made.changes] == ([] if capacity == MIB else ["batch"])


def test_it_is_said_in_words():
    made = compare(chain(parameters=100 * MIB), cluster(1, memory="128MiB"), batch=16, codecs=CODECS)
    assert made.chosen is None
    assert made.changes[0].text in made.why
    assert "600.00 MiB of weights" in made.why
    change = Change(setting="devices", value=4, now=1, strategy="pipeline")
    assert change.text == "4 devices instead of 1, with pipeline"
    assert change.to_json()["factor"] == 4
