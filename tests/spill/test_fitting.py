"""Jobs that take turns: real devices, a real store, and the bits that plain training gives."""

import dataclasses
import itertools
import os
import re
import signal
import time
import types

import pytest
import torch
from fit_jobs import MEMORY, assert_equal_to_plain, files, job, part
from safetensors.torch import load_file, save_file

from plait import Factory, Timeline
from plait.cluster.machine import memory_limit_bytes, memory_total_bytes
from plait.errors import FileError, UsageError
from plait.evaluation import Evaluation
from plait.spill import Fitting, fit
from plait.spill.footprint import private_bytes
from plait.spill.outcome import Outcome
from plait.spill.settings import Settings
from plait.spill.store import Store
from plait.units import parse_bytes


def test_jobs_that_differ_end_with_the_bits_of_plain_training_in_the_least_memory_that_works(tmp_path):
    wide = {"model": part("mlp", width=768, depth=6)}
    jobs = [
        job("adam", **wide, accumulate=2, clip_norm=1.0, steps=3),
        job("sgd", **wide, optimizer=Factory("torch.optim:SGD", lr=1e-3, momentum=0.9), steps=3, seed=2),
        job("normed", model=part("normed"), evaluation=Evaluation(data=part("rows"), every=2)),
        job("tied", model=part("tied"), data=part("tokens"), loss="plait.losses:cross_entropy",
            inputs=part("tokens_of"), precision="bf16"),
        job("frozen-a", model=part("on_frozen_base")),
        job("frozen-b", model=part("on_frozen_base"), optimizer=Factory("torch.optim:AdamW", lr=3e-3)),
    ]  # fmt: skip
    timeline, lines = Timeline(), []
    little = private_bytes() + (64 << 20)
    with Fitting(
        memory=little, devices=2, directory=tmp_path, timeline=timeline, show=lines.append, commit_every=2
    ) as fitting:
        with pytest.raises(UsageError, match=r"3 processes take .* by themselves") as refused:
            fitting.add(jobs)
        works = refused.value.works.removesuffix(", or fewer devices")
        fitting.settings = dataclasses.replace(fitting.settings, memory=works)
        fitting.add(jobs)
        outcomes = fitting.wait()
    assert [outcome.name for outcome in outcomes] == [job.name for job in jobs]
    for outcome, of in zip(outcomes, jobs, strict=True):
        assert_equal_to_plain(outcome, of)
        assert Outcome.load(tmp_path / f"{of.name}.json") == outcome
    names = [f"{of.name}.{ending}" for of in jobs for ending in ("json", "safetensors")]
    assert files(tmp_path) == sorted(names)  # and nothing else
    assert outcomes.measured.memory_bytes <= parse_bytes(works)
    assert 0.5 * outcomes.forecast.disk_bytes < outcomes.measured.disk_bytes <= outcomes.forecast.disk_bytes
    assert outcomes.measured.read_bytes > 0  # the two wide models do not fit together
    assert {"device 0", "device 1"} <= set(timeline.tracks)
    assert any(re.match(r"adam: \d+ shards?.*; 3 steps", line) for line in lines)
    assert any("normed: 6 of 6 steps, finished" in line for line in lines)
    again = fit(jobs, memory=MEMORY, directory=tmp_path, resume=True, show=False)
    assert list(again) == list(outcomes)  # nothing is trained twice


def test_under_hydras_policy_jobs_alternate_and_bits_stay(tmp_path):
    jobs = [
        job(name, model=part("mlp", width=768, depth=6), steps=2, seed=seed)
        for seed, name in enumerate("abc")
    ]
    timeline = Timeline()
    outcomes = fit(jobs, memory="900MiB", policy="lrtf", directory=tmp_path, timeline=timeline, show=False)
    for outcome, of in zip(outcomes, jobs, strict=True):
        assert_equal_to_plain(outcome, of)
    assert outcomes.measured.memory_bytes <= parse_bytes("900MiB")
    # What was planned can be played: it computes what was foretold, in the memory that jobs shared.
    assert [load.name for load in outcomes.loads] == ["a", "b", "c"]
    foretold = sum(load.work_ms for load in outcomes.loads) / 1e3
    assert foretold == pytest.approx(outcomes.forecast.busy_seconds, rel=1e-6)
    assert outcomes.below is not None
    assert 0 < outcomes.below.memory_bytes < parse_bytes("900MiB")
    order = [span.info["job"] for span in timeline.spans if span.track == "device 0"]
    changes = sum(one != other for one, other in itertools.pairwise(order))
    assert changes > len(jobs)  # not one job after another


def test_idle_devices_lend_their_cores_where_that_is_asked_for(tmp_path):
    alone = job("alone")
    outcomes = fit(alone, memory=MEMORY, devices=2, lend=True, directory=tmp_path, show=False)
    assert_equal_to_plain(outcomes["alone"], dataclasses.replace(alone, threads=2))
    assert any("1 devices have the cores of 2; threads: alone 2" in note for note in outcomes.notes)


def test_a_job_starts_from_weights_that_it_is_given(tmp_path):
    given = job("given", steps=1, optimizer=Factory("torch.optim:SGD", lr=0.0))
    model = dataclasses.replace(given, seed=9).build_model()
    save_file(model.state_dict(), tmp_path / "start.safetensors")
    weights = {"given": tmp_path / "start.safetensors"}
    hoard = []

    def show(line):
        if not hoard:
            hoard.append(b"1" * parse_bytes(MEMORY))

    outcomes = fit(given, memory=MEMORY, directory=tmp_path / "run", weights=weights, show=show)
    assert any(
        re.match(r"all processes .* more than the 1\.17 GiB of memory", note) for note in outcomes.notes
    )
    hoard.clear()
    trained = load_file(outcomes[0].weights)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(UsageError, match=r"no job 'gven'.*works: given"):
        fit(given, memory=MEMORY, directory=tmp_path, weights={"gven": tmp_path}, show=False)
    with pytest.raises(FileError, match=r"no .*nothing for job 'given' to start from"):
        fit(given, memory=MEMORY, directory=tmp_path, weights={"given": tmp_path / "nothing"}, show=False)


def test_a_job_that_fails_does_not_disturb_the_others(tmp_path):
    jobs = [job("good")] + [
        job(how, loss=part("failing_loss", at=5.0, how=how)) for how in ("error", "memory", "nan", "kill")
    ]
    outcomes = fit(jobs, memory=MEMORY, devices=2, directory=tmp_path, show=False)
    assert_equal_to_plain(outcomes["good"], jobs[0])
    expected = {
        "error": "ArithmeticError: a loss of .* is below 5.0",
        "memory": "MemoryError: a loss of .* is below 5.0",
        "nan": "job 'nan' has a loss of nan over a weight of 16 at step",
        "kill": "3 devices died while they computed for job 'kill'",
    }
    for name, error in expected.items():
        assert outcomes[name].end == "failed"
        assert re.match(error, outcomes[name].error), outcomes[name].error
        assert outcomes[name].weights is None
    assert "in failing_loss" in outcomes["error"].error  # its traceback
    assert any("job kill went back to step 0" in note for note in outcomes.notes)


def test_a_job_that_the_disk_has_no_room_for_on_the_way_fails_alone(tmp_path, monkeypatch):
    def fails(method):
        def call(store, of, **options):
            if "bad/grads" in getattr(of, "key", "") or of == "bad":
                raise FileError("there is no room", setting="directory", works="another")
            return method(store, of, **options)

        return call

    monkeypatch.setattr(Store, "define", fails(Store.define))
    monkeypatch.setattr(Store, "revert", fails(Store.revert))
    jobs = [job("bad", clip_norm=1.0), job("good", steps=2)]
    outcomes = fit(jobs, memory=MEMORY, directory=tmp_path, show=False)
    assert (outcomes["bad"].end, outcomes["bad"].error.split(" (")[0]) == ("failed", "there is no room")
    assert_equal_to_plain(outcomes["good"], jobs[1])


def test_jobs_that_the_disk_has_no_room_for_are_refused_together(tmp_path, monkeypatch):
    monkeypatch.setattr("plait.spill.disk.disk_free_bytes", lambda directory: 100_000)
    jobs = [job("one"), job("two", clip_norm=1.0)]
    need = r"training of one, two \(.*\) needs \d+\.\d+ KiB of disk .* 97\.66 KiB free .*a disk with \d+"
    with pytest.raises(UsageError, match=need):
        fit(jobs, memory=MEMORY, directory=tmp_path, show=False)
    assert files(tmp_path) == []


def test_a_directory_has_one_run_at_a_time(tmp_path):
    with Fitting(memory=MEMORY, directory=tmp_path, show=False) as fitting:
        with pytest.raises(UsageError, match=f"{tmp_path} is in use by process {os.getpid()}"):
            fit(job("a"), memory=MEMORY, directory=tmp_path, show=False)
        assert fitting.wait().notes == ()
    assert files(tmp_path) == []


def test_jobs_may_come_from_a_generator(tmp_path):
    with pytest.raises(UsageError, match=r"no job 'c'.*works: a, b"):
        fit((job(name) for name in "ab"), memory=MEMORY, directory=tmp_path, weights={"c": "d"})
    with pytest.raises(UsageError, match=r"no path.*works: 'runs/first'"):  # and not that there are no jobs
        fit((job(name) for name in "ab"), memory=MEMORY, directory="")


def test_a_budget_may_be_the_limit_before_it_was_rounded_to_pages(tmp_path):
    limit = min(memory_total_bytes(), memory_limit_bytes() or memory_total_bytes())
    assert Settings(memory=limit + 4095, directory=tmp_path).memory_bytes == limit
    with pytest.raises(UsageError, match="a budget of"):
        Settings(memory=limit + 4096, directory=tmp_path)


def test_a_device_that_is_killed_is_replaced_and_bits_stay(tmp_path):
    jobs = [job(name, steps=30, loss=part("slow_loss", seconds=0.02), seed=i) for i, name in enumerate("abc")]
    lines = []
    with Fitting(memory=MEMORY, devices=2, directory=tmp_path, show=lines.append, commit_every=3) as fitting:
        fitting.add(jobs)
        for kill in range(2):
            wait_for_steps(fitting, 4 * (kill + 1))
            os.kill(fitting.devices[kill].pid, signal.SIGKILL)
        outcomes = fitting.wait()
    for outcome, of in zip(outcomes, jobs, strict=True):
        assert_equal_to_plain(outcome, of)
    assert sum("SIGKILL" in note for note in outcomes.notes) == 2
    assert any("went back to step" in note for note in outcomes.notes)


def wait_for_steps(fitting, steps):
    deadline = time.monotonic() + 60
    while sum(fitting.steps().values()) < steps:
        assert time.monotonic() < deadline, fitting.steps()
        time.sleep(0.01)


def test_jobs_are_added_stopped_and_cloned_while_others_run(tmp_path):
    slow = {"loss": part("slow_loss", seconds=0.03)}
    first, unwanted = job("first", steps=20, **slow), job("unwanted", steps=1000, **slow)
    with Fitting(memory=MEMORY, devices=2, directory=tmp_path, show=False) as fitting:
        fitting.add([first, unwanted])
        wait_for_steps(fitting, 4)
        clone = fitting.clone("first", name="same")
        other = fitting.clone("first", name="other", optimizer=Factory("torch.optim:AdamW", lr=0.1))
        added = job("added", seed=5, **slow)
        fitting.add(added)
        fitting.stop("unwanted")
        with pytest.raises(UsageError, match="no job 'nobody' is under way"):
            fitting.stop("nobody")
        with pytest.raises(UsageError, match="differs in its parameters from 'first'"):
            fitting.clone("first", name="sgd", optimizer=Factory("torch.optim:SGD", lr=0.1))
        with pytest.raises(UsageError, match="two jobs are named 'added'"):
            fitting.add(added)
        with pytest.raises(UsageError, match=r"a job has no 'rate'.*works: name, model"):
            fitting.clone("first", name="faster", rate=3)
        with pytest.raises(UsageError, match="None is not a job"):
            fitting.add(None)
        outcomes = fitting.wait()
        with pytest.raises(UsageError, match="this run has ended"):
            fitting.add(job("late"))
    assert_equal_to_plain(outcomes["first"], first)
    assert_equal_to_plain(outcomes["added"], added)
    assert clone.name == "same"
    assert outcomes["same"].losses == outcomes["first"].losses
    assert same_weights(outcomes["same"], outcomes["first"])
    assert other.optimizer.arguments == {"lr": 0.1}
    assert outcomes["other"].losses[:1] == outcomes["first"].losses[:1]
    assert outcomes["other"].steps == 20
    assert not same_weights(outcomes["other"], outcomes["first"])
    assert (outcomes["unwanted"].end, outcomes["unwanted"].weights) == ("stopped", None)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("count", "what", "setting", "works"),
    [
        (0, r"1 GPUs were asked for, and torch .* sees 0", "device, devices", "device='cpu'"),
        (1, r"a unit may need up to 1\.17 GiB, and a GPU has 1\.00 GiB", "memory", "1024MiB"),
    ],
)
def test_gpus_that_are_not_there_or_too_small_are_refused(count, what, setting, works, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    small = types.SimpleNamespace(total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: small)
    with pytest.raises(UsageError, match=what) as refused:
        fit([job("a")], memory=MEMORY, directory=tmp_path / "run", device="cuda", show=False)
    assert (refused.value.setting, refused.value.works) == (setting, works)
    assert not (tmp_path / "run").exists()


def same_weights(one, other):
    mine, theirs = load_file(one.weights), load_file(other.weights)
    return all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


BAD = {
    "no memory": ({"memory": "0B"}, "a budget of 0 B", "memory"),
    "more memory than there is": ({"memory": "900TiB"}, r"a budget of 900\.00 TiB on a machine", "memory"),
    "no devices": ({"devices": 0}, "devices is 0", "devices"),
    "more devices than cores": ({"devices": 999}, "999 devices were asked of a machine", "devices"),
    "no such device": ({"device": "tpu"}, "there is no device 'tpu'", "device"),
    "no commits": ({"commit_every": 0}, "commit_every is 0", "commit_every"),
    "no such policy": ({"policy": "random"}, "no policy 'random'", "policy"),
    "no jobs": ({"jobs": []}, "there are no jobs", "jobs"),
    "not a job": ({"jobs": ["a"]}, "'a' is not a job", "jobs"),
    "nothing": ({"jobs": None}, "None is not a job", "jobs"),
    "two bytes": ({"memory": "2"}, r"a budget of 2 B for 2 processes, of which this one alone", "memory"),
    "a byte and a half": ({"memory": 1.5}, "a budget of 2 B", "memory"),
    "no directory": ({"directory": None}, "None is no path", "directory"),
    "a number for a directory": ({"directory": 3}, "3 is no path", "directory"),
    "an empty directory": ({"directory": ""}, "'' is no path", "directory"),
    "weights of nothing": ({"weights": {"a": None}}, "None is no path", "weights"),
    "weights of nobody": ({"weights": "a"}, "'a' does not give jobs their weights", "weights"),
    "resume in words": ({"resume": "yes"}, "resume is 'yes'", "resume"),
    "prefetch in words": ({"prefetch": "no"}, "prefetch is 'no'", "prefetch"),
    "export in words": ({"export": "no"}, "export is 'no'", "export"),
    "lend in words": ({"lend": 1}, "lend is 1", "lend"),
    "loud": ({"show": "loud"}, "show is 'loud'", "show"),
    "a name for a timeline": ({"timeline": "t"}, "'t' is no timeline", "timeline"),
    "two of a name": ({"jobs": [job("a"), job("a", seed=1)]}, "two jobs are named 'a'", "name"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_run_is_refused_before_anything_starts(bad, tmp_path):
    given, what, setting = BAD[bad]
    given = {"jobs": [job("a")], "memory": MEMORY, "directory": tmp_path / "run", "show": False, **given}
    with pytest.raises(UsageError, match=what) as refused:
        fit(given.pop("jobs"), **given)
    assert refused.value.setting == setting
    assert refused.value.works


def test_what_is_likely_to_work_is_named_where_torch_is_still_to_be_imported(tmp_path, monkeypatch):
    monkeypatch.setattr("plait.spill.settings.private_bytes", lambda: 24 << 20)
    with pytest.raises(UsageError, match=r"2 processes, of which this one alone takes 24\.00 MiB") as refused:
        fit([job("a")], memory="20MiB", directory=tmp_path, show=False)
    assert refused.value.works == "about 328MiB and what the model takes"


def test_a_directory_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be written"):
        fit(job("a"), memory=MEMORY, directory=tmp_path / "file", show=False)
    (tmp_path / "a.json").write_text(
        Outcome(name="a", end="finished", losses=(1.0,), job=job("a").to_json()).to_json()
    )
    with pytest.raises(FileError, match="holds jobs of an earlier run: a"):
        fit(job("a"), memory=MEMORY, directory=tmp_path, show=False)
    with pytest.raises(FileError, match="begun with another seed: 0, now 1"):
        fit(job("a", seed=1), memory=MEMORY, directory=tmp_path, resume=True, show=False)
    with pytest.raises(UsageError, match="finished after 1 steps and keeps no state to go on to 6 from"):
        fit(job("a"), memory=MEMORY, directory=tmp_path, resume=True, show=False)
