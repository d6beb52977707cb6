"""Which of many points are not matched or beaten in every figure by another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_CHUNK = 256
_MANY = 4096
"""Points beyond which a few of them rule out most others before the rest is sorted."""
_EVERY = 61


def minimal(figures: NDArray[np.float64]) -> NDArray[np.int64]:
    """The columns of [figure, point] that no other column is at or below in every row; of equal ones the
    first.

    They come sorted by the first figure. With two figures this sorts; with more it compares all with all, a
    chunk at a time.
    """
    if len(figures) == 2:
        if figures.shape[1] <= _MANY:
            return _lowest(figures)
        near = _near(figures)
        return near[_lowest(figures[:, near])]
    order = np.lexsort(figures[::-1])
    rest = figures[1:, order]  # whoever comes earlier in this order is not above in the first figure
    alive = np.ones(rest.shape[1], dtype=bool)
    kept = np.empty((len(rest), 0))
    for start in range(0, rest.shape[1], _CHUNK):
        chunk = np.arange(start, min(start + _CHUNK, rest.shape[1]))
        chunk = chunk[~_covered(rest[:, chunk], kept)]
        own = rest[:, chunk]
        below = np.ones((len(chunk), len(chunk)), dtype=bool)
        for row in own:
            below &= row[:, None] <= row[None, :]
        alive[start : start + _CHUNK] = False
        chunk = chunk[~np.triu(below, 1).any(axis=0)]
        alive[chunk] = True
        kept = np.concatenate([kept, rest[:, chunk]], axis=1)
    return order[alive]


def _lowest(figures: NDArray[np.float64]) -> NDArray[np.int64]:
    """The minimal points of two figures: whatever is lower in the second than all before it."""
    order = np.lexsort(figures[::-1])
    second = figures[1][order]
    lowest = np.minimum.accumulate(second)
    first = np.ones(min(1, len(second)), dtype=bool)
    return np.asarray(order[np.concatenate([first, second[1:] < lowest[:-1]])], dtype=np.int64)


def _near(figures: NDArray[np.float64]) -> NDArray[np.int64]:
    """The points of two figures that no point of a sample beats in both; all minimal ones are among them."""
    sample = figures[:, ::_EVERY]
    first, second = sample[:, _lowest(sample)]
    before = (
        np.searchsorted(first, figures[0]) - 1
    )  # the last of the sample that is below in the first figure
    beaten = (before >= 0) & (second[before] <= figures[1])
    return np.flatnonzero(~beaten)


def _covered(points: NDArray[np.float64], by: NDArray[np.float64]) -> NDArray[np.bool_]:
    """By point, whether some point of ``by`` is at or below it in every row."""
    if not by.shape[1] or not points.shape[1]:
        return np.zeros(points.shape[1], dtype=bool)
    below = np.ones((by.shape[1], points.shape[1]), dtype=bool)
    for mine, its in zip(points, by, strict=True):
        below &= its[:, None] <= mine[None, :]
    return np.asarray(below.any(axis=0))
