"""What the links really carry: every ordered pair of hosts in turn, timed by the receiver."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.errors import LabError, UsageError
from plait.lab.traffic import ask, serve
from plait.lab.workers import end

if TYPE_CHECKING:
    from plait.lab.lab import Lab

TOLERANCE = 0.10
"""How far goodput may be off the asked rate; 4.4% are headers and cannot be otherwise."""
JUDGED_BYTES_PER_SECOND = 125e6
"""Up to 1 Gbit/s the rate decides; above, the machine's processors have a say, and it is only shown."""
_MOST = 9


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One direction between two hosts, measured."""

    source: int
    target: int
    size_bytes: int
    """What was sent each time, without headers."""
    seconds: tuple[float, ...]
    """How long each repetition took from asking to the last byte, by the receiver's clock."""
    asked_bytes_per_second: float | None
    """What the slower of the two links is shaped to; None when neither is."""

    @property
    def bytes_per_second(self) -> float:
        """Goodput, what the application got; headers take another 4.4% of the link's rate.

        The fastest repetition counts: what else runs on the machine can only make one slower.
        """
        return self.size_bytes / min(self.seconds)

    @property
    def of_asked(self) -> float | None:
        """Goodput as a share of the link's rate."""
        asked = self.asked_bytes_per_second
        return None if asked is None else self.bytes_per_second / asked

    @property
    def holds(self) -> bool | None:
        """Whether the link carries what was asked of it; None where that is not judged."""
        asked = self.asked_bytes_per_second
        if asked is None or asked > JUDGED_BYTES_PER_SECOND:
            return None
        return abs(self.bytes_per_second / asked - 1) <= TOLERANCE


def measure_bandwidth(lab: Lab, size_bytes: int, *, seconds: float = 2.0) -> Generator[Transfer, None, None]:
    """Send `size_bytes` between every ordered pair of hosts, one pair at a time, sender by sender.

    Each is repeated until `seconds` have gone, at least once and at most 9 times. Use the size of the
    transfers that the lab will see: the burst that a shaped link allows flatters short ones.
    """
    if size_bytes < 1:
        raise UsageError(f"a transfer of {size_bytes} bytes", setting="size", works="64MiB")
    if len(lab.hosts) < 2:
        raise UsageError(f"{len(lab.hosts)} host has no link to measure", setting="hosts", works="2")
    return _measure_pairs(lab, size_bytes, seconds)


def _measure_pairs(lab: Lab, size_bytes: int, seconds: float) -> Generator[Transfer, None, None]:
    servers = [serve(lab, host) for host in range(len(lab.hosts))]
    try:
        for source, (_, port) in enumerate(servers):
            for target in range(len(servers)):
                if source != target:
                    yield _measure(lab, source, target, port, size_bytes, seconds)
    finally:
        end([server for server, _ in servers], grace_seconds=0.0)


def _measure(lab: Lab, source: int, target: int, port: int, size_bytes: int, seconds: float) -> Transfer:
    options = [str(size_bytes), "--seconds", str(seconds), "--most", str(_MOST)]
    said, complaint = ask(lab, target, "fetch", source, port, options).communicate()
    if not said:
        reason = complaint.decode(errors="replace").strip().rpartition("\n")[2] or "it was ended"
        raise LabError(f"no transfer from host {source} to host {target}: {reason}")
    return Transfer(
        source=source,
        target=target,
        size_bytes=size_bytes,
        seconds=tuple(json.loads(said)),
        asked_bytes_per_second=_slower(lab.hosts[i].rate_bytes_per_second for i in (source, target)),
    )


def _slower(rates: Iterable[float | None]) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)
