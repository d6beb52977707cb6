"""The plain trainer as a worker: ``python -m plait.reference``, under the torchrun contract."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait.job import Job, read_job
from plait.reference import Result, Step, train
from plait.worker import Place

FORMAT = "plait.reference/1"
"""Of what the worker prints."""


def main(arguments: list[str] | None = None) -> int:
    """Train one job as a worker; rank 0 prints the result as JSON.

    The exit code is 2 for what could not be started, 1 for a run that failed.
    """
    given = _parser().parse_args(arguments)
    done: list[Step] = []
    try:
        first = Place.from_environment().rank == 0
        job = read_job(given.file, given.job)
        if first and (job.strategy not in ("auto", "data") or job.memory is not None):
            told = f"job {job.name!r} is trained plainly; its strategy and memory are for others to read"
            print(f"plait.reference: {told}", file=sys.stderr)
        result = train(
            job, resume=given.resume, directory=given.directory, overwrite=given.overwrite,
            save_every=given.save_every, on_step=done.append,
        )  # fmt: skip
    except (PlaitError, OSError) as error:
        if done and isinstance(error, OSError):
            raise  # of the job's own code, in the middle of a run: where it came from is what counts
        print(f"plait.reference: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, OSError)) and not done else 1
    except KeyboardInterrupt:
        print("plait.reference: interrupted", file=sys.stderr)
        return 130
    if first:
        sys.stdout.write(json.dumps(_told(job, result), allow_nan=False) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m plait.reference",
        description="Train one job as a worker, plainly; rank 0 prints the result as JSON.",
    )
    parser.add_argument("file", type=Path, help="a jobs file: a .py, or a .json as Job.to_json wrote it")
    parser.add_argument("--job", metavar="NAME", help="which job, where the file has several")
    parser.add_argument("--directory", type=Path, help="where to write a checkpoint")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="steps between checkpoints")
    parser.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=True,
        help="go on from this checkpoint; alone: from the one in --directory, if there is one yet",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint in --directory")
    return parser


def _told(job: Job, result: Result) -> dict[str, Any]:
    """A result as JSON can hold it: what is not finite is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(part) for name, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    names = ("steps", "finished", "skipped", "seconds", "losses")
    told = {"format": FORMAT, "job": job.name, **{name: getattr(result, name) for name in names}}
    told["evaluations"] = [asdict(evaluated) for evaluated in result.evaluations]
    return {name: plain(value) for name, value in told.items()}
