"""What any candidate would take and need, as things are now: measured times, the network, the memory.

Times of computing are known for the sizes of micro-batches that were run. For others they are read off the
straight lines between those; with one size known, off the line through it and zero: that flatters smaller
micro-batches, which lose on fixed costs, so a size that was never run must be tried before it is trusted.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.pipeline.candidate import Candidate
from plait.pipeline.events import Load, Prediction, predict
from plait.pipeline.memory import StageMemory, peak_bytes
from plait.pipeline.network import Network

_REMEMBERED = 5
"""Steps over which the times of a size are the median."""


class Times:
    """Forward and backward milliseconds of every stage, by rows of a micro-batch."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[tuple[float, float], ...]]] = {}

    def observe(self, rows: int, forward_ms: Sequence[float], backward_ms: Sequence[float]) -> None:
        """What a step with micro-batches of so many rows took, by stage."""
        pairs = tuple(zip(forward_ms, backward_ms, strict=True))
        self._seen.setdefault(rows, deque(maxlen=_REMEMBERED)).append(pairs)

    def __contains__(self, rows: int) -> bool:
        return rows in self._seen

    def __bool__(self) -> bool:
        return bool(self._seen)

    def at(self, rows: int) -> tuple[tuple[float, float], ...]:
        """Forward and backward milliseconds by stage."""
        sizes = sorted(self._seen)
        if rows in self._seen or len(sizes) == 1:
            nearest = rows if rows in self._seen else sizes[0]
            return tuple((f * rows / nearest, b * rows / nearest) for f, b in self._median(nearest))
        place = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        small, large = sizes[place - 1], sizes[place]
        part = (rows - small) / (large - small)
        return tuple(
            (max(0.0, f + part * (F - f)), max(0.0, b + part * (B - b)))
            for (f, b), (F, B) in zip(self._median(small), self._median(large), strict=True)
        )

    def _median(self, rows: int) -> tuple[tuple[float, float], ...]:
        return tuple(
            (statistics.median(f for f, _ in of_stage), statistics.median(b for _, b in of_stage))
            for of_stage in zip(*self._seen[rows], strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a prediction depends on, for one size of micro-batches."""

    loads: tuple[Load, ...]
    network: Network

    def differ(self, other: Conditions, share: float) -> str | None:
        """What differs by more than a share, in words; None where nothing does.

        A transfer matters by its time beside what a stage computes: one that is short stays short.
        """
        period_ms = max(load.forward_ms + load.backward_ms for load in self.loads)
        for stage, (now, then) in enumerate(zip(self.loads, other.loads, strict=True)):
            for name in ("forward_ms", "backward_ms"):
                before, after = getattr(then, name), getattr(now, name)
                if abs(after - before) > share * max(before, 0.1 * period_ms):
                    kind = name.removesuffix("_ms")
                    return f"{kind} of stage {stage} went from {before:.3g} to {after:.3g} ms"
        for wire, (before, after) in enumerate(zip(other._transfers_ms(), self._transfers_ms(), strict=True)):
            if abs(after - before) > share * max(before, 0.1 * period_ms):
                link, backward = divmod(wire, 2)
                way = f"stage {link + 1} to {link}" if backward else f"stage {link} to {link + 1}"
                return f"a transfer from {way} went from {before:.3g} to {after:.3g} ms"
        return None

    def _transfers_ms(self) -> tuple[float, ...]:
        found = []
        for place, wire in enumerate(self.network.wires):
            link, backward = divmod(place, 2)
            size = self.loads[link + 1].gradient_bytes if backward else self.loads[link].output_bytes
            found.append(wire.latency_ms + 1e3 * size / wire.bytes_per_s)
        return tuple(found)


class Outlook:
    """Predictions of candidates, each made once."""

    def __init__(
        self,
        times: Times,
        network: Network,
        memories: Sequence[StageMemory],
        limits: Sequence[float],
        *,
        wake_ms: Sequence[float] | None = None,
    ) -> None:
        """``wake_ms``, by stage: from the arrival of what a stage waited for to the start of its work."""
        self._times, self._memories, self.limits = times, memories, tuple(limits)
        self._network = network if wake_ms is None else _later(network, wake_ms)
        self._predicted: dict[Candidate, Prediction] = {}
        self._peaks: dict[Candidate, tuple[int, ...]] = {}

    def conditions(self, rows: int) -> Conditions:
        """The loads of micro-batches of so many rows, and the network."""
        loads = tuple(
            Load(
                forward_ms=forward_ms,
                backward_ms=backward_ms,
                output_bytes=round(memory.output_bytes_per_row * rows),
                gradient_bytes=round(memory.input_bytes_per_row * rows),
            )
            for (forward_ms, backward_ms), memory in zip(self._times.at(rows), self._memories, strict=True)
        )
        return Conditions(loads=loads, network=self._network)

    def known(self, candidate: Candidate) -> bool:
        """Whether micro-batches of this size have been run."""
        return candidate.rows in self._times

    def prediction(self, candidate: Candidate) -> Prediction:
        """The step as the event model sees it."""
        if candidate not in self._predicted:
            now = self.conditions(candidate.rows)
            self._predicted[candidate] = predict(
                candidate.order, now.loads, now.network, shares=candidate.shares
            )
        return self._predicted[candidate]

    def step_ms(self, candidate: Candidate) -> float:
        """How long a step would take."""
        return self.prediction(candidate).step_ms

    def peak_bytes(self, candidate: Candidate) -> tuple[int, ...]:
        """What each stage would hold."""
        if candidate not in self._peaks:
            self._peaks[candidate] = peak_bytes(candidate, self._memories)
        return self._peaks[candidate]

    def fits(self, candidate: Candidate) -> bool:
        """Whether every stage stays within its limit."""
        return all(u <= limit for u, limit in zip(self.peak_bytes(candidate), self.limits, strict=True))


def _later(network: Network, wake_ms: Sequence[float]) -> Network:
    """The network as seen from the work: a message counts when the stage has woken up for it."""
    links = tuple(
        replace(
            link,
            forward=replace(link.forward, latency_ms=link.forward.latency_ms + wake_ms[i + 1]),
            backward=replace(link.backward, latency_ms=link.backward.latency_ms + wake_ms[i]),
        )
        for i, link in enumerate(network.links)
    )
    return replace(network, links=links)
