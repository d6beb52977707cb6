"""What a training process says of itself to whoever shares its devices: its steps, and what it does now.

A foreground job writes a small file of shared memory, one a process: the phase it is in and since when,
and rings of the last steps and phases. A word costs a store in memory; only while somebody waits for a
change of phase does a writer make a system call, to wake them (futex). There is no socket and no lock
between processes, and whoever reads cannot delay whoever writes.

    words 0..15    who, the bell, the phase and the step under way, how many steps and phases there were
    then           the last 256 steps: number, begin, end
    then           the last 1024 phases: since when, which

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share. A file of a process that
was killed stays; its name has the process's number and start, so that the next one who writes or reads there
can tell, and removes it: anyone in the same pid namespace, for shared memory may be that of several
containers, and numbers are not.
"""

from __future__ import annotations

import atexit
import mmap
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from ctypes import CDLL, Structure, byref, c_int, c_int64, c_uint32
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal, get_args

DIRECTORY_VARIABLE = "PLAIT_BURST_DIRECTORY"
"""Where the files are; the default is in shared memory, one folder a user."""
ROLE_VARIABLE = "PLAIT_PUBLISH"
"""What a process is: ``background`` where a multiplexer started it, else ``foreground``."""
RUN_VARIABLE = "PLAIT_RUN"
"""Whose processes it is one of: background work of a run makes room for that run's foreground, and work of
none for everybody's. Letters and digits."""

Role = Literal["foreground", "background"]

_MAGIC = int.from_bytes(b"plaitph1", "little")
_PID, _STARTED, _DEVICE, _BELL, _PHASE, _SINCE, _UNTIL = 1, 2, 3, 4, 5, 6, 7
_NUMBER, _BEGUN, _STEPS, _PHASES, _HEARD_UNTIL, _WAITS = 8, 9, 10, 11, 12, 13
_STEP_RING, _STEP_WORDS, _STEPS_KEPT = 16, 3, 256
_PHASE_RING, _PHASE_WORDS, _PHASES_KEPT = _STEP_RING + _STEP_WORDS * _STEPS_KEPT, 2, 1024
_WORDS = _PHASE_RING + _PHASE_WORDS * _PHASES_KEPT
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1


class Phase(IntEnum):
    """What a foreground process does, as far as its device is concerned."""

    COMPUTE = 1
    """The device works."""
    COLLECTIVE = 2
    """Nothing is left to do but wait for the wire."""
    IDLE = 3
    """The plan has no work for this device."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step that has ended."""

    number: int
    begin_ns: int
    end_ns: int

    @property
    def milliseconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.begin_ns) / 1e6


def default_directory() -> Path:
    """Where this user's processes publish."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given:
        return Path(given)
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"plait-burst-{os.getuid()}"


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; None when it is gone or only waits to be reaped."""
    try:
        # The second field is the command in parentheses and may itself contain blanks and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def pid_namespace() -> int:
    """Where the numbers of processes that this one sees mean something; 0 where there are no namespaces."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class _Timespec(Structure):
    _fields_ = (("seconds", c_int64), ("nanoseconds", c_int64))


class _Shared:
    """The words of one file, and its bell."""

    def __init__(self, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, 8 * _WORDS)
        self.words = memoryview(memory).cast("Q")
        self._bell = c_uint32.from_buffer(memory, 8 * _BELL)
        self._call = CDLL(None, use_errno=True).syscall

    def ring(self) -> None:
        """Wake whoever waits."""
        self.words[_BELL] = (self.words[_BELL] + 1) & 0xFFFFFFFF
        if _FUTEX is not None:
            self._call(_FUTEX, byref(self._bell), _WAKE, _ALL, None, None, 0)

    def wait(self, heard: int, seconds: float) -> None:
        """Sleep until the bell is no longer at ``heard``, and for so long at most."""
        if _FUTEX is None:
            time.sleep(min(seconds, 0.005))
            return
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        self._call(_FUTEX, byref(self._bell), _WAIT, c_int(heard), byref(limit), None, 0)


class Publisher:
    """Tells the multiplexer on this host what this process does; from any thread, in microseconds.

    Where there is nowhere to write it does nothing: training must not end because nobody can listen.
    """

    def __init__(
        self, *, device: int = 0, role: Role | None = None, directory: str | Path | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._path: Path | None = None
        self._shared: _Shared | None = None
        given = os.environ.get(ROLE_VARIABLE, "")
        kind = role or ("background" if given == "background" else "foreground")
        with suppress(OSError):
            self._open(default_directory() if directory is None else Path(directory), kind, device)

    @property
    def path(self) -> Path | None:
        """The file that is written; None where none can be."""
        return self._path

    def begin_step(self, number: int) -> None:
        """A step begins, and the one before ends; all processes of a job give a step the same number."""
        now = time.monotonic_ns()
        with self._lock:
            if self._shared is not None:
                self._end(self._shared.words, now)
                words = self._shared.words
                words[_NUMBER], words[_BEGUN] = number, now
                self._enter(self._shared, Phase.COMPUTE, now, 0)

    def phase(self, phase: Phase, *, expected_ms: float = 0.0) -> None:
        """This process now does something else, probably for so long."""
        now = time.monotonic_ns()
        with self._lock:
            if self._shared is not None and self._shared.words[_PHASE] != phase:
                self._enter(self._shared, phase, now, int(expected_ms * 1e6))

    def end_step(self) -> None:
        """The step ends, and what follows (an evaluation, saving) belongs to none."""
        now = time.monotonic_ns()
        with self._lock:
            if self._shared is not None:
                self._end(self._shared.words, now)
                self._shared.words[_BEGUN] = 0

    def close(self) -> None:
        """Publish no longer, and remove the file."""
        with self._lock:
            path, self._path, self._shared = self._path, None, None
        atexit.unregister(self.close)
        if path is not None and os.getpid() == self._owner:  # a forked child has its parent's publisher
            with suppress(OSError):
                path.unlink()
            _sweep(path.parent)
            with suppress(OSError):
                path.parent.rmdir()  # the last one closes the door

    def _open(self, directory: Path, role: Role, device: int) -> None:
        started = start_ticks(self._owner)
        name = f"{role}-{pid_namespace()}-{self._owner}-{started}-{device}-{time.monotonic_ns()}"
        name += f"-{run}" if (run := os.environ.get(RUN_VARIABLE)) else ""
        for _ in range(3):  # whoever was the last may remove the folder meanwhile
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_uid != os.getuid():
                return  # somebody else made it, and could make us write anywhere
            _sweep(directory)
            try:
                # Complete before it has its name: nobody reads half a file.
                descriptor, partial = tempfile.mkstemp(prefix=".", dir=directory)
                break
            except FileNotFoundError:
                continue
        else:
            return
        try:
            # Not a file with holes: where memory is short, filling one later would kill the training.
            os.posix_fallocate(descriptor, 0, 8 * _WORDS)
            shared = _Shared(descriptor)
            words = shared.words
            words[0], words[_PID], words[_STARTED], words[_DEVICE] = (
                _MAGIC,
                self._owner,
                started or 0,
                device,
            )
            words[_PHASE], words[_SINCE] = Phase.COMPUTE, time.monotonic_ns()
            os.rename(partial, directory / name)
        except OSError:
            os.unlink(partial)
            raise
        finally:
            os.close(descriptor)
        self._path, self._shared = directory / name, shared
        atexit.register(self.close)

    def _end(self, words: memoryview, now: int) -> None:
        if words[_BEGUN]:
            count = words[_STEPS]
            at = _STEP_RING + _STEP_WORDS * (count % _STEPS_KEPT)
            words[at], words[at + 1], words[at + 2] = words[_NUMBER], words[_BEGUN], now
            words[_STEPS] = count + 1  # last, so that what is counted is whole

    def _enter(self, shared: _Shared, phase: Phase, now: int, expected_ns: int) -> None:
        words = shared.words
        count = words[_PHASES]
        at = _PHASE_RING + _PHASE_WORDS * (count % _PHASES_KEPT)
        words[at], words[at + 1] = now, phase
        words[_PHASE], words[_SINCE], words[_UNTIL] = phase, now, now + expected_ns if expected_ns else 0
        words[_PHASES] = count + 1
        if phase != Phase.COMPUTE:
            words[_WAITS] = 1
        if now < words[_HEARD_UNTIL]:
            shared.ring()


class Listener:
    """The other side: reads what one process publishes."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            if os.fstat(descriptor).st_size != 8 * _WORDS:
                raise OSError(f"{path} is not a file of phases")
            self._shared = _Shared(descriptor)
        finally:
            os.close(descriptor)
        if self._shared.words[0] != _MAGIC:
            raise OSError(f"{path} is not a file of phases")
        self.path = path
        self.pid: int = self._shared.words[_PID]
        self.device: int = self._shared.words[_DEVICE]
        self._steps_read: int = self._shared.words[_STEPS]
        self._phases_read: int = self._shared.words[_PHASES]

    @property
    def is_alive(self) -> bool:
        """Whether the process that publishes still runs."""
        return start_ticks(self.pid) == self._shared.words[_STARTED]

    @property
    def phase(self) -> Phase:
        """What it does now."""
        return Phase(self._shared.words[_PHASE])

    @property
    def has_phases(self) -> bool:
        """Whether it was ever in a phase in which its device is free."""
        return bool(self._shared.words[_WAITS])

    @property
    def step(self) -> int | None:
        """The number of the step under way; None between steps."""
        return self._shared.words[_NUMBER] if self._shared.words[_BEGUN] else None

    @property
    def steps_ended(self) -> int:
        """How many steps it has made."""
        return self._shared.words[_STEPS]

    @property
    def phases_entered(self) -> int:
        """How many phases it has entered; a phase that was missed shows here."""
        return self._shared.words[_PHASES]

    def new_steps(self) -> list[StepTime]:
        """The steps that ended since the last call; those that were overwritten meanwhile are left out."""
        words, ended = self._shared.words, self._shared.words[_STEPS]
        found = []
        for count in range(max(self._steps_read, ended - _STEPS_KEPT), ended):
            at = _STEP_RING + _STEP_WORDS * (count % _STEPS_KEPT)
            step = StepTime(words[at], words[at + 1], words[at + 2])
            if words[_STEPS] - count <= _STEPS_KEPT:
                found.append(step)
        self._steps_read = ended
        return found

    def new_phases(self) -> list[tuple[int, Phase]]:
        """The phases entered since the last call, each with the nanosecond at which it began."""
        words, entered = self._shared.words, self._shared.words[_PHASES]
        found = []
        for count in range(max(self._phases_read, entered - _PHASES_KEPT), entered):
            at = _PHASE_RING + _PHASE_WORDS * (count % _PHASES_KEPT)
            since, phase = words[at], words[at + 1]
            if words[_PHASES] - count <= _PHASES_KEPT:
                found.append((since, Phase(phase)))
        self._phases_read = entered
        return found

    @property
    def bell(self) -> int:
        """A number that changes with every phase that somebody waited for."""
        return self._shared.words[_BELL] & 0xFFFFFFFF

    def expect(self, seconds: float) -> None:
        """Ask to be woken at changes of phase for so long from now."""
        until = time.monotonic_ns() + int(seconds * 1e9)
        if self._shared.words[_HEARD_UNTIL] < until:  # others may listen, too
            self._shared.words[_HEARD_UNTIL] = until

    def wait(self, heard: int, seconds: float) -> None:
        """Sleep until the bell is no longer at ``heard``; returns at once where it is not."""
        self._shared.wait(heard, seconds)


def publishing(directory: Path, role: Role, *, run: str | None = None) -> Iterator[Path]:
    """The files of processes that publish in a folder, and still run; those of dead ones are removed.

    Those of another pid namespace are left alone: whether their processes run cannot be told from here.
    ``run`` leaves out those of other runs, and of none.
    """
    for path in _sweep(directory):
        if path.name.startswith(f"{role}-") and (not run or path.name.endswith(f"-{run}")):
            yield path


def _sweep(directory: Path) -> list[Path]:
    """Remove the files of dead processes of this pid namespace; those of the living."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    living, here = [], str(pid_namespace())
    for name in names:
        role, *numbers = name.split("-")
        if role not in get_args(Role) or len(numbers) < 3 or not all(map(str.isdecimal, numbers[:3])):
            continue
        namespace, pid, started = numbers[:3]
        if namespace != here:
            continue
        if start_ticks(int(pid)) == int(started):
            living.append(directory / name)
        else:
            with suppress(OSError):
                (directory / name).unlink()
    return living
