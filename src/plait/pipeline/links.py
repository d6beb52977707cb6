"""Links as training itself measures them: what a stage tells of the messages that came, and of its own times.

No message is sent to measure: those that cross anyway carry the time at which they were sent, and the report
that follows the last gradient of a step brings all to the first stage, which estimates the network from them
(:mod:`plait.pipeline.estimate`).
"""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.pipeline.estimate import Arrival, Direction, Estimator
from plait.pipeline.memory import StageMemory
from plait.pipeline.network import Network
from plait.pipeline.record import StepRecord


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a step went on one stage; times in milliseconds."""

    stage: int
    host: str
    """Equal where stages share a network card."""
    forward_ms: float
    """Median over the micro-batches of full size, as ``backward_ms``."""
    backward_ms: float
    wake_ms: float
    """From the arrival of what it waited for to the start of its work: the median."""
    arrivals: tuple[Arrival, ...]
    memory: StageMemory
    peak_bytes: int
    limit_bytes: float

    def to_json(self) -> dict[str, Any]:
        """As plain data, short: it crosses the links that it is about."""
        rows = [
            [a.link, a.direction == "backward", a.micro_batch, a.size_bytes]
            + [round(ms, 3) for ms in (a.sent_ms, a.started_ms, a.arrived_ms)]
            for a in self.arrivals
        ]
        return {**vars(self), "arrivals": rows, "memory": asdict(self.memory)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """From plain data."""
        arrivals = tuple(
            Arrival(
                link=link,
                direction="backward" if backward else "forward",
                micro_batch=micro_batch,
                size_bytes=size_bytes,
                sent_ms=sent_ms,
                started_ms=started_ms,
                arrived_ms=arrived_ms,
            )
            for link, backward, micro_batch, size_bytes, sent_ms, started_ms, arrived_ms in data["arrivals"]
        )
        return cls(**{**data, "arrivals": arrivals, "memory": StageMemory(**data["memory"])})


def arrivals(record: StepRecord, stage: int) -> tuple[Arrival, ...]:
    """What came to a stage in a step."""
    found = []
    for receipt in record.receipts:
        direction: Direction = "forward" if receipt.what == "activation" else "backward"
        found.append(
            Arrival(
                link=stage - 1 if direction == "forward" else stage,
                direction=direction,
                micro_batch=receipt.number,
                size_bytes=receipt.bytes,
                sent_ms=receipt.sent_ns / 1e6,
                started_ms=receipt.head_ns / 1e6,
                arrived_ms=receipt.arrived_ns / 1e6,
            )
        )
    return tuple(found)


def times_ms(record: StepRecord, full: int) -> tuple[float, float]:
    """Forward and backward of a stage: medians over the first ``full`` micro-batches, the largest."""
    forward, backward = (
        statistics.median(
            (c.end_ns - c.start_ns) / 1e6
            for c in record.computations
            if c.kind == kind and c.micro_batch < full
        )
        for kind in ("F", "B")
    )
    return forward, backward


def wake_ms(record: StepRecord) -> float:
    """How late a stage begins what it has waited for: the median; 0 where it never waited."""
    came_ns = {("F" if r.what == "activation" else "B", r.number): r.arrived_ns for r in record.receipts}
    late, free_ns = [], record.begun_ns
    for each in record.computations:
        arrived_ns = came_ns.get((each.kind, each.micro_batch))
        if arrived_ns is not None and arrived_ns > free_ns:
            late.append((each.start_ns - arrived_ns) / 1e6)
        free_ns = each.end_ns
    return statistics.median(late) if late else 0.0


def own_host() -> str:
    """What two processes have in common that share a network card: the machine and the network namespace."""
    name = socket.gethostname()
    space = Path("/proc/self/ns/net")
    return f"{name} {os.readlink(space)}" if space.exists() else name


class Links:
    """The network, as the reports of steps show it."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._estimator: Estimator | None = None

    def observe(self, reports: Sequence[Report]) -> None:
        """Take in a step's reports, one a stage."""
        if self._estimator is None:
            names = [report.host for report in reports]
            hosts = [list(dict.fromkeys(names)).index(name) for name in names]
            self._estimator = Estimator(self._stages, hosts=hosts)
        self._estimator.observe(arrival for report in reports for arrival in report.arrivals)

    @property
    def network(self) -> Network | None:
        """What it is like; None until something has crossed every link both ways."""
        return None if self._estimator is None else self._estimator.network
