"""Data plans as files, and their buckets: those that torch itself would make."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import FileError, UsageError
from plait.profile import BlockProfile, Profile, Times
from plait.sim.data_plan import Bucket, DataPlan, buckets


def profile(sizes):
    blocks = [
        BlockProfile(
            name=f"b{i}",
            parameter_bytes=size,
            output_bytes_per_sample=4,
            milliseconds={1: Times(forward=1.0, backward=2.0)},
        )
        for i, size in enumerate(sizes)
    ]
    return Profile(blocks=tuple(blocks))


def test_buckets_are_those_of_the_drawing():
    plan = DataPlan(devices=2, batch=2, bucket_bytes=20, first_bucket_bytes=10)
    found = buckets(plan, profile([8, 12, 8, 12, 8, 4]))
    assert found == (
        Bucket(first=4, end=6, gradient_bytes=12),
        Bucket(first=2, end=4, gradient_bytes=20),
        Bucket(first=0, end=2, gradient_bytes=20),
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 100),
    st.integers(1, 40),
)
def test_buckets_are_those_of_torch(numbers, limit, first):
    import torch
    import torch.distributed as dist

    plan = DataPlan(devices=2, batch=2, bucket_bytes=4 * limit, first_bucket_bytes=4 * first)
    found = buckets(plan, profile([4 * count for count in numbers]))
    weights = [torch.empty(count) for count in reversed(numbers)]
    theirs, _ = dist._compute_bucket_assignment_by_size(weights, [4 * first, 4 * limit])
    last = len(numbers) - 1
    assert [list(reversed(range(b.first, b.end))) for b in found] == [[last - i for i in b] for b in theirs]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 60), st.integers(1, 60))
def test_every_block_is_in_one_bucket_and_none_waits_for_blocks_without_weights(sizes, limit, first):
    plan = DataPlan(devices=2, batch=2, bucket_bytes=limit, first_bucket_bytes=first)
    found = buckets(plan, profile(sizes))
    assert [place for b in found for place in reversed(range(b.first, b.end))] == [
        *reversed(range(len(sizes)))
    ]
    assert sum(b.gradient_bytes for b in found) == sum(sizes)
    for bucket in found[:-1]:
        assert bucket.gradient_bytes > 0
        assert sizes[bucket.first] > 0


def test_rows_are_divided_as_in_a_run():
    assert DataPlan(devices=4, batch=10).rows == (3, 3, 2, 2)


def test_micro_batches_are_parts_of_a_devices_rows():
    plan = DataPlan(devices=3, batch=8, accumulate=3)
    assert plan.rows == (3, 3, 2)
    assert plan.micro_batches == ((1, 1, 1), (1, 1, 1), (1, 1))  # none is empty
    assert DataPlan(devices=2, batch=14, accumulate=2).micro_batches == ((4, 3), (4, 3))
    assert DataPlan(devices=2, batch=5).micro_batches == ((3,), (2,))


def test_a_file_without_micro_batches_has_one():
    data = DataPlan(devices=4, batch=8).to_json()
    del data["accumulate"]
    assert DataPlan.from_json(data) == DataPlan(devices=4, batch=8)


def test_a_plan_is_a_file(tmp_path):
    plan = DataPlan(devices=4, batch=10, bits=4, bucket_bytes=1000, accumulate=2)
    plan.save(tmp_path / "plan.json")
    assert DataPlan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["format"] == "plait.plan.data/1"


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"devices": 0}, "devices"),
        ({"batch": 3}, "batch"),
        ({"bits": 9}, "bits"),
        ({"bits": 0}, "bits"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"first_bucket_bytes": 0}, "first_bucket_bytes"),
        ({"accumulate": 0}, "accumulate"),
    ],
)
def test_what_cannot_be_is_refused(wrong, setting):
    with pytest.raises(UsageError) as error:
        DataPlan(**{"devices": 4, "batch": 8, **wrong})
    assert error.value.setting == setting


@pytest.mark.parametrize("change", [{"format": "plait.plan.burst/1"}, {"more": 1}, {"batch": "many"}])
def test_a_wrong_file_is_named(tmp_path, change):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**DataPlan(devices=4, batch=8).to_json(), **change}))
    with pytest.raises(FileError, match=r"plan\.json") as error:
        DataPlan.load(file)
    assert next(iter(change)) in str(error.value)
