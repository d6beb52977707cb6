"""Points that no other matches or beats."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.burst.pareto import minimal


def slow(points):
    """One of each kind of point that nothing else is at or below."""
    found = {tuple(p) for p in points.T.tolist()}
    return {
        p for p in found if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in found)
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(0, 700), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_same_as_all_pairs(figures, count, values, seed):
    points = np.random.default_rng(seed).integers(0, values, (figures, count)).astype(float)
    chosen = minimal(points)
    kept = points[:, chosen].T.tolist()
    assert {tuple(p) for p in kept} == slow(points)
    assert len({tuple(p) for p in kept}) == len(kept)  # of equal ones, one
    assert points[0, chosen].tolist() == sorted(points[0, chosen].tolist())


@settings(max_examples=30, deadline=None)
@given(st.integers(4000, 9000), st.integers(1, 4000), st.booleans(), st.integers(0, 2**32 - 1))
def test_of_many_points_most_are_ruled_out_before_the_rest_is_sorted(count, values, bent, seed):
    points = np.random.default_rng(seed).integers(0, values, (2, count)).astype(float)
    if bent:  # nearly all of them are minimal
        points[1] = 1e3 / (1 + points[0])
    found, lowest = [], np.inf
    for place in np.lexsort(points[::-1]).tolist():
        if points[1, place] < lowest:
            found.append(place)
            lowest = points[1, place]
    assert minimal(points).tolist() == found
