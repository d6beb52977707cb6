from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from plait import losses
from plait.errors import UsageError

LOGITS = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 5, (4, 6), generator=torch.Generator().manual_seed(1))
MASKED = TOKENS.clone()
MASKED[0, 2:] = MASKED[2] = losses.IGNORED


@pytest.mark.parametrize("loss", [losses.cross_entropy, losses.next_token])
@pytest.mark.parametrize("cut", [[4], [1, 3], [2, 2], [3, 1]])
def test_a_loss_and_its_weight_are_the_whole_batchs_however_it_is_cut(loss, cut):
    sums = weights = 0.0
    for logits, labels in zip(LOGITS.double().split(cut), MASKED.split(cut), strict=True):
        batch = {"labels": labels}
        weight = float(loss.weight(batch))
        sums += weight * float(loss(logits, batch))
        weights += weight
    whole = {"labels": MASKED}
    assert weights == float(loss.weight(whole))
    assert sums / weights == pytest.approx(float(loss(LOGITS.double(), whole)), rel=1e-12)


def test_each_position_predicts_the_next():
    wanted = [functional.cross_entropy(LOGITS[i, t], TOKENS[i, t + 1]) for i in range(4) for t in range(5)]
    assert losses.next_token(LOGITS, TOKENS).item() == pytest.approx(torch.stack(wanted).mean().item())
    assert losses.next_tokens({"labels": MASKED}) == (MASKED[:, 1:] != -100).sum() == 1 + 5 + 5
    assert losses.targets({"labels": MASKED}) == 2 + 6 + 6


def test_classes_are_last_or_where_torch_has_them():
    image = LOGITS.movedim(-1, 1)
    batch = (None, TOKENS)
    assert torch.equal(losses.cross_entropy(image, batch), functional.cross_entropy(image, TOKENS))
    assert losses.cross_entropy(LOGITS, batch).item() == pytest.approx(
        losses.cross_entropy(image, batch).item()
    )


@pytest.mark.parametrize(
    "output", [LOGITS, SimpleNamespace(logits=LOGITS), {"logits": LOGITS, "loss": None}, (LOGITS, None)]
)
@pytest.mark.parametrize("batch", [{"labels": TOKENS}, {"input_ids": TOKENS}, (LOGITS, TOKENS), TOKENS])
def test_logits_and_labels_are_found_where_they_usually_are(output, batch):
    assert losses.logits_of(output) is LOGITS
    assert losses.labels_of(batch) is TOKENS


def test_squares_and_accuracy():
    batch = (None, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert losses.mean_squared_error(torch.zeros(2, 2), batch) == 7.5
    assert losses.mean_squared_error.weight(batch) == 2
    best = LOGITS.argmax(-1)
    best[1] = losses.IGNORED
    best[0, 0] = (best[0, 0] + 1) % 5
    assert losses.accuracy(LOGITS, {"labels": best}).item() == pytest.approx(17 / 18)
    assert losses.accuracy.weight({"labels": best}) == 18


def test_the_models_own_loss():
    assert losses.model_loss(SimpleNamespace(loss=LOGITS.mean()), None) == LOGITS.mean()
    assert losses.model_loss({"loss": LOGITS.mean()}, None) == LOGITS.mean()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: losses.cross_entropy(LOGITS, TOKENS[:3]), r"\(4, 6, 5\) do not belong to labels .*\(3, 6\)"),
        (lambda: losses.next_token(LOGITS, TOKENS[:, :5]), r"\(4, 6, 5\) do not belong to tokens .*\(4, 5\)"),
        (
            lambda: losses.mean_squared_error(LOGITS, (0, LOGITS[0])),
            r"do not belong to labels of shape \(6, 5\)",
        ),
        (lambda: losses.model_loss(LOGITS, None), r"output \(Tensor\) has no loss"),
        (lambda: losses.model_loss({"logits": LOGITS}, None), "has no loss"),
        (lambda: losses.labels_of({"x": LOGITS}), "a batch of type dict with x has no labels"),
        (lambda: losses.labels_of(("a", "b")), "a batch of type tuple has no labels"),
        (lambda: losses.logits_of("text"), r"output \(str\) has no logits"),
        (lambda: losses.logits_of({"hidden": LOGITS}), r"output \(dict\) has no logits"),
    ],
)
def test_what_does_not_fit_is_said_with_its_shape(call, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        call()
    assert caught.value.works


def test_nothing_reaches_everything_and_changes_nothing():
    one = torch.full((2,), torch.finfo(torch.float32).max, requires_grad=True)
    other = torch.ones(3, dtype=torch.float64, requires_grad=True)
    losses.nothing({"a": one * 1, "b": [other * 2, torch.ones(1), "text"]}).backward()
    assert torch.equal(one.grad, torch.zeros(2))  # although the sum overflows
    assert torch.equal(other.grad, torch.zeros(3, dtype=torch.float64))
