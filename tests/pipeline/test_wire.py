"""What an error that ends a rank comes from; the rest of the wire is tested with real processes."""

from plait.errors import UsageError
from plait.pipeline.wire import root


def chained(error, cause):
    error.__cause__ = cause
    return error


def test_it_is_what_a_stage_raised_and_not_what_was_made_of_it():
    raised = ValueError("no luck")
    assert root(chained(RuntimeError("a stage failed"), raised)) is raised


def test_an_error_of_plaits_own_is_told_whatever_caused_it():
    error = chained(UsageError("7 rows", setting="batch", works="8"), KeyError("x"))
    assert root(error) is error
    assert root(chained(RuntimeError("a stage failed"), error)) is error


def test_causes_that_go_in_a_circle_come_to_an_end():
    alone, first = ValueError("round"), ValueError("round")
    alone.__cause__, first.__cause__ = alone, chained(KeyError("and round"), first)
    assert root(alone) is alone
    assert root(first) in (first, first.__cause__)
