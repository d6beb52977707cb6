"""One piece of background work as processes: held back, paused and resumed, measured, and ended whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from plait.burst import gpu, leftover
from plait.burst.cgroup import Group
from plait.burst.entry import LEAST_NICE, Settings
from plait.burst.phases import (
    DIRECTORY_VARIABLE,
    ROLE_VARIABLE,
    Listener,
    default_directory,
    publishing,
    start_ticks,
)
from plait.errors import FileError, UsageError

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_LOOK_SECONDS = 0.5
"""Between two looks at which processes there are, where no group knows them."""
OWN_MEMORY_BYTES = 32 * 2**20
"""A bare Python process needs about 12 MB; near that it dies before it can say why."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What runs in the background, and what it may take."""

    command: tuple[str, ...]
    name: str
    threads: int = 1
    memory_bytes: int | None = None
    cores: tuple[int, ...] | None = None
    """None: those of this process."""
    idle: bool = True
    """Run only when nothing else wants to; False: held back by pauses alone."""
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    """Where its output goes; None: where this process's goes."""

    def __post_init__(self) -> None:
        program = self.command[0] if self.command else ""
        if not program or shutil.which(program) is None:
            raise UsageError(
                f"there is no program {program!r} to run in the background",
                setting="command",
                works=f"[{sys.executable!r}, 'train.py']",
            )
        may = sorted(os.sched_getaffinity(0))
        if self.cores is not None and (not self.cores or not set(self.cores) <= set(may)):
            raise UsageError(
                f"background work on the cores {list(self.cores)}", setting="cores", works=f"some of {may}"
            )


class Background:
    """Background work under way, from its construction until ``end``; any thread may call."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.label = leftover.new_label()
        self.paused = False
        self._ending = self._promoted = False
        self.oom_kills = 0
        """How many of its processes were killed at its memory limit."""
        self._seconds = 0.0
        self._members: dict[int, int] = {}
        """Its processes, each with its start: a number alone may have passed to somebody else."""
        self._looked_at = self._scanned_at = -_LOOK_SECONDS
        self._listeners: dict[Path, Listener] = {}
        self._steps = 0
        self._folder = default_directory() / self.label
        self._lock = threading.RLock()
        self._watchdog = leftover.Watchdog(self.label)
        try:
            self._folder.mkdir(mode=0o700, parents=True)
            self._group = Group(self.label, idle=work.idle, memory_bytes=work.memory_bytes)
            self.protection = self._protection()
            """How the foreground is protected from it."""
            self._process = self._start()
        except BaseException:
            with self._watchdog.relieved():
                leftover.remove(self.label)
            raise
        self._open = True

    def _start(self) -> subprocess.Popen[bytes]:
        own_session = self._must_have_session
        cores = self.work.cores
        settings = Settings(
            entrances=self._group.entrances,
            cores=None if cores is None else list(cores),
            idle=self.work.idle,
            own_session=own_session,
        )
        environment = {**os.environ, **dict.fromkeys(_THREADS, str(self.work.threads)), **gpu.environment()}
        environment |= self.work.environment
        environment |= {
            leftover.VARIABLE: self.label,
            ROLE_VARIABLE: "background",
            DIRECTORY_VARIABLE: str(self._folder),
        }
        with ExitStack() as stack:
            output = None
            if self.work.log is not None:
                try:
                    output = stack.enter_context(self.work.log.open("ab"))
                except OSError as error:
                    raise FileError(
                        f"{self.work.log} cannot be written: {error.strerror}",
                        setting="directory",
                        works="a folder that exists and may be written",
                    ) from None
            entry = [sys.executable, "-I", "-S", str(Path(__file__).with_name("entry.py"))]
            return subprocess.Popen(
                [*entry, json.dumps(settings), *self.work.command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                # Its own process group, so that Ctrl-C ends it only when we do; but the session stays, for
                # a new one has an autogroup of its own. (Where it must have one, the entry makes it.)
                process_group=None if own_session else 0,
            )

    @property
    def _must_have_session(self) -> bool:
        return self.work.idle and not self._group.is_idle and not self._promoted

    @property
    def pid(self) -> int:
        """The number of its first process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Of its first process; None while that runs, negative where a signal ended it."""
        return self._process.poll()

    def _protection(self) -> str:
        how = "cpu.idle group" if self._group.is_idle else "SCHED_IDLE in a session of the least weight"
        how = how if self.work.idle and not self._promoted else "normal priority"
        return f"{how}, paused {'through its control group' if self._group.can_freeze else 'by SIGSTOP'}"

    def pause(self) -> None:
        """Stop all its processes where they are; they keep their memory. What was asked to end goes on."""
        with self._lock:
            if not self.paused and not self._ending and self._open:
                self.paused = True
                self._stop_or_go(frozen=True)

    def resume(self) -> None:
        """Let them go on."""
        with self._lock:
            if self.paused:
                self.paused = False
                self._stop_or_go(frozen=False)

    def promote(self) -> None:
        """Let it run like everything else, where it ran only when nothing else wanted to.

        Beside somebody who is busy that may take a second or two: the kernel first evens out what the
        work used at its low weight.
        """
        with self._lock:
            if self._promoted or not self._open or not self.work.idle:
                return
            self._promoted = True
            self._group.promote()
            for _ in range(2):  # a thread that is new meanwhile has what the one had that made it
                own = leftover.members(self.label)
                for pid in own:
                    leftover.release(pid, own)
            with suppress(OSError):
                if os.sched_getscheduler(self.pid) != os.SCHED_IDLE:  # only root may do so
                    self.protection = self._protection()

    def _stop_or_go(self, *, frozen: bool) -> None:
        if self._group.can_freeze:
            self._group.freeze(frozen)
            return
        # None may be left stopped. But to look for new ones at every pause would take the foreground's time;
        # keep_back stops them.
        self._look(at_once=not frozen)
        self._signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid, started in self._members.items():
            with suppress(ProcessLookupError):
                if start_ticks(pid) == started:
                    os.kill(pid, number)

    def _look(self, *, at_once: bool = False) -> None:
        """Find the processes of the work; for machines without control groups."""
        now = time.monotonic()
        if at_once or now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            found = ((pid, start_ticks(pid)) for pid in leftover.members(self.label))
            self._members = {pid: started for pid, started in found if started is not None}

    def keep_back(self) -> None:
        """Put processes back that stepped forward; to be called twice a second, where no group holds them.

        Some are new since a pause; some made a new session, which has a new autogroup, of full weight.
        """
        with self._lock:
            if not self._open:
                return
            if self.paused and not self._group.can_freeze:
                self._look()
                self._signal(signal.SIGSTOP)
            if self._must_have_session:
                self._look()
                self._weigh_down()

    def _weigh_down(self) -> None:
        for pid in self._members:
            with suppress(OSError):
                path = Path(f"/proc/{pid}/autogroup")
                # Only of a session that one of them made: the foreground may well be in the caller's.
                own = os.getsid(pid) in self._members
                if own and not path.read_text().endswith(f"nice {LEAST_NICE}\n"):
                    path.write_text(LEAST_NICE)

    def seconds(self) -> float:
        """Processor time used so far, by all its processes."""
        with self._lock:
            counted = self._group.seconds() if self._open else None
            if counted is None and self._open:
                self._look()
                counted = sum(_seconds_of(pid) for pid in self._members)
            self._seconds = max(self._seconds, counted or 0.0)
            return self._seconds

    def steps(self) -> int:
        """How many training steps it has made, where it says so: plait jobs and torch scripts do."""
        now = time.monotonic()
        with self._lock:
            if now - self._scanned_at >= _LOOK_SECONDS:
                self._scanned_at = now
                for path in publishing(self._folder, "background"):
                    if path not in self._listeners:
                        with suppress(OSError):
                            self._listeners[path] = Listener(path)
            # Several processes of one job make the same steps.
            self._steps = max([self._steps, *(each.steps_ended for each in self._listeners.values())])
            return self._steps

    def leave(self, seconds: float | None) -> int | None:
        """Have it end in its own time, unpaused; a plait job saves a checkpoint first.

        Its exit code; None where it still runs after so long, and then it may be paused again.
        """
        with self._lock:
            self._ending = True
            self.resume()
            self._process.send_signal(signal.SIGTERM)  # nothing where it has ended
        try:
            return self.wait(seconds)
        finally:
            self._ending = False

    def wait(self, seconds: float | None) -> int | None:
        """The exit code; None where it still runs after so long."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self, grace_seconds: float = 3.0) -> None:
        """Ask it to end, kill what has not after the grace, and leave nothing behind.

        What cannot be removed at once raises, and the watchdog removes it as soon as it can.
        """
        if not self._open:
            return
        if self.exit_code is None:
            self.leave(grace_seconds)
        with self._lock:
            if not self._open:  # another thread was faster
                return
            self.seconds()
            self.steps()
            self.oom_kills = self._group.oom_kills()
            self._open = False
        with self._watchdog.relieved():
            self._group.remove()
            leftover.remove(self.label)
            self._process.kill()  # it may have shed its label
        self._process.wait()


def _seconds_of(pid: int) -> float:
    """Processor time of a process and of those of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def cores_of(pid: int) -> set[int]:
    """The cores that a process may use; none when it is gone."""
    try:
        return os.sched_getaffinity(pid) if start_ticks(pid) is not None else set()
    except OSError:
        return set()


def check_threads(threads: int, cores: Sequence[int] | None) -> None:
    """Raise for more threads than there are cores to run them on."""
    room = len(os.sched_getaffinity(0) if cores is None else cores)
    if threads > room:
        raise UsageError(
            f"{threads} background threads on {room} core{'s' if room > 1 else ''}",
            setting="threads",
            works=f"1 to {room}",
        )
