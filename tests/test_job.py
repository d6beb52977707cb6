import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from plait import losses
from plait.errors import FileError, UsageError
from plait.factory import Factory
from plait.job import Evaluation, Job, read_job, read_jobs


def net(*, width=4, frozen=False):
    model = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))
    model[0].requires_grad_(not frozen)
    return model


def points(seed, *, count=20):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return [(x[i], (x[i].sum() > 0).long()) for i in range(count)]


def by_hand(parameters, *, lr):
    decayed = [(name, p) for name, p in parameters if p.ndim > 1]
    rest = [(name, p) for name, p in parameters if p.ndim <= 1]
    return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=lr)


def seedless():
    return points(0)


def not_a_model():
    return 5


def optimizer_of(one):
    return one.build_optimizer(one.build_model().named_parameters())


def not_an_optimizer(parameters):
    return 5


BASE = {
    "name": "small",
    "model": net,
    "data": points,
    "loss": "plait.losses:cross_entropy",
    "optimizer": functools.partial(torch.optim.AdamW, lr=0.1),
    "batch": 8,
    "steps": 3,
}
FULL = {
    **BASE,
    "model": functools.partial(net, width=5),
    "steps": None,
    "epochs": 2,
    "schedule": functools.partial(CosineAnnealingLR, T_max=10),
    "weight": losses.rows,
    "inputs": "plait.objective:all_inputs",
    "collate": "torch.utils.data:default_collate",
    "accumulate": 2,
    "clip_norm": 1,
    "precision": "fp64",
    "nonfinite": "skip",
    "evaluation": Evaluation(data=points, every=2, batch=3, metrics={"accuracy": losses.accuracy}),
    "seed": 7,
    "threads": 2,
    "priority": "background",
    "strategy": "spill",
    "memory": "1.5GiB",
}


def job(**changes):
    return Job(**{**BASE, **changes})


@pytest.mark.parametrize("fields", [BASE, FULL])
def test_a_job_goes_through_json_as_it_is(fields):
    one = Job(**fields)
    other = Job.from_json(one.to_json())
    assert other == one
    assert hash(other) == hash(one)
    assert other.digest == one.digest
    assert set(json.loads(one.to_json())) == {"format", *(field.name for field in dataclasses.fields(Job))}


def test_every_field_counts_in_the_digest():
    assert FULL.keys() == {field.name for field in dataclasses.fields(Job)}
    base = job(steps=None, epochs=1)
    changed = [
        dataclasses.replace(base, **{name: value})
        for name, value in FULL.items()
        if name not in ("name", "batch", "steps", "loss", "data", "optimizer")
    ]
    changed += [dataclasses.replace(base, name="other"), dataclasses.replace(base, batch=9)]
    digests = {one.digest for one in changed}
    assert len(digests) == len(changed)
    assert base.digest not in digests


def digest_of(text):
    return Job.from_json(text).digest


def test_the_digest_is_the_same_in_another_process(ranks):
    assert ranks(1, digest_of, Job(**FULL).to_json(), group=False) == [Job(**FULL).digest]


def test_values_are_held_in_one_form():
    full = Job(**FULL)
    assert full.memory_bytes == 3 * 2**29
    assert (full.clip_norm, type(full.clip_norm)) == (1.0, float)
    assert full.model == Factory(net, width=5)
    assert job(steps=torch.tensor(4)).steps == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        full.seed = 3


BAD = [
    ({"name": ""}, "name", "'' cannot be a job's name"),
    ({"name": "../up"}, "name", "'../up' cannot be"),
    ({"name": None}, "name", "None cannot be"),
    ({"name": "x" * 201}, "name", "a job's name of 201 characters"),
    ({"model": lambda: net()}, "model", "a lambda has no name"),
    ({"data": "points"}, "data", "does not name a function"),
    ({"optimizer": torch.optim.SGD(net().parameters(), lr=1.0)}, "optimizer", "a SGD object has no name"),
    ({"loss": nn.CrossEntropyLoss()}, "loss", "a CrossEntropyLoss object has no name"),
    ({"schedule": lambda o: None}, "schedule", "a lambda"),
    ({"weight": lambda b: 1}, "weight", "a lambda"),
    ({"inputs": lambda b: b}, "inputs", "a lambda"),
    ({"collate": lambda b: b}, "collate", "a lambda"),
    ({"batch": 0}, "batch", "batch is 0, not a whole number of at least 1"),
    ({"batch": -8}, "batch", "batch is -8"),
    ({"batch": 2.5}, "batch", "batch is 2.5"),
    ({"batch": True}, "batch", "batch is True"),
    ({"batch": None}, "batch", "batch is None"),
    ({"steps": 0}, "steps", "steps is 0"),
    ({"steps": None}, "steps, epochs", "neither steps nor epochs"),
    ({"epochs": 1}, "steps, epochs", "both steps and epochs"),
    ({"steps": None, "epochs": 0}, "epochs", "epochs is 0"),
    ({"accumulate": 0}, "accumulate", "accumulate is 0"),
    ({"accumulate": 9}, "accumulate", "a batch of 8 rows cannot be cut into 9 micro-batches"),
    ({"clip_norm": 0}, "clip_norm", "cannot be clipped to 0"),
    ({"clip_norm": -1.0}, "clip_norm", "cannot be clipped to -1.0"),
    ({"clip_norm": float("nan")}, "clip_norm", "cannot be clipped to nan"),
    ({"clip_norm": float("inf")}, "clip_norm", "cannot be clipped to inf"),
    ({"clip_norm": 10**400}, "clip_norm", "cannot be clipped to 1000"),
    ({"memory": 10**400}, "memory", "not a finite size"),
    ({"clip_norm": "1"}, "clip_norm", "cannot be clipped to '1'"),
    ({"clip_norm": True}, "clip_norm", "cannot be clipped to True"),
    ({"precision": "fp16"}, "precision", "there is no precision 'fp16'"),
    ({"nonfinite": "ignore"}, "nonfinite", "there is no nonfinite 'ignore'"),
    ({"priority": "high"}, "priority", "there is no priority 'high'"),
    ({"strategy": "magic"}, "strategy", "there is no strategy 'magic'"),
    ({"strategy": ["data"]}, "strategy", "there is no strategy"),
    ({"evaluation": points}, "evaluation", "is not an evaluation"),
    ({"seed": -1}, "seed", "seed is -1"),
    ({"seed": 2**63}, "seed", "seed is 9223372036854775808, more than 9223372036854775807"),
    ({"steps": 10**30}, "steps", f"steps is {10**30}, more than {2**63 - 1}"),
    ({"threads": 0}, "threads", "threads is 0"),
    ({"memory": "much"}, "memory", "'much' is not a size"),
    ({"memory": -1}, "memory", "cannot be negative"),
    ({"memory": 0}, "memory", "a memory budget of 0 bytes"),
    ({"memory": "4Gib"}, "memory", "'4Gib' ends in a small b"),
    ({"loss": losses.model_loss}, "weight", "does not tell what it is the mean over"),
]


@pytest.mark.parametrize(("changes", "setting", "reason"), BAD, ids=[str(bad[0])[:30] for bad in BAD])
def test_a_bad_value_is_refused_with_its_setting_and_one_that_works(changes, setting, reason):
    with pytest.raises(UsageError) as caught:
        job(**changes)
    assert reason in caught.value.what
    assert setting != "batch" or caught.value.works == "32"
    assert caught.value.setting == setting
    assert caught.value.works


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"data": lambda seed: []}, "evaluation.data"),
        ({"every": 0}, "evaluation.every"),
        ({"batch": -1}, "evaluation.batch"),
        ({"metrics": {"best": lambda output, batch: 1}}, "evaluation.metrics.best"),
        ({"metrics": [losses.accuracy]}, "evaluation.metrics"),
        ({"metrics": {"loss": losses.accuracy}}, "evaluation.metrics"),
    ],
)
def test_so_is_one_of_an_evaluation(changes, setting):
    with pytest.raises(UsageError) as caught:
        Evaluation(**{"data": points, **changes})
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("change", "setting", "reason"),
    [
        (lambda c: c.pop("format"), "format", "the format is None"),
        (lambda c: c.update(format="plait.job/9"), "format", "the format is 'plait.job/9'"),
        (lambda c: c.update(colour=1), "colour", "a job has no field colour"),
        (lambda c: c["evaluation"].update(colour=1), "evaluation.colour", "no field evaluation.colour"),
        (lambda c: c.pop("batch"), "batch", "the job has no batch"),
        (lambda c: c["evaluation"].pop("data"), "evaluation.data", "the job has no evaluation.data"),
        (lambda c: c.update(model={"call": 1}), "model", "is not a call"),
        (lambda c: c.update(batch="8"), "batch", "batch is '8'"),
        (lambda c: c.update(evaluation=[]), "evaluation", "is not an evaluation"),
    ],
)
def test_a_wrong_file_is_named_with_the_field(change, setting, reason):
    content = json.loads(Job(**FULL).to_json())
    change(content)
    with pytest.raises((FileError, UsageError)) as caught:
        Job.from_json(json.dumps(content))
    assert reason in caught.value.what
    assert caught.value.setting == setting


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", "[" * 100_000, "1" * 5000])
def test_what_is_no_job_is_refused(text):
    with pytest.raises(FileError):
        Job.from_json(text)


def test_the_same_seed_builds_the_same_model_and_another_another():
    one, same, other = job().build_model(), job().build_model(), job(seed=1).build_model()
    assert one.training
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one[0].weight, other[0].weight)


def test_weights_come_from_seed_and_name_not_from_what_was_built_before():
    narrow, wide = job().build_model(), job(model=functools.partial(net, width=4)).build_model()
    torch.manual_seed(99)
    assert torch.equal(narrow[2].weight, wide[2].weight)
    deeper = Job(**{**BASE, "model": deeper_net}).build_model()
    assert torch.equal(narrow[0].weight, deeper[0].weight)


def deeper_net():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def test_double_precision_widens_the_same_weights():
    single, double = job().build_model(), job(precision="fp64").build_model()
    assert double[0].weight.dtype == torch.float64
    assert torch.equal(double[0].weight, single[0].weight.double())


def test_batches_are_the_jobs():
    batches = job(seed=5).build_batches()
    x, y = batches.fetch(batches.indices(0))
    assert x.shape == (8, 3)
    assert torch.equal(y, (x.sum(1) > 0).long())
    assert job().total_steps(batches.steps_per_epoch) == 3
    assert job(steps=None, epochs=5).total_steps(batches.steps_per_epoch) == 10


def test_an_optimizer_gets_the_trained_parameters_by_name():
    one = job(model=functools.partial(net, frozen=True), optimizer=functools.partial(by_hand, lr=0.5))
    optimizer = one.build_optimizer(one.build_model().named_parameters())
    assert [group["param_names"] for group in optimizer.param_groups] == [["2.weight"], ["2.bias"]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0]


def test_a_schedule_follows_its_optimizer():
    one = job(schedule=functools.partial(CosineAnnealingLR, T_max=10))
    optimizer = one.build_optimizer(one.build_model().named_parameters())
    schedule = one.build_schedule(optimizer)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] < 0.1
    assert job().build_schedule(optimizer) is None


@pytest.mark.parametrize(
    ("changes", "build", "reason"),
    [
        ({"model": not_a_model}, lambda j: j.build_model(), "returned a int"),
        (
            {"model": functools.partial(net, height=2)},
            lambda j: j.build_model(),
            "takes no argument 'height'",
        ),
        (
            {"data": functools.partial(points, count=7)},
            lambda j: j.build_batches(),
            "a global batch of 8 rows",
        ),
        ({"optimizer": not_an_optimizer}, lambda j: optimizer_of(j), "returned a int"),
        ({"optimizer": "torch.optim:AdamZ"}, lambda j: optimizer_of(j), "torch.optim has no 'AdamZ'"),
        ({"schedule": ReduceLROnPlateau}, lambda j: j.build_schedule(optimizer_of(j)), "ReduceLROnPlateau"),
        ({"loss": "losses_of_mine:l1"}, lambda j: j.build_objective(), "cannot be imported"),
        ({"data": seedless}, lambda j: j.build_batches(), r"is called with \(seed\): too many positional"),
        ({"loss": seedless}, lambda j: j.build_objective(), r"is called with \(output, batch\): too many"),
        ({"model": by_hand}, lambda j: j.build_model(), r"is called with \(\): missing a required argument"),
    ],
)
def test_what_a_factory_should_have_built_is_said_before_training(changes, build, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        build(job(**changes))
    assert caught.value.setting in (*changes, "batch")


def test_a_model_with_nothing_to_train_is_refused():
    one = job(model=nn.Identity)
    with pytest.raises(UsageError, match="no parameter requires a gradient"):
        optimizer_of(one)


def test_the_weight_is_the_losss_own_unless_told():
    assert job().build_objective().weight is losses.targets
    assert job(weight=losses.rows).build_objective().weight.func is losses.rows
    assert job(loss=my_loss).build_objective().weight is losses.rows


def my_loss(output, batch):
    return output.mean()


def test_labels_go_to_whoever_computes_the_loss():
    batch = {"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2, 3)}
    inside = job(loss=losses.model_loss, weight=losses.next_tokens).build_objective()
    assert set(inside.model_inputs(batch)[1]) == {"input_ids", "labels"}
    assert set(job().build_objective().model_inputs(batch)[1]) == {"input_ids"}


def test_jobs_are_read_from_a_file(tmp_path):
    text = job().to_json()
    (tmp_path / "job.json").write_text(text)
    assert read_jobs(tmp_path / "job.json") == [job()]
    source = f"from plait.job import Job\njob = Job.from_json({text!r})"
    (tmp_path / "one.py").write_text(source)
    assert read_jobs(str(tmp_path / "one.py")) == [job()]
    (tmp_path / "many.py").write_text(
        source + "\nimport dataclasses\njobs = [job, dataclasses.replace(job, name='b')]"
    )
    assert [one.name for one in read_jobs(tmp_path / "many.py")] == ["small", "b"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.py", None, "there is no jobs file"),
        ("jobs.toml", "", "there is no jobs file"),
        ("empty.py", "x = 1", "defines neither a list of jobs nor a job"),
        ("wrong.py", "jobs = [1]", "defines neither"),
        ("bare.py", "jobs = 5", "defines neither"),
        (
            "sweep.py",
            "class Sweep:\n  class job:\n    name = 'gpt'\njobs = [Sweep()]",
            "a Sweep of 'gpt'.*dry-run",
        ),
        ("broken.json", "{", "not JSON"),
    ],
)
def test_a_file_without_jobs_is_refused(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(FileError, match=reason):
        read_jobs(tmp_path / name)


def test_a_wrong_job_file_is_named(tmp_path):
    file = tmp_path / "job.json"
    file.write_text('{"format": "plait.profile/1"}')
    with pytest.raises(FileError, match=r"job\.json: the format is 'plait.profile/1'"):
        read_jobs(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match=r"job\.json cannot be read: 'utf-8' codec"):
        read_jobs(file)


def test_one_job_of_a_file(tmp_path):
    (tmp_path / "job.json").write_text(job().to_json())
    assert read_job(tmp_path / "job.json") == read_job(tmp_path / "job.json", "small") == job()
    (tmp_path / "two.py").write_text(
        f"import dataclasses\nfrom plait.job import Job\none = Job.from_json({job().to_json()!r})\n"
        "jobs = [one, dataclasses.replace(one, name='b')]"
    )
    assert read_job(tmp_path / "two.py", "b").name == "b"
    for name, reason in ((None, "has 2 jobs"), ("c", "has no job 'c'")):
        with pytest.raises(UsageError, match=reason) as caught:
            read_job(tmp_path / "two.py", name)
        assert caught.value.setting == "job"
        assert "small, b" in caught.value.works


def test_two_jobs_of_one_name_are_refused(tmp_path):
    file = tmp_path / "jobs.py"
    file.write_text(f"from plait.job import Job\njobs = [Job.from_json({job().to_json()!r})] * 2")
    with pytest.raises(FileError, match="2 jobs named 'small'"):
        read_jobs(file)


def test_a_job_is_described_without_torch():
    source = str(Path(sys.modules["plait"].__file__).parents[1])
    code = (
        "import sys, plait.job, plait.collective, plait.checkpoint, plait.determinism\n"
        f"job = plait.job.Job.from_json({Job(**FULL).to_json()!r})\n"
        "print(job.digest, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [Job(**FULL).digest, "False"]
