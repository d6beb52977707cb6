"""What lies beside a device: its memory, and the disk below."""

from __future__ import annotations

import math
from collections.abc import Callable

from plait.errors import UsageError
from plait.sim.simulation import Simulation
from plait.sim.trace import Trace
from plait.units import format_bytes


class Disk:
    """Reads one thing at a time and writes one thing at a time, each first come, first served."""

    def __init__(
        self,
        simulation: Simulation,
        *,
        read: Trace | float = math.inf,
        write: Trace | float = math.inf,
        name: str = "",
    ) -> None:
        """``read`` and ``write`` are bytes a second. Spans go to tracks of these names, after ``name``."""
        for rate, setting in ((read, "read"), (write, "write")):
            if not isinstance(rate, Trace) and not rate > 0:
                raise UsageError(f"a disk with {rate} bytes/s", setting=setting, works="1e9")
        prefix = f"{name} " if name else ""
        self._reading = _Lane(simulation, f"{prefix}read", read)
        self._writing = _Lane(simulation, f"{prefix}write", write)

    def read(
        self, name: str, size_bytes: int, then: Callable[[], None] | None = None, *, earliest_ms: float = 0.0
    ) -> float:
        """Read so much after all that is to be read already, and not before ``earliest_ms``.

        Returns when it will be there, which nothing that comes later changes.
        """
        return self._reading.move(name, size_bytes, then, earliest_ms)

    def write(
        self, name: str, size_bytes: int, then: Callable[[], None] | None = None, *, earliest_ms: float = 0.0
    ) -> float:
        """Write so much; as :meth:`read`."""
        return self._writing.move(name, size_bytes, then, earliest_ms)

    @property
    def read_bytes(self) -> int:
        """What was asked to be read so far."""
        return self._reading.moved_bytes

    @property
    def written_bytes(self) -> int:
        """What was asked to be written so far."""
        return self._writing.moved_bytes


class _Lane:
    """One direction of a disk. Nothing overtakes, so the end of each move is known when it is asked for."""

    def __init__(self, simulation: Simulation, track: str, rate: Trace | float) -> None:
        self.simulation, self.track, self.rate = simulation, track, rate
        self.free_ms = 0.0
        self.moved_bytes = 0

    def move(self, name: str, size_bytes: int, then: Callable[[], None] | None, earliest_ms: float) -> float:
        if not 0 <= size_bytes < math.inf:
            raise UsageError(f"{name!r} has {size_bytes} bytes", setting="size_bytes", works="0 or more")
        start_ms = max(self.simulation.now_ms, self.free_ms, earliest_ms)
        if isinstance(self.rate, Trace):
            end_ms = self.rate.reaches(start_ms, 1e3 * size_bytes)
        else:
            end_ms = start_ms + 1e3 * size_bytes / self.rate
        self.free_ms = end_ms
        self.moved_bytes += size_bytes
        if end_ms > start_ms:
            self.simulation.note(self.track, name, start_ms, end_ms)
        if then is not None:
            self.simulation.at(end_ms, then)
        return end_ms


class Memory:
    """Bytes that are held, never more than there are."""

    def __init__(self, name: str, capacity_bytes: float = math.inf) -> None:
        if not capacity_bytes > 0:
            raise UsageError(
                f"memory {name!r} has {capacity_bytes} bytes", setting="capacity_bytes", works="4 * 2**30"
            )
        self.name, self.capacity_bytes = name, capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def hold(self, size_bytes: int) -> None:
        """Take so much; where there is less, it is an error."""
        if size_bytes < 0:
            raise UsageError(f"{size_bytes} bytes to hold", setting="size_bytes", works="0 or more")
        if self.used_bytes + size_bytes > self.capacity_bytes:
            raise UsageError(
                f"{self.name} holds {format_bytes(self.used_bytes)} of {format_bytes(self.capacity_bytes)}, "
                f"and {format_bytes(size_bytes)} more do not fit",
                setting="capacity_bytes",
                works=format_bytes(self.used_bytes + size_bytes),
            )
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def free(self, size_bytes: int) -> None:
        """Give so much back."""
        if not 0 <= size_bytes <= self.used_bytes:
            raise UsageError(
                f"{size_bytes} bytes to free, and {self.name} holds {self.used_bytes}",
                setting="size_bytes",
                works=f"0 to {self.used_bytes}",
            )
        self.used_bytes -= size_bytes
