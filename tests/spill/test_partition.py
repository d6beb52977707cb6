"""The partition: against all cuts there are, within its budgets, never slower with more memory."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.spill.forecast import Machine, Model
from plait.spill.intervals import Intervals
from plait.spill.partition import best_cut, partition, smallest
from plait.spill.plan import MODES, Shard

PAGE = 4096


def machine(arena_pages, private_pages, *, pages_per_ms=1.0, devices=1):
    rate = pages_per_ms * PAGE * 1e3
    return Machine(
        arena_bytes=arena_pages * PAGE,
        private_bytes=private_pages * PAGE,
        read_bytes_per_s=rate,
        write_bytes_per_s=rate / 2,
        devices=devices,
        unit_ms=0.1,
    )


def cuts_of(count, modes=MODES):
    """All ways to cut a chain, with all modes of the shards but the last."""
    for size in range(count):
        for at in itertools.combinations(range(1, count), size):
            edges = [0, *at, count]
            for chosen in itertools.product(modes, repeat=len(at)):
                yield [
                    Shard(first=first, end=end, activations=mode)
                    for first, end, mode in zip(edges, edges[1:], (*chosen, "keep"), strict=False)
                ]


def brute_force(intervals, on, modes=MODES):
    """The fastest of all cuts, each with every window at which something comes to fit."""
    best, models = float("inf"), {}
    rough = Model(intervals, on, window_bytes=0)
    for shards in cuts_of(intervals.blocks, modes):
        need = rough.forecast(shards, 1)
        places = [(MODES.index(shard.activations), shard.first, shard.end) for shard in shards]
        sizes = [int(rough.size[place]) for place in places]
        windows = {max(sizes), *(int(rough.roomy[p]) for p in places), *map(sum, itertools.pairwise(sizes))}
        for window in windows:
            fits = max(sizes) <= window <= on.share_bytes
            if fits and need.private_peak_bytes <= on.private_bytes:
                if window not in models:
                    models[window] = Model(intervals, on, window_bytes=window)
                best = min(best, models[window].forecast(shards, 1).step_ms)
    return best


blocks = st.lists(
    st.fixed_dictionaries(
        {
            "weights": st.integers(1, 3),
            "moments": st.integers(0, 2),
            "forward": st.sampled_from([0.5, 1, 4]),
            "saved": st.integers(0, 4),
            "transient": st.integers(0, 2),
            "trained": st.sampled_from([True, True, False]),
        }
    ),
    min_size=1,
    max_size=4,
)


# Trying to shrink what fails would take minutes, and cases are small.
def test_what_keeps_some_may_fit_a_window_that_others_do_not(sketch):
    large = {"trained": True, "transient": 2, "weights": 2, "moments": 0, "forward": 4, "saved": 4}
    small = {**large, "transient": 1, "weights": 1, "forward": 1}
    last = {**large, "trained": False, "weights": 3, "moments": 1, "saved": 3}
    intervals = Intervals.of(*sketch([large, small, large, last], micro_batches=(1,)))
    on = machine(28, 9, pages_per_ms=0.3)
    assert best_cut(intervals, on).forecast.step_ms == pytest.approx(brute_force(intervals, on), rel=1e-9)


@settings(max_examples=120, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    blocks=blocks,
    clips=st.booleans(),
    tie=st.booleans(),
    micro_batches=st.sampled_from([(1,), (1, 1)]),
    arena=st.integers(-1, 40),
    private=st.integers(-1, 20),
    pages_per_ms=st.sampled_from([0.3, 2.0, 20.0]),
)
def test_no_cut_is_faster(sketch, blocks, clips, tie, micro_batches, arena, private, pages_per_ms):
    tied = (len(blocks) - 1,) if tie and len(blocks) > 1 else ()
    intervals = Intervals.of(*sketch(blocks, clips=clips, tied=tied, micro_batches=micro_batches))
    least = smallest(intervals)
    arena += least.arena_bytes // PAGE
    private += least.private_bytes // PAGE
    on = machine(max(0, arena), max(0, private), pages_per_ms=pages_per_ms)
    expected = brute_force(intervals, on)
    if expected == float("inf"):
        with pytest.raises(UsageError, match="takes at least"):
            best_cut(intervals, on)
        return
    plan = best_cut(intervals, on)
    assert plan.forecast.step_ms == pytest.approx(expected, rel=1e-9)
    check(plan, len(blocks))


def check(plan, count):
    """It covers every block once, and keeps its budgets."""
    assert [shard.first for shard in plan.shards[1:]] == [shard.end for shard in plan.shards[:-1]]
    assert (plan.shards[0].first, plan.shards[-1].end) == (0, count)
    assert plan.forecast.arena_peak_bytes <= plan.window_bytes <= plan.arena_bytes
    assert plan.forecast.private_peak_bytes <= plan.private_bytes


@pytest.mark.parametrize(
    ("count", "private", "modes"), [(6, 12, ("keep", "spill", "recompute")), (8, 100, ("keep",))]
)
def test_no_cut_of_a_longer_chain_is_faster(sketch, count, private, modes):
    blocks = [{"weights": 1 + i % 3, "moments": 1, "forward": 1 + i % 2, "saved": 2} for i in range(count)]
    description, costs = sketch(blocks)
    dear = replace(costs, blocks=tuple(replace(block, thrift_ms=1e3) for block in costs.blocks))
    intervals = Intervals.of(description, dear if private < 100 else costs)
    on = machine(24, private, pages_per_ms=2.0)
    assert best_cut(intervals, on).forecast.step_ms == pytest.approx(brute_force(intervals, on, modes))


def chain(seed, count):
    source = random.Random(seed)
    return [
        {
            "weights": source.randint(1, 12),
            "moments": 2,
            "forward": source.uniform(0.5, 5),
            "saved": source.randint(1, 30),
            "transient": source.randint(0, 5),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_more_memory_is_never_slower(sketch, seed):
    blocks = chain(seed, 6)
    intervals = Intervals.of(*sketch(blocks, tied=(5,)))
    least = smallest(intervals)
    by_arena, by_private = [], []
    for more in (0, 1, 3, 8, 20, 50, 120):
        arena, private = least.arena_bytes // PAGE + more, least.private_bytes // PAGE + 40
        by_arena.append(best_cut(intervals, machine(arena, private)).forecast.step_ms)
        arena, private = least.arena_bytes // PAGE + 60, least.private_bytes // PAGE + more
        by_private.append(best_cut(intervals, machine(arena, private)).forecast.step_ms)
    assert by_arena == sorted(by_arena, reverse=True)
    assert by_private == sorted(by_private, reverse=True)


@pytest.mark.parametrize("private", [40, 5000])
@pytest.mark.parametrize("arena", [120, 500, 3000])
def test_a_long_chain_is_cut_within_its_budgets(sketch, arena, private):
    intervals = Intervals.of(*sketch(chain(0, 60)))
    on = machine(arena, private, pages_per_ms=8.0)
    plan = best_cut(intervals, on)
    check(plan, 60)
    assert plan.forecast.step_ms >= max(plan.forecast.compute_ms, plan.forecast.read_ms) - 1e-6


def test_with_plenty_of_memory_nothing_moves_and_everything_is_kept(sketch):
    plan = best_cut(Intervals.of(*sketch(chain(1, 5))), machine(10_000, 10_000))
    assert plan.forecast.read_bytes == plan.forecast.written_bytes == 0
    assert {shard.activations for shard in plan.shards} == {"keep"}
    assert plan.forecast.bottleneck == "compute"
    assert plan.forecast.stall_ms == 0


def test_the_least_memory_works_and_less_does_not(sketch):
    intervals = Intervals.of(*sketch(chain(2, 7), tied=(6,)))
    least = smallest(intervals)
    rates = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}
    exact = {"arena_bytes": least.arena_bytes, "private_bytes": least.private_bytes}
    check(best_cut(intervals, Machine(**exact, **rates)), 7)
    for name in exact:
        with pytest.raises(UsageError, match=r"shared \(block.*optimizer state .* on each device") as error:
            best_cut(intervals, Machine(**{**exact, name: exact[name] - 1}, **rates))
        assert error.value.setting == "memory"
        assert "shared" in error.value.works


def test_a_long_chain_that_barely_fits_is_cut(sketch):
    # The first block is far larger than all others: windows that hold it hold many of those.
    blocks = [{"weights": 300, "moments": 2}, *chain(3, 40)]
    intervals = Intervals.of(*sketch(blocks))
    least = smallest(intervals)
    on = machine(least.arena_bytes // PAGE, least.private_bytes // PAGE)
    check(best_cut(intervals, on), 41)


def test_devices_share_the_arena(sketch):
    intervals = Intervals.of(*sketch(chain(2, 7)))
    assert smallest(intervals, devices=3).arena_bytes == 3 * smallest(intervals).arena_bytes
    alone = best_cut(intervals, machine(100, 100))
    shared = best_cut(intervals, machine(300, 100, pages_per_ms=3.0, devices=3))
    assert shared == alone


def test_shards_that_spill_have_room_for_it(sketch):
    blocks = [{"weights": 1, "forward": 50, "saved": 8}] * 4
    description, costs = sketch(blocks, micro_batches=(1, 1))
    plan = partition(
        description,
        costs,
        arena_bytes=400 * PAGE,
        private_bytes=14 * PAGE,
        read_bytes_per_s=1e9,
        write_bytes_per_s=1e9,
    )
    spilled = [shard for shard in plan.shards if shard.activations == "spill"]
    assert spilled
    for shard in spilled:
        # Half of what is saved is cheap to make again; a value between two blocks is saved too.
        assert shard.saved_bytes == (4 * (shard.end - shard.first) + shard.end - shard.first - 1) * PAGE
    assert plan.forecast.steps == description.steps


def test_costs_of_another_job_are_refused(sketch):
    description, _ = sketch([{}] * 3)
    _, costs = sketch([{}] * 2)
    with pytest.raises(UsageError, match="3 blocks, and costs are given of 2"):
        Intervals.of(description, costs)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("arena_bytes", -1), ("devices", 0), ("read_bytes_per_s", 0.0), ("write_bytes_per_s", float("inf"))],
)
def test_machines_that_cannot_be_are_refused(setting, value):
    given = {"arena_bytes": 1, "private_bytes": 1, "read_bytes_per_s": 1.0, "write_bytes_per_s": 1.0}
    with pytest.raises(UsageError, match=setting):
        Machine(**{**given, setting: value})
