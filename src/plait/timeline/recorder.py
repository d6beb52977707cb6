"""Recording, cheap enough to leave on: about a microsecond a span, no lock, no growth without end.

An entry is one tuple appended to a ``deque`` of fixed length: where the deque is full, the oldest
entry falls out. Every entry carries a number drawn from one counter, so what fell out can be counted
afterwards. Both steps (``next`` on the counter, ``append`` on the deque) are single calls into C,
which the interpreter's lock makes atomic: threads record at the same time with no lock of ours, and
no recording thread ever waits for a reader. Entries stay as plain tuples in nanoseconds and become
spans when somebody reads them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from plait.errors import UsageError
from plait.timeline.span import Sample, Scalar, Span

_SpanEntry = tuple[int, str, str, int, int, dict[str, Scalar]]
_SampleEntry = tuple[int, str, str, int, float]
_Entry = TypeVar("_Entry", _SpanEntry, _SampleEntry)


class OpenSpan:
    """A span under way: starts when the ``with`` block is entered, is recorded when it is left."""

    # Filled in by Recorder.span: a constructor of our own would cost an eighth of a span's time.
    __slots__ = ("_info", "_name", "_recorder", "_start_ns", "_track")
    _recorder: Recorder
    _track: str
    _name: str
    _start_ns: int
    _info: dict[str, Scalar]

    def __enter__(self) -> None:
        self._start_ns = self._recorder.clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder = self._recorder
        end_ns = recorder.clock()
        if kind is not None:
            self._info["error"] = kind.__name__
        recorder._keep_span((recorder._number(), self._track, self._name, self._start_ns, end_ns, self._info))


class Recorder:
    """The recording half of a timeline: keeps the latest ``capacity`` spans, and as many samples."""

    def __init__(self, *, capacity: int = 65_536, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        if capacity < 1:
            raise UsageError(
                f"a timeline cannot keep {capacity} spans",
                setting="capacity",
                works="65536, or any number from 1",
            )
        self.clock = clock
        """Nanoseconds of this process; what ``record`` is given must come from it."""
        self._spans: deque[_SpanEntry] = deque(maxlen=capacity)
        self._samples: deque[_SampleEntry] = deque(maxlen=capacity)
        # Bound once: looking a method up is a good part of what a span costs.
        self._keep_span = self._spans.append
        self._keep_sample = self._samples.append
        self._number = itertools.count().__next__
        self._sample_number = itertools.count().__next__

    def span(self, track: str, name: str, /, **info: Scalar) -> OpenSpan:
        """Record what a ``with`` block takes; an exception passes through and is named in the info."""
        opened = OpenSpan()
        opened._recorder = self
        opened._track = track
        opened._name = name
        opened._info = info
        return opened

    def record(self, track: str, name: str, start_ns: int, end_ns: int, /, **info: Scalar) -> None:
        """Record a span whose times, in nanoseconds of ``clock``, are known."""
        if end_ns < start_ns:
            raise UsageError(
                f"span {name!r} on {track!r} ends at {end_ns} ns, before its start at {start_ns} ns",
                setting="end_ns",
                works=f"{start_ns} or later",
            )
        self._keep_span((self._number(), track, name, start_ns, end_ns, info))

    def mark(self, track: str, name: str, /, **info: Scalar) -> None:
        """Record that something happened now: a span with no length."""
        now_ns = self.clock()
        self._keep_span((self._number(), track, name, now_ns, now_ns, info))

    def sample(self, track: str, name: str, value: float, /) -> None:
        """Record the value of a counter now; one that is not finite counts as dropped."""
        self._keep_sample((self._sample_number(), track, name, self.clock(), value))

    def _recorded(self) -> tuple[list[Span], list[Sample], int]:
        """What the rings hold at this moment, and how many entries fell out of them."""
        spans, samples = _copy(self._spans), _copy(self._samples)
        # Two threads may append in another order than they drew their numbers in: the largest
        # number is the count of what was ever recorded, wherever in the ring it stands.
        ever = max((entry[0] + 1 for entry in spans), default=0)
        ever += max((entry[0] + 1 for entry in samples), default=0)
        kept = [
            Sample(track, name, at / 1e6, float(value))
            for _, track, name, at, value in samples
            if math.isfinite(value)
        ]
        return (
            [Span(track, name, start / 1e6, end / 1e6, info) for _, track, name, start, end, info in spans],
            kept,
            ever - len(spans) - len(kept),
        )


def _copy(ring: deque[_Entry]) -> list[_Entry]:
    # A copy fails if another thread appends in the middle of it; the reader tries again, the writer
    # never notices.
    while True:
        try:
            return list(ring)
        except RuntimeError:
            continue
