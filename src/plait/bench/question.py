"""The questions that can be asked: folders with a ``bench.py`` and a README, found and run."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from plait.bench import machine
from plait.bench.bench import Bench
from plait.bench.report import Report
from plait.errors import FileError, UsageError

SCRIPT = "bench.py"
_GRACE_SECONDS = 5.0
"""How long a process may take to leave its blocks before it is killed; a lab's workers have 3 of them."""
MOST_SECONDS = 3600.0
"""After which a question counts as hung; the longest one takes half of it."""
_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One folder: a script that answers it, and a README that says what is asked."""

    name: str
    directory: Path
    title: str
    summary: str

    @classmethod
    def read(cls, directory: Path) -> Question:
        """Read a folder; its README opens with a heading and a paragraph that says what is asked."""
        readme = directory / "README.md"
        try:
            text = readme.read_text(encoding="utf-8")
        except OSError as error:
            raise FileError(
                f"{readme} cannot be read: {error.strerror}",
                setting="README.md",
                works="a heading and a paragraph that says what is asked",
            ) from None
        title, _, rest = text.strip().partition("\n")
        summary = " ".join(rest.strip().split("\n\n", 1)[0].split())
        if not title.startswith("# ") or not summary or summary.startswith("#"):
            raise FileError(
                f"{readme} does not open with a heading and a paragraph",
                setting="README.md",
                works="# a title, an empty line, and what is asked",
            )
        return cls(name=directory.name, directory=directory, title=title[2:].strip(), summary=summary)


def find_directory(directory: Path | None = None) -> Path:
    """Where the questions are: the directory given, or ``benchmarks`` of the source tree plait runs from."""
    if directory is not None:
        if not directory.is_dir():
            raise UsageError(
                f"{directory} is no directory",
                setting="--directory",
                works="the benchmarks folder of a source tree",
            )
        return directory.resolve()
    root = Path(__file__).resolve().parents[3]
    if not (root / "pyproject.toml").is_file() or not (root / "benchmarks").is_dir():
        raise UsageError(
            f"{root} is no source tree of plait, and benchmarks come with the source tree only",
            setting="--directory",
            works="the benchmarks folder of a source tree",
        )
    return root / "benchmarks"


def questions(directory: Path) -> tuple[Question, ...]:
    """The questions in a directory, by name."""
    folders = sorted(folder for folder in directory.iterdir() if (folder / SCRIPT).is_file())
    if not folders:
        raise UsageError(
            f"no folder in {directory} has a {SCRIPT}",
            setting="--directory",
            works="the benchmarks folder of a source tree",
        )
    return tuple(Question.read(folder) for folder in folders)


def run_here(question: Question, *, quick: bool = False, seed: int = 0) -> Report:
    """Answer a question in this process; an exception of the script ends the run and stands in the report."""
    bench = Bench(quick=quick, seed=seed)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    load, before = machine.load_average(), machine.Moment.now()
    error: str | None = None
    try:
        _entry(question)(bench)
        if not bench.cases and not bench.skipped:
            error = "the script ended without a case"
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    during = machine.Moment.now().since(before)
    return Report(
        question=question.name,
        title=question.title,
        quick=quick,
        date=date,
        machine=machine.describe(),
        versions=machine.versions(),
        activity={
            "load_before": load,
            "load_after": machine.load_average(),
            "seconds": during.seconds,
            "steal": during.steal,
            "others": during.others,
            "disturbed": during.disturbed,
        },
        config=bench.config,
        cases=tuple(bench.cases),
        skipped=bench.skipped,
        error=error,
    )


def _entry(question: Question) -> Callable[[Bench], None]:
    """The ``run`` of the question's script."""
    path = question.directory / SCRIPT
    name = f"plait_bench_{question.name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles in the script look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    entry = getattr(module, "run", None)
    if not callable(entry):
        raise FileError(f"{path} has no function run", setting="run", works="def run(bench: Bench) -> None:")
    return entry  # type: ignore[no-any-return]


def run_apart(
    question: Question, *, quick: bool = False, seed: int = 0, most_s: float = MOST_SECONDS
) -> Report:
    """Answer a question in a fresh process, so that none leaves anything behind for the next.

    What the script prints goes to standard error. A script that takes its process down with it is a
    report with an error like any other, and so is one that takes longer than ``most_s``. When this process
    is left or killed, that one ends too.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as result:  # it has no name that could stay behind
        asked = {
            "directory": str(question.directory),
            "result": result.fileno(),
            "quick": quick,
            "seed": seed,
            "parent": os.getpid(),
        }
        command = [sys.executable, "-m", "plait.bench", json.dumps(asked)]
        with subprocess.Popen(command, stdout=2, pass_fds=[result.fileno()]) as answering:
            try:
                status = answering.wait(most_s)
            except subprocess.TimeoutExpired:
                _end(answering)
                return _broken(question, quick, f"it was ended after {most_s:g} s without an answer")
            except BaseException:
                _end(answering)
                raise
        result.seek(0)
        text = result.read()
    try:
        data = json.loads(text)
    except ValueError:  # none, or cut short
        return _broken(question, quick, f"its process ended with status {status} before it could report")
    return Report.from_json(data, source="the process's report")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a process leave its blocks, which may hold a lab, and kill it where that takes too long."""
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _broken(question: Question, quick: bool, error: str) -> Report:
    return Report(
        question=question.name,
        title=question.title,
        quick=quick,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine.describe(),
        versions=machine.versions(),
        activity={"load_after": machine.load_average()},
        config={},
        error=error,
    )


def answer(asked: dict[str, Any]) -> None:
    """The fresh process's side of ``run_apart``."""
    _end_with(asked["parent"])
    report = run_here(Question.read(Path(asked["directory"])), quick=asked["quick"], seed=asked["seed"])
    text = json.dumps(report.to_json(), allow_nan=False, default=str)
    with open(asked["result"], "w", encoding="utf-8") as result:
        result.write(text)


def _end_with(parent: int) -> None:
    """Have the kernel ask this process to end when its parent does, and leave blocks when asked."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough; more would disturb the cleaning up
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl: {os.strerror(code)}")
    if os.getppid() != parent:  # it was gone before the kernel knew
        sys.exit(128 + signal.SIGTERM)
