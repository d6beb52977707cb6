"""What error feedback remembers between steps, by parameter, whatever buckets DDP puts them in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from plait.compress.codec import Quantizer
from plait.compress.feedback import Feedback, Stretch, merged
from plait.compress.given import WHOLE, damaged, entry
from plait.compress.rounding import stream_key
from plait.errors import UsageError

_HOLDER = Quantizer(bits=8, bucket=256)
"""Keeps it in 8 bits."""
_PHASE = 9
"""Tells its rounding from that of the collectives."""


@dataclass
class _Bucket:
    """Parameters that are reduced together."""

    counts: dict[str, int]
    owned: tuple[Stretch, ...]
    """As in :class:`Feedback`."""
    held: list[Tensor]
    """One row of fp32 for all of them, or for each a payload of 8 bits an element."""

    @property
    def count(self) -> int:
        return sum(self.counts.values())


class FeedbackMemory:
    """Lends what is remembered of a bucket for the time of an all-reduce, and takes it back."""

    def __init__(self, *, world: int, bits: Literal[8, 32] = 32, seed: int = 0, rank: int = 0) -> None:
        self._world, self._bits, self._seed, self._rank = world, bits, seed, rank
        self._buckets: dict[tuple[str, ...], _Bucket] = {}
        self._home: dict[str, tuple[str, ...]] = {}
        self._lent: dict[tuple[str, ...], Feedback] = {}

    @property
    def bytes(self) -> int:
        """What it holds between steps."""
        # Another thread may be putting buckets together.
        return sum(held.nbytes for bucket in list(self._buckets.values()) for held in bucket.held)

    def lend(self, counts: Mapping[str, int]) -> Feedback:
        """What is remembered of parameters that lie one after the other, each with so many elements."""
        names = tuple(counts)
        if names not in self._buckets:
            self._put_together(names, counts)
        bucket = self._buckets[names]
        self._lent[names] = Feedback(kept=_numbers(bucket), owned=bucket.owned)
        return self._lent[names]

    def take_back(self, names: Sequence[str], step: int) -> None:
        """The all-reduce of a step has ended."""
        feedback, bucket = self._lent.pop(tuple(names)), self._buckets[tuple(names)]
        bucket.owned = feedback.owned
        bucket.held = self._held(bucket.counts, feedback.kept, step)

    def _held(self, counts: Mapping[str, int], numbers: Tensor, step: int) -> list[Tensor]:
        if self._bits == 32:
            return [numbers]
        payloads = []
        # One by one, so that the bytes do not depend on what else is in a bucket.
        for name, part in zip(counts, torch.split(numbers, list(counts.values())), strict=True):
            payload = torch.empty(_HOLDER.payload_bytes(len(part)), dtype=torch.uint8)
            key = stream_key(seed=self._seed, step=step, rank=self._rank, phase=_PHASE, parameter=name)
            _HOLDER.compress(part, payload, key=key)
            payloads.append(payload)
        return payloads

    def _put_together(self, names: tuple[str, ...], counts: Mapping[str, int]) -> None:
        """Make a bucket of parameters that may have been in others."""
        homes = _distinct(self._home.get(name) for name in names)
        left = {home: _parts(self._buckets[home]) for home in homes}
        parts = {name: part for home in left for name, part in left[home].items()}
        held: list[Tensor] = []
        owned: list[Stretch] = []
        offset = 0
        for name, count in counts.items():
            if name in self._home:
                part, stretches = parts[name]
            else:
                (part,), stretches = self._held({name: count}, torch.zeros(count), 0), []
            held.append(part)
            owned += [(offset + start, offset + stop) for start, stop in stretches]
            offset += count
        if self._bits == 32:
            held = [torch.cat(held)]
        self._buckets[names] = _Bucket(dict(counts), merged(owned), held)
        self._home.update(dict.fromkeys(names, names))
        for home in left:
            if all(self._home[name] is not home for name in home):
                del self._buckets[home]

    # Saving and restoring.

    def state_dict(self) -> list[dict[str, Any]]:
        """What a checkpoint needs of this worker."""
        return [
            {
                "counts": dict(bucket.counts),
                "owned": list(bucket.owned),
                "held": [held.clone() for held in bucket.held],
            }
            for bucket in self._buckets.values()
        ]

    @staticmethod
    def check_state(state: Sequence[Any], counts: Mapping[str, int]) -> None:
        """Refuse a state that is not whole, or of another model than one with so many elements by name."""
        names: set[str] = set()
        for bucket in state:
            _check(bucket, counts)
            if twice := names.intersection(bucket["counts"]):
                raise damaged(f"error feedback for {min(twice)!r} twice")
            names.update(bucket["counts"])

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what a worker with the same rank, in a world of the same size, has saved."""
        self._buckets, self._home, self._lent = {}, {}, {}
        for bucket in map(_saved, state):
            if (bucket.held[0].dtype == torch.uint8) != (self._bits == 8):  # it was held in the other form
                bucket.held = self._held(bucket.counts, _numbers(bucket), 0)
            names = tuple(bucket.counts)
            self._buckets[names] = bucket
            self._home.update(dict.fromkeys(names, names))

    def load_other_world(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Go on from what all workers of another world saved.

        The mean over the workers of what they remember is what the average still lacks; each worker of the
        new world takes that on, so that the mean over these is the same.
        """
        lacking: dict[str, Tensor] = {}
        for bucket in (bucket for state in states for bucket in map(_saved, state)):
            feedback = Feedback(kept=_numbers(bucket), owned=bucket.owned)
            feedback.settle((), len(states))  # as if all were lost of this worker's own contributions
            for name, kept in zip(
                bucket.counts, torch.split(feedback.kept, list(bucket.counts.values())), strict=True
            ):
                lacking[name] = lacking.get(name, torch.zeros(())) + kept / len(states)
        self.load_state_dict(
            [{"counts": {name: len(kept)}, "owned": [], "held": [kept]} for name, kept in lacking.items()]
        )


def _numbers(bucket: _Bucket) -> Tensor:
    if bucket.held[0].dtype != torch.uint8:
        return bucket.held[0]
    numbers = torch.empty(bucket.count)
    parts = torch.split(numbers, list(bucket.counts.values()))
    for payload, part in zip(bucket.held, parts, strict=True):
        _HOLDER.extract(payload, part)
    return numbers


def _parts(bucket: _Bucket) -> dict[str, tuple[Tensor, list[Stretch]]]:
    """What is held of each parameter, and which of it this worker adds up."""
    counts = list(bucket.counts.values())
    starts = list(accumulate(counts, initial=0))
    owned: list[list[Stretch]] = [[] for _ in counts]
    for low, high in bucket.owned:
        place = bisect_right(starts, low) - 1
        while place < len(counts) and starts[place] < high:
            start, stop = starts[place], starts[place + 1]
            if start < stop:
                owned[place].append((max(low, start) - start, min(high, stop) - start))
            place += 1
    alone = bucket.held[0].dtype == torch.uint8
    held = bucket.held if alone else torch.split(bucket.held[0], counts)
    return dict(zip(bucket.counts, zip(held, owned, strict=True), strict=True))


def _distinct(homes: Iterable[tuple[str, ...] | None]) -> Iterable[tuple[str, ...]]:
    """Each bucket once; by identity, since the hash of a long tuple takes long."""
    return {id(home): home for home in homes if home is not None}.values()


def _saved(state: Mapping[str, Any]) -> _Bucket:
    owned = tuple((start, stop) for start, stop in state["owned"])
    return _Bucket(dict(state["counts"]), owned, [held.to("cpu", copy=True) for held in state["held"]])


def _check(bucket: object, counts: Mapping[str, int]) -> None:
    """Refuse what cannot be a bucket of a model with so many elements by name."""
    found = entry(bucket, "counts", Mapping)
    for name, count in found.items():
        if name not in counts or count != counts[name]:
            raise UsageError(
                f"the state has error feedback for {count} elements of {name!r}, and the model has "
                f"{counts.get(name, 'no such parameter')}",
                setting="state",
                works="the state of the same model",
            )
    total = sum(found.values())
    owned = entry(bucket, "owned", list, tuple)
    pairs = all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in owned)
    edges = [0, *(edge for pair in owned for edge in pair), total] if pairs else []
    numbers = edges and all(isinstance(edge, WHOLE) for edge in edges)
    if not numbers or any(low > high for low, high in pairwise(edges)):
        raise damaged(f"error feedback for {total} elements, of which it is of sums in {owned}")
    held = entry(bucket, "held", list, tuple)
    whole = [(torch.float32, (total,))]
    alone = [(torch.uint8, (_HOLDER.payload_bytes(count),)) for count in found.values()]
    if not all(isinstance(each, Tensor) for each in held):
        raise damaged("error feedback that is no tensor")
    shapes = [(each.dtype, tuple(each.shape)) for each in held]
    if not held or shapes not in (whole, alone):
        raise damaged(f"error feedback for {total} elements in {len(shapes)} tensors, {shapes[:2]}")
