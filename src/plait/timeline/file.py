"""Timelines on disk: JSON, format ``plait.timeline/1``; errors name the file and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plait.errors import FileError, UsageError
from plait.timeline.span import Sample, Scalar, Span

FORMAT = "plait.timeline/1"

_KINDS = {str: "text", float: "a number", int: "a whole number", list: "a list", dict: "an object"}


def plain(info: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """What a span carries, as JSON can say it: other objects, NaN and infinities become text."""
    return {
        key: value
        if value is None
        or isinstance(value, (str, int))
        or (isinstance(value, float) and math.isfinite(value))
        else str(value)
        for key, value in info.items()
    }


def to_json(spans: Iterable[Span], samples: Iterable[Sample], dropped: int) -> dict[str, Any]:
    """The parts of a timeline as plain data."""
    return {
        "format": FORMAT,
        "dropped": dropped,
        "spans": [
            {
                "track": s.track,
                "name": s.name,
                "start_ms": s.start_ms,
                "end_ms": s.end_ms,
                "info": plain(s.info),
            }
            for s in spans
        ],
        "samples": [{"track": s.track, "name": s.name, "at_ms": s.at_ms, "value": s.value} for s in samples],
    }


def from_json(data: object, source: str) -> tuple[list[Span], list[Sample], int]:
    """The parts of a timeline from plain data; whatever is wrong with it is named."""
    top = _Record(data, source, "", {"format", "dropped", "spans", "samples"})
    if top.get("format", str) != FORMAT:
        raise FileError(f"{source}: the format is {top.get('format', str)!r}", setting="format", works=FORMAT)
    dropped = top.get("dropped", int, default=0)
    if dropped < 0:
        raise FileError(f"{source}: dropped is {dropped}", setting="dropped", works="0")
    spans: list[Span] = []
    for i, item in enumerate(top.get("spans", list)):
        row = _Record(item, source, f"spans[{i}].", {"track", "name", "start_ms", "end_ms", "info"})
        spans.append(
            row.build(
                Span,
                row.get("track", str),
                row.get("name", str),
                row.get("start_ms", float),
                row.get("end_ms", float),
                row.get("info", dict, default={}),
            )
        )
    samples: list[Sample] = []
    for i, item in enumerate(top.get("samples", list, default=[])):
        row = _Record(item, source, f"samples[{i}].", {"track", "name", "at_ms", "value"})
        samples.append(
            row.build(
                Sample,
                row.get("track", str),
                row.get("name", str),
                row.get("at_ms", float),
                row.get("value", float),
            )
        )
    return spans, samples, dropped


class _Record:
    """One JSON object of a file, read field by field."""

    def __init__(self, data: object, source: str, where: str, known: set[str]) -> None:
        self._source, self._where = source, where
        if not isinstance(data, Mapping):
            raise FileError(
                f"{source}: {where.rstrip('.') or 'the file'} is {type(data).__name__}, not an object",
                setting=where.rstrip(".") or "format",
                works=", ".join(sorted(known)),
            )
        self._data = data
        for key in data:
            if key not in known:
                raise FileError(
                    f"{source}: {where}{key} is not a field of {FORMAT}",
                    setting=f"{where}{key}",
                    works=", ".join(sorted(known)),
                )

    def get(self, field: str, kind: type, *, default: Any = None) -> Any:
        """The field's value; an int will do for a float, a bool for neither."""
        value = self._data.get(field, default)
        if isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool):
            return value
        wanted = _KINDS[kind]
        found = f"is {value!r:.60}, not {wanted}" if field in self._data else "is missing"
        name = f"{self._where}{field}"
        raise FileError(f"{self._source}: {name} {found}", setting=name, works=wanted)

    def build(self, kind: Any, *values: Any) -> Any:
        """Make the object; what it refuses is reported with its place in the file."""
        try:
            return kind(*values)
        except UsageError as error:
            where = self._where.rstrip(".")
            raise FileError(
                f"{self._source}: {where}: {error.what}",
                setting=f"{self._where}{error.setting}",
                works=error.works,
            ) from None


def dumps(data: object) -> str:
    """JSON text on one line, ended by a newline; never NaN or infinity, which other readers refuse."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n"


def write(path: str | Path, text: str) -> None:
    """Write a file whole."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(
            f"{path} cannot be written: {error.strerror}",
            setting="path",
            works="a path in a directory that exists",
        ) from None


def read(path: str | Path) -> Any:
    """Read a JSON file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(
            f"{path} cannot be read: {error.strerror}",
            setting="path",
            works="a file written by Timeline.save",
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileError(
            f"{path} is not JSON, or only a part of it: {error}",
            setting="path",
            works="a file written by Timeline.save",
        ) from None
