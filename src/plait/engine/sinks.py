"""Where a run's numbers go besides its directory: TensorBoard's files by default, or a tracker of yours.

A sink is anything with the three methods of :class:`Sink`. A run opens it once, gives it numbers as they come
and closes it, all from one thread that does nothing else. One that fails is left out from then on, with a
warning: no tracker ends a training, or makes it wait.

What is here for Weights & Biases and MLflow is thin, and needs their packages.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from plait.engine.journal import plain
from plait.engine.record import file_name
from plait.engine.tensorboard import EventFile
from plait.errors import UsageError

_NOT_MEASURED = ("time", "step", "attempt")
"""Numbers of a row that are its place, not something that came of it."""
_MOST_WAITING = 10_000
"""Rows that a sink may be behind."""
_CLOSING_S = 30.0


class Sink(Protocol):
    """Takes numbers."""

    def open(self, run: str, config: Mapping[str, Any]) -> None:
        """A run begins, or goes on."""

    def scalar(self, job: str, name: str, value: float, step: int) -> None:
        """A number of a job, such as its ``loss`` at a step; it may be infinite or not a number."""

    def close(self) -> None:
        """The run has ended."""


class TensorBoard:
    """Event files in a folder for each job: ``tensorboard --logdir runs/first/tensorboard``."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._files: dict[str, EventFile] = {}

    def open(self, run: str, config: Mapping[str, Any]) -> None:
        """Files are made when there is something to write."""

    def scalar(self, job: str, name: str, value: float, step: int) -> None:
        """Write it at once, for who is looking on."""
        if job not in self._files:
            self._files[job] = EventFile(self._directory / file_name(job))
        self._files[job].scalars({name: value}, step)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class WeightsAndBiases:
    """A run of Weights & Biases with a section for each job, whose steps are its own."""

    def __init__(self, project: str = "plait", **settings: Any) -> None:
        """``settings`` go to ``wandb.init``."""
        _check("wandb", "wandb")
        self._project, self._settings = project, settings
        self._run: Any = None
        self._jobs: set[str] = set()

    def open(self, run: str, config: Mapping[str, Any]) -> None:
        """Begin a run of that name."""
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=self._project, name=run, config=plain(config), **self._settings)

    def scalar(self, job: str, name: str, value: float, step: int) -> None:
        """Log it over the job's own steps: jobs are not at the same step at the same time."""
        if job not in self._jobs:
            self._jobs.add(job)
            self._run.define_metric(f"{job}/step", hidden=True)
            self._run.define_metric(f"{job}/*", step_metric=f"{job}/step")
        self._run.log({f"{job}/{name}": value, f"{job}/step": step})

    def close(self) -> None:
        """Send what is left."""
        if self._run is not None:
            self._run.finish()


class MLflow:
    """A run of MLflow, with metrics such as ``gpt/loss``."""

    def __init__(self, experiment: str = "plait", *, uri: str | None = None) -> None:
        """``uri`` is the tracking server's; None is ``MLFLOW_TRACKING_URI``, or MLflow's own default."""
        _check("mlflow", "mlflow-skinny")
        self._experiment, self._uri = experiment, uri
        self._client: Any = None
        self._run = ""

    def open(self, run: str, config: Mapping[str, Any]) -> None:
        """Begin a run of that name."""
        mlflow = importlib.import_module("mlflow")
        self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        kept = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(kept, run_name=run).info.run_id
        self._client.log_dict(self._run, plain(config), "config.json")

    def scalar(self, job: str, name: str, value: float, step: int) -> None:
        """Log it."""
        self._client.log_metric(self._run, f"{job}/{name}", value, int(time.time() * 1e3), step)

    def close(self) -> None:
        """Say that the run has ended."""
        if self._client is not None:
            self._client.set_terminated(self._run)


class Sinks:
    """Several sinks as one, which takes whole rows and never waits: each sink has a thread of its own.

    One that fails, or falls far behind, is left out from then on; ``warn`` is called with the reason, once.
    """

    def __init__(self, sinks: Sequence[Sink], *, warn: Callable[[str], object]) -> None:
        self._feeds = [_Feed(sink, warn) for sink in sinks]

    def open(self, run: str, config: Mapping[str, Any]) -> None:
        """A run begins."""
        for feed in self._feeds:
            feed.begin(run, config)

    def row(self, row: Mapping[str, Any]) -> None:
        """What came of a step, as :meth:`plait.engine.record.Record.step` takes it."""
        values = numbers(row)
        for feed in self._feeds:
            feed.give((row["job"], values, row["step"]))

    def close(self, *, within_s: float = _CLOSING_S) -> None:
        """The run has ended; sinks have some time to take what is left."""
        for feed in self._feeds:
            feed.give(None)
        until_s = time.monotonic() + within_s
        for feed in self._feeds:
            feed.end(until_s)
        self._feeds.clear()


class _Feed(threading.Thread):
    """Gives a sink its numbers, in order."""

    def __init__(self, sink: Sink, warn: Callable[[str], object]) -> None:
        super().__init__(name=f"plait-{type(sink).__name__}", daemon=True)
        self._sink, self._warn = sink, warn
        self._rows: queue.Queue[tuple[str, Mapping[str, float], int] | None] = queue.Queue(_MOST_WAITING)
        self._left_out = threading.Event()

    def begin(self, run: str, config: Mapping[str, Any]) -> None:
        self._opening = run, dict(config)
        self.start()

    def give(self, row: tuple[str, Mapping[str, float], int] | None) -> None:
        """A row to pass on, or None at the end."""
        if self._left_out.is_set():
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._leave_out(f"it is {_MOST_WAITING} rows behind")

    def end(self, until_s: float) -> None:
        if self.ident is None or self._left_out.is_set():
            return
        self.join(max(0.0, until_s - time.monotonic()))
        if self.is_alive():
            self._leave_out(f"it has not taken {self._rows.qsize()} rows in time")

    def run(self) -> None:
        try:
            self._sink.open(*self._opening)
            while (row := self._rows.get()) is not None and not self._left_out.is_set():
                job, values, step = row
                for name, value in values.items():
                    self._sink.scalar(job, name, value, step)
            self._sink.close()
        except Exception as error:
            self._leave_out(f"{type(error).__name__}: {error}")
            with contextlib.suppress(Exception):
                self._sink.close()

    def _leave_out(self, reason: str) -> None:
        if not self._left_out.is_set():
            self._left_out.set()
            told = " ".join(reason.split())[:300]
            self._warn(f"{type(self._sink).__name__} gets no more numbers of this run: {told}")


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, and of its evaluation, by their names; a loss of null was not finite."""
    found: dict[str, Any] = {name: value for name, value in row.items() if name not in _NOT_MEASURED}
    evaluation = found.pop("evaluation", None)
    if isinstance(evaluation, Mapping):
        found |= {f"evaluation/{name}": value for name, value in evaluation.items()}
    return {
        name: float("nan") if value is None else float(value)
        for name, value in found.items()
        if (value is None and name.endswith("loss"))
        or (isinstance(value, (int, float)) and not isinstance(value, bool))
    }


def chosen(names: Sequence[str | Sink], directory: str | Path) -> list[Sink]:
    """The sinks that a user asked for, by name or as objects; TensorBoard writes into the directory."""
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoard(directory),
        "wandb": WeightsAndBiases,
        "mlflow": MLflow,
    }
    found: list[Sink] = []
    for name in names:
        if not isinstance(name, str):
            if not all(callable(getattr(name, method, None)) for method in ("open", "scalar", "close")):
                raise UsageError(
                    f"{name!r} is no sink", setting="sinks", works="an object with open, scalar and close"
                )
            found.append(name)
        elif name in makers:
            found.append(makers[name]())
        else:
            raise UsageError(f"there is no sink {name!r}", setting="sinks", works=", ".join(makers))
    return found


def _check(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UsageError(
            f"the package {module} is not installed here", setting="sinks", works=f"pip install {package}"
        )
