"""An optimizer or a schedule that cannot be made is refused before anything starts, and no other."""

import functools

import pytest
import torch

from plait.engine.rehearsal import rehearse
from plait.errors import UsageError
from plait.factory import Factory
from reference_jobs import ADAMW, EVERYTHING, job

SCHEDULES = "torch.optim.lr_scheduler:"
ONE_CYCLE = functools.partial(Factory, f"{SCHEDULES}OneCycleLR", max_lr=0.1)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def no_schedule(optimizer):
    raise KeyError("no rates")


def two_groups(parameters, *, names=("first.weight",), lr=0.1):
    """As many do: some weights with other settings than the rest, a group that is empty left out."""
    parameters = list(parameters)
    some = [parameter for name, parameter in parameters if name in names]
    rest = [parameter for name, parameter in parameters if name not in names]
    return torch.optim.SGD([{"params": group} for group in (some, rest) if group], lr=lr)


def large_only(parameters, *, name="SGD", **settings):
    """Of the weights that have many rows, as they are in the model, on a device that computes."""
    parameters = list(parameters)
    if any(parameter.device.type == "meta" for _, parameter in parameters):
        raise ValueError("nothing can be computed there")
    large = [parameter for _, parameter in parameters if len(parameter) > 3]
    return getattr(torch.optim, name)(large, lr=0.1, **settings)


class Huge(torch.nn.Module):
    """Of four tebibytes, which a check does not ask for."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(2**20, 2**20))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"schedule": no_schedule},
            r"its schedule \S*:no_schedule raised KeyError: 'no rates' \(test_rehear",
        ),
        ({"schedule": no_schedule, "optimizer": ADAMW}, r"its schedule \S*:no_schedule raised KeyError"),
        ({"schedule": plateau}, "plateau returned a ReduceLROnPlateau, which is not stepped by the number"),
        ({"schedule": Factory(f"{SCHEDULES}CosineAnnealingLR")}, r"CosineAnnealingLR.*argument: 'T_max'"),
        ({"schedule": Factory(f"{SCHEDULES}StepLR", step=3)}, "StepLR takes no argument 'step'"),
        ({"schedule": "nowhere:at_all"}, "nowhere:at_all cannot be imported"),
        ({"schedule": ONE_CYCLE(total_steps=5)}, r"OneCycleLR ends after 5 steps, and the job has 7 "),
        ({"schedule": ONE_CYCLE()}, r"OneCycleLR raised ValueError: You must define either total_steps OR"),
        (
            {"optimizer": Factory("torch.optim:Adam", betas=(1.5, 0.9))},
            r"raised ValueError: Invalid beta par",
        ),
        ({"optimizer": Factory("torch.optim:Adam", betas=(1.5, 0.9)), "model": Huge}, r"Invalid beta param"),
    ],
)
def test_what_cannot_be_made_is_refused(changes, what):
    with pytest.raises(UsageError, match=what) as caught:
        rehearse(job(**changes))
    assert caught.value.setting.startswith(next(iter(changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {name: getattr(EVERYTHING, name) for name in ("model", "optimizer", "schedule")},
        {"schedule": ONE_CYCLE(total_steps=7)},
        {"schedule": ONE_CYCLE(total_steps=6)},  # a job that spills never asks for the last rate
        {
            "schedule": Factory(f"{SCHEDULES}OneCycleLR", max_lr=[0.1, 0.2], total_steps=9),
            "optimizer": two_groups,
        },
        {"optimizer": large_only},
        {
            "optimizer": functools.partial(large_only, name="Adagrad"),
            "model": Huge,
        },  # makes its state at once
        {"optimizer": functools.partial(large_only, name="AdamW", fused=True), "model": Huge},
    ],
)
def test_what_can_be_is_not(changes):
    rehearse(job(**changes))


def test_a_schedule_may_be_shorter_than_trials_that_may_never_get_there():
    rehearse(job(schedule=ONE_CYCLE(total_steps=5)), whole=False)


def no_model():
    raise OSError("no weights")


def test_where_the_model_cannot_be_made_nothing_is_certain():
    """Planning says that of the model itself."""
    rehearse(job(schedule=no_schedule, model=no_model))
