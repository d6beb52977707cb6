"""Which rows a step trains on, and how they become a batch.

The rows of step n come from (seed, n) alone. Each epoch is a permutation of the data set that can be
asked for any position without computing the others: a Feistel network over the smallest even number of
bits that can count the rows, walked until the result is a row (Black and Rogaway, "Ciphers with arbitrary
finite domains", CT-RSA 2002). So any strand, any number of workers and any resume sees the same batches,
and nothing is stored or replayed to get there.

An epoch has ``size // batch`` steps. The rows that are left over are dropped, other ones in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.determinism import derive
from plait.errors import UsageError

_ROUNDS = 8
_STRETCH_ROWS = 4096
"""The rows of so many positions are looked up at once: one by one, numpy would take a millisecond a step."""


def permute(positions: NDArray[np.uint64], size: int, key: int) -> NDArray[np.uint64]:
    """What the permutation of ``range(size)`` under a key has at these positions."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = [derive(key, turn) for turn in range(_ROUNDS)]
    found = np.array(positions, np.uint64)
    outside = np.ones(found.shape, bool)
    while outside.any():  # the network permutes up to four times as many numbers: walk on until in range
        found[outside] = _feistel(found[outside], half, keys)
        outside = found >= size
    return found


def _feistel(numbers: NDArray[np.uint64], half: np.uint64, keys: Sequence[int]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right, key) & mask)
    return (left << half) | right


def _mix(numbers: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Scramble 64 bits (the finaliser of SplitMix64; Steele, Lea, Flood, OOPSLA 2014)."""
    mixed = numbers + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def indices(*, seed: int, step: int, batch: int, size: int) -> list[int]:
    """The rows of a data set of ``size`` that make up the global batch of a step, in order."""
    epoch, place = divmod(step, steps_per_epoch(batch=batch, size=size))
    steps = max(1, _STRETCH_ROWS // batch)
    stretch, within = divmod(place, steps)
    rows = _stretch(derive(seed, "epoch", epoch), size, stretch * steps * batch, steps * batch)
    return rows[within * batch : (within + 1) * batch]


@lru_cache(maxsize=4)
def _stretch(key: int, size: int, start: int, count: int) -> list[int]:
    """What the permutation has at neighbouring positions, as far as it has any."""
    positions = np.arange(start, min(start + count, size), dtype=np.uint64)
    return [int(row) for row in permute(positions, size, key)]


def steps_per_epoch(*, batch: int, size: int) -> int:
    """How many full batches an epoch has."""
    if batch > size:
        raise UsageError(
            f"a global batch of {batch} rows is larger than the data set of {size}",
            setting="batch",
            works=f"at most {size}" if size else "a data set that is not empty",
        )
    return size // batch


def share(count: int, part: int, parts: int) -> range:
    """The contiguous part of ``range(count)`` that falls to one of several; the first ones get one more."""
    small, more = divmod(count, parts)
    start = part * small + min(part, more)
    return range(start, start + small + (part < more))


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a data set."""

    dataset: Any
    """Map-style: ``len(dataset)`` and ``dataset[i]``, a function of i alone."""
    batch: int
    """Rows of the global batch."""
    seed: int
    collate: Callable[[list[Any]], Any]
    """Makes a batch of samples."""
    double: bool = False
    """Floating-point tensors become float64."""

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            raise UsageError(
                f"a {type(self.dataset).__name__} has no length or cannot be indexed, so the rows of a step "
                "cannot be looked up",
                setting="data",
                works="a map-style data set: an object with __len__ and __getitem__, or a list",
            )
        steps_per_epoch(batch=self.batch, size=len(self.dataset))

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has."""
        return steps_per_epoch(batch=self.batch, size=len(self.dataset))

    def indices(self, step: int) -> list[int]:
        """The rows of one step's global batch, in order."""
        return indices(seed=self.seed, step=step, batch=self.batch, size=len(self.dataset))

    def fetch(self, rows: Sequence[int], *, device: Any = "cpu") -> Any:
        """These rows as one batch."""
        import torch

        from plait.compat import tree_map

        if hasattr(self.dataset, "__getitems__"):  # how torch's own loader asks for many at once
            samples = list(self.dataset.__getitems__(list(rows)))
        else:
            samples = [self.dataset[row] for row in rows]
        try:
            batch = self.collate(samples)
        except (TypeError, RuntimeError) as error:
            what = ", ".join(sorted({type(sample).__name__ for sample in samples}))
            raise UsageError(
                f"{len(samples)} samples ({what}) do not make a batch: {' '.join(str(error).split())[:300]}",
                setting="collate",
                works="samples of equal shape, or a function of (samples) that pads or converts them",
            ) from error
        if isinstance(batch, Mapping) and not isinstance(batch, dict):
            batch = dict(batch)  # a tokenizer's BatchEncoding, which torch does not look into

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            wide = self.double and leaf.is_floating_point()
            return leaf.to(device, torch.float64) if wide else leaf.to(device)

        return tree_map(place, batch)


def rows_of(batch: Any) -> int:
    """How many rows a batch has: the length of its first tensor."""
    import torch

    from plait.compat import tree_leaves

    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    raise UsageError(
        f"a batch of type {type(batch).__name__} holds no tensor with rows", setting="data", works="tensors"
    )
