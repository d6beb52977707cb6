"""A report of several questions, as sections of a page: what held, what did not, on what, against what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plait.bench.case import Case
from plait.bench.comparison import DEVIATIONS, LEAST, LOOSE, ROUNDS, Change, Comparison
from plait.bench.forest import Forest, Mark
from plait.bench.markdown import Details
from plait.bench.report import Report
from plait.bench.row import COLUMNS, row
from plait.bench.suite import Suite
from plait.page import Heading, Paragraph, Section, Table
from plait.units import format_bytes

RATIOS = "How many times better than what it is measured against"
LIMITS = "The share of the physical limit that is reached"
RULE = (
    f"Worse or better is a change of more than {LEAST:.0%} of the mean of both, and of more than "
    f"{DEVIATIONS:g} joint standard deviations of the rounds; {LOOSE:.0%} where a case had fewer than "
    f"{ROUNDS} rounds. A case is compared by its ratio where it has one, else by its value. One without "
    "ratio and bound only informs: it is no regression, nor is one that was measured while others used the "
    "machine."
)
COMPARED = ("question", "case", "by", "before", "after", "change", "noise", "verdict")
_READ = (
    "Value: the median of the rounds ± their standard deviation; mean: their mean. Against: measured in the "
    "same run. Ratio: above 1 is better, whatever the unit. Limit: how much of it is reached. Published: "
    "what a paper claims of the same comparison, on its own hardware; nothing of it was measured here."
)


def title(suite: Suite) -> str:
    """The title of the page."""
    return f"Benchmarks of {suite.date[:10]}" + (", quick" if suite.quick else "")


def sections(suite: Suite, comparison: Comparison | None = None) -> list[Section]:
    """All that stands below the title."""
    return [
        *_opening(suite),
        *pictures(suite),
        *([] if comparison is None else _compared(comparison)),
        *_not_asked(suite),
        Heading("How to read the tables"),
        Paragraph(_READ),
        *(section for report in suite.reports for section in _question(report)),
    ]


def pictures(suite: Suite) -> list[Forest]:
    """Those of which there is something to draw."""
    ratios = [mark for report in suite.reports for mark in _ratios(report)]
    limits = [mark for report in suite.reports for mark in _limits(report)]
    found = []
    if any(mark.value > 0 for mark in ratios):
        found.append(Forest(title=RATIOS, x="ratio: right of the line is better", marks=ratios))
    if any(mark.value > 0 for mark in limits):
        found.append(Forest(title=LIMITS, x="share of the limit: 1 is all of it", marks=limits))
    return found


def machine_line(suite: Suite | Report) -> str:
    """The machine and the versions, in one line."""
    about = suite.machine
    return (
        f"{about['cpu']}, {about['cores']} cores, {format_bytes(about['memory_bytes'])}, {about['kernel']}; "
        + ", ".join(f"{name} {version}" for name, version in suite.versions.items() if version)
    )


def counted(suite: Suite) -> str:
    """What came of all cases, in one line."""
    cases = [case for report in suite.reports for case in report.cases]
    failed = [report.question for report in suite.reports if report.error is not None]
    told = [
        f"{len(cases)} cases: {sum(case.holds is True for case in cases)} hold",
        f"{sum(case.holds is False for case in cases)} fall short",
        f"{sum(case.holds is None for case in cases)} inform",
    ]
    if failed:
        told.append(f"{len(failed)} of {len(suite.reports)} questions failed ({', '.join(failed)})")
    return ", ".join(told)


def _opening(suite: Suite) -> Iterator[Section]:
    asked = [report.question for report in suite.reports]
    minutes = sum(suite.seconds.get(name, 0.0) for name in asked) / 60
    how = "quick answers: few rounds, small sizes" if suite.quick else "full answers"
    yield Paragraph(f"{len(asked)} questions asked from {suite.date} on, in {minutes:.1f} minutes; {how}.")
    if not suite.finished:
        yield Paragraph("The run goes on, or was interrupted: this is what it has so far.")
    yield Paragraph(f"Machine: {machine_line(suite)}; seed {suite.seed}.")
    yield Paragraph(f"{counted(suite)}.")
    short = [(report, case) for report in suite.reports for case in report.cases if case.holds is False]
    if short:
        yield Table(
            title="Falls short",
            columns=("question", *COLUMNS),
            rows=[(report.question, *row(case)) for report, case in short],
        )


def _compared(comparison: Comparison) -> Iterator[Section]:
    yield Heading(f"Against the run of {comparison.before}")
    yield Paragraph(RULE)
    yield Paragraph(f"{compared_line(comparison)}.")
    if comparison.changed:
        yield Table(columns=COMPARED, rows=[changed(change) for change in comparison.changed])
    if comparison.broken:
        yield Table(
            title="Failed now, and not before",
            columns=("question", "error"),
            rows=[*comparison.broken.items()],
        )
    if comparison.notes:
        yield Table(title="What else differs", columns=("",), rows=[(note,) for note in comparison.notes])
    if comparison.left_out:
        yield Table(title="Not compared", columns=("what", "why"), rows=[*comparison.left_out.items()])


def compared_line(comparison: Comparison) -> str:
    """What came of a comparison, in one line."""
    verdicts = [change.verdict for change in comparison.changes]
    worse, better, same = (verdicts.count(verdict) for verdict in ("worse", "better", "same"))
    told = (
        f"regressions: {len(comparison.regressions)}; of {len(verdicts)} cases that both have, "
        f"{worse} worse, {better} better, {same} the same"
    )
    doubtful = sum(c.verdict == "worse" and c.disturbed and not c.informs for c in comparison.changes)
    return told + (f"; {doubtful} are worse while others used the machine: ask again" if doubtful else "")


def changed(change: Change) -> tuple[str, ...]:
    """One cell for each of COMPARED."""
    verdict = "REGRESSION" if change.regression else change.verdict
    told = [word for word in ("loosely", "disturbed", "informs") if getattr(change, word)]
    return (
        change.question,
        change.case,
        change.by + (f", {change.unit}" if change.unit else ""),
        f"{change.before:.3g}",
        f"{change.after:.3g}",
        f"{change.change:+.1%}",
        "—" if change.noise is None else f"{change.noise:.1%}",
        verdict + (f" ({', '.join(told)})" if told else ""),
    )


def _not_asked(suite: Suite) -> Iterator[Section]:
    if suite.not_asked:
        yield Heading("Not asked")
        yield Table(columns=("question", "why"), rows=[*suite.not_asked.items()])


def _question(report: Report) -> Iterator[Section]:
    yield Heading(f"{report.question}: {report.title}")
    again = f"plait bench {report.question}" + (" --quick" if report.quick else "")
    yield Paragraph(f"{report.date}. Again: {again}")
    yield from (Paragraph(line) for line in remarks(report))
    if report.cases:
        yield _cases(report.cases)
    if report.skipped:
        yield Table(title="Not run", columns=("case", "why"), rows=[*report.skipped.items()])
    yield Details(title="Settings", data=report.config)


def remarks(report: Report) -> list[str]:
    """What must be said of a run beside its cases."""
    told = []
    if report.activity.get("disturbed"):
        told.append(
            f"disturbed: other processes used {report.activity['others']:.0%} of the processors, "
            f"the hypervisor took {report.activity['steal']:.0%}"
        )
    if report.error is not None:
        told.append(f"FAILED: {report.error}")
    return told


def _cases(cases: Sequence[Case]) -> Table:
    """With the columns that say something."""
    heads = [COLUMNS[0], COLUMNS[1], "mean", *COLUMNS[2:], "published"]
    rows = [[*row(case)[:2], _mean(case), *row(case)[2:], case.published or ""] for case in cases]
    kept = [i for i in range(len(heads)) if any(line[i] for line in rows)]
    return Table(columns=[heads[i] for i in kept], rows=[[line[i] for i in kept] for line in rows])


def _mean(case: Case) -> str:
    return "" if case.spread is None or case.spread.mean is None else f"{case.spread.mean:.3g}"


def _ratios(report: Report) -> Iterator[Mark]:
    for case in report.cases:
        if case.ratio is not None:
            spread = case.ratio_spread
            yield Mark(
                group=report.question,
                name=f"{case.name} / {case.against}",
                value=case.ratio,
                low=None if spread is None else spread.minimum,
                high=None if spread is None else spread.maximum,
                bound=case.at_least,
                holds=case.holds,
            )


def _limits(report: Report) -> Iterator[Mark]:
    for case in report.cases:
        if case.of_limit is not None and case.limit_value:
            yield Mark(
                group=report.question,
                name=f"{case.name} / {case.limit}",
                value=case.of_limit,
                holds=case.holds,
            )
