import math

from plait.engine.result import JobResult
from plait.evaluation import Evaluated


def test_figures_that_are_not_finite_are_told_and_come_back_as_no_numbers(tmp_path):
    judged = Evaluated(step=2, loss=math.inf, metrics={"accuracy": math.nan, "other": 0.5})
    made = JobResult(
        name="gpt", end="finished", strategy="data", losses=(1.0, math.nan), evaluations=(judged,)
    )
    made.save(tmp_path)
    found = JobResult.load(tmp_path)
    assert found is not None
    assert found.losses[0] == 1.0
    assert math.isnan(found.losses[1])
    (one,) = found.evaluations
    assert math.isnan(one.loss)
    assert math.isnan(one.metrics["accuracy"])
    assert one.metrics["other"] == 0.5
    assert str(found) == (
        "gpt: finished after 2 steps, loss nan (evaluated: loss nan, accuracy nan, other 0.5)"
    )
