"""An operation that measures: how fast the wire is, how fast the codecs are, and agrees on it with all.

1. pings        to the next worker and back; the shortest round trip counts
2. a stream     from each worker to the next, all at once, as in a collective; timed where it arrives,
                from the second quarter on, when TCP has found its speed
3. figures      everyone's to everyone; the slowest of each counts, so that all come to the same end
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from plait.compress.arena import Buffer
from plait.compress.codec import Codec
from plait.compress.mesh import Mesh
from plait.compress.operation import Label, Operation
from plait.compress.price import Pace, Speed, measure_speed

_PING, _PONG, _STREAM, _FIGURES = 0, 1, 2, 3
_PINGS = 8
_MESSAGE_BYTES = 256 << 10
_MESSAGES = 16
_SKIPPED = 4
_FIGURES_BYTES = 4096


class Probe(Operation):
    """Measures a mesh; what all agreed on is in ``pace`` and ``speeds`` when it has ended."""

    def __init__(self, mesh: Mesh, codecs: Sequence[Codec], *, timeout_s: float) -> None:
        names = [repr(codec) for codec in codecs]
        super().__init__(mesh, fingerprint={"operation": "probe", "codecs": names}, timeout_s=timeout_s)
        self.pace = Pace(bandwidth_bytes_per_s=1.0)
        self.speeds: dict[Codec, Speed] = {}
        self._codecs = tuple(codecs)
        self._right = (mesh.position + 1) % mesh.world
        self._left = (mesh.position - 1) % mesh.world
        self._pinged_s = 0.0
        self._trips_s: list[float] = []
        self._streamed = self._streaming = 0
        self._mark_s = self._mark_busy_s = 0.0
        self._stream: tuple[float, float] | None = None
        """How long what was timed of the stream took, and how busy this worker was meanwhile."""
        self._figures: list[list[float]] = []

    def start(self) -> None:
        """Note what will arrive and what will be sent, and ping."""
        for number in range(_PINGS):
            self.expect(self._left, _PING, 0, number, 1)
            self.expect(self._right, _PONG, 0, number, 1)
        for number in range(_MESSAGES):
            self.expect(self._left, _STREAM, 0, number, _MESSAGE_BYTES)
        for position in self.mesh.links:
            self.expect(position, _FIGURES, 0, 0, _FIGURES_BYTES)
        self.owe(2 * _PINGS + _MESSAGES + len(self.mesh.links))
        self._ping()

    def _ping(self) -> None:
        self._pinged_s = time.perf_counter()
        self._post(self._right, _PING, len(self._trips_s), 1)

    def _post(self, position: int, phase: int, number: int, size: int, text: bytes = b"") -> None:
        buffer = self.mesh.arena.take(size)
        buffer.view[: len(text)] = text
        self.send(position, phase, 0, number, buffer)
        buffer.drop()

    def arrived(self, label: Label, buffer: Buffer) -> None:
        """Answer, time, or write down."""
        _, phase, _, number = label
        text = bytes(buffer.view).rstrip(b"\0 ") if phase == _FIGURES else b""
        buffer.drop()
        if phase == _PING:
            self._post(self._left, _PONG, number, 1)
        elif phase == _PONG:
            self._trips_s.append(time.perf_counter() - self._pinged_s)
            if len(self._trips_s) < _PINGS:
                self._ping()
            elif self._stream is not None:  # a quick neighbour's stream is there before a slow one's answers
                self._tell(*self._stream)
        elif phase == _STREAM:
            self._streamed += 1
            if self._streamed == _SKIPPED:
                self._mark_s, self._mark_busy_s = time.perf_counter(), time.thread_time()
            elif self._streamed == _MESSAGES:
                self._stream = time.perf_counter() - self._mark_s, time.thread_time() - self._mark_busy_s
                if len(self._trips_s) == _PINGS:
                    self._tell(*self._stream)
        else:
            self._figures.append(json.loads(text))

    def step(self) -> bool:
        """Feed the stream; at the end, draw the conclusion."""
        ready = len(self._trips_s) == _PINGS and self._streaming < _MESSAGES
        if ready and self.mesh.links[self._right].pending < 2:
            self._post(self._right, _STREAM, self._streaming, _MESSAGE_BYTES)
            self._streaming += 1
            return True
        return False

    @property
    def idle(self) -> bool:
        """Whether the stream has been sent."""
        return self._streaming == _MESSAGES

    def _tell(self, seconds: float, busy_s: float) -> None:
        size = (_MESSAGES - _SKIPPED) * _MESSAGE_BYTES
        figures = [min(self._trips_s) / 2, seconds / size, busy_s / size]
        for codec in self._codecs:
            speed = measure_speed(codec)
            figures += [speed.pack_s_per_byte, speed.add_s_per_byte, speed.decode_s_per_byte]
        self._figures.append(figures)
        text = json.dumps(figures).encode()
        for position in self.mesh.links:
            self._post(position, _FIGURES, 0, _FIGURES_BYTES, text.ljust(_FIGURES_BYTES))

    def finish(self) -> None:
        """Take the slowest of each figure."""
        latency_s, wire, busy, *speeds = (max(column) for column in zip(*self._figures, strict=True))
        self.pace = Pace(bandwidth_bytes_per_s=1 / wire, latency_ms=1e3 * latency_s, busy_s_per_byte=busy)
        for i, codec in enumerate(self._codecs):
            pack, add, decode = speeds[3 * i : 3 * i + 3]
            self.speeds[codec] = Speed(pack_s_per_byte=pack, add_s_per_byte=add, decode_s_per_byte=decode)
