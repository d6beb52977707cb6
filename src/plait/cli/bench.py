"""``plait bench``: ask the questions under ``benchmarks/``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import EXIT_FAILED

if TYPE_CHECKING:
    from plait.bench import Case, Question, Report, Spread


def bench(
    question: Annotated[str | None, typer.Argument(help="The question; none lists them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Ask all questions.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A rough answer in seconds; without QUESTION, to all questions.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result, as JSON, to this file too.")] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where the questions are; default: benchmarks/ of the source tree.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order in which the sides take turns.")] = 0,
) -> None:
    """Ask a benchmark's question, or list the questions there are.

    Ends with 0 when every case keeps its bound and with 1 when one falls short.
    """
    from plait.bench import find_directory, questions, run_apart
    from plait.cli.console import print_json
    from plait.destination import check_file, write_text

    known = questions(find_directory(directory))
    if question is None and not every and not quick:
        _print_questions(known, as_json)
        return
    if out is not None:
        check_file(out, setting="--out")
    asked = known if question is None else (_chosen(known, question),)
    reports = []
    for i, one in enumerate(asked, start=1):
        with _progress(f"{one.name} ({i} of {len(asked)})"):
            report = run_apart(one, quick=quick, seed=seed)
        reports.append(report)
        if not as_json:
            _print_report(report)
    data = [report.to_json() for report in reports]
    result = data if question is None else data[0]
    if as_json:
        print_json(result)
    if out is not None:
        write_text(out, json.dumps(result, indent=2) + "\n", setting="--out")
    if not all(report.holds for report in reports):
        raise typer.Exit(EXIT_FAILED)


def _chosen(known: Sequence[Question], name: str) -> Question:
    from plait.errors import UsageError

    for question in known:
        if question.name == name:
            return question
    names = ", ".join(question.name for question in known)
    raise UsageError(f"there is no question {name!r} among the {len(known)}", setting="QUESTION", works=names)


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
    from plait.cli.console import console, print_table
    from plait.units import format_bytes

    columns = ["case", "value", "against", "ratio", "limit", "bound", "verdict"]
    rows = [_row(case) for case in report.cases]
    rows += [[name, "", "", "", "", "", f"not run: {why}"] for name, why in report.skipped.items()]
    title = f"{report.question}: {report.title}" + (" (quick)" if report.quick else "")
    print_table(title, columns, rows)
    about, versions = report.machine, report.versions
    lines = [
        f"{about['cpu']}, {about['cores']} cores, {format_bytes(about['memory_bytes'])}, {about['kernel']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    ]
    if report.activity.get("disturbed"):
        lines.append(
            f"disturbed: other processes used {report.activity['others']:.0%} of the processors, "
            f"the hypervisor took {report.activity['steal']:.0%}"
        )
    if report.error is not None:
        lines.append(f"FAILED: {report.error}")
    for line in lines:
        console().print(line, markup=False, highlight=False)


def _row(case: Case) -> list[str]:
    bounds = []
    if case.at_least is not None:
        bounds.append(f"≥ {case.at_least:g}" + (f" {case.unit}" if case.against is None else ""))
    if case.at_most is not None:
        bounds.append(f"≤ {case.at_most:g} {case.unit}")
    if case.aim is not None:
        bounds.append(f"aim {case.aim:g}")
    verdict = {None: "—", True: "holds", False: "FALLS SHORT"}[case.holds]
    if case.reaches_aim and case.holds:
        verdict += ", aim reached"
    return [
        case.name,
        f"{case.value:.3g}{_plus_minus(case.spread)} {case.unit}",
        ""
        if case.against_value is None
        else f"{case.against} {case.against_value:.3g}{_plus_minus(case.against_spread)}",
        "" if case.ratio is None else f"{case.ratio:.3g}{_plus_minus(case.ratio_spread)}",
        "" if case.limit is None else f"{case.limit} {case.limit_value:.3g} ({case.of_limit or 0:.0%})",
        ", ".join(bounds),
        verdict + (" (disturbed)" if case.disturbed else ""),
    ]


def _plus_minus(spread: Spread | None) -> str:
    return "" if spread is None else f" ± {spread.std:.2g}"
