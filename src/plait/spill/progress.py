"""How a run with many jobs shows itself: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from plait.errors import UsageError
from plait.evaluation import Evaluated
from plait.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

Show = bool | Callable[[str], None] | None
"""None: a table on a terminal, lines elsewhere; False: nothing; a function: lines, one a call."""
OnStep = Callable[[str, int, float], object] | None
"""Told of a job's name, how many steps are done, and the last one's loss."""
OnEvaluation = Callable[[str, Evaluated], object] | None
"""Told of a job's name, and how its model did on other data."""
_REFRESH_PER_SECOND = 4
_LINE_SECONDS = 10.0
"""The least time between two lines about one job that merely goes on."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Where a job stands."""

    name: str
    state: str
    """``waiting``, ``device 0``, ``committing``, ``finished`` and so on."""
    step: int
    steps: int
    loss: float | None = None
    seconds_left: float | None = None
    """Of computing."""

    def line(self) -> str:
        """The row as a line of text."""
        text = f"{self.name}: {self.step} of {self.steps} steps, {self.state}"
        if self.loss is not None:
            text += f", loss {self.loss:.4g}"
        if self.seconds_left is not None and self.step < self.steps:
            text += f", {format_seconds(self.seconds_left)} of computing left"
        return text


class Progress(Protocol):
    """What a run tells as it goes; a context manager around it."""

    def say(self, text: str) -> None:
        """Print a line."""

    def update(self, row: Row) -> None:
        """A job has moved on."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def progress(show: Show) -> Progress:
    """The progress that a user asked for."""
    if show is not None and not isinstance(show, bool) and not callable(show):
        raise UsageError(f"show is {show!r}", setting="show", works="None, True, False or a function")
    if show is False:
        return Lines(lambda text: None)
    if callable(show):
        return Lines(show)
    if sys.stderr.isatty():
        from rich.console import Console

        return LiveTable(Console(stderr=True))
    return Lines(lambda text: print(text, file=sys.stderr, flush=True))


class Lines:
    """A line when a job changes its state for good, and now and then while it goes on."""

    def __init__(self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._said: dict[str, tuple[str, float]] = {}

    def say(self, text: str) -> None:
        """Print a line."""
        self._write(text)

    def update(self, row: Row) -> None:
        """Print a line if the job has come to an end, or if it is long since its last one."""
        ended = row.state in ("finished", "stopped", "failed", "interrupted")
        state, at = self._said.get(row.name, ("", self._clock()))
        self._said.setdefault(row.name, (state, at))
        if (ended and state != row.state) or (not ended and self._clock() - at >= _LINE_SECONDS):
            self._said[row.name] = (row.state if ended else state, self._clock())
            self._write(row.line())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class LiveTable:
    """One table with a row a job, redrawn a few times a second; when they are many, those under way first."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, Row] = {}
        self._lock = threading.Lock()
        self._live: Live | None = None

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, markup=False, highlight=False)

    def update(self, row: Row) -> None:
        """Take over a row; it is drawn with the next refresh."""
        with self._lock:
            self._rows[row.name] = row

    def table(self) -> Table:
        """The table as it is now, cut to what the terminal can show."""
        from rich.table import Table

        table = Table()
        for title, right in (("job", 0), ("step", 1), ("loss", 1), ("left", 1), ("state", 0)):
            table.add_column(title, justify="right" if right else "left", no_wrap=True)
        with self._lock:
            rows = list(self._rows.values())
        room = max(3, self._console.size.height - 6)
        order = {"failed": 1, "finished": 2, "stopped": 2}
        shown = sorted(rows, key=lambda row: order.get(row.state, 0))[:room]
        for row in shown:
            left = "" if row.seconds_left is None else format_seconds(row.seconds_left)
            loss = "" if row.loss is None else f"{row.loss:.4g}"
            table.add_row(row.name, f"{row.step}/{row.steps}", loss, left, row.state)
        if len(rows) > len(shown):
            table.add_row(f"and {len(rows) - len(shown)} more", "", "", "", "")
        return table

    def __enter__(self) -> Self:
        from rich.live import Live

        self._live = Live(
            get_renderable=self.table, console=self._console, refresh_per_second=_REFRESH_PER_SECOND
        )
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
