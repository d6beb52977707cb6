"""Questions: found as folders, answered in a process of their own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import plait
from plait.bench import Question, Report, find_directory, questions, run_apart, run_here
from plait.errors import FileError, UsageError

GOOD = """
import os
from plait.bench import Bench

def run(bench: Bench) -> None:
    print("this goes to standard error")
    rounds = bench.pick(quick=2, full=3)
    a, b = bench.interleave({"a": lambda: 1, "b": lambda: 2}, repetitions=rounds, better="higher")
    bench.configure(process=os.getpid())
    bench.case("half", a, against=("b", b), at_least=0.5, unit="x")
    bench.case("whole", a, against=("b", b), at_least=1, unit="x")
    bench.skip("root", "needs root")
"""


def folder(
    directory: Path, script: str, readme: str | None = "# A title\n\nWhat is\nasked?\n\nMore.\n"
) -> Question:
    directory.mkdir()
    (directory / "bench.py").write_text(script)
    if readme is not None:
        (directory / "README.md").write_text(readme)
    return Question.read(directory)


def test_every_question_of_the_source_tree_can_be_listed() -> None:
    found = questions(find_directory())
    assert {"timeline-span", "cli-start"} <= {question.name for question in found}
    for question in found:
        assert "def run(bench: Bench) -> None:" in (question.directory / "bench.py").read_text()


def test_folders_are_questions(tmp_path: Path) -> None:
    folder(tmp_path / "second", GOOD)
    folder(tmp_path / "first", GOOD)
    (tmp_path / "notes").mkdir()
    (tmp_path / "README.md").write_text("not a folder")
    first, second = questions(find_directory(tmp_path))
    assert (first.name, first.title, first.summary) == ("first", "A title", "What is asked?")
    assert second.name == "second"


def test_a_directory_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no folder in .* has a bench\.py.*--directory"):
        questions(tmp_path)
    with pytest.raises(UsageError, match=r"none is no directory.*--directory"):
        find_directory(tmp_path / "none")


def test_an_installed_plait_says_that_benchmarks_are_in_the_source_tree(tmp_path: Path) -> None:
    package = Path(plait.__file__).parent
    shutil.copytree(package, tmp_path / "plait", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    code = "from plait.bench import find_directory; find_directory()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # without site-packages: an editable install comes first there
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "benchmarks come with the source tree only (setting: --directory)" in done.stderr


@pytest.mark.parametrize("readme", [None, "", "no heading\n\ntext", "# title only", "# title\n\n## another"])
def test_a_question_needs_a_readme(tmp_path: Path, readme: str | None) -> None:
    with pytest.raises(FileError, match=r"q/README\.md (cannot be read|does not open with a heading)"):
        folder(tmp_path / "q", GOOD, readme)


def test_a_question_is_answered_in_a_fresh_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = run_apart(folder(tmp_path / "q", GOOD), quick=True, seed=3)
    assert [case.holds for case in report.cases] == [True, False]
    assert not report.holds
    assert (report.error, report.skipped, report.quick) == (None, {"root": "needs root"}, True)
    assert report.cases[0].repetitions == 2
    assert report.config["process"] != os.getpid()
    assert report.config["seed"] == 3
    out, err = capfd.readouterr()
    assert (out, err) == ("", "this goes to standard error\n")
    data = report.to_json()
    assert (data["format"], data["question"], data["title"]) == ("plait.bench/1", "q", "A title")
    assert {"cpu", "cores", "memory_bytes", "kernel", "isa"} <= set(data["machine"])
    assert {"python", "torch", "plait"} <= set(data["versions"])
    assert {"load_before", "load_after", "steal", "others", "disturbed"} <= set(data["activity"])
    assert Report.from_json(json.loads(json.dumps(data))) == report


@pytest.mark.parametrize(
    ("script", "error", "cases"),
    [
        (
            "def run(bench):\n    bench.case('a', 1, unit='s', better='lower')\n    1 / 0",
            "ZeroDivisionError: .*",
            1,
        ),
        ("import nowhere_to_be_found", "ModuleNotFoundError: .*nowhere.*", 0),
        ("def walk(bench): pass", r"FileError: .*bench\.py has no function run .*", 0),
        ("def run(bench): pass", "the script ended without a case", 0),
    ],
)
def test_a_script_that_fails_is_in_the_report(tmp_path: Path, script: str, error: str, cases: int) -> None:
    report = run_here(folder(tmp_path / "q", script))
    assert report.error is not None
    assert re.fullmatch(error, report.error)
    assert len(report.cases) == cases
    assert not report.holds


def test_a_script_that_takes_its_process_down_is_in_the_report(tmp_path: Path) -> None:
    report = run_apart(folder(tmp_path / "q", "import os\ndef run(bench): os._exit(7)"))
    assert report.error == "its process ended with status 7 before it could report"


def test_a_script_that_never_ends_is_ended(tmp_path: Path) -> None:
    script = "import os, pathlib, time\ndef run(bench):\n    pathlib.Path(%r).write_text(str(os.getpid()))\n"
    note = tmp_path / "process"
    question = folder(tmp_path / "q", script % str(note) + "    time.sleep(600)\n")
    report = run_apart(question, most_s=10)
    assert report.error == "it was ended after 10 s without an answer"
    assert not Path(f"/proc/{note.read_text()}").exists()
    assert not report.holds
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "x.json: the format is 'list'"),
        ({"format": "plait.bench/2"}, "x.json: the format is 'plait.bench/2'.*works: plait.bench/1"),
        ({"format": "plait.bench/1"}, "x.json: question is missing"),
    ],
)
def test_a_wrong_report_is_refused(data: object, told: str) -> None:
    with pytest.raises(FileError, match=told):
        Report.from_json(data, source="x.json")  # type: ignore[arg-type]


def test_a_report_with_half_a_case_is_refused(tmp_path: Path) -> None:
    data = run_here(folder(tmp_path / "q", GOOD)).to_json()
    del data["cases"][0]["value"]
    with pytest.raises(FileError, match=r"report: cases: .*'value'"):
        Report.from_json(data)


def test_the_benchmark_in_the_docs_runs_as_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    script = next(
        text for text in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "def run" in text
    )
    (readme,) = re.findall(r"```text\n(# .*?)```", page, flags=re.DOTALL)
    report = run_here(folder(tmp_path / "copy-bytes", script, readme), quick=True)
    assert report.error is None
    assert [case.name for case in report.cases] == ["bytearray of a memoryview", "one copy", "size"]
