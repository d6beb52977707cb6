"""What is told of a job whose own code raises: the job, the part, and the line."""

import functools
import re

import pytest
import torch

import plait
from plait.cluster import Cluster
from plait.engine.diagnosis import cited, explained, explaining
from plait.errors import FileError, UsageError
from reference_jobs import BASE, job


class NoModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        raise ValueError("no model today")


class NoRows(list):
    def __init__(self, seed):
        super().__init__(range(20))

    def __getitem__(self, index):
        raise KeyError("row")


def no_inputs(batch):
    return batch["x"]


class NoForward(torch.nn.Module):
    """One that raises, or is of other shapes than the rows."""

    def __init__(self, *, raises=True):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.raises = raises

    def forward(self, x):
        if self.raises:
            raise ValueError("no forward today")
        return self.layer(x)


AT = r"\(test_diagnosis.py:\d+\)"
BROKEN = {
    "model": ({"model": NoModel}, rf"its model \S*:NoModel raised ValueError: no model today {AT}"),
    "data": ({"data": NoRows}, rf"its data \S*:NoRows raised KeyError: 'row' {AT}"),
    "inputs": ({"inputs": no_inputs}, rf"its inputs \S*:no_inputs raised TypeError: .* {AT}"),
    "rate": (
        {"optimizer": functools.partial(torch.optim.AdamW, lr=-1)},
        r"its optimizer \S*:AdamW raised ValueError: Invalid learning rate: -1 \(.*\.py:\d+\)",
    ),
    "closure": (
        {"optimizer": torch.optim.LBFGS},
        r"its optimizer LBFGS cannot step by itself, given dense gradients: .*closure",
    ),
    "sparse": (
        {"optimizer": torch.optim.SparseAdam},
        r"its optimizer SparseAdam cannot step by itself, given dense gradients: .*dense gradients",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_part_that_raises_is_told_with_the_job_and_the_line(name):
    changes, what = BROKEN[name]
    found = explained([BASE, job(name="wrong", **changes)], RuntimeError("somewhere"))
    assert isinstance(found, UsageError)
    (setting,) = changes
    assert found.setting == setting
    assert found.what.startswith("job 'wrong': its ")
    with pytest.raises(UsageError, match=what):
        raise found


def test_a_forward_that_raises_is_told_with_its_line_and_no_word_of_shapes():
    found = explained([job(model=NoForward)], RuntimeError("somewhere"))
    assert re.search(rf"cannot take a batch of \d+ rows, .*: ValueError: no forward today {AT}$", found.what)
    assert found.works == "a forward that takes such a batch"
    found = explained([job(model=functools.partial(NoForward, raises=False))], RuntimeError("somewhere"))
    assert re.search(rf"RuntimeError: mat1 and mat2 shapes .* {AT}$", found.what)
    assert found.works.startswith("samples of the shape that the model's first layer takes")


def test_an_error_that_no_job_makes_stays_as_it_is():
    error = RuntimeError("of ours")
    assert explained([BASE], error) is error


def test_a_model_for_which_there_is_no_room_is_not_made_to_explain_an_error(monkeypatch):
    wrong = job(optimizer=torch.optim.LBFGS)
    error = RuntimeError("somewhere")
    assert explained([wrong], error) is not error
    monkeypatch.setattr("plait.engine.diagnosis.memory_available_bytes", lambda: 1000)
    monkeypatch.setattr("plait.job.Job.build_model", lambda job: pytest.fail("it was made"))
    assert explained([wrong], error) is error


def test_what_is_refused_already_stays_as_it_is():
    for error in (UsageError("a", setting="b"), FileError("c", setting="d")):
        with pytest.raises(type(error)) as caught, explaining([job(model=NoModel)]):
            raise error
        assert caught.value is error
    with pytest.raises(RuntimeError, match="of ours") as caught, explaining([BASE]):
        raise RuntimeError("of ours")
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("name", ["model", "rate", "closure"])
def test_a_run_refuses_it_before_anything_starts(tmp_path, name):
    changes, what = BROKEN[name]
    here = Cluster.uniform(memory="1GiB", bandwidth="10gbit")
    with pytest.raises(UsageError, match=what):
        plait.run(
            job(**changes), here, directory=tmp_path / "run", profiles=tmp_path, strategy="data", show=False
        )
    assert not (tmp_path / "run").exists()


def test_the_last_line_that_is_not_installed_is_cited():
    with pytest.raises(ValueError, match="learning rate") as caught:
        torch.optim.AdamW([torch.zeros(2)], lr=-1)
    assert cited(caught.value).startswith("ValueError: Invalid learning rate: -1 (test_diagnosis.py:")
    assert cited(ValueError("never\nraised")) == "ValueError: never raised"
