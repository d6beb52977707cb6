"""Weights that several stages hold, as a profile knows them: the copies, and what their sums cost in a step.

A word embedding that is the output layer too lies on the first stage and on the last. Each holds a copy with
gradients and optimizer state, and updates it. At the end of a step the first stage that holds it has the
gradients of the others sent to it, and sends them the sum (:mod:`plait.pipeline.tied`).

A profile names the weights that blocks share, and has their bytes in those of the block that uses them first.
So that block's weights count as a whole: rather too much than too little. What is held for a moment while
gradients are added up, when no activations are there, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from plait.pipeline.memory import StageMemory
from plait.pipeline.network import Network
from plait.profile import BlockProfile
from plait.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Weights that the same stages hold, two or more of them."""

    stages: tuple[int, ...]
    blocks: tuple[str, ...]
    """Those that use them first."""
    size_bytes: int
    """Of one copy's gradients."""

    @property
    def wire_bytes(self) -> int:
        """What crosses in a step: gradients to the first of the stages, and the sum back."""
        return 2 * (len(self.stages) - 1) * self.size_bytes

    @property
    def remark(self) -> str:
        """What the figures rest on, in words."""
        names, stages = ", ".join(self.blocks), ", ".join(map(str, self.stages))
        size = format_bytes(self.size_bytes)
        return f"stages {stages} share weights: all {size} of {names} count as shared, on each of them"


def copied(blocks: Sequence[BlockProfile], begin: int, end: int) -> tuple[BlockProfile, ...]:
    """The blocks before a stage whose weights it uses and so holds too."""
    first = _first_users(blocks)
    places = {first[name] for block in blocks[begin:end] for name in block.tied}
    return tuple(blocks[place] for place in sorted(places) if place < begin)


def sharings(blocks: Sequence[BlockProfile], ends: Sequence[int]) -> tuple[Sharing, ...]:
    """What stages share that run from one of ``ends`` to the next; in the order in which it is summed."""
    first = _first_users(blocks)
    holders: dict[int, set[int]] = {}
    for stage, (begin, end) in enumerate(pairwise(ends)):
        for block in blocks[begin:end]:
            for name in block.tied:
                holders.setdefault(first[name], set()).add(stage)
    together: dict[tuple[int, ...], list[int]] = {}
    for place, stages in holders.items():
        if len(stages) > 1:
            together.setdefault(tuple(sorted(stages)), []).append(place)
    return tuple(
        Sharing(
            stages=stages,
            blocks=tuple(blocks[place].name for place in sorted(places)),
            size_bytes=sum(blocks[place].parameter_bytes for place in places),
        )
        for stages, places in sorted(together.items())
    )


def with_copies(
    memories: Sequence[StageMemory], blocks: Sequence[BlockProfile], ends: Sequence[int]
) -> tuple[StageMemory, ...]:
    """The sizes of stages, with weights, gradients and optimizer state of what they hold too."""
    return tuple(
        replace(memory, static_bytes=memory.static_bytes + copies_bytes(blocks, *between))
        for memory, between in zip(memories, pairwise(ends), strict=True)
    )


def copies_bytes(blocks: Sequence[BlockProfile], begin: int, end: int) -> int:
    """What a stage holds of weights that a stage before it holds too."""
    return sum(2 * block.parameter_bytes + block.optimizer_bytes for block in copied(blocks, begin, end))


def summed_ms(ends_ms: Sequence[float], shared: Sequence[Sharing], network: Network) -> float:
    """When the last stage has its gradients, the sums among them; ``ends_ms``, by stage, its last backward.

    Between stages that are no neighbours there is taken to be a link like the slowest of those between them.
    """
    ready = list(ends_ms)
    for each in shared:
        first, *others = each.stages
        ways = {other: _way(network, first, other) for other in others}
        arrived = [
            ready[other] + latency_ms + 1e3 * each.size_bytes / rate
            for other, (latency_ms, rate) in ways.items()
        ]
        summed = max(ready[first], *arrived)
        back = sum(1e3 * each.size_bytes / rate for _, rate in ways.values())  # they leave by one card
        for stage in each.stages:
            ready[stage] = summed + back + max(latency_ms for latency_ms, _ in ways.values())
    return max(ready)


def _way(network: Network, one: int, other: int) -> tuple[float, float]:
    """Latency in milliseconds and bytes a second, between two stages."""
    wires = [wire for link in network.links[one:other] for wire in (link.forward, link.backward)]
    return max(wire.latency_ms for wire in wires), min(wire.bytes_per_s for wire in wires)


def _first_users(blocks: Sequence[BlockProfile]) -> dict[str, int]:
    found: dict[str, int] = {}
    for place, block in enumerate(blocks):
        for name in block.tied:
            found.setdefault(name, place)
    return found
