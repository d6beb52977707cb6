"""What every choice of widths costs: tables by block and width, and the one model of a step that all agree
on.

1. Forward goes through blocks 0 to N-1 and backward back. A block takes as long as its largest share of rows.
2. Where widths differ, what is alive at the cut moves (:mod:`plait.burst.rows`): one message from a rank to
   another, of latency + bytes / bandwidth; a rank sends its messages one after another, and receives at the
   same time. So the cut takes the longest of all ranks' sending and receiving, in forward, and in backward
   for the gradients.
3. The gradients of a block of width > 1 are synchronised from the end of its backward on, one block after
   another on one wire, while backward goes on. Moving rows takes the wire first. With q the time that the
   wire still needs:

       q(after block i) = max(0, q(after block i+1) - backward of i) + sync of i

   Weights that several blocks share are synchronised with the first of them, over the widest.
4. step = forward + backward + moving rows + q(after block 0) + optimizer of all blocks (device 0 has them
   all) device time = sum over blocks of width * (forward + backward + optimizer)
                 + moving rows * the larger width + q(after block 0) * width of block 0

With the whole backlog q written out, step is the longest of N chains: for the block j from which on the wire
never rests, backward counts down to j, and from there the wire:  q = max over j of sum(sync 0..j) -
sum(backward 0..j-1).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.burst.live import cut_bytes, sharers
from plait.burst.network import Network
from plait.burst.rows import shares
from plait.collective import Collective, ring_ms
from plait.errors import UsageError
from plait.profile import Profile

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Score:
    """What plans cost, one entry a plan."""

    step_ms: Floats
    device_ms: Floats
    tail_ms: Floats
    """What the wire still needs when backward has ended."""


class Costs:
    """The tables of a profile at the widths that may be chosen, in order; a ``place`` is an index of them."""

    def __init__(
        self,
        profile: Profile,
        widths: Sequence[int],
        *,
        batch: int,
        network: Network,
        collective: Collective | None = None,
    ) -> None:
        self.profile, self.batch, self.network, self.collective = profile, batch, network, collective
        self.widths = np.array(widths, dtype=np.int64)
        blocks = profile.blocks
        large = [-(-batch // width) for width in widths]
        small = [batch // width for width in widths]
        self.forward, self.backward = (
            np.maximum(at(profile, large, kind), at(profile, small, kind)) for kind in ("forward", "backward")
        )
        self.optimizer = np.array([block.optimizer_milliseconds for block in blocks])
        links = [network.ring(width) for width in widths]
        estimate = ring_ms if collective is None else collective.estimate_ms
        synced = {
            size: [
                estimate(size, width, link) if width > 1 and size else 0.0
                for width, link in zip(widths, links, strict=True)
            ]
            for size in {block.parameter_bytes for block in blocks}
        }
        self.sync = np.array([synced[block.parameter_bytes] for block in blocks])
        wrong = self.sync[~((self.sync >= 0) & np.isfinite(self.sync))]
        if collective is not None and len(wrong):
            raise UsageError(
                f"the collective estimates {wrong[0]} ms", setting="collective", works="0 or more, and finite"
            )
        self.cut_bytes = np.array(cut_bytes(profile), dtype=np.float64)
        self.sharers = sharers(profile)

    def capped(self, count: int) -> Costs:
        """The same with the first so many widths alone."""
        found = copy.copy(self)
        found.widths = self.widths[:count]
        for name in ("forward", "backward", "sync", "busy"):
            setattr(found, name, getattr(self, name)[:, :count])
        for name in ("one_way", "reshard"):
            setattr(found, name, getattr(self, name)[:, :count, :count])
        found.wider = self.wider[:count, :count]
        return found

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.profile.blocks)

    @cached_property
    def busy(self) -> Floats:
        """[block, width]: forward, backward and optimizer."""
        found: Floats = self.forward + self.backward + self.optimizer[:, None]
        return found

    @cached_property
    def wider(self) -> Floats:
        """[width, width]: the larger of two."""
        found: Floats = np.maximum(self.widths[:, None], self.widths[None, :]).astype(np.float64)
        return found

    @cached_property
    def one_way(self) -> Floats:
        """[block, width before, width after]: moving what is alive before the block, in forward."""
        slopes, offsets = _lines(self.batch, self.widths.tolist(), self.network)
        found = np.zeros((self.blocks, len(self.widths), len(self.widths)))
        for slope, offset in zip(slopes, offsets, strict=True):
            np.maximum(found, self.cut_bytes[:, None, None] * slope + offset, out=found)
        found[self.cut_bytes == 0] = 0.0
        return found

    @cached_property
    def reshard(self) -> Floats:
        """[block, width before, width after]: forward and backward together; gradients go the other way."""
        found: Floats = self.one_way + self.one_way.transpose(0, 2, 1)
        return found

    def chosen_sync(self, places: Places) -> Floats:
        """[plan, block]: the sync of each block, shared weights over the widest of their blocks."""
        every = np.arange(self.blocks)
        found: Floats = self.sync[every, places]
        for first, later in self.sharers.items():
            widest = places[:, [first, *later]].max(axis=1)
            found[:, first] = self.sync[first, widest]
        return found

    def score(self, places: Places) -> Score:
        """The costs of plans, [plan, block] places of their widths."""
        every = np.arange(self.blocks)
        widths = self.widths[places]
        busy = self.busy[every, places]
        moving = self.reshard[every[1:], places[:, :-1], places[:, 1:]]
        wider = np.maximum(widths[:, :-1], widths[:, 1:])
        backward, sync = self.backward[every, places], self.chosen_sync(places)
        chains = np.cumsum(sync, axis=1)
        chains[:, 1:] -= np.cumsum(backward, axis=1)[:, :-1]
        tail = chains.max(axis=1)
        step = busy.sum(axis=1) + moving.sum(axis=1) + tail
        device = (widths * busy).sum(axis=1) + (wider * moving).sum(axis=1) + tail * widths[:, 0]
        return Score(step_ms=step, device_ms=device, tail_ms=tail)


def evaluate(
    profile: Profile,
    widths: Sequence[int],
    *,
    batch: int,
    network: Network,
    collective: Collective | None = None,
) -> tuple[float, float]:
    """Step and device time, in milliseconds, of any widths, block by block."""
    known = sorted(set(widths))
    costs = Costs(profile, known, batch=batch, network=network, collective=collective)
    score = costs.score(np.array([[known.index(width) for width in widths]]))
    return float(score.step_ms[0]), float(score.device_ms[0])


def at(profile: Profile, sizes: Sequence[int], kind: Literal["forward", "backward"]) -> Floats:
    """[block, size]: the time of every block at batch sizes, as ``BlockProfile.forward_ms`` has it.

    Blocks that were measured at the same batch sizes, as usual, go together: a thousand blocks take no time.
    """
    found = np.empty((len(profile.blocks), len(sizes)))
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, block in enumerate(profile.blocks):
        alike.setdefault(tuple(sorted(block.milliseconds)), []).append(place)
    for known, places in alike.items():
        times = np.array(
            [[getattr(profile.blocks[i].milliseconds[size], kind) for size in known] for i in places]
        )
        if len(known) == 1:
            found[places] = times * (np.array(sizes) / known[0])
            continue
        piece = np.clip(np.searchsorted(known, sizes), 1, len(known) - 1)
        left, right = np.array(known)[piece - 1], np.array(known)[piece]
        slope = (times[:, piece] - times[:, piece - 1]) / (right - left)
        found[places] = np.maximum(0.0, times[:, piece - 1] + slope * (np.array(sizes) - left))
    return found


def _lines(batch: int, widths: Sequence[int], network: Network) -> tuple[Floats, Floats]:
    """For all pairs of widths, the time of moving as the highest of a few lines over the bytes of a row.

    Each rank's sending, and its receiving, is a line: the rows it moves over the bandwidth, and the latency
    of its messages. Gives slopes and offsets, each [line, before, after]; most pairs need one or two lines.
    """
    pairs: list[list[list[tuple[float, float]]]] = []
    for i, before in enumerate(widths):
        # One figure for all pairs makes the way back as long as the way there.
        known = i if network.is_uniform else 0
        pairs.append([pairs[j][i] for j in range(known)])
        pairs[i] += [_pair(batch, before, after, network) for after in widths[known:]]
    most = max(len(lines) for row in pairs for lines in row)
    found = np.zeros((2, most, len(widths), len(widths)))
    for i, row in enumerate(pairs):
        for j, lines in enumerate(row):
            for k, line in enumerate(lines):
                found[:, k, i, j] = line
    return found[0], found[1]


def _pair(batch: int, before: int, after: int, network: Network) -> list[tuple[float, float]]:
    """The lines of one pair that are highest somewhere: (ms for each byte of a row, ms)."""
    if before == after:
        return [(0.0, 0.0)]
    old, new = _ends(batch, before), _ends(batch, after)
    ends = np.union1d(old, new)
    rows = np.diff(ends, prepend=0)
    source, target = np.searchsorted(old, ends), np.searchsorted(new, ends)
    moving = source != target
    rows, source, target = rows[moving], source[moving], target[moving]
    if network.is_uniform:
        slope, offset = rows * (1e3 / network.bandwidth(0, 1)), np.full(len(rows), network.latency(0, 1))
    else:
        ways = list(zip(source.tolist(), target.tolist(), strict=True))
        slope = rows * np.array([1e3 / network.bandwidth(*way) for way in ways])
        offset = np.array([network.latency(*way) for way in ways])
    lines = []
    for rank in (source, target):
        lines += list(zip(np.bincount(rank, slope).tolist(), np.bincount(rank, offset).tolist(), strict=True))
    return _highest(lines)


def _ends(batch: int, width: int) -> Places:
    return np.cumsum(shares(batch, width))


def _highest(lines: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of lines (slope, offset) that no other line is above at both ends."""
    found: list[tuple[float, float]] = []
    for slope, offset in sorted(set(lines), reverse=True):
        if not found or offset > found[-1][1]:
            found.append((slope, offset))
    return found
