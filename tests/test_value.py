"""What is known of a value between blocks: its size at any batch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.value import Value, line


def value(*dimensions, itemsize=4):
    return Value(name="x", dtype="float32", itemsize=itemsize, dimensions=dimensions, differentiable=True)


def test_a_size_follows_the_batch():
    one = value((1, 0), (0, 16), (2, 1), itemsize=2)
    assert one.shape(3) == (3, 16, 7)
    assert one.nbytes(3) == 2 * 3 * 16 * 7


def test_a_scalar_has_one_element():
    assert value().shape(5) == ()
    assert value().nbytes(5) == 4


@pytest.mark.parametrize(
    ("dimensions", "place"),
    [([(1, 0), (0, 3)], 0), ([(0, 3), (2, 0)], 1), ([(0, 3)], None), ([], None)],
)
def test_the_batch_dimension_is_the_first_that_grows(dimensions, place):
    assert value(*dimensions).batch_dimension == place


@settings(deadline=None)
@given(
    dimensions=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4),
    batch=st.integers(1, 9),
    other=st.integers(1, 99),
)
def test_two_shapes_give_all_others(dimensions, batch, other):
    known = value(*dimensions)
    found = value(*line(known.shape(batch), known.shape(batch + 1), batch))
    assert found == known
    assert found.shape(other) == known.shape(other)
