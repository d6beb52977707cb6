"""When a task is tried again: limits count only what gains nothing."""

from hypothesis import given
from hypothesis import strategies as st

from plait.engine.retries import Failure, Retries


def failure(cause="killed", text="it was killed", began=0, reached=None, final=False):
    return Failure(cause=cause, text=text, began=began, reached=reached, final=final)


def test_restarts_in_a_row_wait_ever_longer_and_come_to_an_end():
    retries = Retries(3, first_s=1.0, most_s=3.0)
    waits = [retries.after(failure()).again_s for _ in range(4)]
    assert waits == [1.0, 2.0, 3.0, None]
    assert retries.count == 3


def test_a_checkpoint_that_was_gained_begins_the_count_anew():
    retries = Retries(2)
    for began in range(0, 100, 10):
        assert retries.after(failure(began=began)).again_s == 1.0
    assert retries.count == 10


def test_what_is_final_is_not_tried_again():
    assert Retries(3).after(failure(final=True)).again_s is None


def test_a_job_that_raises_the_same_at_the_same_step_is_not_tried_a_third_time():
    retries = Retries(9)
    raised = failure(cause="raised", text="ValueError: 7", reached=7)
    assert retries.after(raised).again_s is not None
    verdict = retries.after(raised)
    assert verdict.again_s is None
    assert "twice" in verdict.why


def test_a_disk_that_is_full_at_the_same_step_is_tried_again_up_to_the_limit():
    retries = Retries(3)
    waits = [retries.after(failure(cause="disk", text="no space left", reached=7)).again_s for _ in range(4)]
    assert waits == [1.0, 2.0, 4.0, None]


def test_a_job_that_raises_elsewhere_is_tried_again():
    retries = Retries(9)
    for step in range(5):
        assert retries.after(failure(cause="raised", text="OSError", reached=step)).again_s is not None


@given(
    st.lists(
        st.builds(
            failure,
            cause=st.sampled_from(["killed", "lost", "stalled"]),
            began=st.one_of(st.none(), st.integers(0, 5)),
        )
    ),
    st.integers(0, 4),
)
def test_never_more_than_the_limit_in_a_row_without_a_gain(failures, limit):
    retries, fruitless, last = Retries(limit), 0, None
    for each in failures:
        if last is not None and each.began is not None and each.began > (last.began or 0):
            fruitless = 0
        last = each
        verdict = retries.after(each)
        assert (verdict.again_s is None) == (fruitless >= limit)
        fruitless += verdict.again_s is not None
