import pytest
import torch

from plait.compress.memory import FeedbackMemory

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
