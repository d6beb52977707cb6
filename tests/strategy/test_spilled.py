"""Spilling as an option, from a profile alone."""

from dataclasses import replace
from itertools import pairwise

import pytest
from chains import MIB, chain, cluster, demand, spilling, with_disk

from plait.cluster.parts import Tier
from plait.errors import UsageError
from plait.sim.spill import play_spill
from plait.sim.spilled_job import SpilledJob
from plait.spill.footprint import PROCESS_BYTES, likely_bytes
from plait.spill.makespan import Disk
from plait.spill.partition import smallest
from plait.spill.policies import Sticky
from plait.strategy.site import Site
from plait.strategy.spilled import spill_intervals, spilled

LARGE = demand(profile=chain(parameters=64 * MIB), batch=8)


def test_a_model_that_fits_runs_as_if_alone():
    option = spilled(demand(batch=8), Site(cluster=with_disk(cluster(1, memory="8GiB"))))
    whole = chain().step_ms(8)
    assert whole <= option.step_ms < whole + 10
    assert option.plan.forecast.read_bytes == 0


def test_a_model_that_does_not_fit_moves_and_stays_within_memory():
    site = Site(cluster=with_disk(cluster(1, memory=spilling(512))))
    option = spilled(LARGE, site)
    assert option.feasible
    assert len(option.plan.shards) > 1
    assert spilling(256) < option.peak_bytes <= spilling(512)
    assert option.plan.forecast.read_bytes > 0
    assert option.step_ms >= chain(parameters=64 * MIB).step_ms(8)
    assert any("reads" in remark for remark in option.remarks)


def test_more_memory_is_never_slower():
    steps = [
        spilled(LARGE, Site(cluster=with_disk(cluster(1, memory=spilling(size))))).step_ms
        for size in (400, 600, 1000, 2000, 4000)
    ]
    assert all(after <= before * 1.001 for before, after in pairwise(steps))


def test_too_little_says_what_takes_it():
    refused = spilled(LARGE, Site(cluster=with_disk(cluster(1, memory="100MiB"))))
    assert "at least" in refused.why_not
    assert "2 processes take about 328.00 MiB by themselves" in refused.why_not
    need = refused.works.removeprefix("about ").split(" of memory")[0]
    assert spilled(LARGE, Site(cluster=with_disk(cluster(1, memory=need)))).feasible


def test_what_processes_take_is_off_a_budget_that_would_hold_the_model():
    small = demand(batch=1)
    least = smallest(spill_intervals(small))
    need = least.arena_bytes + least.private_bytes
    assert spilled(small, Site(cluster=with_disk(cluster(1, memory=need + likely_bytes(1))))).feasible
    for memory in (need, need + likely_bytes(1) - MIB):
        refused = spilled(small, Site(cluster=with_disk(cluster(1, memory=memory))))
        assert not refused.feasible
    # Devices that take turns have one process for all of them; one that a site counts is not counted twice.
    turns = Site(cluster=with_disk(cluster(1, memory=need + likely_bytes(2) // 2)))
    assert spilled(small, turns, at_once=2).feasible
    assert not spilled(small, turns).feasible
    counted = Site(cluster=with_disk(cluster(1, memory=need + likely_bytes(1))), process_bytes=PROCESS_BYTES)
    assert spilled(small, counted).feasible


def test_what_is_missing_below_the_device_is_named():
    with pytest.raises(UsageError, match="no tier below"):
        spilled(LARGE, Site(cluster=cluster(1)))
    slow = with_disk(cluster(1))
    unknown = replace(slow, tiers=(replace(slow.tiers[0], read_bytes_per_s=None),))
    with pytest.raises(UsageError, match="how fast tier 'disk'"):
        spilled(LARGE, Site(cluster=unknown))


def test_a_disk_that_is_too_small_is_refused():
    small = with_disk(cluster(1, memory=spilling(512)), capacity=100 * MIB)
    assert "'disk' holds 100.00 MiB" in spilled(LARGE, Site(cluster=small)).why_not


def test_below_a_gpu_the_arena_is_the_hosts_memory():
    on = with_disk(cluster(1, memory="400MiB"))
    gpu = replace(on, devices=(replace(on.devices[0], kind="cuda"),))
    with pytest.raises(UsageError, match="'ram'"):
        spilled(LARGE, Site(cluster=gpu))
    ram = Tier(name="ram", host="node0", capacity_bytes=16 << 30)
    option = spilled(LARGE, Site(cluster=replace(gpu, tiers=(ram, *gpu.tiers))))
    assert option.plan.forecast.read_bytes == 0
    assert option.peak_bytes <= 400 * MIB  # of which processes take nothing


def test_shared_weights_and_odd_states_are_counted_rather_too_large():
    plain = chain(4)
    tied = replace(
        plain,
        blocks=(
            replace(plain.blocks[0], tied=("w",)),
            *plain.blocks[1:3],
            replace(plain.blocks[3], tied=("w",)),
        ),
    )
    assert (
        smallest(spill_intervals(demand(profile=tied))).arena_bytes
        >= smallest(spill_intervals(demand(profile=plain))).arena_bytes
    )
    odd = replace(plain, blocks=tuple(replace(b, optimizer_bytes=6 * MIB) for b in plain.blocks))
    assert spill_intervals(demand(profile=odd)).moments[0, 4] == pytest.approx(4 * 8 * MIB, rel=0.01)


def test_spilled_activations_have_room_in_the_plan():
    many = demand(profile=chain(parameters=16 * MIB, saved=16 * MIB, scale=5.0), batch=8, accumulate=2)
    on = with_disk(cluster(1, memory=spilling(450)), read=4e9, write=4e9)
    shards = spilled(many, Site(cluster=on)).plan.shards
    stored = [shard for shard in shards if shard.activations == "spill"]
    assert stored
    for shard in stored:  # of the largest micro-batch, with what passes between its own blocks
        blocks = shard.end - shard.first
        assert shard.saved_bytes == 4 * (blocks * 16 * MIB + (blocks - 1) * (64 << 10))
    assert all(shard.saved_bytes == 0 for shard in shards if shard.activations != "spill")


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_simulator_comes_to_the_same_figures_where_nothing_waits_for_the_disk(accumulate):
    of = replace(LARGE, accumulate=accumulate, steps=4)
    option = spilled(of, Site(cluster=with_disk(cluster(1, memory="8GiB"))))
    job = SpilledJob(
        name="job", plan=option.plan, profile=of.profile, batch=8, steps=4, micro_batches=accumulate
    )
    below = Disk(memory_bytes=option.plan.arena_bytes, read_bytes_per_s=1.5e9, write_bytes_per_s=1.2e9)
    played = play_spill([job], 1, Sticky(), below)
    assert option.step_ms == pytest.approx(played.steps_ms["job"][-1], rel=1e-9)
