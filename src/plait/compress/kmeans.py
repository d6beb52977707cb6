"""Bits by k-means, CGX's own way of choosing them: the baseline that allocation.py is measured against.

After CGX (I. Markov, H. Ramezanikebrya, D. Alistarh, Middleware 2022): layers are points whose coordinates
are their size and the norm of their accumulated gradient; k-means groups them; the groups are put in order of
norm for their size, and those with more norm get more bits.

1. A point is (log size, log norm), each scaled to unit variance, since both differ by orders of magnitude.
2. Lloyd's iteration from k layers evenly spaced in order of norm / size, so that nothing is random.
3. Groups in order of the norm / size of their centroids; widths may only rise along them.
4. Of all such assignments, the cheapest one that keeps the same error budget as `allocate`.

Where we differ: CGX gives the groups a fixed ladder of widths. Step 4 finds the best ladder for the groups,
and one that meets the constraint, so the baseline is at its best.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from plait.compress.allocation import Allocation, price
from plait.compress.observation import LayerError
from plait.errors import UsageError
from plait.units import parse_whole

_ITERATIONS = 100


def kmeans_allocate(
    layers: Sequence[LayerError], alpha: float = 1.0, *, reference_bits: int = 4, clusters: int = 4
) -> Allocation:
    """Widths by group of similar layers, with a squared error of at most alpha times ``reference_bits``'s."""
    clusters = parse_whole(clusters, setting="clusters")
    if clusters > 8:
        raise UsageError(
            f"{clusters} groups have too many assignments to try", setting="clusters", works="1 to 8"
        )
    everything = price(layers, {layer.name: None for layer in layers}, alpha, reference_bits=reference_bits)
    finite = [layer for layer in layers if layer.finite]
    if not finite:
        return everything
    ladder = (*sorted(set.intersection(*(set(layer.widths) for layer in finite))), None)
    group = _groups(_points(finite), min(clusters, len(finite)))
    count = int(group.max()) + 1
    # Error and bytes of each group at each width; assignments then cost one lookup a group.
    error, size = np.zeros((count, len(ladder))), np.zeros((count, len(ladder)))
    for layer, own in zip(finite, group.tolist(), strict=True):
        error[own] += [layer.error_at(bits) for bits in ladder]
        size[own] += [layer.bytes_at(bits) for bits in ladder]
    tried = np.array(list(combinations_with_replacement(range(len(ladder)), count)))
    rows = np.arange(count)
    # Sums of floats, in another order than the reference's: the last bits decide nothing.
    within = error[rows, tried].sum(axis=1) <= alpha * everything.reference_error * (1 + 1e-12)
    best = tried[within][size[rows, tried[within]].sum(axis=1).argmin()]
    bits = {layer.name: ladder[best[own]] for layer, own in zip(finite, group.tolist(), strict=True)}
    return price(
        layers,
        {layer.name: bits.get(layer.name) for layer in layers},
        alpha,
        reference_bits=reference_bits,
    )


def _points(layers: Sequence[LayerError]) -> NDArray[np.float64]:
    """Columns: log size and log norm; a layer whose gradient is zero takes the least norm of the others."""
    norms = np.sqrt([layer.squared_norm for layer in layers])
    least = norms[norms > 0].min() if norms.any() else 1.0
    sizes = np.array([max(1, layer.count) for layer in layers])
    return np.column_stack([np.log(sizes), np.log(np.maximum(norms, least))])


def _groups(points: NDArray[np.float64], clusters: int) -> NDArray[np.int64]:
    """The group of each point, numbered in order of the centroid's norm / size."""
    scaled = points / np.where(points.std(axis=0) > 0, points.std(axis=0), 1.0)
    by_density = np.argsort(points[:, 1] - points[:, 0], kind="stable")
    first = np.linspace(0, len(points) - 1, clusters).round().astype(np.int64)
    centres = scaled[by_density[first]]
    group = np.full(len(points), -1, dtype=np.int64)
    for _ in range(_ITERATIONS):
        apart = np.square(scaled[:, None] - centres[None]).sum(axis=2)
        before, group = group, apart.argmin(axis=1)
        if np.array_equal(before, group):
            break
        for own in range(clusters):
            if (group == own).any():
                centres[own] = scaled[group == own].mean(axis=0)
    kept = np.unique(group)
    means = np.array([points[group == own].mean(axis=0) for own in kept])
    order = np.argsort(means[:, 1] - means[:, 0], kind="stable")
    rank = np.empty(len(kept), dtype=np.int64)
    rank[order] = np.arange(len(kept))
    return np.asarray(rank[np.searchsorted(kept, group)])
