"""What lies between the devices: one bandwidth and latency for all pairs, or a matrix of each.

Devices are taken in their order: a block of width w is on the first w. So that narrow blocks are well joined,
the first rows of a matrix should be the devices that are joined fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from plait.errors import UsageError
from plait.units import parse_rate, parse_seconds

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Path:
    """The way from a device to another; it is a ``Link`` of :mod:`plait.collective`."""

    bandwidth_bytes_per_s: float
    latency_ms: float


@dataclass(frozen=True, kw_only=True)
class Network:
    """How fast devices talk, all pairs at once. Of a matrix, row i column j is the way from i to j."""

    bandwidth_bytes_per_s: float | Matrix
    latency_ms: float | Matrix = 0.0

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "latency_ms"):
            given = getattr(self, name)
            if not isinstance(given, tuple):
                _check(name, given)
                continue
            for i, row in enumerate(given):
                if not isinstance(row, tuple) or len(row) != len(given):
                    raise UsageError(
                        f"{name} has {len(given)} rows, and row {i} is not as long",
                        setting=name,
                        works="as many columns as rows",
                    )
                for j, value in enumerate(row):
                    if i != j:
                        _check(name, value)
        sizes = {
            len(given) for given in (self.bandwidth_bytes_per_s, self.latency_ms) if isinstance(given, tuple)
        }
        if len(sizes) > 1:
            raise UsageError(
                f"matrices of {min(sizes)} and {max(sizes)} devices", setting="latency_ms", works="one size"
            )

    @classmethod
    def of(cls, bandwidth: Any, latency: Any = 0.0, *, devices: int | None = None) -> Network:
        """Read figures as people write them (``"1gbit"``, ``"40us"``; numbers are bytes/s and seconds), or
        rows.

        With ``devices``, matrices must be as large at least.
        """

        def read(given: Any, one: Any, setting: str) -> float | Matrix:
            if isinstance(given, (str, int, float)):
                return float(one(given, setting=setting))
            if not isinstance(given, Sequence) and hasattr(given, "tolist"):
                given = given.tolist()
            if not isinstance(given, Sequence) or not all(isinstance(row, (list, tuple)) for row in given):
                what = f"{setting} is {given!r}, which is neither a figure nor rows of figures"
                raise UsageError(what, setting=setting, works="one figure, or a row for each device")
            if devices is not None and len(given) < devices:
                what = f"a matrix of {len(given)} rows for {devices} devices"
                raise UsageError(what, setting=setting, works=f"{devices} rows of {devices}")
            return tuple(
                tuple(0.0 if i == j else float(one(value, setting=setting)) for j, value in enumerate(row))
                for i, row in enumerate(given)
            )

        in_ms = lambda text, setting: 1e3 * parse_seconds(text, setting=setting)  # noqa: E731
        return cls(
            bandwidth_bytes_per_s=read(bandwidth, parse_rate, "bandwidth"),
            latency_ms=read(latency, in_ms, "latency"),
        )

    @property
    def devices(self) -> int | None:
        """How many devices a matrix knows; None where one figure holds for any number."""
        for given in (self.bandwidth_bytes_per_s, self.latency_ms):
            if isinstance(given, tuple):
                return len(given)
        return None

    @property
    def is_uniform(self) -> bool:
        """Whether one figure holds for all pairs."""
        return self.devices is None

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes a second from a device to another."""
        given = self.bandwidth_bytes_per_s
        return given[source][target] if isinstance(given, tuple) else given

    def latency(self, source: int, target: int) -> float:
        """Milliseconds until the first byte arrives."""
        given = self.latency_ms
        return given[source][target] if isinstance(given, tuple) else given

    def ring(self, width: int) -> Path:
        """The slowest link of a ring through the first devices: what a collective among them goes by."""
        return _ring(self, width)


@lru_cache(maxsize=1024)
def _ring(network: Network, width: int) -> Path:
    pairs = (
        [(rank, (rank + 1) % width) for rank in range(width)]
        if width > 1 and not network.is_uniform
        else [(0, 1)]
    )
    if width == 1 and not network.is_uniform:
        return Path(bandwidth_bytes_per_s=math.inf, latency_ms=0.0)
    return Path(
        bandwidth_bytes_per_s=min(network.bandwidth(*pair) for pair in pairs),
        latency_ms=max(network.latency(*pair) for pair in pairs),
    )


def _check(name: str, value: Any) -> None:
    least = "a latency of 0 or more" if name == "latency_ms" else "a bandwidth above 0"
    good = isinstance(value, (int, float)) and (
        0 <= value < math.inf if name == "latency_ms" else 0 < value <= math.inf
    )
    if not good:
        raise UsageError(f"{name} has {value!r}", setting=name, works=least)
