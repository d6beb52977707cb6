"""A task from its first start to its end: its attempts, what their workers said, and how one failed."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.engine.channel import BEAT_S
from plait.engine.launcher import LOST, Worker
from plait.engine.result import JobResult
from plait.engine.retries import Cause, Failure, Retries
from plait.engine.task import Task
from plait.engine.worker import EXIT_LOST
from plait.errors import UsageError
from plait.units import parse_whole

_TAIL_BYTES = 1 << 14
"""Of a log, in which the last line is looked for."""
_MOST_S = 1e6
"""Twelve days; a socket takes no more than twice that."""
_LONGER = 6
"""Times a silence that was too short, to be tried next: what holds up a worker is rarely just over it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When something is taken for broken, and how often it is tried again."""

    restarts: int = 3
    """In a row, without a checkpoint gained in between."""
    silence_s: float = 10.0
    """A worker that is not heard for so long is lost: stopped, cut off, or its code lets no thread run."""
    stall_s: float = 600.0
    """Workers that make no step for so long hang."""
    backoff_s: float = 1.0
    """Before the first restart; each further one in a row waits twice as long."""
    missing_s: float = 30.0
    """A device that is gone is waited for so long before its task goes on without it."""

    def __post_init__(self) -> None:
        parse_whole(self.restarts, setting="restarts", least=0)
        for name in ("silence_s", "stall_s", "backoff_s", "missing_s"):
            value = getattr(self, name)
            least = 3 * BEAT_S if name == "silence_s" else 0.0
            if not isinstance(value, (int, float)) or not least <= value <= _MOST_S:
                too_long = isinstance(value, (int, float)) and value > _MOST_S
                works = f"{_MOST_S:.0f} or less" if too_long else f"{least:g} or more"
                raise UsageError(f"{name} is {value!r}", setting=name, works=works)


@dataclass(kw_only=True)
class Attempt:
    """Workers of a task, and what they have said."""

    number: int
    workers: list[Worker]
    started_s: float
    moved_s: float
    """When it last made a step."""
    began: int | None = None
    reached: int | None = None
    longest_s: float = 0.0
    error: dict[str, Any] | None = None
    ended_s: float | None = None
    """When the first of them ended with a failure."""

    def step(self, row: Mapping[str, Any], now_s: float) -> None:
        """A step is done."""
        number = int(row["step"])
        self.longest_s = max(self.longest_s, float(row.get("seconds") or 0.0))
        self.moved_s = now_s
        self.began = number if self.began is None else self.began
        self.reached = number if self.reached is None else max(number, self.reached)

    def blame(self, error: dict[str, Any]) -> None:
        """One of the workers says why it failed; the first one tells most, unless it blames another."""
        if self.error is None or (self.is_unsure and not _blames_another(error)):
            self.error = error

    @property
    def is_unsure(self) -> bool:
        """Whether nothing is known yet but that one worker lost another."""
        return self.error is None or _blames_another(self.error)

    def failed(self, cause: Cause, text: str, *, final: bool = False) -> Failure:
        """That it has."""
        return Failure(cause=cause, text=text, began=self.began, reached=self.reached, final=final)

    def unheard(self, rank: int, silent_s: float, limit_s: float) -> Failure:
        """It has, where nothing is heard of a worker."""
        return self.failed(
            "lost",
            f"rank {rank} on {self.workers[rank].name} has not been heard for {silent_s:.1f} s: it is "
            "stopped or cut off, or code of the job lets no other thread run for so long "
            f"(setting: --silence, limits.silence_s; works: {_LONGER * limit_s:g})",
        )

    def ended(self, codes: Sequence[int | None], rank: int, log: Path) -> Failure:
        """Why it has, where a worker ended."""
        if self.error is not None:
            cause: Cause = "disk" if self.error["kind"] in ("FileError", "OSError") else "raised"
            where = f", all of it in {self.error['log']}" if "log" in self.error else ""
            return self.failed(cause, f"{self.error['text']}{where}", final=bool(self.error["final"]))
        code, name = codes[rank], self.workers[rank].name
        if code == LOST:
            return self.failed("lost", f"rank {rank} on {name} is gone")
        assert code is not None, "it has ended"
        if code == EXIT_LOST:
            return self.failed("lost", f"rank {rank} on {name} ended: it heard nothing of this engine")
        if code < 0:
            sent = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
            return self.failed("killed", f"rank {rank} on {name} was ended by {sent}")
        return self.failed("raised", f"rank {rank} on {name} ended with exit code {code}: {_last_line(log)}")


@dataclass(kw_only=True)
class Course:
    """A task from its first start to its end."""

    task: Task
    retries: Retries
    attempts: int = 0
    attempt: Attempt | None = None
    not_before_s: float = 0.0
    missing_s: float | None = None
    started_s: float | None = None
    end: str | None = None
    error: str | None = None
    ended_s: float = 0.0
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By job, what is known of it besides its steps, such as the share of a background job."""
    heard: set[str] = field(default_factory=set)
    """Jobs of which a step was told."""
    settled: set[str] = field(default_factory=set)
    """Jobs of which there is a result."""

    @property
    def expected(self) -> tuple[str, ...]:
        """The jobs of which there must be a result; what trials there are, only a search knows.

        Of a search that failed it is the job that is searched for, or nobody would be told.
        """
        return () if self.task.kind == "search" and self.end != "failed" else self.task.names

    def result(self, name: str, folder: Path) -> JobResult | None:
        """What the workers say came of a job; what was left by a run that was stopped does not count."""
        found = JobResult.load(folder)
        return found if found is not None and (found.finished or name in self.settled) else None


def _blames_another(error: Mapping[str, Any]) -> bool:
    """Whether a worker only noticed that another was gone."""
    transport = "gloo" in str(error["text"]) or "NCCL" in str(error["text"])
    return error["kind"] == "WorkerError" or transport


def _last_line(log: Path) -> str:
    """What a worker printed last; a log may be large, so only its end is read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").strip().splitlines()
    except OSError:
        return f"see {log}"
    return f"{lines[-1][:300]} (all of it: {log})" if lines else f"{log} is empty"
