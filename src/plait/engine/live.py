"""A run as it goes: a table on a terminal, plain lines elsewhere.

    view = View()
    view.begin([{"job": "gpt", "strategy": "data, 4 bits", "devices": ["here/0", "here/1"], "steps": 100}])
    view.update("gpt", {"step": 0, "loss": 4.2, "samples_per_s": 31.0})
    view.event("gpt: restarted: worker 1 was killed")
    view.end()

Threads may call at the same time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from plait.engine.figures import number
from plait.errors import UsageError
from plait.spill.progress import Show
from plait.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

LINE_SECONDS = 2.0
"""The least time between two lines about one job."""
_REFRESH_PER_SECOND = 4
_AROUND_ROWS = 6
"""Lines of a terminal that the table's frame and head, and what is typed next, take."""


def _share(value: float) -> str:
    return f"{100 * value:.0f}%"


_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", "{:.4g}".format),
    "samples_per_s": ("samples/s", lambda value: f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"),
    "memory_bytes": ("memory", format_bytes),
    "bits": ("bits", "{:.3g}".format),
    "k": ("k", "{:g}".format),
    "width": ("width", "{:g}".format),
    "wire_bytes": ("sent a step", format_bytes),
    "background_share": ("background", _share),
}
"""By name in a row: the column's head, and how a value is written."""
_DOING = "doing"
"""In a row: what is done for a job that makes no steps yet."""
_JUDGED = "evaluation"
"""In a row: how the model did on other data when it was last evaluated."""
_ALWAYS = ("loss", "samples_per_s")
"""Other columns are there once a row has such a value."""
_WORDS = ("job", "strategy", "device", _DOING, _JUDGED)
"""Columns that are cut where they are too long for the terminal; the others are figures."""
_FIRST_TO_GO = ("wire_bytes", "width", "k", "memory_bytes", "device", "bits", "strategy", "background_share")
"""Columns that a narrow terminal does without, this one first."""


class View:
    """Shows a run; ``show`` is None (a table on a terminal, else lines), False, or a function of a line."""

    def __init__(
        self,
        show: Show = None,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The table is drawn on ``console``, or where none is given on standard error, if a terminal."""
        if show is not None and not isinstance(show, bool) and not callable(show):
            raise UsageError(f"show is {show!r}", setting="show", works="None, True, False or a function")
        self._jobs: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()
        self._clock = clock
        self._said_s: dict[str, float] = {}
        self._unsaid: set[str] = set()
        self._console: Console | None = None
        self._live: Live | None = None
        if callable(show):
            self._write: Callable[[str], object] = show
        elif show is False:
            self._write = lambda line: None
        else:
            self._write = lambda line: print(line, file=sys.stderr, flush=True)
            if console is None and sys.stderr.isatty():
                from rich.console import Console

                console = Console(stderr=True)
            self._console = console

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Who runs where: rows with ``job``, and ``strategy``, ``devices`` and ``steps`` where known."""
        with self._lock:
            for row in rows:
                self._jobs[str(row["job"])] = dict(row)
        if self._console is not None and self._live is None:
            from rich.live import Live

            self._live = Live(
                get_renderable=self.table, console=self._console, refresh_per_second=_REFRESH_PER_SECOND
            )
            self._live.start()

    def update(self, job: str, row: Mapping[str, Any]) -> None:
        """A job has moved on; what a row does not say stays as it was."""
        if "evaluation" in row and "loss" not in row:
            self._judge(job, int(row["step"]), row["evaluation"])
            return
        with self._lock:
            known = self._jobs.setdefault(job, {"job": job})
            known |= {name: value for name, value in row.items() if name != "evaluation"}
            known.pop(_DOING, None)
            if self._live is not None:
                return
            now_s = self._clock()
            self._unsaid.add(job)
            if job not in self._said_s or now_s - self._said_s[job] >= LINE_SECONDS:
                self._say(job, now_s)

    def _judge(self, job: str, step: int, found: Mapping[str, Any]) -> None:
        """A job was evaluated: that is rare enough to be said at once."""
        told = ", ".join(f"{name} {_rounded(value)}" for name, value in found.items())
        with self._lock:
            self._jobs.setdefault(job, {"job": job})[_JUDGED] = told
            if self._live is None:
                self._say_unsaid([job])
                self._write(_printable(f"{job}: evaluated after step {step + 1}: {told}"))

    def doing(self, job: str, what: str) -> None:
        """What is done for a job until its next step, empty for nothing; it is said where it changes."""
        with self._lock:
            known = self._jobs.setdefault(job, {"job": job})
            if known.get(_DOING, "") == what:
                return
            known[_DOING] = what
            if what and self._live is None:
                self._write(_printable(f"{job}: {what}"))

    def event(self, text: str, jobs: Collection[str] = ()) -> None:
        """Something happened; it is shown at once, after the last line of the ``jobs`` that it is about."""
        with self._lock:
            if self._live is None:
                self._say_unsaid(jobs)
                self._write(_printable(text))
                return
        # Not within the lock: who draws the table has the console, and wants the lock.
        assert self._console is not None, "there is a table"
        self._console.print(_printable(text), markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """The run is over: the table stays as it is, and every job has had its last line."""
        with self._lock:
            live, self._live = self._live, None
            if live is None:
                self._say_unsaid(self._jobs)
        if live is not None:
            live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _say_unsaid(self, jobs: Collection[str]) -> None:
        for job in [name for name in self._jobs if name in jobs and name in self._unsaid]:
            self._say(job, self._clock())

    def _say(self, job: str, now_s: float) -> None:
        self._said_s[job] = now_s
        self._unsaid.discard(job)
        self._write(_printable(line(self._jobs[job])))

    def table(self) -> Table:
        """The table as it is now, cut to what the terminal can show."""
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            rows = [dict(row) for row in self._jobs.values()]
        height = 25 if self._console is None else self._console.size.height
        room = max(3, height - _AROUND_ROWS)
        # Where not all fit, those that have come to their end make room.
        kept = sorted(rows, key=_is_done)[:room] if len(rows) > room else rows
        table = Table()
        columns = _columns(kept)
        if self._console is not None:
            for name in _FIRST_TO_GO:
                if _width(columns) > self._console.size.width:
                    columns.pop(name, None)
        for name, (head, _) in columns.items():
            if name in _WORDS:
                table.add_column(head, overflow="ellipsis", no_wrap=True)
            else:
                table.add_column(head, justify="right", no_wrap=True)
        for cells in zip(*(cells for _, cells in columns.values()), strict=True):
            table.add_row(*map(Text, cells))
        if len(rows) > len(kept):
            table.add_row(f"and {len(rows) - len(kept)} more")
        return table


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, list[str]]]:
    """By name, the head and the cells of what there is to say of some job."""
    cells: dict[str, tuple[str, list[str]]] = {
        "job": ("job", [str(row["job"]) for row in rows]),
        "strategy": ("strategy", [str(row.get("strategy", "")) for row in rows]),
        "device": ("device", [_devices(row) for row in rows]),
        _DOING: (_DOING, [str(row.get(_DOING, "")) for row in rows]),
        "step": ("step", [_step(row) for row in rows]),
        **{name: (head, [_figure(row, name) for row in rows]) for name, (head, _) in _FIGURES.items()},
        _JUDGED: (_JUDGED, [str(row.get(_JUDGED, "")) for row in rows]),
    }
    always = ("job", "strategy", "device", "step", *_ALWAYS)
    return {
        name: (head, [_printable(cell) for cell in found])
        for name, (head, found) in cells.items()
        if name in always or any(found)
    }


def _width(columns: Mapping[str, tuple[str, list[str]]]) -> int:
    """How many characters a table of these takes, its frame included."""
    return 1 + sum(3 + max(map(len, (head, *cells))) for head, cells in columns.values())


def line(row: Mapping[str, Any]) -> str:
    """Where a job stands, as a line of text."""
    step = _step(row)
    parts = [f"step {step}"] if step else []
    for name, (head, _) in _FIGURES.items():
        figure = _figure(row, name)
        if figure and name in ("loss", "bits", "k", "width", "memory_bytes", "background_share"):
            parts.append(f"{head} {figure}")
        elif figure:
            parts.append(f"{figure} {head}")
    told = " on ".join(part for part in (str(row.get("strategy", "")), _devices(row)) if part)
    return f"{row['job']}: {', '.join(parts)}" + (f" ({told})" if told else "")


def _step(row: Mapping[str, Any]) -> str:
    """How many steps are done; rows count them from 0."""
    if not isinstance(row.get("step"), int):
        return "" if row.get("steps") is None else f"0/{row['steps']}"
    done = row["step"] + 1
    return str(done) if row.get("steps") is None else f"{done}/{row['steps']}"


def _is_done(row: Mapping[str, Any]) -> bool:
    steps = row.get("steps")
    return isinstance(steps, int) and isinstance(row.get("step"), int) and row["step"] + 1 >= steps


def _devices(row: Mapping[str, Any]) -> str:
    found = row.get("devices", row.get("device", ""))
    if isinstance(found, str):
        return found
    names = [str(name) for name in found]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if names else ""


def _figure(row: Mapping[str, Any], name: str) -> str:
    value = number(row.get(name))
    if value is None:  # a loss of null was not finite
        return "not finite" if name == "loss" and name in row else str(row.get(name) or "")
    return _FIGURES[name][1](value)


def _rounded(value: object) -> str:
    found = number(value)
    return "not finite" if found is None else f"{found:.4g}"


def _printable(text: str) -> str:
    """Text that leaves a terminal as it is: a name or an error may hold its control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
