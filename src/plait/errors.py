"""The errors a user can cause or meet, each with the setting it depends on and a value that works."""

from __future__ import annotations


class PlaitError(Exception):
    """Base of plait's errors: what happened, which setting it depends on, and what would work.

    The three parts are kept apart so that the command line can lay them out and ``--json`` can carry
    them; ``str()`` joins them into one line.
    """

    def __init__(self, what: str, *, setting: str | None = None, works: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.setting = setting
        self.works = works

    def __str__(self) -> str:
        text = self.what
        if self.setting is not None:
            text += f" (setting: {self.setting})"
        if self.works is not None:
            text += f"; works: {self.works}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        state = {"setting": self.setting, "works": self.works}
        return type(self), (self.what,), state


class UsageError(PlaitError, ValueError):
    """A value that cannot be used: an argument, a command-line option, a field of a job."""


class FileError(PlaitError, ValueError):
    """A file that cannot be read or does not say what it should; names the file and the field."""


class TraceError(PlaitError, RuntimeError):
    """A model that cannot be turned into a chain."""


class LabError(PlaitError, RuntimeError):
    """The lab cannot do what was asked on this machine."""


class WorkerError(PlaitError, RuntimeError):
    """A worker died, stalled or disagreed with the others; names the rank and the operation."""


class NonfiniteError(PlaitError, ArithmeticError):
    """A loss or a gradient that is infinite or not a number; names the job and the step."""
