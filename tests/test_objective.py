import pytest
import torch
from torch import nn
from torch.nn import functional

from plait import losses
from plait.errors import UsageError
from plait.objective import Objective, all_inputs, inputs_without_labels


def objective(**changes):
    given = {"loss": losses.cross_entropy, "weight": losses.targets, "inputs": all_inputs, "bf16": False}
    return Objective(**{**given, **changes})


X, Y = torch.ones(3, 2), torch.tensor([0, 1, -100])


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, Y), (X,), {}),
        ([X, X, Y], (X, X), {}),
        ((X,), (X,), {}),
        ({"x": X, "labels": Y}, (), {"x": X}),
    ],
)
def test_a_model_is_called_with_what_its_batch_holds(given, args, kwargs):
    got = objective(inputs=inputs_without_labels).model_inputs(given)
    assert got[0] == args
    assert got[1] == kwargs


def test_a_job_may_say_otherwise():
    own = objective(inputs=lambda batch: {"pixels": batch[1]})
    assert own.model_inputs((Y, X)) == ((), {"pixels": X})
    assert objective().model_inputs({"labels": Y}) == ((), {"labels": Y})


def test_parts_add_up_to_the_whole():
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 2, -100, -100, 0, 3])
    whole = objective().mean(logits, (None, labels))
    wanted = torch.autograd.grad(whole, logits)[0]
    value = 0.0
    for cut in (slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)):  # the second counts for nothing
        batch = (None, labels[cut])
        weight = objective().weigh(batch)
        part, share = objective().share(logits[cut], batch, weight=weight, total=4.0, world=2)
        part.backward()
        value += share
    assert value == pytest.approx(whole.item(), rel=1e-14)
    torch.testing.assert_close(logits.grad / 2, wanted, rtol=1e-14, atol=0)


def test_one_part_is_the_loss_itself_to_the_bit():
    logits = torch.randn(3, 5, requires_grad=True)
    batch = (None, torch.tensor([1, 2, 3]))
    part, share = objective().share(logits, batch, weight=3.0, total=3.0)
    assert torch.equal(part, losses.cross_entropy(logits, batch))
    assert share == part.item()


def test_bf16_is_for_forward_and_loss():
    weight = torch.ones(2, 2)
    with objective(bf16=True).autocast("cpu"):
        assert (X @ weight).dtype == torch.bfloat16
    with objective().autocast("cpu"):
        assert (X @ weight).dtype == torch.float32


@pytest.mark.parametrize("loss", [functional.cross_entropy, functional.mse_loss], ids=["type", "attribute"])
def test_a_loss_of_torchs_own_is_told_what_it_gets(loss):
    with pytest.raises(
        UsageError, match=r"the loss failed when .*the whole batch: .*\.py:\d+\) \(setting"
    ) as caught:
        objective(loss=loss).mean(X, [X, Y])
    assert caught.value.setting == "loss"
    assert "a function of (output, batch), such as plait.losses:cross_entropy" in caught.value.works
    assert functional.mse_loss(X, X) == objective(loss=functional.mse_loss).mean(
        X, X
    )  # a tensor batch is fine


class Model(nn.Module):
    def forward(self, x, scale=1.0):
        return nn.functional.linear(x, torch.ones(1, 2)) * scale


class Broken(nn.Module):
    def forward(self, x):
        return self.no_such_layer(x)


@pytest.mark.parametrize(
    ("args", "kwargs", "setting", "reason"),
    [
        ((("a", "b"),), {}, "data", "cannot be called with str in a batch: linear"),
        ((), {"x": X, "mask": Y}, "inputs", "with x, mask, .*unexpected keyword argument 'mask'"),
        ((X, 1.0, Y), {}, "inputs", "with argument 1, argument 2, argument 3, .*too many positional"),
    ],
)
def test_inputs_that_a_model_cannot_take_are_told_from_its_own_mistakes(args, kwargs, setting, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        objective().call(Model(), args, kwargs)
    assert caught.value.setting == setting
    assert objective().call(Model(), (X, 2), {}).shape == (3, 1)
    with pytest.raises(AttributeError, match="no_such_layer"):
        objective().call(Broken(), (X,), {})


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(UsageError, match="the weight of a batch is") as caught:
        objective(weight=lambda batch: weight).weigh(X)
    assert caught.value.setting == "weight"


@pytest.mark.parametrize(
    ("value", "reason"), [(torch.ones(3), r"shape \(3,\)"), (1.5, "1.5"), (torch.tensor(1), "a tensor")]
)
def test_a_loss_that_is_no_mean_is_refused(value, reason):
    with pytest.raises(UsageError, match=f"the loss returned .*{reason}") as caught:
        objective(loss=lambda output, batch: value).mean(X, X)
    assert caught.value.setting == "loss"
