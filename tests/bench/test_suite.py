"""The answers of one run as a file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.bench import Case, Report, Suite
from plait.errors import FileError

Suites, Reports = Callable[..., Suite], Callable[..., Report]
HOLDS = Case(name="c", value=1.0, unit="s", better="lower", at_most=2.0, published="3x (a paper)")


def test_a_suite_goes_through_a_file_and_a_folder(suite: Suites, tmp_path: Path) -> None:
    one = suite(HOLDS, minutes=10.0, seconds={"q-a": 3.5, "q-b": 9.0}, not_asked={"q-b": "too long"})
    (tmp_path / "report.json").write_text(json.dumps(one.to_json()))
    assert Suite.load(tmp_path) == Suite.load(str(tmp_path / "report.json")) == one
    data = one.to_json()
    assert (data["format"], data["holds"], data["finished"]) == ("plait.bench.report/1", True, True)
    assert data["reports"][0]["cases"][0]["published"] == "3x (a paper)"


def test_a_suite_holds_when_all_its_reports_do(suite: Suites, report: Reports) -> None:
    assert suite(report("a", HOLDS), report("b")).holds
    assert not suite(report("a", HOLDS), report("b", error="failed")).holds


def test_single_results_are_read_as_well(report: Reports, tmp_path: Path) -> None:
    one, two = report("a", HOLDS, config={"seed": 7}), report("b", HOLDS)
    for data, names in ((one.to_json(), ["a"]), ([one.to_json(), two.to_json()], ["a", "b"])):
        (tmp_path / "out.json").write_text(json.dumps(data))
        found = Suite.load(tmp_path / "out.json")
        assert [each.question for each in found.reports] == names
        assert (found.quick, found.seed, found.finished) == (True, 7, True)
        assert found.seconds == dict.fromkeys(names, 3.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "r.json cannot be read: .*setting: --against.*works: the report.json of an earlier"),
        ("{", "r.json is no JSON, or not whole"),
        ("[]", "r.json: there is no report in it"),
        ("[3]", "r.json: the format is 'int'"),
        ('{"format": "plait.run/1"}', "r.json: field 'format' is 'plait.run/1'.*'plait.bench.report/1'"),
        ('{"format": "plait.bench.report/1"}', "r.json: quick is missing"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    with pytest.raises(FileError, match=told):
        Suite.load(tmp_path / "r.json", setting="--against")


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("reports", 3, "not iterable"),
        ("seconds", [], "no attribute 'items'"),
        ("seconds", {"q-a": "long"}, "could not convert"),
        ("reports", [{"format": "plait.bench/2"}], "the format is 'plait.bench/2'"),
    ],
)
def test_a_wrong_field_is_refused(suite: Suites, field: str, value: object, told: str) -> None:
    with pytest.raises(FileError, match=f"x.json: .*{told}"):
        Suite.from_json({**suite(HOLDS).to_json(), field: value}, source="x.json")
