"""A case in words: the cells of a table's row, the same on a terminal and in a report."""

from __future__ import annotations

from plait.bench.case import Case
from plait.bench.measured import Spread

COLUMNS = ("case", "value", "against", "ratio", "limit", "bound", "verdict")


def row(case: Case) -> list[str]:
    """One cell for each of COLUMNS."""
    return [
        case.name,
        f"{case.value:.3g}{plus_minus(case.spread)} {case.unit}",
        ""
        if case.against_value is None
        else f"{case.against} {case.against_value:.3g}{plus_minus(case.against_spread)}",
        "" if case.ratio is None else f"{case.ratio:.3g}{plus_minus(case.ratio_spread)}",
        "" if case.limit is None else f"{case.limit} {case.limit_value:.3g} ({case.of_limit or 0:.0%})",
        _bounds(case),
        _verdict(case),
    ]


def plus_minus(spread: Spread | None) -> str:
    """What is written behind a value of several rounds: their standard deviation."""
    return "" if spread is None else f" ± {spread.std:.2g}"


def _bounds(case: Case) -> str:
    bounds = []
    if case.at_least is not None:
        bounds.append(f"≥ {case.at_least:g}" + (f" {case.unit}" if case.against is None else ""))
    if case.at_most is not None:
        bounds.append(f"≤ {case.at_most:g} {case.unit}")
    if case.aim is not None:
        bounds.append(f"aim {case.aim:g}")
    return ", ".join(bounds)


def _verdict(case: Case) -> str:
    verdict = {None: "—", True: "holds", False: "FALLS SHORT"}[case.holds]
    if case.reaches_aim and case.holds:
        verdict += ", aim reached"
    return verdict + (" (disturbed)" if case.disturbed else "")
