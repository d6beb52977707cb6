"""Workers from start to end: their output line by line, their exit codes, and none left when one fails."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from plait.errors import WorkerError

Process = subprocess.Popen[bytes]
_PIPE_BYTES = 1 << 20
"""What a pipe holds at most."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the workers of one run."""

    exit_codes: tuple[int, ...]
    """By rank; a negative one is the signal that ended the worker."""
    first_failed: int | None
    """The rank that failed first. Those after it may have been ended because of it."""

    @property
    def exit_code(self) -> int:
        """One number for a script: 0, or that of the first worker that failed (128 + n for signal n)."""
        if self.first_failed is None:
            return 0
        code = self.exit_codes[self.first_failed]
        return code if code > 0 else 128 - code


def end(processes: Sequence[Process], grace_seconds: float) -> None:
    """End processes with their process groups: ask, wait for the grace, then kill; none runs afterwards."""
    running = [process for process in processes if process.poll() is None]
    for number, wait_seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, None)):
        for process in running:
            # Not reaped yet, so the number is still this process's and not a stranger's.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        running = [process for process in running if process.poll() is None]


class _Stream:
    """One worker's output, passed on line by line."""

    def __init__(self, process: Process, write: Callable[[str], None]) -> None:
        assert process.stdout is not None, "a supervised worker writes to a pipe"
        self.pipe = process.stdout
        os.set_blocking(self.pipe.fileno(), False)
        self._write = write
        self._kept = b""

    def read(self) -> bool:
        """Pass on the complete lines of what has arrived, 64 KiB at most; False at the end of the output."""
        try:
            chunk = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._kept = (self._kept + chunk).split(b"\n")
        for line in lines:
            self._write(line.decode(errors="replace"))
        return bool(chunk)

    def finish(self) -> None:
        """Pass on what the pipe holds, and no more: a grandchild may keep it open, or even go on writing."""
        for _ in range(_PIPE_BYTES >> 16):
            if not self.read():
                break
        if self._kept:
            self._write(self._kept.decode(errors="replace"))
        self.pipe.close()


def supervise(
    processes: Sequence[Process],
    writers: Sequence[Callable[[str], None]],
    *,
    grace_seconds: float,
    timeout_seconds: float | None = None,
) -> Outcome:
    """Pass on the workers' output until all have ended; the first that fails ends the others.

    Each process writes to a pipe and leads its own process group. Whatever happens in here, none of them
    is running afterwards.
    """
    streams = [_Stream(process, write) for process, write in zip(processes, writers, strict=True)]
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    first_failed: int | None = None
    try:
        with ExitStack() as stack:
            ready = stack.enter_context(selectors.DefaultSelector())
            for rank, (process, stream) in enumerate(zip(processes, streams, strict=True)):
                ready.register(stream.pipe, selectors.EVENT_READ, stream)
                end_of_process = os.pidfd_open(process.pid)
                stack.callback(os.close, end_of_process)
                ready.register(end_of_process, selectors.EVENT_READ, rank)
            while first_failed is None and any(process.returncode is None for process in processes):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise _too_slow(processes, timeout_seconds)
                for key, _ in ready.select(left):
                    if isinstance(key.data, _Stream):
                        if not key.data.read():
                            ready.unregister(key.fileobj)
                        continue
                    ready.unregister(key.fileobj)
                    if processes[key.data].wait() != 0 and first_failed is None:
                        first_failed = key.data
    finally:
        end(processes, grace_seconds)
        for stream in streams:
            stream.finish()
    return Outcome(exit_codes=tuple(process.returncode for process in processes), first_failed=first_failed)


def _too_slow(processes: Sequence[Process], timeout_seconds: float | None) -> WorkerError:
    running = [rank for rank, process in enumerate(processes) if process.returncode is None]
    return WorkerError(
        f"ranks {running} were still running after {timeout_seconds:g} s",
        setting="timeout_seconds",
        works="more time, or None to wait for ever",
    )
