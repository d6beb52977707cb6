"""Who had a device when: foreground, background and nobody, as spans on the tracks of a timeline."""

from __future__ import annotations

from plait.burst.phases import Phase
from plait.timeline import Span, Timeline
from plait.timeline.span import by_track, gaps

_NAMES = {Phase.COMPUTE: "compute", Phase.COLLECTIVE: "collective", Phase.IDLE: "idle"}
_LEAST_SHARE = 0.02
"""Of the time; processor time below it is the background's noise, not its work."""


class Occupancy:
    """Writes what was observed of one device into a timeline."""

    def __init__(self, timeline: Timeline, device: int) -> None:
        self._timeline = timeline
        self._foreground, self._background = f"device{device}/foreground", f"device{device}/background"
        self._last: tuple[int, Phase] | None = None

    def entered(self, since_ns: int, phase: Phase) -> None:
        """The foreground entered a phase, and so left the one before."""
        if self._last is not None and since_ns >= self._last[0]:
            begun, before = self._last
            self._timeline.record(self._foreground, _NAMES[before], begun, since_ns)
        self._last = (since_ns, phase)

    def used(self, begin_ns: int, end_ns: int, seconds: float, threads: int, name: str) -> None:
        """The background used processor time between two moments; it is drawn from the first on."""
        length = min(int(seconds * 1e9 / threads), end_ns - begin_ns)
        if length > _LEAST_SHARE * (end_ns - begin_ns):
            self._timeline.record(self._background, name, begin_ns, begin_ns + length)


def with_idle(timeline: Timeline) -> Timeline:
    """The same timeline, with a track for each device that shows when neither had it.

    A foreground that waits for the wire, or for which the plan has no work, leaves its device to others.
    """
    tracks = by_track(timeline.spans)
    added: list[Span] = []
    for track, spans in tracks.items():
        device, _, kind = track.rpartition("/")
        if kind != "foreground":
            continue
        busy = [span for span in spans if span.name == _NAMES[Phase.COMPUTE]]
        busy += tracks.get(f"{device}/background", [])
        begin, end = min(span.start_ms for span in spans), max(span.end_ms for span in spans)
        inside = [
            Span(device, span.name, max(span.start_ms, begin), min(span.end_ms, end))
            for span in busy
            if span.end_ms > begin and span.start_ms < end
        ]
        added += [Span(f"{device}/idle", "idle", left, right) for left, right in gaps(inside, begin, end)]
    return Timeline.of([*timeline.spans, *added], timeline.samples, dropped=timeline.dropped)
