"""The k-means baseline: it keeps the budget, and is never better than the best."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.compress.allocation import allocate
from plait.compress.kmeans import kmeans_allocate
from plait.compress.observation import WIDTHS, LayerError
from plait.errors import UsageError


def layer(name, count, norm):
    """A layer whose elements are evenly spread over a range that follows from its norm."""
    unit = 12 * norm**2 / max(1, count)
    return LayerError(
        name=name,
        count=count,
        widths=WIDTHS,
        squared_error=tuple(count * unit / (2**bits - 1) ** 2 / 6 for bits in WIDTHS),
        payload_bytes=tuple(8 + math.ceil(count * bits / 8) for bits in WIDTHS),
        exact_bytes=4 * count,
        squared_norm=norm**2,
    )


models = st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e6)), min_size=1, max_size=12).map(
    lambda rows: [layer(f"l{i}", count, norm) for i, (count, norm) in enumerate(rows)]
)


@given(layers=models, alpha=st.sampled_from([0.01, 0.5, 1.0, 3.0]), clusters=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_it_keeps_the_budget_and_never_beats_the_exact_choice(layers, alpha, clusters):
    found = kmeans_allocate(layers, alpha, clusters=clusters)
    assert found.holds
    assert len(set(found.bits.values())) <= clusters
    # Hair's breadths apart, since this one adds errors up in floating point.
    best = allocate(layers, alpha * (1 + 1e-9))
    assert best.payload_bytes <= found.payload_bytes
    assert kmeans_allocate(layers, alpha, clusters=clusters) == found


def test_groups_are_found_and_those_with_more_norm_for_their_size_get_more_bits():
    rng = np.random.default_rng(0)
    layers = [layer(f"large{i}", 10**6, float(rng.uniform(0.9, 1.1))) for i in range(5)]
    layers += [layer(f"small{i}", 10**4, float(rng.uniform(9, 11))) for i in range(5)]
    bits = kmeans_allocate(layers, 1.0, clusters=2).bits
    (large,) = {bits[f"large{i}"] for i in range(5)}
    (small,) = {bits[f"small{i}"] for i in range(5)}
    assert large < 4 < small


def test_one_group_is_a_uniform_width():
    layers = [layer("a", 1000, 1.0), layer("b", 50, 100.0)]
    assert kmeans_allocate(layers, 1.0, clusters=1).bits == {"a": 4, "b": 4}


def test_layers_that_are_not_finite_stay_exact():
    bad = replace(layer("bad", 1000, 1.0), squared_error=(math.nan,) * 8)
    layers = [layer("a", 1000, 1.0), bad]
    found = kmeans_allocate(layers)
    assert (found.bits, found.nonfinite) == ({"a": 4, "bad": None}, ("bad",))
    assert kmeans_allocate([bad]).bits == {"bad": None}


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"clusters": 0}, "clusters is 0"), ({"clusters": 9}, "9 groups"), ({"alpha": 0}, "alpha is 0")],
)
def test_what_makes_no_sense_is_refused(settings, match):
    with pytest.raises(UsageError, match=match):
        kmeans_allocate([layer("a", 10, 1.0)], **settings)
