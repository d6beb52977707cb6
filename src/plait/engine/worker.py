"""A worker of a run: ``python -m plait.engine.worker FOLDER``, under the torchrun contract.

The folder holds the task. Where ``PLAIT_ENGINE`` names an engine, the worker tells it every step, ends at a
checkpoint when it is asked to, and ends at once when the engine is gone. Without one (Slurm, Kubernetes,
torchrun) it trains just the same, writes its steps to the run's metrics itself, and takes SIGTERM for the
question to stop.

The exit code is 0 for a task that is done, 75 for one that stopped at a checkpoint, 2 for one that cannot be
carried out however often it is tried, 1 for one that failed, 76 where the engine was lost.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from plait.burst.leftover import WORKER_VARIABLE
from plait.engine.channel import Caller, Line
from plait.engine.diagnosis import cited
from plait.engine.launcher import end_marked
from plait.engine.recording import Recording
from plait.engine.task import Task
from plait.engine.telling import Teller
from plait.errors import FileError, NonfiniteError, PlaitError, TraceError, UsageError
from plait.heap import keep_freed
from plait.worker import Place

EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, EXIT_LOST = 1, 2, 75, 76
ENGINE, TOKEN, ATTEMPT = "PLAIT_ENGINE", "PLAIT_ENGINE_TOKEN", "PLAIT_ATTEMPT"
SILENCE, CORES, BEHIND = "PLAIT_ENGINE_SILENCE", "PLAIT_CORES", "PLAIT_BEHIND"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Where a worker finds itself, beside its place among the others."""

    engine: tuple[str, int] | None = None
    token: str = ""
    attempt: int = 0
    silence_s: float = 10.0
    cores: tuple[int, ...] = ()
    behind: bool = False
    """Whether this process is the one that trains in the background, and not the one that minds it."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Situation:
        """What whoever started this worker has said."""
        host, _, port = environment.get(ENGINE, "").rpartition(":")
        try:
            return cls(
                engine=(host, int(port)) if port else None,
                token=environment.get(TOKEN, ""),
                attempt=int(environment.get(ATTEMPT, "0")),
                silence_s=float(environment.get(SILENCE, "10")),
                cores=tuple(int(core) for core in environment.get(CORES, "").split(",") if core),
                behind=environment.get(BEHIND) == "1",
            )
        except ValueError as error:
            raise UsageError(
                f"what the environment says of the engine cannot be read: {error}",
                setting=f"{ENGINE}, {ATTEMPT}, {SILENCE}, {CORES}",
                works="127.0.0.1:4000, 0, 10, 0,1",
            ) from None

    def environment(self) -> dict[str, str]:
        """As variables."""
        said = {
            TOKEN: self.token,
            ATTEMPT: str(self.attempt),
            SILENCE: f"{self.silence_s:g}",
            CORES: ",".join(map(str, self.cores)),
        }
        if self.engine is not None:
            said[ENGINE] = f"{self.engine[0]}:{self.engine[1]}"
        return said | ({BEHIND: "1"} if self.behind else {})


def main(arguments: list[str] | None = None) -> int:
    """Carry out a task; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m plait.engine.worker", description="Work on a task of a run."
    )
    parser.add_argument("folder", type=Path, help="that holds the task: runs/<name>/tasks/<task>")
    folder: Path = parser.parse_args(arguments).folder
    stop = threading.Event()
    _listen_to_signals(stop)
    teller: Teller | None = None
    recording: Recording | None = None
    log: Path | None = None
    try:
        situation = Situation.from_environment(os.environ)
        place = Place.from_environment()
        # Not by rank: whether two attempts failed alike must not depend on who was first to say so.
        log = folder / ("rank0.log" if place.world == 1 else "rank*.log")
        task = Task.load(folder)
        if situation.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, situation.cores)
        minds = task.priority == "background" and not situation.behind
        line = _line(situation, task.name, -1 if minds else place.rank)
        teller = Teller(
            line=line,
            stop=stop,
            run=folder.parents[1],
            attempt=situation.attempt,
            rank=place.rank,
            silence_s=situation.silence_s,
        )
        if minds:
            from plait.engine.minding import mind

            return mind(task, folder, situation, teller)
        if task.kind == "train":  # steps are alike; who spills has its own way with memory
            keep_freed()
        teller.doing(task.names, "importing")
        recording = Recording(task, folder, attempt=situation.attempt, rank=place.rank)
        from plait.engine.training import carry_out

        return 0 if carry_out(task, folder, teller, recording) else EXIT_STOPPED
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a job that leaves has not done its work
        return _failed(error, teller, log)
    finally:
        if recording is not None:
            recording.save()
        if teller is not None:
            teller.close()


def _listen_to_signals(stop: threading.Event) -> None:
    def ask(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, ask)


def _line(situation: Situation, task: str, rank: int) -> Line | None:
    if situation.engine is None:
        return None
    caller = Caller(task=task, attempt=situation.attempt, rank=rank)
    return Line(situation.engine, situation.token, caller, silence_s=situation.silence_s, lost=_lost)


def _lost(why: str) -> None:
    """End at once: whoever takes over must find nobody writing to the same place."""
    with suppress(OSError, ValueError):  # a full disk must not keep it alive
        print(f"plait.engine.worker: {why}: this worker ends", file=sys.stderr, flush=True)
    _end_started()
    os._exit(EXIT_LOST)


def _end_started() -> None:
    """End what this worker has started, which the engine would have done."""
    own = os.getpid()
    if mark := os.environ.get(WORKER_VARIABLE):
        end_marked(mark)
    if os.getpgrp() != own:
        return
    with suppress(FileNotFoundError):
        for number in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
            with suppress(ProcessLookupError, PermissionError):
                if number != own and os.getpgid(number) == own:
                    os.kill(number, signal.SIGKILL)


def _failed(error: BaseException, teller: Teller | None, log: Path | None = None) -> int:
    """Say why, here and to the engine, with the line at fault and the log where it is not plait's own."""
    final = _is_final(error)
    with suppress(OSError, ValueError):  # a disk that is full has no room for it here; the engine hears it
        if isinstance(error, PlaitError):
            print(f"plait.engine.worker: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
    if teller is not None:
        more = {} if log is None or isinstance(error, PlaitError) else {"log": str(log)}
        text = str(error) if isinstance(error, PlaitError) else cited(error)
        if isinstance(error, SystemExit):
            text = f"the job's own code called sys.exit({'' if error.code is None else repr(error.code)})"
        teller.tell(error={"kind": type(error).__name__, "text": text, "final": final, **more})
    return EXIT_REFUSED if final else EXIT_FAILED


def _is_final(error: BaseException) -> bool:
    """Whether the same would happen again, whenever and wherever it is tried."""
    if isinstance(error, FileError):
        return error.setting != "directory"  # a disk may have room again
    return isinstance(error, (UsageError, NonfiniteError, TraceError))


if __name__ == "__main__":
    code = main()
    # What is left are threads of gloo and of user code, which nobody needs and which may wait for ever.
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            output.flush()
    os._exit(code)
