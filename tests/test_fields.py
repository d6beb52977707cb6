"""The fields of a job by name."""

import dataclasses
import pickle

import pytest
import torch

from plait.errors import FileError, UsageError
from plait.evaluation import Evaluation
from plait.fields import read
from plait.job import Job
from reference_jobs import BASE, job


@pytest.mark.parametrize(
    ("name", "value", "optimizer"),
    [("lr", 0.1, "AdamW"), ("betas", (0.9, 0.95), "AdamW"), ("momentum", 0.9, "SGD")],
)
def test_an_argument_of_the_optimizer_is_sent_there(name, value, optimizer):
    with pytest.raises(UsageError) as refused:
        job(name="mine", **{name: value})
    assert refused.value.what == f"job 'mine' has no field {name!r}: it belongs to the optimizer"
    works = f"optimizer=functools.partial(torch.optim.{optimizer}, {name}={value!r})"
    assert (refused.value.setting, refused.value.works) == (name, works)
    getattr(torch.optim, optimizer)([torch.zeros(1)], **{name: value})  # which has it


def test_any_other_word_is_refused_with_the_fields_that_there_are():
    with pytest.raises(
        UsageError, match=r"^a job has no field 'modle' \(setting: modle\); works: name, model,"
    ):
        Job(modle=torch.nn.Identity)
    with pytest.raises(UsageError, match="has no field 'rows'"):
        dataclasses.replace(BASE, rows=3)


def test_a_job_is_copied_as_ever():
    assert pickle.loads(pickle.dumps(BASE)) == BASE == dataclasses.replace(BASE)


def test_what_a_file_has_is_read_by_name():
    assert read(Evaluation, {"data": "a:b", "every": 3}, "evaluation.").every == 3
    with pytest.raises(FileError, match=r"a job has no field evaluation\.when"):
        read(Evaluation, {"data": "a:b", "when": 3}, "evaluation.")
    with pytest.raises(FileError, match=r"the job has no evaluation\.data"):
        read(Evaluation, {"every": 3}, "evaluation.")
