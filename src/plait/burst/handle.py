"""Background work as its owner sees it: ``background`` starts it, a handle reports of it and ends it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from plait.burst.controller import Control
from plait.burst.multiplex import Multiplexer
from plait.burst.process import OWN_MEMORY_BYTES, Background, Work, check_threads
from plait.burst.report import Report
from plait.errors import UsageError, WorkerError
from plait.units import format_bytes, parse_bytes, parse_whole

if TYPE_CHECKING:
    from plait.job import Job
    from plait.timeline import Timeline

_COMMON = {"max_slowdown", "outlive", "timeline", "control"}
"""Settings of all works together."""


class Handle:
    """One piece of background work, as its owner sees it; leaving the block ends it."""

    def __init__(
        self, multiplexer: Multiplexer, work: Background, *, directory: Path | None, added: bool
    ) -> None:
        self._multiplexer, self._work, self._directory, self._added = multiplexer, work, directory, added

    @property
    def pid(self) -> int:
        """The number of its first process."""
        return self._work.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._work.exit_code

    @property
    def steps(self) -> int:
        """How many training steps it has made, where it says so: plait jobs and torch scripts do."""
        return self._work.steps()

    @property
    def report(self) -> Report:
        """What it cost the foreground so far, and what it got."""
        return self._multiplexer.report(self._work)

    def add(self, command_or_job: Sequence[str] | Job, **settings: object) -> Handle:
        """Start another work under the same bound; the settings are those of :func:`background`.

        Those of the bound itself (``max_slowdown``, ``outlive``, ``timeline``, ``control``) were given there.
        """
        if common := sorted(_COMMON & set(settings)):
            raise UsageError(
                f"{common[0]} for a work that is added: there is one for all works together",
                setting=common[0],
                works=f"background(..., {common[0]}=...)",
            )
        return _start(self._multiplexer, command_or_job, added=True, **settings)  # type: ignore[arg-type]

    def pause(self) -> None:
        """Pause it, and all that was added to it, whatever the foreground would bear."""
        self._multiplexer.hold(True, only=self._work if self._added else None)

    def resume(self) -> None:
        """Let it run again, as far as the foreground bears it."""
        self._multiplexer.hold(False, only=self._work if self._added else None)

    def promote(self) -> None:
        """Let it, and all that was added to it, have its share of the cores like everybody else.

        For when the foreground is over: idle priority leaves it nothing where others keep the cores busy.
        Where control groups cannot be made, it takes root.
        """
        self._multiplexer.promote()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until it has ended by itself; its exit code, or None after so long."""
        return self._work.wait(seconds)

    def checkpoint(self, seconds: float | None = None) -> Path:
        """Have a job save a checkpoint and end there; where it is, for another host to go on from.

        ``plait.burst.background(job, directory=...)`` with the same directory goes on, here or there.
        """
        from plait.burst.task import EXIT_MOVED

        if self._directory is None:
            raise UsageError(
                "a command cannot be checkpointed from outside, and a job only with a directory",
                setting="directory",
                works="background(job, directory='runs/second')",
            )
        code = self._work.leave(seconds)
        if code not in (0, EXIT_MOVED):
            what = f"ended with {code}" if code is not None else f"has not ended within {seconds:g} s"
            raise WorkerError(f"the job {self._work.work.name!r} {what} on the way to a checkpoint")
        self._work.end()
        return self._directory

    def stop(self, grace_seconds: float = 3.0) -> Report:
        """End it, and all that was added to it; what came of it."""
        if self._added:
            self._work.end(grace_seconds)
        else:
            self._multiplexer.stop(grace_seconds)
        if self._work.oom_kills:
            limit = format_bytes(self._work.work.memory_bytes or 0)
            print(f"plait: background work {self._work.work.name} ran out of its {limit}", file=sys.stderr)
        return self.report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def background(
    command_or_job: Sequence[str] | Job,
    *,
    max_slowdown: float = 1.05,
    threads: int | None = None,
    memory: str | int | None = None,
    cores: Sequence[int] | None = None,
    directory: str | Path | None = None,
    save_every: int = 10,
    idle: bool = True,
    environment: Mapping[str, str] | None = None,
    outlive: bool = True,
    timeline: Timeline | None = None,
    control: Control | None = None,
) -> Handle:
    """Run a command or a job in the background of whatever trains in the foreground on this host's cores.

    Args:
        command_or_job: Words as ``subprocess`` takes them, or a plait Job, which is trained plainly.
        max_slowdown: What a step of the foreground may take, in multiples of what it takes alone.
        threads: Of its own; a job's are the job's, a command's default is 1 (told by OMP_NUM_THREADS).
        memory: Its limit, such as "2GiB", for all its processes; needs control groups.
        cores: Where it may run; default: where this process may.
        directory: Where a job saves checkpoints and goes on from, and where output goes (``background.log``).
            None: nothing is saved, and output goes where this process's does.
        save_every: Steps between a job's checkpoints.
        idle: Run only when nothing else wants the cores; False: it is held back by pauses alone, as work that
            mostly waits for a GPU may need it.
        environment: More variables for it.
        outlive: Whether it goes on when the foreground has ended.
        timeline: Records who had the device when; see :func:`plait.burst.occupancy.with_idle`.
        control: How the bound is held, in place of ``max_slowdown``.
    """
    multiplexer = Multiplexer(max_slowdown=max_slowdown, outlive=outlive, timeline=timeline, control=control)
    return _start(
        multiplexer,
        command_or_job,
        threads=threads,
        memory=memory,
        cores=cores,
        directory=directory,
        save_every=save_every,
        idle=idle,
        environment=environment,
    )


def _start(
    multiplexer: Multiplexer,
    command_or_job: Sequence[str] | Job,
    *,
    added: bool = False,
    threads: int | None = None,
    memory: str | int | None = None,
    cores: Sequence[int] | None = None,
    directory: str | Path | None = None,
    save_every: int = 10,
    idle: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Handle:
    folder = None if directory is None else Path(directory)
    if folder is not None:
        from plait.destination import make_folder

        make_folder(folder, setting="directory")
    if isinstance(command_or_job, (str, bytes)):
        raise UsageError(
            f"the command {command_or_job!r} is one string", setting="command", works="its words, in a list"
        )
    if isinstance(command_or_job, Sequence):
        command, name = tuple(command_or_job), Path(command_or_job[0]).name if command_or_job else ""
        count = parse_whole(1 if threads is None else threads, setting="threads")
    else:
        job, name = command_or_job, command_or_job.name
        if threads is not None and threads != job.threads:
            raise UsageError(
                f"a job of {job.threads} threads with {threads}: that would change its results",
                setting="threads",
                works=str(job.threads),
            )
        count = job.threads
        command = (sys.executable, "-m", "plait.burst.task", job.to_json())
        every = parse_whole(save_every, setting="save_every")
        if folder is not None:
            command += ("--directory", str(folder), "--save-every", str(every))
    check_threads(count, cores)
    work = Work(
        command=command,
        name=name,
        threads=count,
        memory_bytes=_limit(memory),
        cores=None if cores is None else tuple(cores),
        idle=idle,
        environment=environment or {},
        log=None if folder is None else folder / "background.log",
    )
    is_job = not isinstance(command_or_job, Sequence)
    return Handle(multiplexer, multiplexer.add(work), directory=folder if is_job else None, added=added)


def _limit(memory: str | int | None) -> int | None:
    if memory is None:
        return None
    count = parse_bytes(memory, setting="memory")
    if count < OWN_MEMORY_BYTES:
        raise UsageError(
            f"{format_bytes(count)} is less than a Python process needs ({format_bytes(OWN_MEMORY_BYTES)})",
            setting="memory",
            works="512MiB (a process that imports torch takes about 220 MB)",
        )
    return count
