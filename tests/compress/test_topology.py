import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.compress.settings import Settings
from plait.compress.topology import Topology
from plait.errors import UsageError


@st.composite
def topologies(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    workers = draw(st.permutations(range(sum(sizes))))
    hosts, taken = [], 0
    for size in sizes:
        hosts.append(tuple(sorted(workers[taken : taken + size])))
        taken += size
    return Topology(tuple(hosts), draw(st.integers(1, min(sizes))))


def test_the_drawing():
    both = Topology(((0, 1), (2, 3)), 2)
    assert both.owners == (0, 1, 2, 3)
    assert both.lane(1) == (1, 3)
    assert both.deputy(0, 3) == 1
    one = Topology(((0, 1), (2, 3)), 1)
    assert one.owners == (0, 2)
    assert one.deputy(3, 0) == 2
    flat = Topology.flat(3)
    assert flat.owners == (0, 1, 2)
    assert flat.lane(1) == (0, 1, 2)
    assert [flat.deputy(worker, 1) for worker in range(3)] == [0, 1, 2]


@settings(deadline=None)
@given(topologies())
def test_every_share_has_one_owner_and_one_deputy_on_each_host(topology):
    assert len(set(topology.owners)) == len(topology.owners) == topology.lanes * len(topology.hosts)
    for owner in topology.owners:
        lane = topology.lane(owner)
        assert owner in lane
        assert len(lane) == len(topology.hosts)
        for worker in range(topology.world):
            deputy = topology.deputy(worker, owner)
            assert deputy in topology.host(worker)
            assert deputy in lane
        assert topology.deputy(owner, owner) == owner


def test_which_topology_the_settings_give():
    hosts = ((0, 1), (2, 3))
    assert Settings().topology(hosts) == Topology(hosts, 2)
    assert Settings(leaders=True).topology(hosts) == Topology(hosts, 1)
    assert Settings(algorithm="scatter").topology(hosts) == Topology.flat(4)
    assert Settings(algorithm="ring").topology(hosts) is None
    # One host, or one worker a host: there is nothing to gain from two levels unless they are asked for.
    assert Settings().topology(((0, 1, 2),)) == Topology.flat(3)
    assert Settings().topology(((0,), (1,))) == Topology.flat(2)
    assert Settings(algorithm="hierarchical").topology(((0, 1, 2),)) == Topology(((0, 1, 2),), 3)
    # Where everyone must own a share, leaders cannot do it alone, nor can hosts be uneven.
    assert Settings(leaders=True).topology(hosts, everyone=True) == Topology(hosts, 2)
    assert Settings().topology(((0, 1), (2,)), everyone=True) == Topology.flat(3)


@pytest.mark.parametrize(
    ("hosts", "lanes", "setting"),
    [
        ((), 1, "hosts"),
        (((0, 1), ()), 1, "hosts"),
        (((0, 2),), 1, "hosts"),
        (((0, 1), (1, 2)), 1, "hosts"),
        (((0, 1), (2,)), 2, "lanes"),
        (((0, 1),), 0, "lanes"),
    ],
)
def test_what_is_no_topology(hosts, lanes, setting):
    with pytest.raises(UsageError) as caught:
        Topology(hosts, lanes)
    assert caught.value.setting == setting
