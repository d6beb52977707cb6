"""Asks many questions in one run, within a time, and keeps what there is after each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime

from plait.bench import machine
from plait.bench.question import Question, run_apart
from plait.bench.report import Report
from plait.bench.suite import Suite
from plait.bench.turns import turns, why_not
from plait.errors import UsageError

PENDING = "no answer yet"


def check_minutes(minutes: float | None) -> None:
    """Refuse a time in which nothing can be asked."""
    if minutes is not None and not minutes > 0:
        raise UsageError(f"{minutes:g} minutes", setting="--minutes", works="10")


def ask(
    asked: Sequence[Question],
    *,
    quick: bool = False,
    seed: int = 0,
    minutes: float | None = None,
    known_s: Mapping[str, float] | None = None,
    begun: Callable[[str], AbstractContextManager[object]] = nullcontext,
    answered: Callable[[Report], None] = lambda report: None,
    keep: Callable[[Suite], None] = lambda suite: None,
) -> Suite:
    """Ask the questions one after another, each in a process of its own.

    Args:
        asked: The questions; with ``minutes`` they are asked by turns of their families, else in this order.
        quick: Whether rough answers are wanted.
        seed: Of the order in which the sides of a question take turns.
        minutes: The time for all; a question that took longer before than what is left is not asked.
        known_s: How many seconds questions took before.
        begun: Given a line about a question, a block that its run stands in.
        answered: Called with each report.
        keep: Called with what there is so far, after each question and at the end; a run that is interrupted
            leaves what was kept.
    """
    check_minutes(minutes)
    known_s = known_s or {}
    by_name = {question.name: question for question in asked}
    names = tuple(by_name) if minutes is None else turns(by_name, known_s)
    suite = Suite(
        quick=quick,
        seed=seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine.describe(),
        versions=machine.versions(),
        minutes=minutes,
        not_asked=dict.fromkeys(names, PENDING),
        seconds={name: known_s[name] for name in names if name in known_s},
    )
    keep(suite)
    start = time.monotonic()
    for place, name in enumerate(names, start=1):
        begin = time.monotonic()
        refused = why_not(begin - start, known_s.get(name), None if minutes is None else 60 * minutes)
        if refused is not None:
            suite = replace(suite, not_asked={**suite.not_asked, name: refused})
            continue
        with begun(f"{name} ({place} of {len(names)})"):
            report = run_apart(by_name[name], quick=quick, seed=seed)
        suite = replace(
            suite,
            reports=tuple(sorted((*suite.reports, report), key=lambda one: one.question)),
            seconds={**suite.seconds, name: time.monotonic() - begin},
            not_asked={other: why for other, why in suite.not_asked.items() if other != name},
        )
        answered(report)
        keep(suite)
    suite = replace(suite, finished=True)
    keep(suite)
    return suite
