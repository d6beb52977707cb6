"""What a stage holds during a step: weights, activations in flight, receive buffers, sends under way.

For a stage with the counts of :mod:`plait.pipeline.validity`, at their worst moment:

    static + transient + in_flight * saved + (inputs + gradients_sent) * input + gradients * output

``saved`` is what autograd keeps for one micro-batch, its input and output among it; an output that is still
being sent is such a tensor and counted there. A gradient has the size of what it is the gradient of: the one
sent back that of the input, the one received that of the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from plait.errors import UsageError
from plait.pipeline.candidate import Candidate
from plait.pipeline.orders import Order
from plait.pipeline.validity import Held, held, states
from plait.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The sizes of one stage; what follows the batch is given for one row (sample)."""

    static_bytes: int = 0
    """Weights, gradients, optimizer state, and whatever else is there at all times."""
    saved_bytes_per_row: float = 0.0
    input_bytes_per_row: float = 0.0
    """0 for the first stage, whose inputs are there anyway."""
    output_bytes_per_row: float = 0.0
    """0 for the last stage, which sends no output on."""
    transient_bytes: int = 0
    """What a pass needs for a moment."""
    transient_bytes_per_row: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < 2**63:
                raise UsageError(f"{name} is {value}", setting=name, works="0 or more")


def stage_bytes(candidate: Candidate, stage: int, memory: StageMemory) -> int:
    """The most that a stage holds during a step."""
    rows = candidate.rows
    worst = max(
        counts.in_flight * memory.saved_bytes_per_row
        + (counts.inputs + counts.gradients_sent) * memory.input_bytes_per_row
        + counts.gradients * memory.output_bytes_per_row
        for counts in _moments(candidate.order, stage)
    )
    transient = memory.transient_bytes + memory.transient_bytes_per_row * rows
    return memory.static_bytes + round(transient + worst * rows)


def peak_bytes(candidate: Candidate, memories: Sequence[StageMemory]) -> tuple[int, ...]:
    """The most that each stage holds during a step."""
    return tuple(stage_bytes(candidate, stage, memory) for stage, memory in enumerate(memories))


def fits(candidate: Candidate, memories: Sequence[StageMemory], limits: Sequence[float]) -> bool:
    """Whether every stage stays within its limit in bytes."""
    return all(used <= limit for used, limit in zip(peak_bytes(candidate, memories), limits, strict=True))


def fitting(
    candidates: Iterable[Candidate], memories: Sequence[StageMemory], limits: Sequence[float]
) -> tuple[Candidate, ...]:
    """The candidates that fit; an error that names the smallest limit that works where none does."""
    known = list(candidates)
    found = tuple(candidate for candidate in known if fits(candidate, memories, limits))
    if not found:
        raise too_small(known, memories, limits)
    return found


def too_small(
    candidates: Sequence[Candidate],
    memories: Sequence[StageMemory],
    limits: Sequence[float],
    *,
    reserve: float = 0.0,
) -> UsageError:
    """The error of limits that no candidate fits: which stage lacks most, and what would work.

    ``reserve`` is the share of a limit that is to stay free.
    """
    if not candidates:
        return UsageError("there is no candidate", setting="candidates", works="1F1B is always one")
    over = {
        candidate: max(
            (used - (1 - reserve) * limit, stage, used)
            for stage, (used, limit) in enumerate(zip(peak_bytes(candidate, memories), limits, strict=True))
        )
        for candidate in candidates
    }
    best = min(candidates, key=lambda candidate: over[candidate][0])
    _, stage, used = over[best]
    return UsageError(
        f"stage {stage} needs {format_bytes(used)} with {best}, the candidate that lacks least, "
        f"and its limit is {format_bytes(limits[stage])}; "
        f"{format_bytes(memories[stage].static_bytes)} of it is there at all times",
        setting="memory_limit",
        works=f"{math.ceil(used / (1 - reserve))}",
    )


@lru_cache(maxsize=4096)
def _moments(order: Order, stage: int) -> tuple[Held, ...]:
    """The different counts that a stage goes through."""
    return tuple({held(order, stage, *state) for state in states(order, stage)})
