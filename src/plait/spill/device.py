"""A device on a machine without accelerators: a process with its own cores and torch threads that computes.

It maps the store's arena, so weights are never copied to it, and runs one call at a time. Everything that
lasts is in the arena and on disk: a device that dies loses what it was working on and nothing else.

A device is a new interpreter rather than a fork: the caller may have threads and a large heap. It finds a
job's functions by their names. Where these are in the script that is being run, that script is run again up
to its call of ``fit``, under a name that is not ``__main__``: scripts with and without the usual guard work.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from importlib import import_module
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from plait.errors import WorkerError
from plait.job import Job
from plait.spill import slab

RUNNER = "plait.spill.runner:Runner"
"""What a device does its work with: made with an empty memory, later given the arena by ``map``."""
_MAIN = "__plait_device__"
"""The name that the running script has in a device."""
_START = "from plait.spill.device import main; main()"
_END_SECONDS = 5.0
_MALLOC = {
    # Freed tensors go back to the system rather than to a heap that only grows: a budget counts them.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 20),
    "MALLOC_TOP_PAD_": str(1 << 20),
    "MALLOC_ARENA_MAX": "1",
}


class DeviceLost(WorkerError):
    """A device's process has ended while it was needed."""


class ScriptStop(BaseException):
    """Raised where a script calls ``fit`` within a device: all that its jobs need is defined by then."""


class Call(Future[Any]):
    """A call that a device was given, and when it ran: nanoseconds of the clock that all processes share."""

    start_ns: int = 0
    end_ns: int = 0


class Device:
    """One device, from the side of the process that gives it work."""

    def __init__(
        self,
        index: int,
        *,
        cores: Sequence[int] = (),
        threads: int = 1,
        kind: str = "cpu",
        runner: str = RUNNER,
    ) -> None:
        self.index = index
        self._cores = tuple(cores)
        self._threads = threads
        self._kind = kind
        self._runner = runner
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        """Not the same: whoever sends may wait for the device, which may wait for its answer to be read."""
        self._waiting: dict[int, tuple[str, Call]] = {}
        self._number = 0
        self._code: int | None = None

    def start(self) -> None:
        """Start the process; it is ready when a first call returns."""
        assert self._process is None, f"device {self.index} runs already"
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).parents[2])
        environment = {
            # Activations and gradients come and go by the hundred megabytes: in large pages that costs less.
            "THP_MEM_ALLOC_ENABLE": "1",
            **os.environ,
            **_MALLOC,
            **slab.environment(),
            "OMP_NUM_THREADS": str(self._threads),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # its profiler warns of memory from before a measurement
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        }
        if self._kind == "cuda":  # not run where plait is developed: there is no GPU
            environment["CUDA_VISIBLE_DEVICES"] = str(self.index)
        with ours, theirs:
            theirs.set_inheritable(True)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), str(os.getpid())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            self._connection = Connection(ours.detach())
        settings = {
            "index": self.index,
            "cores": self._cores,
            "kind": self._kind,
            "runner": self._runner,
            "path": sys.path,
            "script": _script(),
        }
        with contextlib.suppress(OSError):  # it died at once: the first call says so
            self._connection.send(settings)
        reader = threading.Thread(
            target=self._read,
            args=(self._process, self._connection),
            name=f"plait-device-{self.index}",
            daemon=True,
        )
        reader.start()

    @property
    def pid(self) -> int:
        """The number of its process."""
        assert self._process is not None, f"device {self.index} has not been started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        process = self._process
        return process is not None and process.poll() is None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Call:
        """Have the runner do something, after all that it was asked before; arguments and result are pickled.

        What the method raises is raised by the future, its traceback in the notes.
        """
        return self._send(method, args, kwargs)

    def map(self, fd: int, nbytes: int) -> Call:
        """Let the device see shared memory, which the runner's ``map`` gets as a view."""
        return self._send("map", (nbytes,), {}, fd=fd)

    def stop(self) -> None:
        """End the process, at once if it computes; calls that have not returned fail. Can be called twice."""
        process = self._process
        if process is None:
            return
        with self._lock:
            connection = None if self._waiting else self._connection
        if connection is None:
            process.kill()
        else:
            with contextlib.suppress(OSError), self._sending:
                connection.send(None)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def _send(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, fd: int | None = None
    ) -> Call:
        future = Call()
        with self._sending:
            with self._lock:
                connection = self._connection
                if connection is None:
                    future.set_exception(self._lost(method))
                    return future
                self._number += 1
                self._waiting[self._number] = (method, future)
                content = pickle.dumps((self._number, method, args, kwargs, fd is not None))
            with contextlib.suppress(OSError):  # it has died; the reader is about to notice
                connection.send_bytes(content)
                if fd is not None:
                    reduction.send_handle(connection, fd, self.pid)
        return future

    def _read(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        """Pass results on to their futures until the process ends."""
        while True:
            try:
                number, error, value, times = pickle.loads(connection.recv_bytes())
            except (OSError, EOFError):
                break
            with self._lock:
                _, future = self._waiting.pop(number)
            future.start_ns, future.end_ns = times
            if error is None:
                future.set_result(value)
            else:
                raised, text = error
                raised.__notes__ = [text]
                future.set_exception(raised)
        process.wait()
        with self._lock:
            self._connection = None
            connection.close()
            waiting, self._waiting = self._waiting, {}
            self._code = process.returncode
        for method, future in waiting.values():
            future.set_exception(self._lost(method))

    def _lost(self, method: str) -> DeviceLost:
        code = self._code
        how = "was stopped" if code in (0, None) else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        works = "a smaller one, if the system ran out of it" if code == -signal.SIGKILL else None
        return DeviceLost(
            f"device {self.index} {how} before it was done with {method!r}",
            setting=None if works is None else "memory",
            works=works,
        )


def _script() -> str | None:
    """The file that is being run, where it is one that jobs can name."""
    main = sys.modules.get("__main__")
    if in_device():
        return None
    file = getattr(main, "__file__", None)
    return None if file is None or not file.endswith(".py") else os.path.realpath(file)


# In the device's process.


def in_device() -> bool:
    """Whether this process is a device."""
    return _MAIN in sys.modules


def main() -> None:
    """Serve calls until the process that started this one says so, or ends."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal's processes; ours decides
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    _end_with(parent)
    settings = connection.recv()
    slab.settle()
    sys.argv = [""]
    sys.path[:] = settings["path"]
    if settings["cores"]:  # before torch is imported, which looks at them
        os.sched_setaffinity(0, settings["cores"])
    script = _Script(settings["script"])
    runner: Any = None
    while True:
        try:
            content = connection.recv_bytes()
        except (OSError, EOFError):
            os._exit(0)
        if (message := pickle.loads(content)) is None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # torch's threads and the arena's views need no taking apart
        number, method, args, kwargs, mapped = message
        error, value, start_ns = None, None, time.perf_counter_ns()
        try:
            if mapped:
                args = (_mapped(reduction.recv_handle(connection), *args),)
            for arg in args:
                if isinstance(arg, Job):
                    script.run_for(arg)
            if runner is None:
                place, _, name = settings["runner"].rpartition(":")
                runner = getattr(import_module(place), name)(memoryview(b""), settings["kind"])
            value = getattr(runner, method)(*args, **kwargs)
        except BaseException as raised:
            error = _portable(raised)
        times = start_ns, time.perf_counter_ns()
        try:
            answer = pickle.dumps((number, error, value, times))
        except Exception as raised:
            answer = pickle.dumps((number, _portable(raised), None, times))
        connection.send_bytes(answer)


def _end_with(parent: int) -> None:
    """End this process at once when another ends, whatever it is doing.

    A pidfd tells of the process; PR_SET_PDEATHSIG would tell of the thread that started this one.
    """
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        select.select([fd], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="plait-parent", daemon=True).start()


def _mapped(fd: int, nbytes: int) -> memoryview:
    view = memoryview(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED))
    os.close(fd)
    return view


def _portable(error: BaseException) -> tuple[BaseException, str]:
    """An exception that can be pickled, and its traceback."""
    text = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is not type(error) or str(copy) != str(error):
            raise TypeError
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    return copy, text


class _Script:
    """The script that the user runs, as jobs see it in a device: run once, and only if a job needs it."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._module = ModuleType(_MAIN)
        sys.modules[_MAIN] = self._module
        self._ran = False

    def run_for(self, job: Job) -> None:
        """Run the script, up to its call of ``fit``, if a function of the job is in it."""
        if self._ran or self._file is None or json.dumps(self._file)[:-1] + ":" not in job.to_json():
            return
        self._ran = True
        self._module.__file__ = self._file
        sys.path.append(os.path.dirname(self._file))
        sys.modules["__main__"] = self._module  # where plait.factory looks for a script's functions
        code = compile(Path(self._file).read_bytes(), self._file, "exec")
        with contextlib.suppress(ScriptStop):
            exec(code, vars(self._module))
