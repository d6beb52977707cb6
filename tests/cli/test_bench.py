"""``plait bench``."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from plait.cli.bench import bench
from plait.errors import FileError, UsageError

SCRIPT = """
def run(bench):
    bench.case("size", {value}, unit="MB", better="lower", at_most=2, aim=1)
    rate = dict(against=("copy", 2.0), limit=("memory", 12.0), at_least=1)
    bench.case("rate", 3.0, unit="GB/s", better="higher", **rate)
    bench.case("told", 7, unit="x", better="higher")
    bench.skip("links", "needs root")
"""


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    for name, value in {"small": 0.5, "large": 3.25}.items():
        folder = tmp_path / "benchmarks" / name
        folder.mkdir(parents=True)
        (folder / "bench.py").write_text(SCRIPT.format(value=value))
        (folder / "README.md").write_text(f"# A {name} thing\n\nHow {name} is it?\n")
    return tmp_path / "benchmarks"


def plait_bench(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_without_a_question_the_questions_are_listed(benchmarks: Path) -> None:
    result = plait_bench("--directory", benchmarks)
    assert result.exit_code == 0
    for text in ("small", "A small thing", "How small is it?", "large"):
        assert text in result.stdout
    listed = json.loads(plait_bench("--directory", benchmarks, "--json").stdout)
    assert listed[0] == {"name": "large", "title": "A large thing", "summary": "How large is it?"}


def test_a_case_that_holds_ends_with_0(benchmarks: Path) -> None:
    result = plait_bench("small", "--directory", benchmarks)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.replace("│", " ").split())
    for text in (
        "0.5 MB",
        "≤ 2 MB, aim 1",
        "holds, aim",
        "copy 2",
        "1.5",
        "memory 12 (25%)",
        "not run: needs root",
    ):
        assert text in words
    assert "FALLS SHORT" not in words


def test_a_case_that_falls_short_is_shown_and_ends_with_1(benchmarks: Path, tmp_path: Path) -> None:
    result = plait_bench("large", "--quick", "--directory", benchmarks, "--out", tmp_path / "out.json")
    assert result.exit_code == 1
    assert "FALLS SHORT" in result.stdout
    kept = json.loads((tmp_path / "out.json").read_text())
    assert (kept["format"], kept["quick"], kept["holds"]) == ("plait.bench/1", True, False)
    assert [case["holds"] for case in kept["cases"]] == [False, True, None]


@pytest.mark.parametrize("every", ["--quick", "--all"])
def test_all_questions_are_asked(benchmarks: Path, every: str) -> None:
    result = plait_bench(every, "--json", "--directory", benchmarks)
    assert result.exit_code == 1
    reports = json.loads(result.stdout)
    assert [(r["question"], r["holds"], r["quick"]) for r in reports] == [
        ("large", False, every == "--quick"),
        ("small", True, every == "--quick"),
    ]


def test_a_benchmark_that_fails_is_shown_and_ends_with_1(benchmarks: Path) -> None:
    (benchmarks / "small" / "bench.py").write_text("def run(bench): raise RuntimeError('no luck')")
    result = plait_bench("small", "--directory", benchmarks)
    assert result.exit_code == 1
    assert "FAILED: RuntimeError: no luck" in result.stdout


def test_an_unknown_question_is_refused_with_the_known_ones(benchmarks: Path) -> None:
    result = plait_bench("smal", "--directory", benchmarks)
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == (
        "there is no question 'smal' among the 2 (setting: QUESTION); works: large, small"
    )


@pytest.mark.parametrize("out", [".", "no/such/out.json", "/proc/x"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    benchmarks: Path, tmp_path: Path, out: str
) -> None:
    marker = tmp_path / "ran"
    (benchmarks / "small" / "bench.py").write_text(f"open({str(marker)!r}, 'w')")
    result = plait_bench("small", "--directory", benchmarks, "--out", tmp_path / out)
    assert isinstance(result.exception, FileError)
    assert result.exception.what.startswith(f"{tmp_path / out} cannot be written: ")
    assert result.exception.setting == "--out"
    assert not marker.exists()


def test_what_was_measured_is_printed_before_a_file_fails(benchmarks: Path) -> None:
    result = plait_bench("small", "--json", "--directory", benchmarks, "--out", "/dev/full")
    assert isinstance(result.exception, FileError)
    assert result.exception.what == "/dev/full cannot be written: No space left on device"
    assert json.loads(result.stdout)["holds"] is True


ENDLESS = """
import os, signal, time
def run(bench):
    try:
        print("process", os.getpid(), flush=True)
        time.sleep(600)
    finally:
        print("left", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_a_bench_that_is_ended_takes_its_process_along(
    benchmarks: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (benchmarks / "small" / "bench.py").write_text(ENDLESS)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", "from plait.cli import main; main()", "bench", "small"]
    with subprocess.Popen(
        [*command, "--directory", str(benchmarks)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    ) as run:
        assert run.stderr is not None
        line = next(line for line in run.stderr if line.startswith("process"))
        answering = os.pidfd_open(int(line.split()[1]))
        try:
            run.send_signal(number)
            assert run.wait(60) == code
            assert select.select([answering], [], [], 60)[0]  # readable when it has ended
        finally:
            os.close(answering)
        assert run.stderr.read() == "left\n"
    assert os.listdir(scratch) == []
