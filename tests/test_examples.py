"""The examples train."""

import contextlib
import dataclasses
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

import plait
from plait import reference
from plait.cluster.machine import usable_cores
from plait.engine.workload import Workload
from plait.extras import install
from plait.job import Job, read_job, read_jobs
from plait.pipeline import orders, train
from plait.pipeline.plan import Forecast, PipelinePlan, Stage

ROOT = Path(__file__).parents[1]
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "PLAIT_COMPRESS": "off"}


def needs(package, extra):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is missing: {install(extra)}")


def test_the_text_jobs_learn():
    jobs = read_jobs(ROOT / "examples" / "text.py")
    assert [job.name for job in jobs] == ["text", "text-dropout", "text-gpt2"]
    for job in jobs:
        result = reference.train(dataclasses.replace(job, steps=8, evaluation=None))
        assert sum(result.losses[-3:]) < 0.9 * sum(result.losses[:3]), job.name


def test_their_jobs_travel_by_the_path_of_the_file():
    for job in read_jobs(ROOT / "examples" / "text.py"):
        assert Job.from_json(job.to_json()) == job
        assert job.model.target.startswith(str(ROOT / "examples" / "text.py"))


def test_the_digits_are_read():
    (job,) = read_jobs(ROOT / "examples" / "digits.py")
    result = reference.train(dataclasses.replace(job, epochs=None, steps=30))
    assert result.evaluations[-1].metrics["accuracy"] > 0.8


@needs("transformers", "hf")
def test_a_hugging_face_model_learns_by_its_own_loss():
    job = read_job(ROOT / "examples" / "huggingface.py")
    assert Job.from_json(job.to_json()) == job
    result = reference.train(dataclasses.replace(job, steps=10, evaluation=None))
    assert sum(result.losses[-3:]) < 0.8 * sum(result.losses[:3])


def in_stages(job, plan):
    return train(job, plan).losses


@needs("transformers", "hf")
def test_its_hidden_letters_count_alike_however_a_batch_is_cut(ranks):
    job = read_job(ROOT / "examples" / "huggingface.py")
    exact = dataclasses.replace(job, steps=3, precision="fp64", evaluation=None)
    whole = reference.train(exact).losses
    pieces = reference.train(dataclasses.replace(exact, accumulate=3)).losses
    assert pieces == pytest.approx(whole, abs=1e-10)
    plan = PipelinePlan(
        stages=(Stage(first=0, end=4), Stage(first=4, end=8)),
        order=orders.kfkb(2, 3, 1),
        global_batch=job.batch,
        forecast=Forecast(step_ms=0.0, busy_ms=(0.0, 0.0), peak_bytes=(0, 0)),
    )
    for staged in ranks(2, in_stages, exact, plan):
        assert staged == pytest.approx(whole, abs=1e-10)


def as_a_script(name, *words):
    """What one worker of torchrun prints, in a process that has torch already."""
    sys.argv = [name, *words]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(name, run_name="__main__")
    return text.getvalue()


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        pytest.param("trainer", r"'loss': '?([\d.]+)", marks=needs("accelerate", "hf")),
        pytest.param("lightning_strategy", r"loss ([\d.]+)", marks=needs("lightning", "lightning")),
    ],
)
def test_a_framework_trains_with_fewer_bits(name, loss, ranks):
    script = str(ROOT / "examples" / f"{name}.py")
    said, _ = ranks(2, as_a_script, script, "--steps", "21", group=False, environment=TORCHRUN)
    losses = [float(each) for each in re.findall(loss, said)]
    assert losses[-1] < 0.9 * losses[0], said
    assert re.search(r"plait compresses the gradients of \d+ parameters to 4 bits", said), said
    assert float(re.search(r"([\d.]+) times fewer than uncompressed", said).group(1)) > 6, said


@needs("transformers", "hf")
def test_a_sweep_under_a_memory_limit(tmp_path):
    sweep = Workload.read(ROOT / "examples" / "sweep.py").sweeps["gpt2-sweep"]
    devices = min(2, len(usable_cores()))  # the limit is of each, so more of them hold all trials
    done = plait.run(sweep, directory=tmp_path / "run", devices=devices, show=False)
    ends = sorted(result.end for result in done.values())
    assert (ends.count("finished"), ends.count("stopped")) == (4, 4)
    assert done["gpt2-0"].facts["measured"]["read_bytes"] > 0  # what had waited on disk
    assert done.finished
