"""``plait bench``."""

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from plait.bench import Question, Report, run_apart
from plait.cli.bench import bench
from plait.errors import FileError, UsageError

SCRIPT = """
def run(bench):
    bench.case("size", {value}, unit="MB", better="lower", at_most=2, aim=1)
    rate = dict(against=("copy", 2.0), limit=("memory", 12.0), at_least=1)
    bench.case("rate", 3.0, unit="GB/s", better="higher", published="twice (a paper)", **rate)
    bench.case("told", 7, unit="x", better="higher")
    bench.skip("links", "needs root")
"""


@pytest.fixture
def benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # reports go to runs/ there
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
        "published: twice (a paper)",
    ):
        assert text in words
    assert "FALLS SHORT" not in words
    assert not Path("runs").exists()


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
    found = json.loads(result.stdout)
    assert (found["format"], found["holds"], found["finished"]) == ("plait.bench.report/1", False, True)
    assert found["minutes"] == (10 if every == "--quick" else None)
    assert [(r["question"], r["holds"], r["quick"]) for r in found["reports"]] == [
        ("large", False, every == "--quick"),
        ("small", True, every == "--quick"),
    ]
    (folder,) = Path("runs").iterdir()
    assert found["directory"] == str(folder)
    assert result.stderr.splitlines()[0] == f"report: {folder}"
    assert json.loads((folder / "report.json").read_text())["finished"] is True


def test_a_report_is_written_where_it_is_asked_for_and_nothing_is_overwritten(benchmarks: Path) -> None:
    asked = ("small", "--directory", benchmarks, "--report", "mine")
    result = plait_bench(*asked)
    assert result.exit_code == 0, result.output
    assert "report: mine/report.html" in result.stdout
    assert "published" in Path("mine/report.md").read_text()
    again = plait_bench(*asked)
    assert isinstance(again.exception, FileError)
    assert str(again.exception).startswith("mine has a report.json already")


def test_a_worse_case_than_before_ends_with_1(benchmarks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def calm(question: Question, **settings: Any) -> Report:
        """The real thing, on a machine that nobody else seems to use."""
        return replace(run_apart(question, **settings), activity={"seconds": 1.0, "disturbed": False})

    monkeypatch.setattr("plait.bench.asking.run_apart", calm)
    assert plait_bench("small", "--directory", benchmarks, "--report", "old").exit_code == 0
    same = plait_bench("small", "--directory", benchmarks, "--against", "old")
    assert same.exit_code == 0, same.output
    assert "regressions: 0; of 3 cases that both have" in same.stdout
    (benchmarks / "small" / "bench.py").write_text(SCRIPT.format(value=1.5))
    worse = plait_bench("small", "--directory", benchmarks, "--against", "old/report.json")
    assert worse.exit_code == 1
    words = " ".join(worse.stdout.replace("│", " ").split())
    assert "regressions: 1; of 3 cases that both have, 1 worse" in words
    assert "REGRESSION" in words
    assert "FALLS SHORT" not in words
    told = json.loads(plait_bench("small", "--directory", benchmarks, "--against", "old", "--json").stdout)
    assert told["comparison"]["regressed"] is True
    (benchmarks / "small" / "bench.py").write_text("def run(bench): raise RuntimeError('no luck')")
    failed = plait_bench("small", "--directory", benchmarks, "--against", "old")
    assert failed.exit_code == 1
    assert "FAILED now, and not before: small: RuntimeError: no luck" in failed.stdout
    other = plait_bench("--quick", "--directory", benchmarks, "--against", "old", "--report", "new")
    assert "not compared: small: was asked in full before" in " ".join(other.stdout.split())
    assert "was not asked before" in Path("new/report.md").read_text()


def test_time_is_spent_by_what_questions_took_before(benchmarks: Path) -> None:
    assert plait_bench("--quick", "--directory", benchmarks, "--report", benchmarks / "report").exit_code == 1
    kept = json.loads((benchmarks / "report" / "report.json").read_text())
    kept["seconds"]["large"] = 700.0
    (benchmarks / "report" / "report.json").write_text(json.dumps(kept))
    result = plait_bench("--quick", "--directory", benchmarks)
    assert result.exit_code == 0, result.output
    assert "not asked: large: took 700 s before" in " ".join(result.stdout.split())
    found = json.loads(plait_bench("--all", "--minutes", 5, "--json", "--directory", benchmarks).stdout)
    assert [report["question"] for report in found["reports"]] == ["large", "small"]  # in full: nobody knows
    longer = plait_bench("--quick", "--minutes", 20, "--json", "--directory", benchmarks)
    assert json.loads(longer.stdout)["not_asked"] == {}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--report", "x"], "--report x, and no question is asked (setting: QUESTION)"),
        (["--against", "x"], "--against x, and no question is asked (setting: QUESTION)"),
        (["--out", "x"], "--out x, and no question is asked (setting: QUESTION)"),
        (["--minutes", "3"], "--minutes 3.0, and no question is asked (setting: QUESTION)"),
        (["small", "--minutes", "3"], "--minutes is for many questions, and 'small' is one"),
        (["small", "--all"], "--all is for many questions, and 'small' is one"),
        (["--quick", "--minutes", "0"], "0 minutes (setting: --minutes); works: 10"),
        (["small", "--against", "none.json"], "none.json cannot be read: "),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_run(
    benchmarks: Path, arguments: list[str], told: str
) -> None:
    result = plait_bench(*arguments, "--directory", benchmarks)
    assert isinstance(result.exception, UsageError | FileError)
    assert str(result.exception).startswith(told)
    assert not Path("runs").exists()


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


def test_an_interrupted_run_keeps_what_it_has_and_leaves_no_process(benchmarks: Path) -> None:
    (benchmarks / "small" / "bench.py").write_text(ENDLESS)
    command = [sys.executable, "-c", "from plait.cli import main; main()", "bench", "--quick"]
    with subprocess.Popen(
        [*command, "--directory", str(benchmarks), "--report", "kept"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as run:
        assert run.stderr is not None
        line = next(line for line in run.stderr if line.startswith("process"))
        answering = os.pidfd_open(int(line.split()[1]))
        try:
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does
            assert run.wait(60) == 130
            assert select.select([answering], [], [], 60)[0]
        finally:
            os.close(answering)
        assert "what was answered is in kept\n" in run.stderr.read()
    kept = json.loads(Path("kept/report.json").read_text())
    assert kept["finished"] is False
    assert [report["question"] for report in kept["reports"]] == ["large"]
    assert kept["not_asked"] == {"small": "no answer yet"}
    assert "The run goes on, or was interrupted" in Path("kept/report.md").read_text()
    assert not [path for path in Path("kept").iterdir() if path.name.startswith(".")]
