"""``plait run``: train the jobs of a file, here or on a Ray cluster, or go on with a run that stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli import EXIT_FAILED

if TYPE_CHECKING:
    from plait.engine.course import Limits
    from plait.engine.running import Run

EXIT_INTERRUPTED = 130
_READING_S = 10.0
"""A jobs file that takes longer to read, once torch is there, does more than to make jobs."""
_MAY_CHANGE = {"resume", "engine", "restarts", "silence", "sink", "as_json"}
"""What may be given for a run that goes on."""


def run(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="A jobs file: a .py, or a .json with one job.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with a run: its directory.")] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Of the new run (default: runs/ and the job's name).")
    ] = None,
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, and stop there.")] = False,
    emit: Annotated[
        str | None,
        typer.Option(
            help="Write files that start the same workers, and stop there: slurm, kubernetes, torchrun."
        ),
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="auto, data, pipeline, burst or spill, for jobs that leave it open.")
    ] = "auto",
    compress: Annotated[
        str | None, typer.Option(help="Bits of gradients on the wire: 1 to 8, or auto (default: the plan's).")
    ] = None,
    objective: Annotated[str, typer.Option(help="Of several jobs: makespan or throughput.")] = "makespan",
    cluster: Annotated[Path | None, typer.Option(help="A cluster file (default: this machine).")] = None,
    devices: Annotated[int | None, typer.Option(help="How many of this machine's devices to use.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="What jobs may hold on each device, such as 2GiB; plans keep to it.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints (default: about 30 seconds).")
    ] = None,
    max_slowdown: Annotated[
        float, typer.Option(help="What a foreground step may take beside background jobs, of it alone.")
    ] = 1.05,
    restarts: Annotated[
        int, typer.Option(help="How often in a row a job is restarted without gaining a checkpoint.")
    ] = 3,
    silence: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="A worker that is not heard for so long is taken for lost."),
    ] = 10.0,
    sink: Annotated[
        list[str] | None,
        typer.Option(help="tensorboard, wandb or mlflow; may be repeated. (default: tensorboard)"),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Where profiles of jobs are kept (default: in the user's cache).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train the jobs of a file: plan, run, watch, recover, report.

    Ctrl-C stops at a checkpoint, a second one at once; `plait run --resume DIRECTORY` goes on. The exit code
    is 1 if a job failed, 130 if the run was stopped.
    """
    from plait.cli.options import named_as_options
    from plait.cluster import Cluster
    from plait.engine.running import run as run_jobs
    from plait.engine.workload import Workload
    from plait.errors import UsageError

    if (file is None) == (resume is None):
        what = "neither a jobs file nor a run to go on with" if file is None else "a jobs file and --resume"
        raise UsageError(what, setting="FILE, --resume", works="one of them: plait run jobs.py")
    if resume is not None:
        _check_alone(resume, context)
    asked = "--resume" if resume is not None else "--directory"
    with named_as_options(context, directory=asked), _told_if_early(directory, resume):
        common: dict[str, Any] = {
            "engine": engine,
            "limits": _limits(restarts, silence),
            "sinks": ("tensorboard",) if not sink else tuple(sink),
            "show": False if as_json else None,
        }
        if resume is not None:
            done = run_jobs(resume=resume, **common)
        else:
            assert file is not None, "one of the two is given"
            if directory is not None:
                _check_free(directory)
            with _said_if_long(file):
                workload = Workload.read(file)
            done = run_jobs(
                [*workload.jobs, *workload.sweeps.values()],
                None if cluster is None else Cluster.load(cluster),
                directory=directory,
                dry_run=dry_run,
                write=emit,  # type: ignore[arg-type]
                strategy=strategy,  # type: ignore[arg-type]
                compress=_bits(compress),
                objective=objective,  # type: ignore[arg-type]
                devices=devices,
                memory=memory,
                save_every=save_every,
                max_slowdown=max_slowdown,
                profiles=cache,
                **common,
            )
    _tell(done, as_json)
    if done.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(result.end == "failed" for result in done.values()):
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _said_if_long(file: Path) -> Iterator[None]:
    """Say where time goes while a jobs file is read: one that trains at its top level does so right then."""
    import threading

    import torch  # noqa: F401  # which takes its time on a busy machine, and is not the file's doing

    def say() -> None:
        typer.echo(
            f"plait: {file} is still being read: what it does besides making jobs belongs under "
            "if __name__ == '__main__'",
            err=True,
        )

    late = threading.Timer(_READING_S, say)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


@contextmanager
def _told_if_early(directory: Path | None, resume: Path | None) -> Iterator[None]:
    """Say of Ctrl-C that it came before a new run began; one that has begun says itself how to go on."""
    from plait.engine.preparing import RUNS
    from plait.engine.record import CONFIG

    def records() -> set[Path]:
        return set((RUNS if directory is None else directory.parent).glob(f"*/{CONFIG}"))

    before = records()
    try:
        yield
    except KeyboardInterrupt:
        if resume is None and records() == before:
            typer.echo("plait: stopped before anything was started", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _check_free(directory: Path) -> None:
    """Refuse the directory of another run, with the option that goes on with it."""
    from plait.engine.record import Record
    from plait.errors import FileError

    try:
        Record.check_free(directory)
    except FileError as error:
        works = f"--resume {directory} to go on with it, or another --directory"
        raise FileError(error.what, setting="--directory", works=works) from None


def _check_alone(resume: Path, context: typer.Context) -> None:
    """Refuse what a run that goes on cannot change: whatever was given and is not known to change."""
    from plait.errors import UsageError

    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is None or source.name == "DEFAULT" or option.name in _MAY_CHANGE:
            continue
        name = option.opts[0]
        raise UsageError(
            f"{name} for a run that goes on: it is as it was",
            setting=name,
            works=f"--resume {resume} alone",
        )


def _limits(restarts: int, silence: float) -> Limits:
    from plait.engine.course import Limits
    from plait.errors import UsageError

    try:
        return Limits(restarts=restarts, silence_s=silence)
    except UsageError as error:
        if error.setting != "silence_s":
            raise
        what = f"a worker cannot be taken for lost after {silence:g} s: it is heard once a second"
        raise UsageError(what, setting="--silence", works=f"{error.works}, such as 60") from None


def _bits(text: str | None) -> Any:
    from plait.errors import UsageError

    if text is None or text == "auto":
        return text
    if not text.isdecimal():
        raise UsageError(f"gradients in {text!r} bits", setting="--compress", works="1 to 8, or auto")
    return int(text)


def _tell(done: Run, as_json: bool) -> None:
    from plait.cli.console import console, print_json

    if as_json:
        results = {
            name: {
                "end": result.end,
                "best": bool(result.facts.get("best")),
                "strategy": result.strategy,
                "steps": result.steps,
                "loss": result.losses[-1] if result.losses else None,
                "seconds": result.seconds,
                "restarts": result.restarts,
                "error": result.error,
                "weights": None if result.weights is None else str(result.weights),
            }
            for name, result in done.items()
        }
        plan = None if done.plan is None else done.plan.to_json()
        page = None if done.report is None else str(done.report)
        print_json(
            {
                "format": "plait.run.result/1",
                "directory": str(done.directory),
                "report": page,
                "plan": plan,
                "jobs": results,
                "interrupted": done.interrupted,
            }
        )
        return
    for result in done.values():
        console().print(str(result), markup=False, highlight=False)
    if done.report is not None:
        console().print(f"report: {done.report}", markup=False, highlight=False)
    if done.interrupted:
        console().print(f"go on with: plait run --resume {done.directory}", markup=False, highlight=False)
