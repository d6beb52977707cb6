"""``plait profile``: measure what the blocks of a job's model cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.job import Job
    from plait.profile import Profile


def profile(
    file: Annotated[Path, typer.Argument(help="A jobs file (.py or .json), or a profile (.json) to show.")],
    job: Annotated[str | None, typer.Option(help="The job to measure; default: the first.")] = None,
    batch: Annotated[
        str | None,
        typer.Option(help="Batch sizes to measure, separated by commas; default: 1, 2, 4 ... to the job's."),
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Runs of each block; the median counts.")] = 5,
    threads: Annotated[int | None, typer.Option(help="Torch threads; default: the job's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the profile to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure the time and the bytes of every block of a job's model."""
    from plait.cli.console import print_json
    from plait.destination import check_file
    from plait.units import parse_whole

    if out is not None:
        check_file(out, setting="--out")
    sizes = None if batch is None else _sizes(batch)
    parse_whole(repetitions, setting="--repetitions", works=5)
    if threads is not None:
        parse_whole(threads, setting="--threads")
    measured = _shown(file) or _measured(_chosen(file, job), sizes, repetitions, threads)
    if as_json:
        print_json(measured.to_json())
    else:
        print_profile(measured)
    if out is not None:
        measured.save(out)


def _shown(file: Path) -> Profile | None:
    """The profile in a file that is one already."""
    import json

    from plait.profile import FORMAT, Profile

    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        head = json.loads(file.read_text())
    except (ValueError, RecursionError, OSError):
        return Profile.load(file)  # says what is wrong, and where
    is_job = isinstance(head, dict) and str(head.get("format", FORMAT)).startswith("plait.job/")
    return None if is_job else Profile.load(file)


def _chosen(file: Path, name: str | None) -> Job:
    from plait.job import read_job, read_jobs

    return read_jobs(file)[0] if name is None else read_job(file, name)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is no list of batch sizes", setting="--batch", works="1,2,4,8") from None
    if min(sizes) < 1:
        raise UsageError(f"a batch of {min(sizes)} rows", setting="--batch", works="1,2,4,8")
    return sizes


def _measured(job: Job, sizes: list[int] | None, repetitions: int, threads: int | None) -> Profile:
    from plait.cli.console import status
    from plait.engine.diagnosis import explaining
    from plait.profile import Profile
    from plait.strategy.measuring import batch_sizes

    # As for so many devices that each may get a single row.
    chosen = batch_sizes(job.batch, job.batch, job.accumulate) if sizes is None else sizes
    with explaining([job]), status("tracing the model") as say:
        return Profile.of_job(job, chosen, repetitions=repetitions, threads=threads, progress=say)


def print_profile(profile: Profile) -> None:
    """Print a profile as a table: a block a row, times at each batch size."""
    from plait.cli.console import print_table
    from plait.units import counted, format_bytes

    sizes = profile.batch_sizes
    columns = [
        "block",
        "parameters",
        "saved a sample",
        "output a sample",
        *(f"F+B ms at {size}" for size in sizes),
    ]
    rows = []
    for block in profile.blocks:
        sized = [block.parameter_bytes, block.saved_bytes_per_sample, block.output_bytes_per_sample]
        times = [f"{block.milliseconds[s].forward:.2f}+{block.milliseconds[s].backward:.2f}" for s in sizes]
        rows.append([block.name, *map(format_bytes, sized), *times])
    total = [f"{sum(b.forward_ms(size) + b.backward_ms(size) for b in profile.blocks):.1f}" for size in sizes]
    memory = sum(block.parameter_bytes for block in profile.blocks)
    saved = sum(block.saved_bytes_per_sample for block in profile.blocks)
    rows.append(["all", format_bytes(memory), format_bytes(saved), "", *total])
    print_table(f"{profile.model} on {profile.device}, {counted(profile.threads, 'thread')}", columns, rows)
