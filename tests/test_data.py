import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.data import Batches, indices, permute, rows_of, share, steps_per_epoch
from plait.determinism import derive
from plait.errors import UsageError

sizes = st.integers(1, 3000)
seeds = st.integers(0, 2**63 - 1)


@given(sizes, seeds)
def test_a_permutation_has_every_row_once_and_answers_anywhere(size, key):
    whole = permute(np.arange(size, dtype=np.uint64), size, key)
    assert sorted(whole.tolist()) == list(range(size))
    somewhere = size // 2
    assert permute(np.array([somewhere], np.uint64), size, key)[0] == whole[somewhere]


def test_a_large_data_set_costs_nothing_to_look_into():
    rows = permute(np.arange(1000, dtype=np.uint64), 10**15, 7)
    assert len(set(rows.tolist())) == 1000
    assert rows.max() < 10**15
    assert rows.max() - rows.min() > 10**14


@pytest.mark.parametrize("size", [2, 3, 5, 13])
def test_every_row_is_as_likely_at_every_place_and_beside_every_other(size):
    # Fixed keys, so that the outcome is fixed; the bound is five standard deviations of a fair shuffle.
    rounds = 1500
    places, pairs = Counter(), Counter()
    for key in range(rounds):
        order = permute(np.arange(size, dtype=np.uint64), size, key).tolist()
        places.update(enumerate(order))
        pairs.update(itertools.pairwise(order))

    def fair(counts, cells, draws):
        expected = draws / cells
        assert all(abs(counts[cell] - expected) < 5 * expected**0.5 for cell in counts)
        assert len(counts) == cells

    fair(places, size * size, rounds * size)
    fair(pairs, size * (size - 1), rounds * (size - 1))


@given(st.integers(1, 60), st.integers(1, 60), seeds, st.integers(0, 5))
def test_an_epoch_has_full_batches_of_different_rows(size, batch, seed, epoch):
    batch = min(size, batch)
    steps = steps_per_epoch(batch=batch, size=size)
    assert steps == size // batch
    seen = [
        row
        for step in range(epoch * steps, (epoch + 1) * steps)
        for row in indices(seed=seed, step=step, batch=batch, size=size)
    ]
    assert len(seen) == len(set(seen)) == steps * batch
    assert set(seen) <= set(range(size))


@pytest.mark.parametrize(("size", "batch"), [(10_000, 7), (10_000, 4096), (10_000, 5000), (4096, 1), (5, 5)])
def test_steps_follow_the_permutation_also_where_a_stretch_ends(size, batch):
    steps = steps_per_epoch(batch=batch, size=size)
    found = [row for step in range(steps) for row in indices(seed=3, step=step, batch=batch, size=size)]
    every = permute(np.arange(size, dtype=np.uint64), size, derive(3, "epoch", 0))
    assert found == every[: steps * batch].tolist()


def test_the_rows_of_a_step_can_be_changed_by_who_asked_for_them():
    indices(seed=3, step=0, batch=4, size=64).clear()
    assert len(indices(seed=3, step=0, batch=4, size=64)) == 4


def test_epochs_seeds_and_what_is_left_over_differ():
    def epoch(number, seed=0):
        steps = range(number * 12, (number + 1) * 12)
        return [row for step in steps for row in indices(seed=seed, step=step, batch=8, size=100)]

    assert epoch(0) != epoch(1)
    assert epoch(0) != epoch(0, seed=1)
    assert set(epoch(0)) != set(epoch(1))


def test_the_order_is_what_it_always_was():
    assert indices(seed=0, step=0, batch=6, size=50) == [37, 35, 27, 32, 44, 7]


@given(st.integers(0, 100), st.integers(1, 20))
def test_shares_are_contiguous_complete_and_differ_by_at_most_one(count, parts):
    shares = [share(count, part, parts) for part in range(parts)]
    assert [i for part in shares for i in part] == list(range(count))
    lengths = [len(part) for part in shares]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


class Pairs:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"x": torch.full((2,), index / 4), "y": index}


class Many(Pairs):
    def __getitem__(self, index):
        raise AssertionError("asked for one by one")

    def __getitems__(self, rows):
        return [Pairs()[row] for row in rows]


def batches(dataset, **options):
    return Batches(dataset=dataset, seed=3, collate=torch.utils.data.default_collate, **options)


def test_rows_become_a_batch_in_order():
    batch = batches(Pairs(), batch=4).fetch([7, 1, 3])
    assert batch["y"].tolist() == [7, 1, 3]
    assert batch["x"].dtype == torch.float32
    assert torch.equal(batch["x"][:, 0], torch.tensor([1.75, 0.25, 0.75]))
    assert rows_of(batch) == 3


def test_double_precision_concerns_real_numbers_only():
    batch = batches(Pairs(), batch=4, double=True).fetch([7, 1])
    assert (batch["x"].dtype, batch["y"].dtype) == (torch.float64, torch.int64)


def test_a_data_set_that_can_give_many_at_once_is_asked_so():
    assert batches(Many(), batch=4).fetch([2, 9])["y"].tolist() == [2, 9]


def test_a_list_is_a_data_set_and_steps_are_counted():
    data = batches([torch.tensor(i) for i in range(10)], batch=3)
    assert data.steps_per_epoch == 3
    assert data.indices(1) == indices(seed=3, step=1, batch=3, size=10)
    assert data.fetch(data.indices(1)).tolist() == data.indices(1)


def test_a_mapping_of_another_kind_becomes_a_dict():
    from collections import UserDict

    data = Batches(dataset=[1, 2], seed=0, batch=1, collate=lambda rows: UserDict(x=torch.tensor(rows)))
    batch = data.fetch([1, 0])
    assert type(batch) is dict
    assert batch["x"].tolist() == [2, 1]


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(
        UsageError, match="a global batch of 11 rows is larger than the data set of 10"
    ) as caught:
        batches(Pairs(), batch=11)
    assert (caught.value.setting, caught.value.works) == ("batch", "at most 10")
    with pytest.raises(UsageError, match="larger than the data set of 0"):
        batches([], batch=1)


def test_a_stream_is_refused():
    with pytest.raises(UsageError, match="a generator has no length or cannot be indexed") as caught:
        batches((i for i in range(3)), batch=1)
    assert caught.value.setting == "data"


def test_a_batch_without_tensors_has_no_rows():
    with pytest.raises(UsageError, match="holds no tensor with rows"):
        rows_of({"text": ["a", "b"]})


@pytest.mark.parametrize(
    ("samples", "what"),
    [([torch.ones(2), torch.ones(3)], "Tensor"), ([object(), object()], "object"), ([(1,), (1, 2)], "tuple")],
)
def test_samples_that_do_not_make_a_batch_are_told_from_what_they_are(samples, what):
    batches = Batches(dataset=samples, batch=2, seed=0, collate=torch.utils.data.default_collate)
    with pytest.raises(UsageError, match=rf"2 samples \({what}\) do not make a batch: ") as caught:
        batches.fetch([0, 1])
    assert caught.value.setting == "collate"
