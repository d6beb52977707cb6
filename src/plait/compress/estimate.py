"""What compression will cost in bytes and in error, without running it.

The error is stated for a model: the numbers of a bucket are independent and normal with mean zero. Its
size is relative and squared, E|decoded - x|^2 / E|x|^2, so that errors of layers add up weighted by their
squared norms. Gradients have heavier tails than that; where the range of buckets has been measured, as a
multiple of the root mean square of the numbers, it replaces the model's.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a codec makes of a number of elements."""

    payload_bytes: int
    relative_squared_error: float
    """E|decoded - x|^2 / E|x|^2 under the model."""


@functools.lru_cache(maxsize=256)
def normal_range(elements: int) -> float:
    """The root of the mean squared range (highest less lowest) of so many standard normal numbers.

    From the joint density of the extremes u < v of n numbers, n (n-1) p(u) p(v) (P(v) - P(u))^(n-2),
    summed over a square grid.
    """
    if elements < 2:
        return 0.0
    n = elements
    grid = np.linspace(-10.0, 10.0, 401)
    tail = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in grid])  # P(-x), exact where it is tiny
    low, high = grid[:, None], grid[None, :]
    outside = np.minimum(tail[::-1][:, None] + tail[None, :], 1.0)
    with np.errstate(divide="ignore"):
        log_inside = np.log1p(-outside)
    log_density = (n - 2) * log_inside if n > 2 else np.zeros_like(outside)
    log_density = np.where(low <= high, log_density - (low**2 + high**2) / 2, -np.inf)
    weight = np.exp(log_density - log_density.max()) * np.where(low == high, 0.5, 1.0)
    return float(np.sqrt((weight * (high - low) ** 2).sum() / weight.sum()))


@functools.lru_cache(maxsize=1024)
def rounding_error(bits: int, bucket_range: float, stochastic: bool) -> float:
    """The mean squared error of a standard normal number on a grid over ``bucket_range`` around zero.

    A number that lies a fraction f of a unit above a grid point is rounded with mean squared error
    f (1 - f) if stochastically, min(f, 1 - f)^2 if to the nearest; so far from 1/6 and 1/12 only where the
    grid is coarse.
    """
    if bucket_range == 0:
        return 0.0
    levels = 2**bits - 1
    unit = bucket_range / levels
    per_cell = 64
    place = (np.arange(levels * per_cell) + 0.5) / per_cell
    f = place % 1
    weight = np.exp(-((place * unit - bucket_range / 2) ** 2) / 2)
    error = f * (1 - f) if stochastic else np.minimum(f, 1 - f) ** 2
    return float((weight * error).sum() / weight.sum() * unit**2)


def cast_error(mantissa_bits: int) -> float:
    """The relative squared error of rounding to the nearest number with so many bits after the point.

    For a number s * 2^e, 1 <= s < 2, the unit in the last place is 2^(e-m) and the mean squared error 1/12 of
    its square; relative to the number that goes with 1/s^2, whose mean over evenly spread logarithms of s is
    3 / (8 ln 2).
    """
    return 4.0**-mantissa_bits / 12 * 3 / (8 * math.log(2))


@functools.lru_cache(maxsize=256)
def tail_share(share: float) -> float:
    """What is left of the squared norm of many normal numbers without the largest ``share`` of them."""
    if share >= 1:
        return 0.0
    low, high = 0.0, 40.0  # the bound above which a number is one of the largest
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erfc(middle / math.sqrt(2)) > share else (low, middle)
    density = math.exp(-(low**2) / 2) / math.sqrt(2 * math.pi)
    return 1 - share - 2 * low * density
