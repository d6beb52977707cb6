"""What a step is given, and which of it marks its messages."""

import pytest
import torch

from plait.burst import BurstPlan
from plait.burst.step_batch import StepBatch
from plait.errors import UsageError

PLAN = BurstPlan.of(["a", "b"], [1, 2], batch=8)


def given(rows=8, micro_batches=2, step=1, training=True, dtype=torch.float32):
    batch = {"x": torch.arange(rows * 3, dtype=dtype).view(rows, 3), "scale": 2.0}
    return StepBatch(batch, micro_batches, PLAN, step=step, training=training)


def test_parts_have_all_rows_in_order():
    parts = given(rows=7).parts
    assert [rows for _, rows in parts] == [4, 3]
    assert torch.equal(torch.cat([part["x"] for part, _ in parts]), torch.arange(21.0).view(7, 3))


def test_whatever_ranks_must_have_alike_is_in_the_tag():
    assert given().tag == given().tag
    others = [
        given(rows=6),
        given(micro_batches=1),
        given(step=2),
        given(training=False),
        given(dtype=torch.float64),
    ]
    tags = {each.tag for each in (given(), *others)}
    assert len(tags) == 6
    assert all(0 <= tag < 1 << 31 for tag in tags)
    assert [each.signature == given().signature for each in others] == [True, True, True, False, False]


def test_too_few_rows_are_refused():
    with pytest.raises(UsageError, match="3 rows in 2 micro-batches are too few for the widest block"):
        given(rows=3)
