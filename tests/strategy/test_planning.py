"""Who runs where and when, for one job and for many."""

import json
from dataclasses import replace
from itertools import permutations, product

import pytest
from chains import CODECS, MIB, chain, cluster, demand, spilling, with_disk

import plait
from plait.errors import UsageError
from plait.strategy import compare, plan
from plait.strategy.schedule import in_order, makespan_ms
from plait.units import format_bytes

SMALL, LARGE = chain(4), chain(4, parameters=64 * MIB)


def planned(demands, on=None, **settings):
    return plan(demands, on or cluster(4), codecs=CODECS, **settings)


def test_one_job_is_its_comparison():
    made = planned(demand(steps=10))
    same = compare(chain(), cluster(4), batch=16, codecs=CODECS)
    assert made.why == same.why
    (placement,) = made.placements
    assert placement.option.name == same.chosen.name
    assert made.makespan_ms == pytest.approx(10 * same.chosen.step_ms)
    assert made.bound_ms == made.makespan_ms
    assert plait.plan is plan


def test_one_job_alone_takes_its_fastest_option_by_throughput_too():
    thin = cluster(2, bandwidth="1gbit")
    made = planned(demand(), thin, objective="throughput")
    compared = made.comparisons["job"]
    most = max(compared.options, key=lambda option: option.total_samples_per_s)
    assert most.name != compared.chosen.name  # another leaves more for what is not there
    (placement,) = made.placements
    assert placement.option.name == compared.chosen.name
    assert made.samples_per_s == made.bound_samples_per_s == compared.chosen.samples_per_s
    assert made.why.startswith(placement.option.name)


def test_the_schedule_is_the_best_of_all_by_brute_force():
    on = cluster(3, bandwidth="4gbit")
    demands = [demand(f"j{i}", SMALL, steps=steps) for i, steps in enumerate((30, 20, 10))]
    made = planned(demands, on)
    by_width = {
        k: min(
            option.step_ms
            for option in compare(SMALL, on.take(k), batch=16, codecs=CODECS).options
            if option.feasible
        )
        for k in (1, 2, 3)
    }
    times = [{k: one.steps * ms for k, ms in by_width.items()} for one in demands]
    best = min(
        makespan_ms(in_order(times, widths, order, 3))
        for widths in product((1, 2, 3), repeat=3)
        for order in permutations(range(3))
    )
    assert made.makespan_ms == pytest.approx(best)
    assert made.bound_ms <= made.makespan_ms * (1 + 1e-9)


def test_devices_are_used_once_at_a_time_and_jobs_run_in_full():
    demands = [demand(f"j{i}", SMALL, steps=5 + i) for i in range(6)]
    made = planned(demands)
    for way in made.ways:
        assert sorted(placement.job for placement in way.placements) == [f"j{i}" for i in range(6)]
        for placement in way.placements:
            steps = 5 + int(placement.job[1:])
            assert placement.end_ms - placement.start_ms == pytest.approx(steps * placement.option.step_ms)
        for one, other in permutations(way.placements, 2):
            if set(one.devices) & set(other.devices):
                assert one.end_ms <= other.start_ms + 1e-6 or other.end_ms <= one.start_ms + 1e-6
        assert way.makespan_ms >= made.bound_ms * (1 - 1e-9)
    assert made.makespan_ms == min(way.makespan_ms for way in made.ways)
    assert {way.name for way in made.ways} >= {"side by side", "one after another"}


def test_by_throughput_the_rates_at_the_start_decide():
    demands = [demand(f"j{i}", SMALL, steps=5 + i) for i in range(3)]
    made = planned(demands, objective="throughput")
    assert made.samples_per_s == max(way.samples_per_s for way in made.ways)
    assert made.samples_per_s <= made.bound_samples_per_s * (1 + 1e-9)
    assert "samples/s" in made.why


def test_background_jobs_get_what_is_idle():
    demands = [
        demand("front", SMALL, steps=50),
        demand("behind", SMALL, steps=1, priority="background"),
    ]
    made = planned(demands, cluster(2, bandwidth="1mbit"))
    front, behind = made.placement("front"), made.placement("behind")
    assert (front.how, behind.how) == ("foreground", "background")
    assert set(front.devices) != set(behind.devices)
    assert behind.end_ms == pytest.approx(SMALL.step_ms(16))
    assert behind.done == 1
    assert made.makespan_ms == front.end_ms
    together = planned([demands[0], demand("long", SMALL, steps=500, priority="background")], cluster(1))
    assert together.placement("long").start_ms == pytest.approx(together.makespan_ms)
    assert together.placement("long").done == 0


def test_background_jobs_alone_are_jobs_like_others():
    made = planned([demand(name, SMALL, steps=3, priority="background") for name in "ab"])
    assert {placement.how for placement in made.placements} == {"foreground"}


def test_jobs_that_fit_no_other_way_alternate():
    on = with_disk(cluster(2, memory=spilling(360), per_host=2, bandwidth="40gbit"))
    demands = [demand(f"l{i}", LARGE, batch=8, steps=6, strategy="spill") for i in range(3)]
    made = planned(demands, on)
    names = {way.name for way in made.ways}
    assert {"side by side", "one after another", "alternated"} <= names
    turns = next(way for way in made.ways if way.name == "alternated")
    assert {placement.how for placement in turns.placements} == {"alternated"}
    after = next(way for way in made.ways if way.name == "one after another")
    assert turns.makespan_ms < after.makespan_ms
    for way in made.ways:
        assert way.makespan_ms >= made.bound_ms * (1 - 1e-9)
        assert way.samples_per_s <= made.bound_samples_per_s * (1 + 1e-9)
    mixed = planned([*demands[:2], demand("small", SMALL, batch=8, steps=9, strategy="data")], on)
    assert any("side by side on 1" in way.name for way in mixed.ways)


def test_a_job_that_fits_nowhere_is_named_with_what_would_help():
    made = planned([demand("small", SMALL), demand("large", LARGE, batch=8)], cluster(2, memory="100MiB"))
    assert made.unplaced == ("large",)
    assert [placement.job for placement in made.placements] == ["small"]
    assert made.comparisons["large"].changes[0].text in made.why
    none = planned([demand("large", LARGE, batch=8)], cluster(2, memory="100MiB"))
    assert none.chosen is None
    assert none.placements == ()
    assert none.makespan_ms == float("inf")
    assert none.to_json()["makespan_ms"] is None


def test_a_background_job_that_fits_on_no_device_says_so():
    on = cluster(2, memory="900MiB")
    large = demand("behind", LARGE, batch=8, priority="background")
    made = planned([demand("front", SMALL), large], on)
    assert made.unplaced == ("behind",)
    need, may = format_bytes(large.alone_bytes), "900.00 MiB"
    said = f"background job 'behind' runs on one device, where it would hold {need}, and may hold {may}"
    assert said in made.why
    assert planned([demand("front", SMALL), large], cluster(2)).unplaced == ()
    limited = replace(large, memory_bytes=900 * MIB)
    assert planned([demand("front", SMALL), limited], cluster(2)).unplaced == ("behind",)
    behind = demand("behind", SMALL, batch=8, priority="background")
    none = planned([demand("front", LARGE, batch=8), behind], cluster(2, memory="150MiB"))
    assert none.unplaced == ("front", "behind")
    assert "no foreground job can be placed" in none.why


def test_a_background_job_has_a_process_of_its_own():
    front = demand("front", SMALL, steps=50, strategy="data")
    behind = demand("behind", SMALL, steps=1, strategy="data", priority="background")
    on = cluster(2, bandwidth="40gbit", memory=600 * MIB)
    held = planned([front, behind], on).placement("front").option.peak_bytes
    left = 600 * MIB - held - behind.alone_bytes
    for process_bytes, waits in ((left // 2, False), (left // 2 + MIB, True)):
        made = planned([front, behind], on, process_bytes=process_bytes)
        assert made.placement("front").option.devices == 2
        assert (made.placement("behind").start_ms >= made.makespan_ms) == waits


def test_it_is_plain_data_and_can_be_drawn():
    made = planned([demand("a", SMALL), demand("b", SMALL), demand("c", SMALL, priority="background")])
    data = json.loads(json.dumps(made.to_json()))
    assert data["format"] == "plait.workload/1"
    assert set(data["jobs"]) == {"a", "b", "c"}
    assert {span.name.split(":")[0] for span in made.timeline.spans} == {"a", "b", "c"}


def test_what_is_no_workload_is_refused():
    with pytest.raises(UsageError, match="'speed'"):
        planned(demand(), objective="speed")
    with pytest.raises(UsageError, match="no jobs"):
        planned([])
    with pytest.raises(UsageError, match="2 jobs are named 'job'"):
        planned([demand(), demand()])
    with pytest.raises(UsageError, match="is no job"):
        planned(["jobs.py"])
    with pytest.raises(UsageError, match="'other', which is no job"):
        planned(demand(), profiles={"other": SMALL})
    with pytest.raises(UsageError, match="steps"):
        demand(steps=0)
    with pytest.raises(UsageError, match="'urgent'"):
        demand(priority="urgent")


def test_side_by_side_is_said_where_jobs_do_run_at_the_same_time():
    wide = cluster(4, bandwidth="400gbit")  # more devices pay in full, so jobs take all of them in turn
    made = planned([demand("a", SMALL, steps=5), demand("b", SMALL, steps=6)], wide, strategies=["data"])
    for way in made.ways:
        foreground = [placement for placement in way.placements if placement.how == "foreground"]
        overlap = any(
            one.start_ms < other.end_ms and other.start_ms < one.end_ms
            for one, other in permutations(foreground, 2)
        )
        assert way.name.startswith("side by side") == overlap
    assert len({way.name for way in made.ways}) == len(made.ways)
    assert made.chosen.name == "one after another"
    assert "1 times" not in made.why
    alone = planned([demand("a", SMALL), demand("b", SMALL, priority="background")], wide)
    assert {way.name.split(",")[0] for way in alone.ways} == {"alone"}
