"""Plans against all plans that there are, and what must hold of any frontier."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plait.burst
from plait.burst import labels
from plait.burst.costs import Costs, evaluate
from plait.burst.memory import Memory
from plait.burst.network import Network
from plait.burst.pareto import minimal
from plait.burst.relaxation import Relaxation, split
from plait.collective import ring_ms
from plait.errors import UsageError
from plait.profile import BlockProfile, Profile, Times


def random_profile(source, blocks, *, graph=False, tied=False):
    """Blocks of which some scale and some do not, with little or much to move and to synchronise."""
    made = []
    for place in range(blocks):
        fixed, per_row = source.choice([0.0, source.uniform(0, 2)]), source.uniform(0, 2)
        times = {
            size: Times(forward=fixed + per_row * size, backward=1.5 * fixed + 2 * per_row * size)
            for size in (1, 4, 16)
        }
        inputs = None
        if graph and place and source.random() < 0.6:
            inputs = tuple(
                f"b{k}" for k in sorted(source.sample(range(place), source.randint(0, min(3, place))))
            )
        made.append(
            BlockProfile(
                name=f"b{place}",
                parameter_bytes=source.choice([0, int(10 ** source.uniform(3, 6.5))]),
                output_bytes_per_sample=int(10 ** source.uniform(1, 5)),
                milliseconds=times,
                optimizer_milliseconds=source.uniform(0, 0.2),
                optimizer_bytes=source.randint(0, 10**5),
                saved_bytes_per_sample=source.randint(0, 10**5),
                transient_bytes=source.randint(0, 10**4),
                transient_bytes_per_sample=source.randint(0, 10**4),
                inputs=inputs,
                tied=tuple(name for name in ("x", "y") if tied and source.random() < 0.4),
            )
        )
    return Profile(blocks=tuple(made))


def random_network(source, devices):
    if source.random() < 0.3:
        return {
            "bandwidth": [[10 ** source.uniform(6, 9) for _ in range(devices)] for _ in range(devices)],
            "latency": [[source.uniform(0, 1e-3) for _ in range(devices)] for _ in range(devices)],
        }
    return {"bandwidth": 10 ** source.uniform(6, 9), "latency": source.choice([0.0, 1e-4])}


def all_plans(profile, devices, batch, network, memory=None, collective=None):
    """The frontier of every choice of widths."""
    widths = list(range(1, min(devices, batch) + 1))
    costs = Costs(profile, widths, batch=batch, network=Network.of(**network), collective=collective)
    places = np.array(list(itertools.product(range(len(widths)), repeat=len(profile.blocks))))
    if memory is not None:
        places = places[Memory(costs, memory).fits(places)]
    score = costs.score(places)
    best = minimal(np.stack([score.step_ms, score.device_ms]))
    return list(zip(score.step_ms[best].tolist(), score.device_ms[best].tolist(), strict=True))


def same(found, wanted):
    """Whether two frontiers are one, where points that differ by rounding alone may stand for each other."""

    def covered(some, by):
        return all(
            any(s <= step * (1 + 1e-9) and d <= device * (1 + 1e-9) for s, d in by) for step, device in some
        )

    return covered(found, wanted) and covered(wanted, found)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_equal_to_brute_force_on_five_blocks_and_four_devices(seed, graph, tied):
    source = random.Random(seed)
    profile = random_profile(source, 5, graph=graph, tied=tied)
    network, batch = random_network(source, 4), source.choice([2, 4, 7, 16, 32])
    frontier = plait.burst.plan(profile, devices=4, batch=batch, **network)
    assert frontier.gap == 0
    assert same(frontier.points, all_plans(profile, 4, batch, network))
    for made in frontier:
        assert max(made.widths) <= min(4, batch)
        point = evaluate(profile, made.widths, batch=batch, network=Network.of(**network))
        assert point == pytest.approx((made.forecast.step_ms, made.forecast.device_ms))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_equal_to_brute_force_with_little_memory(seed, equal):
    source = random.Random(seed)
    profile, network = random_profile(source, 4, tied=True), random_network(source, 4)
    costs = Costs(profile, [1, 2, 3, 4], batch=9, network=Network.of(**network))
    needs = Memory(costs, [0.0] * 4).bytes(np.array([[0] * 4, [3] * 4]))
    first = int(source.uniform(needs[1, 0], needs[0, 0]))
    memory = [first] * 4 if equal else [first, *(int(source.uniform(0, first)) for _ in range(3))]
    wanted = all_plans(profile, 4, 9, network, memory)
    if not wanted:
        with pytest.raises(UsageError, match="no plan fits"):
            plait.burst.plan(profile, devices=4, batch=9, memory=memory, **network)
        return
    assert same(plait.burst.plan(profile, devices=4, batch=9, memory=memory, **network).points, wanted)


class Halved:
    """A collective that sends half of what a ring does, and is slower where more than two take part."""

    def all_reduce(self, tensor, group=None):
        raise NotImplementedError

    def estimate_ms(self, bytes, world, link):
        return ring_ms(bytes / 2, world, link) * (3 if world == 3 else 1)


def test_a_collective_is_asked_for_its_own_estimate():
    source = random.Random(5)
    profile, network = random_profile(source, 5, tied=True), {"bandwidth": 2e5, "latency": 0.0}
    frontier = plait.burst.plan(profile, devices=4, batch=16, collective=Halved(), **network)
    assert same(frontier.points, all_plans(profile, 4, 16, network, collective=Halved()))
    plain = plait.burst.plan(profile, devices=4, batch=16, **network)
    assert frontier.fastest.forecast.step_ms < plain.fastest.forecast.step_ms


def test_an_estimate_that_is_no_time_is_refused():
    class Wrong(Halved):
        def estimate_ms(self, bytes, world, link):
            return -1.0

    profile = random_profile(random.Random(5), 5, tied=True)
    with pytest.raises(UsageError, match=r"the collective estimates -1.0 ms"):
        plait.burst.plan(profile, devices=2, batch=16, bandwidth=1e9, collective=Wrong())


def least_step(frontier, device_ms):
    return min(
        (step for step, device in frontier.points if device <= device_ms * (1 + 1e-12)), default=np.inf
    )


def never_worse(profile, counts, batch, **network):
    frontiers = [plait.burst.plan(profile, devices=count, batch=batch, **network) for count in counts]
    for few, more in itertools.pairwise(frontiers):
        for step, device in few.points:
            assert least_step(more, device) <= step * (1 + 1e-12)
    return frontiers


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_device_more_never_makes_a_step_longer(seed):
    source = random.Random(seed)
    profile = random_profile(source, source.randint(2, 8), graph=True, tied=source.random() < 0.3)
    never_worse(profile, range(1, 8), 12, bandwidth=10 ** source.uniform(6, 9), latency=1e-4)


def test_a_device_more_never_makes_a_step_longer_where_the_frontier_is_not_exact():
    profile = random_profile(random.Random(3), 70)
    counts = [1, 2, 3, 5, 8, 12, 16]
    frontiers = never_worse(profile, counts, 32, bandwidth=2e8, latency=1e-5)
    assert all(0 < frontier.gap < 0.1 for frontier in frontiers[1:])


@pytest.mark.parametrize("bandwidth", [1e6, 2e7, 1e9])
def test_labels_that_become_too_many_end_as_a_certified_frontier(monkeypatch, bandwidth):
    profile, network = random_profile(random.Random(bandwidth), 10), {"bandwidth": bandwidth, "latency": 1e-4}
    exact = plait.burst.plan(profile, devices=5, batch=32, **network)
    assert exact.gap == 0
    for most in (0, 150):
        monkeypatch.setattr(labels, "MOST", most)
        near = plait.burst.plan(profile, devices=5, batch=32, **network)
        assert near.gap < 0.5
        for step, device in exact.points:  # what is certified holds of every plan that there is
            share = min(max(s / step, d / device) for s, d in near.points)
            assert share <= (1 + near.gap) * (1 + 1e-9)


def test_bounds_are_below_every_plan():
    source = random.Random(2)
    for tied in (False, True):
        profile = random_profile(source, 5, graph=True, tied=tied)
        network = Network.of(3e6, 1e-4)
        costs = Costs(profile, [1, 2, 3, 4], batch=16, network=network)
        score = costs.score(np.array(list(itertools.product(range(4), repeat=5))))
        prices = np.array([0.0, 0.01, 0.1, 0.5, 2.0, np.inf])
        step, device = split(prices)
        worth = (step[:, None] * score.step_ms + device[:, None] * score.device_ms).min(axis=1)
        relaxation = Relaxation(costs)
        even = np.full((5, len(prices)), 0.5)
        even[0] = 1.0
        for starts in (False, True):
            least, _ = relaxation.least(prices, even, rounds=30, starts=starts)
            assert (least <= worth * (1 + 1e-9)).all()
            assert (least >= 0.8 * worth).all()  # and not far below


def test_limits_deadlines_and_background_work():
    profile = random_profile(random.Random(11), 8)
    network = {"bandwidth": "1gbit", "latency": "40us"}
    every = plait.burst.plan(profile, devices=6, batch=32, **network)
    single_ms = profile.step_ms(32)
    assert every.chosen is every.fastest
    assert every.cheapest.forecast.amplification <= 1 + 1e-12  # one device is among them
    for limit in (1, 1.1, 1.5, 4):
        asked = plait.burst.plan(profile, devices=6, batch=32, limit=limit, **network).chosen.forecast
        assert asked.device_ms <= limit * single_ms * (1 + 1e-9)
        assert asked.step_ms == least_step(every, limit * single_ms)
    deadline_ms = sorted(every.points)[len(every) // 2][0]
    asked = plait.burst.plan(profile, devices=6, batch=32, deadline_ms=deadline_ms, **network).chosen.forecast
    assert (asked.step_ms, asked.device_ms) == sorted(every.points)[len(every) // 2]
    totals = [single_ms / s + 0.7 * (6 - d / s) for s, d in every.points]
    best = plait.burst.plan(profile, devices=6, batch=32, background_value=0.7, **network).chosen
    assert every.plans.index(best) == int(np.argmax(totals))
    assert every.best(0.0) is every.fastest


def test_idle_time_is_what_device_time_leaves():
    profile = random_profile(random.Random(4), 6)
    for made in plait.burst.plan(profile, devices=5, batch=16, bandwidth=3e7, latency=1e-4):
        forecast = made.forecast
        assert 5 * forecast.step_ms - sum(forecast.idle_ms) == pytest.approx(forecast.device_ms)
        assert list(forecast.idle_ms) == sorted(forecast.idle_ms)


def test_beyond_what_was_measured_a_remark_says_so():
    profile = random_profile(random.Random(4), 3)
    assert plait.burst.plan(profile, devices=2, batch=16, bandwidth=1e9).remarks == ()
    far = plait.burst.plan(profile, devices=2, batch=64, bandwidth=1e9)
    assert "batch 64 lies beyond the measured 1 to 16" in far.remarks[-1]


def test_the_smaller_of_uneven_shares_counts_as_well():
    times = {size: Times(forward=size, backward=size) for size in (11, 32)}
    block = BlockProfile(name="b", parameter_bytes=0, output_bytes_per_sample=0, milliseconds=times)
    found = plait.burst.plan(Profile(blocks=(block,)), devices=3, batch=32, bandwidth=1e9)
    assert found.fastest.shares(0) == (11, 11, 10)
    assert found.remarks == ("batch 10 lies beyond the measured 11 to 32 of block 'b'",)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"devices": 0}, "devices is 0"),
        ({"devices": 10**9}, "a plan for 1000000000 devices.*works: 1 to 65536"),
        ({"batch": 0}, "batch is 0"),
        ({"bandwidth": "quick"}, "'quick' is not a rate"),
        ({"limit": 0.5}, "limit of 0.5 .*works: 1"),
        ({"limit": float("nan")}, "limit of nan"),
        ({"deadline_ms": 1e-6}, "no step takes 1e-06 ms or less; the fastest takes"),
        ({"background_value": -1}, "background work of value -1"),
        ({"background_value": float("inf")}, "background work of value inf"),
        ({"limit": "2"}, "limit is '2', which is no number"),
        ({"memory": object()}, "the memory of 0 devices for 4"),
        ({"limit": 2, "deadline_ms": 3}, "limit and deadline_ms are given"),
        ({"memory": [1, 2]}, "the memory of 2 devices for 4"),
        ({"memory": "4Gb"}, "small b"),
        ({"memory": 1}, "no plan fits: with every block on 4 devices, the first needs"),
        ({"widths": [8]}, "none of the widths"),
        ({"widths": 4}, "widths is 4"),
        ({"widths": [2, 4], "limit": 1}, "times the device time of one device or less"),
    ],
)
def test_what_cannot_be_planned(settings, says):
    profile = random_profile(random.Random(4), 3)
    with pytest.raises(UsageError, match=says):
        plait.burst.plan(profile, **{"devices": 4, "batch": 16, "bandwidth": 1e9, **settings})


def test_the_memory_that_an_error_names_works():
    profile = random_profile(random.Random(4), 3)
    with pytest.raises(UsageError) as error:
        plait.burst.plan(profile, devices=4, batch=16, bandwidth=1e9, memory=1)
    least = int(error.value.works.split()[0])
    plait.burst.plan(profile, devices=4, batch=16, bandwidth=1e9, memory=least)
    with pytest.raises(UsageError):
        plait.burst.plan(profile, devices=4, batch=16, bandwidth=1e9, memory=least - 1)


@pytest.mark.parametrize("rows", [4, 8, 9])
def test_what_fits_is_found_in_long_chains_where_better_plans_do_not(rows):
    times = {size: Times(forward=0.01 * size, backward=0.01 * size) for size in (1, 16)}
    profile = Profile(
        blocks=tuple(
            BlockProfile(
                name=f"b{place}",
                parameter_bytes=10**6,
                output_bytes_per_sample=100,
                saved_bytes_per_sample=1000,
                milliseconds=times,
            )
            for place in range(100)
        )
    )
    memory = 100 * (2 * 10**6 + 1000 * rows)  # for so many rows on each device, on average over blocks
    found = plait.burst.plan(profile, devices=4, batch=16, bandwidth="1gbit", latency="40us", memory=memory)
    for plan in found.plans:
        assert sum(plan.shares(place)[0] for place in range(100)) <= 100 * rows
    assert 0 < found.gap < float("inf")


def test_sizes_beyond_a_machine_number_do_not_wrap_around():
    block = {"parameter_bytes": 1, "output_bytes_per_sample": 1, "saved_bytes_per_sample": 2**62}
    times = {1: Times(forward=1, backward=1)}
    profile = Profile(blocks=tuple(BlockProfile(name=name, milliseconds=times, **block) for name in "ab"))
    with pytest.raises(UsageError, match="no plan fits"):
        plait.burst.plan(profile, devices=2, batch=16, bandwidth=1e9, memory="8GiB")


def test_few_blocks_on_devices_between_two_doublings_are_exact():
    profile = random_profile(random.Random(1), 3)
    assert plait.burst.plan(profile, devices=24, batch=64, bandwidth=1e9).gap == 0
