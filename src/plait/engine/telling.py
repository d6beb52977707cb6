"""How a worker tells of its steps: to the engine, or straight to the run's metrics where there is none."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from plait.engine.channel import Line
from plait.engine.record import METRICS, file_name
from plait.engine.result import JobResult
from plait.evaluation import Evaluated

ATTEMPT_FILE = "attempt"
"""In a job's folder: the number of the attempt that may write there."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Teller:
    """What a worker says, and what it is asked."""

    def __init__(
        self,
        *,
        line: Line | None,
        stop: threading.Event,
        run: Path,
        attempt: int,
        rank: int,
        silence_s: float = 0.0,
    ) -> None:
        self._line, self._stop, self.run = line, stop, run
        self.attempt, self.rank = attempt, rank
        self.silence_s = silence_s
        """How long a worker may be silent before it is taken for lost."""

    @property
    def should_stop(self) -> bool:
        """Whether this worker was asked to stop."""
        return self._stop.is_set() or (self._line is not None and self._line.stop.is_set())

    @property
    def is_alone(self) -> bool:
        """Whether nothing is left to do in the foreground."""
        return self._line is not None and self._line.alone.is_set()

    def wait_for_stop(self, over: threading.Event) -> bool:
        """Wait until this worker is asked to stop; False where all is over before."""
        while not self.should_stop:
            if over.wait(0.1):
                return False
        return True

    def tell(self, **message: Any) -> None:
        """Say something, if anybody listens."""
        if self._line is not None:
            self._line.tell(**message)

    def step(self, job: str, facts: Mapping[str, Any]) -> None:
        """Say that a step is done."""
        row = {"time": time.time(), "job": job, "attempt": self.attempt, **facts}
        if self._line is not None:
            self._line.tell(row=row)
        else:
            with (self.run / METRICS).open("a") as file:  # one write a line, so lines stay whole
                file.write(json.dumps(row) + "\n")

    def evaluation(self, job: str, evaluated: Evaluated) -> None:
        """Say how a job's model did on other data, after the step that it did so after."""
        self.step(job, {"step": evaluated.step - 1, "evaluation": evaluated.figures})

    def doing(self, jobs: Sequence[str], what: str) -> None:
        """Say what is done for jobs whose steps have not begun; the first worker says so for all."""
        if self.rank == 0:
            self.tell(doing={"jobs": list(jobs), "text": what})

    def folder(self, job: str) -> Path:
        """Where a job's checkpoint and results are."""
        return self.run / "jobs" / file_name(job)

    def result(self, result: JobResult) -> None:
        """Say what came of a job."""
        result.save(self.folder(result.name))
        self.tell(result=result.name)

    def check_fence(self, job: str) -> None:
        """End at once if a later attempt has taken over this job."""
        if self._line is None:
            return
        try:
            owner = (self.folder(job) / ATTEMPT_FILE).read_text().strip()
        except OSError:
            return
        if owner != str(self.attempt):
            told = f"attempt {owner} has taken over job {job!r} from this one, {self.attempt}"
            with suppress(OSError, ValueError):  # a full disk must not keep it alive
                print(f"plait.engine.worker: {told}: this worker ends", file=sys.stderr, flush=True)
            os._exit(76)

    def close(self) -> None:
        """Send what is left."""
        if self._line is not None:
            self._line.close()


def resident_bytes() -> int:
    """What this process has in memory; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0
