"""Reports as a run would give them, with figures of a test's choice."""

from collections.abc import Callable
from typing import Any

import pytest

from plait.bench import Case, Report, Suite

MACHINE = {
    "cpu": "a processor",
    "cores": 2,
    "cores_usable": 2,
    "memory_bytes": 8 << 30,
    "kernel": "Linux 6",
    "architecture": "x86_64",
    "isa": [],
}
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "numpy": None}


@pytest.fixture(scope="session")
def report() -> Callable[..., Report]:
    """``report("question", case, case, ...)``."""

    def make(question: str, *cases: Case, **fields: Any) -> Report:
        calm = {"seconds": 3.0, "steal": 0.0, "others": 0.0, "disturbed": False}
        given = {"title": f"About {question}", "quick": True, "date": "2026-01-02T03:04:05+00:00"}
        given |= {"machine": MACHINE, "versions": VERSIONS, "activity": calm, "config": {"seed": 0}}
        return Report(**{**given, **fields}, question=question, cases=cases)

    return make


@pytest.fixture(scope="session")
def suite(report: Callable[..., Report]) -> Callable[..., Suite]:
    """``suite(report, ...)``; a case in place of a report is one of the question ``q-a``."""

    def make(*parts: Report | Case, **fields: Any) -> Suite:
        cases = [part for part in parts if isinstance(part, Case)]
        reports = [part for part in parts if isinstance(part, Report)]
        if cases:
            reports.append(report("q-a", *cases))
        given = {"quick": True, "seed": 0, "date": "2026-01-02T03:04:05+00:00", "finished": True}
        given |= {"machine": MACHINE, "versions": VERSIONS}
        return Suite(**{**given, **fields}, reports=tuple(reports))

    return make
