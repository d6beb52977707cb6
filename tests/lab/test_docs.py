from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait.lab import Trace

PAGE = (Path(__file__).parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")


def test_the_examples_run_as_printed(
    namespaces: None, memory_groups: None, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "docs/lab.md", "exec"), {})
    said = capsys.readouterr().out
    assert "host2 | I am rank 2 of 3" in said
    assert "(0, 0, 0) None" in said


def test_the_trace_reads_as_printed() -> None:
    (text,) = re.findall(r"```text\n(# seconds.*?)```", PAGE, flags=re.DOTALL)
    trace = Trace.parse(text)
    assert len(trace.steps) == 4
    assert trace.repeat_seconds == 10.0
