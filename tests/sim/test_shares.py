"""Who gets what, and who is concerned by whom."""

import math

import pytest

from plait.cluster import Cluster
from plait.sim import Simulation, shares
from plait.sim.route import Routes
from plait.sim.shares import Shares
from plait.sim.transfer import Transfer


class Scene:
    def __init__(self, hosts=20):
        cluster = Cluster.uniform(hosts=hosts, memory=1, bandwidth=120.0)
        self.simulation = Simulation()
        self.routes = Routes(cluster, {}, {})
        self.shares = Shares(self.routes)

    def add(self, route, cap=math.inf):
        made = Transfer(self.simulation, "a", route, 1e9, lambda: None, lambda _: None, cap=cap)
        made.begin()
        self.shares.add(made)
        self.shares.settle([route])
        return made

    def way(self, a, b, cap=math.inf):
        return self.add(self.routes.way(f"node{a}", f"node{b}"), cap)

    def ring(self, *hosts):
        return self.add(self.routes.ring([f"node{i}" for i in hosts]))

    def remove(self, transfer):
        self.shares.remove(transfer)
        self.shares.settle([transfer.route])


def test_a_change_reaches_those_that_share_and_nobody_else():
    scene = Scene()
    one, far = scene.way(0, 1), scene.way(5, 6)
    seen = far.seen
    other = scene.way(0, 2)
    assert (one.rate, other.rate, far.rate) == (60, 60, 120)
    assert far.seen == seen < one.seen
    scene.remove(other)
    assert (one.rate, far.seen) == (120, seen)


def test_a_change_reaches_the_neighbours_of_neighbours():
    scene = Scene()
    first, second = scene.way(0, 1), scene.way(2, 1, cap=20)
    third = scene.way(2, 3)
    assert (first.rate, second.rate, third.rate) == (100, 20, 100)
    scene.remove(third)
    assert first.seen == second.seen
    assert scene.shares.any_on(next(iter(first.route.uses)))


@pytest.mark.parametrize("hosts", [3, 20])
def test_rings_small_and_large_share_alike(hosts):
    scene = Scene()
    ring, apart = scene.ring(*range(hosts)), scene.way(1, 0)
    assert ring.route.large == (hosts == 20)
    # Against the ring's direction: both ends of it are cards of the ring, on different edges.
    assert (ring.rate, apart.rate) == pytest.approx((80, 40))
    along = scene.way(0, 1)
    scene.remove(apart)
    assert (ring.rate, along.rate) == (60, 60)
    again = scene.ring(*range(hosts))
    assert (ring.rate, again.rate, along.rate) == (40, 40, 40)
    scene.remove(ring)
    scene.remove(again)
    assert along.rate == 120
    assert list(scene.shares.active()) == [along]


def test_what_met_before_is_known_and_what_is_known_is_bounded(monkeypatch):
    asked = []
    real = shares.fairness.rates
    monkeypatch.setattr(shares.fairness, "rates", lambda *given: asked.append(given) or real(*given))
    scene = Scene()
    one, other = scene.way(0, 1), scene.way(0, 2)
    for _ in range(5):
        scene.remove(other)
        other = scene.way(0, 2)
        assert (one.rate, other.rate) == (60, 60)
    assert len(asked) == 1
    monkeypatch.setattr(shares, "_MOST_KNOWN", 10)
    monkeypatch.setattr(shares, "_MOST_KINDS", 8)
    for cap in range(1, 60):
        scene.remove(other)
        other = scene.way(0, 2, cap=cap)
        assert (one.rate, other.rate) == (120 - cap, cap)
        assert len(scene.shares._kinds) <= 9
        assert len(scene.shares._known) <= 4


def test_another_capacity_makes_other_shares():
    scene = Scene()
    one, other = scene.way(0, 1), scene.way(0, 2)
    (card,) = one.route.uses.keys() & other.route.uses.keys()
    scene.routes.capacities[card] = 40.0
    scene.routes.age += 1
    scene.shares.settle([card])
    assert (one.rate, other.rate) == (20, 20)


class Asked(dict):
    """Counts how often someone goes through it."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize("large", [False, True])
def test_who_is_on_a_card_is_asked_as_often_however_many_there_are(large):
    def times(flows):
        scene = Scene()
        if large:
            scene.ring(*range(1, 20))
        routes = [scene.routes.way(f"node{i}", "node0") for i in range(1, flows + 1)]
        (card,) = set.intersection(*(set(route.uses) for route in routes))
        asked = Asked()
        for route in routes:
            its = zip(route.uses, route.users, strict=True)
            route.users = tuple(asked if resource == card else users for resource, users in its)
        for route in routes:
            scene.add(route)
        asked.times = 0
        scene.shares.settle([routes[0]])
        return asked.times

    assert times(3) == times(19)
