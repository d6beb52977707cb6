"""The timeline: recording, reading, merging, comparing and saving spans on tracks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.errors import UsageError
from plait.page import Paragraph, page
from plait.timeline import compare, drawing, file, perfetto, picture, span
from plait.timeline.recorder import Recorder
from plait.timeline.span import Sample, Span


class Timeline(Recorder):
    """Spans on tracks, and samples of counters.

    ``Timeline()`` records a run as it goes; ``Timeline.of(spans)`` is made from spans that are known,
    as a simulator has them. Times are milliseconds of the clock of whoever recorded them: only their
    differences mean anything until ``merge`` brings several clocks together.
    """

    _given: tuple[tuple[Span, ...], tuple[Sample, ...], int] = ((), (), 0)

    @classmethod
    def of(cls, spans: Iterable[Span], samples: Iterable[Sample] = (), *, dropped: int = 0) -> Timeline:
        """A timeline with these spans and samples; ``dropped`` says how many more there were."""
        made = cls()
        made._given = (span.in_order(spans), tuple(samples), dropped)
        return made

    def _read(self) -> tuple[tuple[Span, ...], tuple[Sample, ...], int]:
        spans, samples, dropped = self._recorded()
        if not (spans or samples or dropped):
            return self._given
        return (
            span.in_order([*self._given[0], *spans]),
            (*self._given[1], *samples),
            self._given[2] + dropped,
        )

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans kept so far, by start."""
        return self._read()[0]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples kept so far, by time."""
        return tuple(sorted(self._read()[1], key=lambda s: (s.at_ms, s.track, s.name, s.value)))

    @property
    def dropped(self) -> int:
        """How many spans and samples were overwritten by later ones (or, a sample, had no finite value)."""
        return self._read()[2]

    @property
    def tracks(self) -> tuple[str, ...]:
        """The tracks that have spans, ``device2`` before ``device10``."""
        return tuple(span.by_track(self.spans))

    @property
    def start_ms(self) -> float:
        """When the first span starts."""
        return span.extent(self.spans)[0]

    @property
    def end_ms(self) -> float:
        """When the last span ends."""
        return span.extent(self.spans)[1]

    @property
    def makespan_ms(self) -> float:
        """From the first start to the last end, over all tracks."""
        start, end = span.extent(self.spans)
        return end - start

    def busy_ms(self, track: str) -> float:
        """How long the track had a span open; where spans overlap, the time counts once."""
        return span.busy_ms(self._of_track(track, self.spans))

    def gaps(self, track: str) -> list[tuple[float, float]]:
        """When the track was idle between the timeline's start and end, as (start, end) in milliseconds.

        The whole timeline counts, not only the track's own part of it: a device that starts late was
        idle before. So busy time and gaps of any track add up to the makespan.
        """
        spans = self.spans
        return span.gaps(self._of_track(track, spans), *span.extent(spans))

    def utilisation(self, track: str) -> float:
        """The share of the makespan for which the track was busy, 0 to 1."""
        makespan_ms = self.makespan_ms
        return self.busy_ms(track) / makespan_ms if makespan_ms else 0.0

    def _of_track(self, track: str, spans: tuple[Span, ...]) -> list[Span]:
        tracks = span.by_track(spans)
        if track not in tracks:
            raise UsageError(
                f"no span on track {track!r}; there are {len(tracks)} tracks",
                setting="track",
                works=", ".join(tracks) or "a track that has spans",
            )
        return tracks[track]

    def shifted(self, by_ms: float) -> Timeline:
        """The same timeline, every time later by so much."""
        return Timeline.merge([self], offsets_ms=[by_ms])

    @classmethod
    def merge(
        cls,
        timelines: Sequence[Timeline],
        *,
        offsets_ms: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
    ) -> Timeline:
        """Bring timelines of several processes together.

        ``offsets_ms[i]`` is added to the times of ``timelines[i]`` (``measure_clock`` finds it);
        without offsets the clocks are taken to be one, as they are for processes of one machine. With
        ``names``, track ``t`` of timeline i becomes ``names[i]/t``, so that equal tracks stay apart.
        """
        for given, setting in ((offsets_ms, "offsets_ms"), (names, "names")):
            if given is not None and len(given) != len(timelines):
                raise UsageError(
                    f"{len(timelines)} timelines, but {len(given)} {setting}",
                    setting=setting,
                    works=f"{len(timelines)} of them",
                )
        spans: list[Span] = []
        samples: list[Sample] = []
        dropped = 0
        for i, timeline in enumerate(timelines):
            offset_ms = 0.0 if offsets_ms is None else offsets_ms[i]
            prefix = "" if names is None else f"{names[i]}/"
            its_spans, its_samples, its_dropped = timeline._read()
            spans += [s.moved(offset_ms, to_track=prefix + s.track) for s in its_spans]
            samples += [s.moved(offset_ms, to_track=prefix + s.track) for s in its_samples]
            dropped += its_dropped
        return cls.of(spans, samples, dropped=dropped)

    def compare(self, other: Timeline) -> compare.Comparison:
        """Judge this timeline against another, both moved to start at zero."""
        return compare.compare(self.spans, other.spans)

    def to_json(self) -> dict[str, Any]:
        """The timeline as plain data, format ``plait.timeline/1``."""
        return file.to_json(self.spans, self.samples, self.dropped)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, source: str = "timeline") -> Timeline:
        """The timeline of plain data; ``source`` names it in errors."""
        spans, samples, dropped = file.from_json(data, source)
        return cls.of(spans, samples, dropped=dropped)

    def save(self, path: str | Path) -> None:
        """Write the timeline to a file, for ``load``."""
        file.write(path, file.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read what ``save`` wrote; a file that is not so is an error that names the field."""
        return cls.from_json(file.read(path), source=str(path))

    def export(
        self, path: str | Path, *, predicted: Timeline | None = None, width: int | None = None
    ) -> None:
        """Write the timeline for other eyes, by the ending of the name.

        ``.svg`` is a static picture, ``.html`` a page with that picture and zoom that loads nothing
        from anywhere, ``.json`` a trace for https://ui.perfetto.dev or ``chrome://tracing``. With
        ``predicted``, that one stands above this one, which is then called measured, on one time axis;
        the lines below them count the tracks that both have. ``width`` is that of the picture: by
        default 960 in a file of its own, so that letters can be read where a text has it, and 1200 on a page.
        """
        both = {"": self} if predicted is None else {"predicted": predicted, "measured": self}
        # What only one of two has, such as the wires of a simulation, does not count as busy or idle.
        shared = set.intersection(*(set(timeline.tracks) for timeline in both.values())) or None
        ending = Path(path).suffix
        if width is None:
            width = picture.NARROW if ending == ".svg" else picture.WIDTH
        drawn = picture.Gantt(timelines=both, counted=shared, width=width)
        if ending == ".svg":
            text = drawn.svg()
        elif ending == ".html":
            text = page(Path(path).stem, [Paragraph(picture.HOW_TO), drawn])
        elif ending == ".json":
            whole = self
            if predicted is not None:
                begins_ms = [-timeline.start_ms for timeline in both.values()]
                whole = Timeline.merge([predicted, self], offsets_ms=begins_ms, names=list(both))
            text = file.dumps(perfetto.trace(whole.spans, whole.samples))
        else:
            raise UsageError(
                f"no picture or trace has names that end in {ending!r}",
                setting="path",
                works="a name that ends in .svg, .html or .json (Perfetto)",
            )
        file.write(path, text)

    def draw(self, width: int = 80) -> str:
        """Draw the timeline in characters, one line a track, for a terminal of that width."""
        return drawing.draw(self.spans, width)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        mine = (self.spans, self.samples, self.dropped)
        return mine == (other.spans, other.samples, other.dropped)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        spans, _, dropped = self._read()
        tracks = len(span.by_track(spans))
        return (
            f"<Timeline: {len(spans)} spans on {tracks} tracks, {self.makespan_ms:.6g} ms, {dropped} dropped>"
        )
