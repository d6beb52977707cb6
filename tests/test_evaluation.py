import functools
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from plait import losses
from plait.errors import UsageError
from plait.evaluation import Evaluator
from plait.job import Evaluation, Job


def net():
    return nn.Linear(3, 4)


def labelled(seed, *, count=10):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    y = (x.sum(1) > 0).long()
    y[1::3] = losses.IGNORED
    return [(x[i], y[i]) for i in range(count)]


def largest(output, batch):
    """A metric with no weight of its own: it takes the loss's."""
    return output.max()


def by_row(output, batch):
    return output.max(1).values


def nothing(output, batch):
    return None


def plain(output, batch):
    return 0.5


def evaluator(**changes):
    given = {
        "data": functools.partial(labelled, count=10),
        "metrics": {"right": losses.accuracy, "top": largest},
    }
    evaluation = Evaluation(**{**given, **changes})
    return Evaluator(
        Job(
            name="small",
            model=net,
            data=labelled,
            loss=losses.cross_entropy,
            optimizer=torch.optim.SGD,
            batch=6,
            accumulate=2,
            steps=1,
            precision="fp64",
            evaluation=evaluation,
        )
    )


MODEL = net().double()
X, Y = (torch.stack(part) for part in zip(*labelled(0), strict=True))
OUTPUT = MODEL(X.double())
KEPT = Y != losses.IGNORED


@pytest.mark.parametrize("batch", [None, 1, 4, 10, 100])
@pytest.mark.parametrize("cuts", [[0, 10], [0, 4, 10], [0, 1, 1, 2, 10]])
def test_the_result_is_that_of_all_rows_at_once_however_they_are_cut(batch, cuts):
    one = evaluator(batch=batch)
    assert one.rows == 10
    tallies = [one.tally(MODEL, range(a, b)) for a, b in itertools.pairwise(cuts)]
    result = one.result(7, [sum(column) for column in zip(*tallies, strict=True)])
    assert result.step == 7
    assert result.loss == pytest.approx(functional.cross_entropy(OUTPUT, Y).item(), rel=1e-12)
    assert result.metrics["right"] == pytest.approx((OUTPUT.argmax(1) == Y)[KEPT].double().mean().item())


def test_a_metric_without_a_weight_of_its_own_takes_the_losss():
    one = evaluator(batch=5)
    halves = [
        (OUTPUT[:5].max().item(), KEPT[:5].sum().item()),
        (OUTPUT[5:].max().item(), KEPT[5:].sum().item()),
    ]
    wanted = sum(top * weight for top, weight in halves) / KEPT.sum().item()
    assert one.result(0, one.tally(MODEL, range(10))).metrics["top"] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (by_row, r"metric 'mine' returned a tensor of shape \(3,\)"),
        (nothing, "metric 'mine' returned None"),
        (functional.cross_entropy, "metric 'mine' failed when called with the model's output and the whole"),
    ],
)
def test_a_metric_that_is_no_mean_is_refused_by_name(metric, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        evaluator(metrics={"mine": metric}).tally(MODEL, range(10))
    assert caught.value.setting == "evaluation.metrics.mine"
    assert caught.value.works


def test_a_metric_is_a_number_too_and_is_called_with_two_things():
    one = evaluator(metrics={"mine": plain})
    assert one.result(0, one.tally(MODEL, range(10))).metrics == {"mine": 0.5}
    with pytest.raises(UsageError, match=r"is called with \(output, batch\): missing") as caught:
        evaluator(metrics={"mine": functional.triplet_margin_loss})
    assert caught.value.setting == "evaluation.metrics.mine"


def test_rows_that_count_for_nothing_do_not_spoil_the_rest():
    one = evaluator(batch=1)
    assert not KEPT[1]
    assert one.tally(MODEL, range(1, 2)) == [0.0] * 6
    assert math.isnan(one.result(1, [0.0] * 6).loss)  # the mean over nothing
