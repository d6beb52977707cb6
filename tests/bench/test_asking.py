"""Many questions in one run."""

from contextlib import nullcontext

import pytest

from plait.bench import Question, Suite, ask
from plait.errors import UsageError

SCRIPT = """
def run(bench):
    bench.case("size", {value}, unit="MB", better="lower", at_most=2)
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[Question]:
    directory = tmp_path_factory.mktemp("benchmarks")
    found = []
    for name, value in (("b-one", 1), ("b-two", 3), ("a-one", 1)):
        (directory / name).mkdir()
        (directory / name / "README.md").write_text("# T\n\nAsked.\n")
        (directory / name / "bench.py").write_text(SCRIPT.format(value=value))
        found.append(Question.read(directory / name))
    return found


def test_what_there_is_is_kept_after_each_question(asked: list[Question]) -> None:
    kept: list[Suite] = []
    begun: list[str] = []
    answered: list[str] = []

    def began(line: str) -> nullcontext[None]:
        begun.append(line)
        return nullcontext()

    suite = ask(
        asked[:2],
        quick=True,
        seed=3,
        begun=began,
        answered=lambda report: answered.append(report.question),
        keep=kept.append,
    )
    assert begun == ["b-one (1 of 2)", "b-two (2 of 2)"]
    assert answered == ["b-one", "b-two"]
    assert [(len(s.reports), dict(s.not_asked), s.finished) for s in kept] == [
        (0, {"b-one": "no answer yet", "b-two": "no answer yet"}, False),
        (1, {"b-two": "no answer yet"}, False),
        (2, {}, False),
        (2, {}, True),
    ]
    assert suite == kept[-1]
    assert not suite.holds
    assert {report.config["seed"] for report in suite.reports} == {3}
    assert set(suite.seconds) == {"b-one", "b-two"}
    assert all(seconds > 0 for seconds in suite.seconds.values())
    assert (suite.quick, suite.seed, suite.minutes) == (True, 3, None)


def test_what_would_take_too_long_is_not_asked(asked: list[Question]) -> None:
    known = {"b-one": 100.0, "b-two": 40.0, "a-one": 61.0}
    suite = ask(asked, quick=True, minutes=1.0, known_s=known)
    assert [report.question for report in suite.reports] == ["b-two"]
    assert set(suite.not_asked) == {"a-one", "b-one"}
    assert suite.not_asked["a-one"] == "took 61 s before, and 60 of 60 s were left"
    assert suite.seconds["a-one"] == 61.0
    assert suite.seconds["b-two"] < 40.0
    assert suite.finished
    assert suite.minutes == 1.0


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan")])
def test_no_time_is_refused(asked: list[Question], minutes: float) -> None:
    with pytest.raises(UsageError, match=r"minutes \(setting: --minutes\); works: 10"):
        ask(asked, minutes=minutes)
