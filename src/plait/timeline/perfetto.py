"""A timeline as a trace that https://ui.perfetto.dev and ``chrome://tracing`` open.

The form is the Trace Event Format: complete events (``X``), instants (``i``), counters (``C``) and
metadata (``M``), times in microseconds. A track ``host/device`` becomes thread ``device`` of process
``host``; where spans of one track overlap without being nested, which the viewers cannot show on one
thread, the track gets more threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.timeline.file import plain
from plait.timeline.span import Sample, Span, by_track, extent, lanes


def trace(spans: Sequence[Span], samples: Sequence[Sample]) -> dict[str, Any]:
    """The trace as plain data; it starts at zero."""
    origin_ms = min([extent(spans)[0]] * bool(spans) + [sample.at_ms for sample in samples], default=0.0)
    events: list[dict[str, Any]] = []
    processes: dict[str, int] = {}

    def microseconds(at_ms: float) -> float:
        # Viewers count whole nanoseconds: rounding each edge, not the duration, keeps nested spans
        # nested and adjacent ones apart.
        return round((at_ms - origin_ms) * 1e6) / 1e3

    def process(track: str) -> int:
        name = track.rpartition("/")[0] or "plait"
        if name not in processes:
            processes[name] = len(processes) + 1
            events.append(_metadata("process_name", processes[name], 0, name))
        return processes[name]

    thread = 0
    for track, its_spans in by_track(spans).items():
        pid = process(track)
        for i, lane in enumerate(lanes(its_spans)):
            thread += 1
            name = track.rpartition("/")[2] + (f" ({i + 1})" if i else "")
            events.append(_metadata("thread_name", pid, thread, name))
            events.append(
                {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": pid,
                    "tid": thread,
                    "args": {"sort_index": thread},
                }
            )
            for span, _ in lane:
                start, end = microseconds(span.start_ms), microseconds(span.end_ms)
                event = {"name": span.name, "pid": pid, "tid": thread, "ts": start, "args": plain(span.info)}
                if span.end_ms > span.start_ms:
                    events.append({"ph": "X", "dur": round(end - start, 3), **event})
                else:
                    events.append({"ph": "i", "s": "t", **event})
    for sample in samples:
        pid = process(sample.track)
        name = f"{sample.track.rpartition('/')[2]} {sample.name}"
        at = microseconds(sample.at_ms)
        events.append({"ph": "C", "name": name, "pid": pid, "ts": at, "args": {sample.name: sample.value}})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _metadata(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
