"""A plait job in the background: says how far it is, and leaves at a checkpoint when it is asked to.

    python -m plait.burst.task "$(cat job.json)" --directory runs/second --save-every 10

SIGTERM makes it go on to the next checkpoint and end with exit code 75 there, so that the job can go on
from the same directory, here or on another host, as if nothing had happened.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from plait.burst.phases import ROLE_VARIABLE, Publisher
from plait.errors import PlaitError

EXIT_MOVED = 75
"""It left at a checkpoint, and can go on from there. (What sysexits.h calls a temporary failure.)"""


class _LeaveError(Exception):
    """Asked to, at a checkpoint."""


def main(arguments: list[str] | None = None) -> int:
    """Train one job in this process; the exit code is 2 for what could not be started, 1 for what failed."""
    parser = argparse.ArgumentParser(prog="python -m plait.burst.task")
    parser.add_argument("job", help="as Job.to_json() has it")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--save-every", type=int)
    given = parser.parse_args(arguments)
    asked = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, ask)
    os.environ.pop(ROLE_VARIABLE, None)  # this process says its steps by itself
    publisher = Publisher(role="background")
    try:
        return _train(given, publisher, asked)
    except PlaitError as error:
        print(f"plait.burst.task: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        publisher.close()


def _train(given: argparse.Namespace, publisher: Publisher, asked: list[int]) -> int:
    from plait import reference
    from plait.burst.gpu import Outstanding
    from plait.job import Job

    job = Job.from_json(given.job)
    keep_up = Outstanding()

    def on_step(step: reference.Step) -> None:
        publisher.begin_step(step.step + 1)
        keep_up()
        saved = given.directory is None or (step.step + 1) % given.save_every == 0
        if asked and saved:
            raise _LeaveError

    publisher.begin_step(0)
    try:
        result = reference.train(
            job,
            resume=None if given.directory is None else True,
            directory=given.directory,
            save_every=None if given.directory is None else given.save_every,
            on_step=on_step,
        )
    except _LeaveError:
        return EXIT_MOVED
    if given.directory is not None:
        told = {"job": job.name, "steps": result.steps, "losses": result.losses}
        (given.directory / "result.json").write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
