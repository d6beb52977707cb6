"""``plait bench``: ask the questions under ``benchmarks/``, write a report, compare with one before."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli import EXIT_FAILED

if TYPE_CHECKING:
    from plait.bench import Comparison, Question, Report, Suite

QUICK_MINUTES = 10.0
COMMITTED = "report"
"""The folder beside the questions in which a source tree keeps a report; it knows how long each takes."""


def bench(
    question: Annotated[str | None, typer.Argument(help="The question; none lists them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Ask all questions, however long it takes.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Rough answers; without QUESTION and --all, what fits into ten minutes."
        ),
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help="The time for all questions (default: 10 with --quick alone).")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="A new folder for the report (default, without QUESTION: runs/bench-DATE)."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="An earlier report to compare with: its folder or its JSON file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result, as JSON, to this file too.")] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where the questions are; default: benchmarks/ of the source tree.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order in which the sides take turns.")] = 0,
) -> None:
    """Ask a benchmark's question, or all of them in one report, or list the questions there are.

    Ends with 0 when every case keeps its bound and none is worse than before, and with 1 otherwise.
    """
    from plait.bench import Suite, find_directory, new_folder, questions
    from plait.bench.asking import check_minutes
    from plait.cli.console import print_json
    from plait.destination import check_file, write_text

    place = find_directory(directory)
    known = questions(place)
    if question is None and not every and not quick:
        _check_asked({"--minutes": minutes, "--report": report, "--against": against, "--out": out})
        _print_questions(known, as_json)
        return
    check_minutes(minutes)
    asked = known if question is None else (_chosen(known, question, every, minutes),)
    if out is not None:
        check_file(out, setting="--out")
    before = None if against is None else Suite.load(against, setting="--against")
    if minutes is None and question is None and not every:
        minutes = QUICK_MINUTES
    known_s = {} if minutes is None else _known_s(quick, place / COMMITTED, before)
    folder = None if question is not None and report is None else new_folder(report)
    suite, comparison = _ask(
        asked, folder, before, as_json, quick=quick, seed=seed, minutes=minutes, known_s=known_s
    )
    result = suite.to_json() if question is None else suite.reports[0].to_json()
    if comparison is not None:
        result["comparison"] = comparison.to_json()
    if folder is not None:
        result["directory"] = str(folder)
    if as_json:
        print_json(result)
    else:
        _print_end(suite, comparison, folder, several=question is None)
    if out is not None:
        write_text(out, json.dumps(result, indent=2) + "\n", setting="--out")
    if not suite.holds or (comparison is not None and comparison.regressed):
        raise typer.Exit(EXIT_FAILED)


def _check_asked(given: dict[str, object]) -> None:
    """Refuse settings of a run where nothing is to run."""
    from plait.errors import UsageError

    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{name} {value}, and no question is asked",
                setting="QUESTION",
                works="a question, --quick or --all beside it",
            )


def _chosen(known: Sequence[Question], name: str, every: bool, minutes: float | None) -> Question:
    from plait.errors import UsageError

    if every or minutes is not None:
        setting = "--all" if every else "--minutes"
        raise UsageError(
            f"{setting} is for many questions, and {name!r} is one", setting=setting, works="one of the two"
        )
    for question in known:
        if question.name == name:
            return question
    names = ", ".join(question.name for question in known)
    raise UsageError(f"there is no question {name!r} among the {len(known)}", setting="QUESTION", works=names)


def _known_s(quick: bool, committed: Path, before: Suite | None) -> dict[str, float]:
    """How long questions took in the reports that there are, of the same kind as what is asked."""
    from plait.bench import Suite

    found: dict[str, float] = {}
    for suite in (Suite.load(committed) if committed.is_dir() else None, before):
        if suite is not None and suite.quick == quick:
            found.update(suite.seconds)
    return found


def _ask(
    asked: Sequence[Question], folder: Path | None, before: Suite | None, as_json: bool, **settings: Any
) -> tuple[Suite, Comparison | None]:
    """Ask, and keep the report after each question; one that is interrupted says where it is."""
    from plait.bench import ask, compare, write_report

    def keep(suite: Suite) -> None:
        if folder is not None:
            write_report(folder, suite, None if before is None else compare(before, suite))

    if folder is not None:
        typer.echo(f"report: {folder}", err=True)
    try:
        suite = ask(
            asked,
            **settings,
            begun=_progress,
            answered=lambda report: None if as_json else _print_report(report),
            keep=keep,
        )
    except (KeyboardInterrupt, SystemExit):
        if folder is not None:
            typer.echo(f"what was answered is in {folder}", err=True)
        raise
    return suite, None if before is None else compare(before, suite)


def _progress(doing: str) -> AbstractContextManager[object]:
    """Say on standard error what is under way; a terminal shows that it goes on."""
    if sys.stderr.isatty():
        from rich.console import Console

        return Console(stderr=True).status(doing)
    typer.echo(doing, err=True)
    return nullcontext()


def _print_questions(known: Sequence[Question], as_json: bool) -> None:
    from plait.cli.console import print_json, print_table

    if as_json:
        print_json([{"name": q.name, "title": q.title, "summary": q.summary} for q in known])
        return
    print_table("questions", ["question", "title", "asks"], [(q.name, q.title, q.summary) for q in known])


def _print_report(report: Report) -> None:
    from plait.bench.row import COLUMNS, row
    from plait.bench.summary import machine_line, remarks
    from plait.cli.console import print_table

    rows = [row(case) for case in report.cases]
    rows += [[name, "", "", "", "", "", f"not run: {why}"] for name, why in report.skipped.items()]
    title = f"{report.question}: {report.title}" + (" (quick)" if report.quick else "")
    print_table(title, COLUMNS, rows)
    claims = dict.fromkeys(case.published for case in report.cases if case.published)
    _print_lines([machine_line(report), *(f"published: {claim}" for claim in claims), *remarks(report)])


def _print_end(suite: Suite, comparison: Comparison | None, folder: Path | None, *, several: bool) -> None:
    from plait.bench.summary import COMPARED, changed, compared_line, counted
    from plait.cli.console import print_table

    lines = []
    if several:
        lines.append(counted(suite))
        lines += [f"not asked: {name}: {why}" for name, why in suite.not_asked.items()]
    _print_lines(lines)
    if comparison is not None:
        rows = [changed(change) for change in comparison.changed]
        if rows:
            print_table(f"against the run of {comparison.before}", COMPARED, rows)
        _print_lines(
            [
                compared_line(comparison),
                *(f"FAILED now, and not before: {name}: {why}" for name, why in comparison.broken.items()),
                *(f"differs: {note}" for note in comparison.notes),
                *(f"not compared: {what}: {why}" for what, why in comparison.left_out.items()),
            ]
        )
    if folder is not None:
        _print_lines([f"report: {folder / 'report.html'}"])


def _print_lines(lines: Sequence[str]) -> None:
    from plait.cli.console import console

    for line in lines:
        console().print(line, markup=False, highlight=False)
