"""Benchmarks: one folder a question, one form of result, both sides of a comparison measured by turns.

A benchmark is ``benchmarks/<question>/bench.py`` with a function ``run(bench: Bench) -> None``, beside
a README.md that says what is asked and how it is fair.
"""

from plait.bench.asking import ask
from plait.bench.bench import Bench
from plait.bench.case import Case
from plait.bench.comparison import Change, Comparison, compare
from plait.bench.folder import new_folder, write_report
from plait.bench.measured import Measured, Spread
from plait.bench.question import Question, find_directory, questions, run_apart, run_here
from plait.bench.report import Report
from plait.bench.suite import Suite

__all__ = [
    "Bench",
    "Case",
    "Change",
    "Comparison",
    "Measured",
    "Question",
    "Report",
    "Spread",
    "Suite",
    "ask",
    "compare",
    "find_directory",
    "new_folder",
    "questions",
    "run_apart",
    "run_here",
    "write_report",
]
