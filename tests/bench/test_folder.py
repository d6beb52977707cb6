"""The files of a report: what stands in them, and that none is lost."""

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from plait.bench import Bench, Case, Measured, Report, Suite, compare, new_folder, write_report
from plait.bench.machine import Activity
from plait.errors import FileError

Suites, Reports = Callable[..., Suite], Callable[..., Report]


def measured(*values: float) -> Measured:
    activity = Activity(seconds=1, steal=0, others=0)
    return Measured(name="side", values=values, better="lower", activity=activity, together=1)


@pytest.fixture
def full(suite: Suites, report: Reports) -> Suite:
    """A run in which all there is to say has happened."""
    bench = Bench(quick=True)
    ours, theirs = measured(1.0, 2.0, 6.0), measured(8.0, 8.0, 8.0)
    bench.case("a | b", ours, unit="s", against=("them", theirs), limit=("light", 0.5), at_least=5, aim=9,
               published="<3x> (a paper)")  # fmt: skip
    bench.case("size", 12.0, unit="MB", better="lower", at_most=20)
    bench.case("*loss*", -0.5, unit="nats", better="lower", against=("plain", -0.4))
    disturbed = {"seconds": 3.0, "steal": 0.01, "others": 0.31, "disturbed": True}
    return suite(
        report("q-a", *bench.cases, config={"rows": [1, 2], "name": "</pre><b>"}, activity=disturbed,
               skipped={"links": "needs root"}),
        report("q-b", error="RuntimeError: no luck"),
        minutes=10.0, seconds={"q-a": 66.0, "q-b": 54.0, "q-c": 700.0},
        not_asked={"q-c": "took 700 s before, and 480 of 600 s were left"},
    )  # fmt: skip


def test_a_report_says_what_was_found_on_what_and_against_what(full: Suite, tmp_path: Path) -> None:
    write_report(tmp_path, full)
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[0] == "# Benchmarks of 2026-01-02, quick"
    assert lines[2] == (
        "2 questions asked from 2026-01-02T03:04:05+00:00 on, in 2.0 minutes; "
        "quick answers: few rounds, small sizes."
    )
    assert lines[4] == (
        "Machine: a processor, 2 cores, 8.00 GiB, Linux 6; python 3.11.7, torch 2.13.0; seed 0."
    )
    assert lines[6] == "3 cases: 1 hold, 1 fall short, 1 inform, 1 of 2 questions failed (q-b)."
    for line in (
        "![How many times better than what it is measured against](ratios.svg)",
        "![The share of the physical limit that is reached](limits.svg)",
        "| q-c | took 700 s before, and 480 of 600 s were left |",
        "## q-a: About q-a",
        "2026-01-02T03:04:05+00:00. Again: plait bench q-a --quick",
        "disturbed: other processes used 31% of the processors, the hypervisor took 1%",
        "| case | value | mean | against | ratio | limit | bound | verdict | published |",
        "| a \\| b | 2 ± 2.6 s | 3 | them 8 ± 0 | 4 ± 3.4 | light 0.5 (25%) | ≥ 5, aim 9 | FALLS SHORT "
        "| &lt;3x> (a paper) |",
        "| size | 12 MB |  |  |  |  | ≤ 20 MB | holds |  |",
        "| links | needs root |",
        '  "rows": [1, 2],',
        "FAILED: RuntimeError: no luck",
    ):
        assert line in lines, line
    assert any(line.startswith("| \\*loss\\* |") for line in lines)


def test_the_page_and_the_pictures_are_whole_and_load_nothing(full: Suite, tmp_path: Path) -> None:
    write_report(tmp_path, full)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg ") == 2
    assert "&lt;/pre&gt;&lt;b&gt;" in page
    assert "src=" not in page
    assert "href=" not in page
    for name, marks in (("ratios.svg", 2), ("limits.svg", 1)):
        root = ElementTree.parse(tmp_path / name).getroot()
        assert len([part for part in root.iter() if part.get("class") == "mark"]) == marks
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "limits.svg", "ratios.svg", "report.html", "report.json", "report.md",
    ]  # fmt: skip
    assert Suite.load(tmp_path) == full


def test_who_reads_a_report_meanwhile_has_it_whole(full: Suite, suite: Suites, tmp_path: Path) -> None:
    write_report(tmp_path, full)
    with (tmp_path / "report.json").open() as reading:
        write_report(tmp_path, suite())
        assert Suite.from_json(json.load(reading)) == full
    assert Suite.load(tmp_path) == suite()


def test_a_report_without_ratios_has_no_pictures(suite: Suites, tmp_path: Path) -> None:
    write_report(tmp_path, suite(Case(name="c", value=1.0, unit="s", better="lower"), finished=False))
    assert "The run goes on, or was interrupted" in (tmp_path / "report.md").read_text()
    assert not list(tmp_path.glob("*.svg"))


def test_a_comparison_stands_in_every_file(suite: Suites, report: Reports, tmp_path: Path) -> None:
    def case(value: float) -> Case:
        return Case(name="c", value=value, unit="s", better="lower", at_most=99)

    before = suite(report("q", case(1.0)), report("r", case(1.0)))
    after = suite(report("q", case(2.0)), report("r", error="no"), report("new"))
    write_report(tmp_path, after, compare(before, after))
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text()
        for words in (
            "Against the run of 2026-01-02T03:04:05+00:00",
            "Worse or better is a change of more than 10% of the mean of both, and of more than 2 joint",
            "regressions: 1; of 1 cases that both have, 1 worse, 0 better, 0 the same.",
            "REGRESSION (loosely)",
            "-66.7%",
            "Failed now, and not before",
            "was not asked before",
        ):
            assert words in text, (name, words)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["comparison"]["regressed"] is True
    assert Suite.load(tmp_path) == after


def test_a_folder_with_a_report_is_not_written_into(tmp_path: Path) -> None:
    assert new_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "a" / "b" / "notes.txt").touch()
    assert new_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "a" / "b" / "report.md").touch()
    with pytest.raises(FileError, match=r"b has a report.md already, which would be overwritten.*--report"):
        new_folder(tmp_path / "a" / "b")
    with pytest.raises(FileError, match=r"notes.txt/r cannot be written.*--report"):
        new_folder(tmp_path / "a" / "b" / "notes.txt" / "r")


def test_the_folders_of_a_day_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = new_folder(), new_folder()
    assert first.parent == Path("runs")
    assert first.name.startswith("bench-20")
    assert second.name == f"{first.name}-2"


def test_what_cannot_be_written_leaves_the_report_before_it(
    full: Suite, suite: Suites, tmp_path: Path
) -> None:
    write_report(tmp_path, full)
    (tmp_path / ".report.json").mkdir()  # where the next one would be made ready
    with pytest.raises(FileError, match=r"report.json cannot be written.*--report"):
        write_report(tmp_path, suite())
    assert Suite.load(tmp_path) == full


def test_what_is_worse_on_a_disturbed_machine_is_to_be_asked_again(suite: Suites, tmp_path: Path) -> None:
    def case(value: float) -> Case:
        return Case(name="c", value=value, unit="s", better="lower", at_most=99, disturbed=True)

    write_report(tmp_path, suite(case(2.0)), compare(suite(case(1.0)), suite(case(2.0))))
    text = (tmp_path / "report.md").read_text()
    assert (
        "regressions: 0; of 1 cases that both have, 1 worse, 0 better, 0 the same; 1 are worse while" in text
    )
    assert "| worse (loosely, disturbed) |" in text
