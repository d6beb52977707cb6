import copy
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.compress.memory import FeedbackMemory
from plait.errors import FileError, UsageError

COUNTS = {"a": 300, "b": 500, "c": 700}


def noise(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def remember(memory, counts, seed=0, owned=()):
    feedback = memory.lend(counts)
    feedback.kept.copy_(noise(sum(counts.values()), seed))
    feedback.owned = owned
    memory.take_back(tuple(counts), 0)
    return feedback.kept.clone()


@pytest.mark.parametrize(("bits", "bytes_each"), [(32, 4.0), (8, 1.032)])
def test_it_is_kept_between_steps(bits, bytes_each):
    memory = FeedbackMemory(world=2, bits=bits)
    kept = remember(memory, COUNTS)
    again = memory.lend(COUNTS)
    assert (again.kept - kept).norm() <= (0.0 if bits == 32 else 0.02) * kept.norm()
    assert memory.bytes == pytest.approx(bytes_each * 1500, rel=0.01)


def test_buckets_may_be_put_together_anew():
    memory = FeedbackMemory(world=4)
    one, two = {"a": 300, "b": 500}, {"c": 700}
    ab, c = remember(memory, one, 1, owned=((0, 100),)), remember(memory, two, 2)
    moved = memory.lend({"c": 700, "a": 300})
    assert moved.owned == ((700, 800),)
    assert torch.equal(moved.kept, torch.cat([c, ab[:300]]))
    memory.take_back(("c", "a"), 0)
    assert torch.equal(memory.lend({"b": 500}).kept, ab[300:])
    memory.take_back(("b",), 0)
    assert memory.bytes == 4 * 1500  # nothing is held twice


@pytest.mark.parametrize("bits", [8, 32])
def test_it_is_saved_and_restored(bits):
    memory, other = (FeedbackMemory(world=2, bits=bits) for _ in range(2))
    remember(memory, COUNTS, owned=((5, 9), (20, 30)))
    other.load_state_dict(memory.state_dict())
    one, two = memory.lend(COUNTS), other.lend(COUNTS)
    assert torch.equal(one.kept, two.kept)
    assert one.owned == two.owned
    two.kept.zero_()
    assert one.kept.ne(0).any()  # no memory is shared


@pytest.mark.parametrize(("before", "after"), [(8, 32), (32, 8)])
def test_it_may_be_held_in_another_form_after_a_restart(before, after):
    memory, other = FeedbackMemory(world=2, bits=before), FeedbackMemory(world=2, bits=after)
    kept = remember(memory, COUNTS)
    other.load_state_dict(memory.state_dict())
    assert (other.lend(COUNTS).kept - kept).norm() <= 0.03 * kept.norm()


@pytest.mark.parametrize("worlds", [(2, 3), (4, 2), (1, 2), (3, 1)])
def test_nothing_is_lost_in_a_world_of_another_size(worlds):
    old, new = worlds
    states, lacking = [], torch.zeros(1500)
    for rank in range(old):
        memory = FeedbackMemory(world=old, rank=rank)
        owned = ((100 * rank, 100 * rank + 100),)
        kept = remember(memory, COUNTS, rank, owned=owned)
        kept[owned[0][0] : owned[0][1]] *= old  # what a sum lacks, every contribution would
        lacking += kept / old
        states.append(memory.state_dict())
    contributions = torch.zeros(1500)
    for rank in range(new):
        memory = FeedbackMemory(world=new, rank=rank)
        memory.load_other_world(states)
        contributions += memory.lend({"b": 500, "c": 700, "a": 300}).kept / new
    expected = torch.cat([lacking[300:], lacking[:300]])
    assert torch.allclose(contributions, expected, rtol=1e-5, atol=1e-6)


@given(
    st.permutations(range(6)),
    st.integers(0, 6),
    st.lists(st.integers(0, 60), max_size=8),
    st.sampled_from([8, 32]),
)
def test_each_parameter_keeps_what_is_its_own_however_buckets_change(order, cut, edges, bits):
    counts = {"a": 3, "b": 0, "c": 17, "d": 1, "e": 20, "f": 19}
    edges = sorted(set(edges))[: len(set(edges)) // 2 * 2]
    owned = tuple(zip(edges[::2], edges[1::2], strict=True))
    memory = FeedbackMemory(world=2, bits=bits)
    kept = remember(memory, counts, owned=owned)
    mask = torch.zeros(60, dtype=torch.bool)
    for start, stop in owned:
        mask[start:stop] = True
    names = [list(counts)[place] for place in order]
    for bucket in (names[:cut], names[cut:]):
        if not bucket:
            continue
        again = memory.lend({name: counts[name] for name in bucket})
        ours = torch.zeros(len(again.kept), dtype=torch.bool)
        for start, stop in again.owned:
            ours[start:stop] = True
        where = torch.cat([_places(counts, name) for name in bucket])
        assert torch.equal(ours, mask[where])
        assert (
            (again.kept - kept[where]).abs().max(dim=0).values < (1e-9 if bits == 32 else 0.05)
            if len(where)
            else True
        )
        memory.take_back(bucket, 0)
    assert sorted(name for each in memory.state_dict() for name in each["counts"]) == sorted(counts)


def _places(counts, name):
    names = list(counts)
    first = sum(counts[before] for before in names[: names.index(name)])
    return torch.arange(first, first + counts[name])


def test_another_thread_may_ask_how_much_it_is():
    memory, problems, done = FeedbackMemory(world=2), [], threading.Event()

    def ask():
        while not done.is_set():
            try:
                memory.bytes  # noqa: B018
            except RuntimeError as error:
                problems.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=ask)
    thread.start()
    for place in range(300):
        remember(memory, {str(place): 1})
    done.set()
    thread.join()
    sys.setswitchinterval(before)
    assert problems == []
    assert memory.bytes == 4 * 300


def damaged(key, value):
    def change(state):
        state[0][key] = value

    return change


@pytest.mark.parametrize(
    ("bits", "damage", "match"),
    [
        (32, lambda state: state.append(5), "no 'counts'"),
        (32, lambda state: state[0].pop("held"), "no 'held'"),
        (32, lambda state: state.append(state[0]), "'a' twice"),
        (32, damaged("counts", {}), "0 elements"),
        (32, damaged("counts", {"a": 300, "b": 500, "x": 700}), "700 elements of 'x'.*no such parameter"),
        (32, damaged("counts", {"a": 300, "b": 501, "c": 700}), "501 elements of 'b', and the model has 500"),
        (32, damaged("owned", [5]), r"sums in \[5\]"),
        (32, damaged("owned", [("x", 9)]), "sums in"),
        (32, damaged("owned", [(20, 10)]), "sums in"),
        (32, damaged("owned", [(0, 1501)]), "sums in"),
        (32, damaged("held", []), "0 tensors"),
        (32, damaged("held", [5]), "no tensor"),
        (32, damaged("held", [torch.zeros(5)]), "1 tensors"),
        (32, damaged("held", [torch.zeros(1500).double()]), "float64"),
        (8, lambda state: state[0]["held"].pop(), "2 tensors"),
        (8, damaged("held", [torch.zeros(9, dtype=torch.uint8)] * 3), "3 tensors"),
    ],
)
def test_what_is_damaged_or_of_another_model_is_refused(bits, damage, match):
    memory = FeedbackMemory(world=2, bits=bits)
    remember(memory, COUNTS, owned=((5, 9), (20, 30)))
    state = copy.deepcopy(memory.state_dict())
    FeedbackMemory.check_state(state, COUNTS)
    damage(state)
    with pytest.raises((FileError, UsageError), match=match):
        FeedbackMemory.check_state(state, COUNTS)
