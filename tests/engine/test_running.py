"""Whole runs in real processes: every strategy, failures, stops, and going on."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time

import engine_jobs
import pipeline_jobs
import pytest
from engine_jobs import ADAM, SMALL, breaking, holding_points, narrow_points, slow, workers_of

import plait
from plait import reference
from plait.burst import BurstPlan
from plait.cluster import Cluster, Tier
from plait.engine import Limits
from plait.engine.assignment import tasks_of
from plait.engine.record import Record
from plait.engine.running import _first_attempt
from plait.engine.worker import _failed
from plait.errors import FileError, UsageError
from plait.evaluation import Evaluation
from plait.spill import Choice, Selection, no_halving
from plait.units import format_bytes
from reference_jobs import job, points

JUDGED = job(SMALL, evaluation=Evaluation(data=points, every=4))
QUICK = Limits(silence_s=5.0, backoff_s=0.05)


@pytest.fixture
def here(tmp_path):
    """Two devices of this machine and its disk, as far as tests need to know them."""
    found = Cluster.uniform(devices_per_host=2, memory="1GiB", bandwidth="10gbit", latency="20us")
    rates = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}
    disk = Tier(name="disk", host="node0", capacity_bytes=1 << 36, directory=str(tmp_path), **rates)
    return dataclasses.replace(found, tiers=(disk,))


@pytest.fixture
def go(tmp_path, here, monkeypatch):
    def run(jobs, **settings):
        settings = {"directory": tmp_path / "run", "show": False, "limits": QUICK, **settings}
        return plait.run(jobs, here, profiles=tmp_path / "profiles", **settings)

    return run


def events(done, kind):
    lines = (done.directory / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def assert_close(found, plain):
    assert len(found) == len(plain)
    assert all(math.isclose(a, b, rel_tol=1e-10) for a, b in zip(found, plain, strict=True))


def assert_judged(done):
    """An evaluation is written down when it is made: after its step, and before the next one."""
    history = [row for row in Record.read(done.directory).history() if row["job"] == "small"]
    kinds = ["evaluation" if "evaluation" in row else row["step"] for row in history]
    assert kinds == [0, 1, 2, 3, "evaluation", 4, 5, "evaluation"]
    assert [row["step"] for row in history if "evaluation" in row] == [3, 5]
    assert history[-1]["evaluation"]["loss"] == done["small"].evaluations[-1].loss


@pytest.mark.parametrize("strategy", ["data", "pipeline", "burst"])
def test_every_strategy_trains_the_same(go, strategy):
    done = go(JUDGED, strategy=strategy)
    assert_close(done["small"].losses, reference.train(SMALL).losses)
    assert_judged(done)
    assert done.finished
    assert done["small"].strategy == strategy
    assert done["small"].weights.is_file()
    assert done.report.is_file()


@pytest.mark.parametrize("strategy", ["pipeline", "burst"])
def test_what_workers_hand_to_the_wire_is_in_rows_and_report(go, monkeypatch, strategy):
    wide = job(SMALL, model=functools.partial(engine_jobs.wide, width=64), batch=8)
    if strategy == "pipeline":  # 64 numbers of each row pass the cut, in two pieces with a head each
        plan, sent = pipeline_jobs.plan_for(wide, 2, 2), 8 * 8 * 64
    else:  # of two ranks each sends half of every gradient twice; then half of the rows come to rank 0
        plan = BurstPlan.of(["0", "2", "4"], [2, 2, 1], batch=8)
        sent = 8 * (7 * 64 + 65 * 64)

    def on_two(*given):
        (task,) = tasks_of(*given)
        both = ("node0/0", "node0/1")
        return (dataclasses.replace(task, plan=plan.to_json(), devices=both, cores=(), compress=None),)

    monkeypatch.setattr("plait.engine.running.tasks_of", on_two)
    lines = []
    done = go(wide, strategy=strategy, show=lines.append)
    rows = Record.read(done.directory).rows()["small"]
    assert len(rows) == wide.steps
    # What is told besides (heads, the loss, which gradients there are) is some hundred bytes.
    assert all(sent < row["wire_bytes"] < sent + 8 * 4 * 64 + 2048 for row in rows), rows
    assert any(line.startswith("small: step ") and "sent a step" in line for line in lines)
    mean = format_bytes(sum(row["wire_bytes"] for row in rows) / len(rows))
    assert mean in done.report.read_text()


def test_workers_tell_what_they_do_before_their_first_step(go, tmp_path):
    lines = []
    stopped = breaking(tmp_path / "flag", at=4, how="killed")
    done = go(stopped, strategy="data", devices=1, save_every=2, show=lines.append)
    assert done.finished
    told = [line.removeprefix("small: ") for line in lines if line.startswith("small: ")]
    told = [line for line in told if not line.startswith(("step ", "started", "restarted", "broken"))]
    begins = ["importing", "building the model", "taking step 1"]
    again = [*begins[:2], "reading the checkpoint", "restoring the checkpoint at step 2", "taking step 3"]
    assert told[: len(begins) + len(again)] == [*begins, *again]


def test_spilled_jobs_and_a_sweep_end_with_the_bits_of_plain_training(go, tmp_path):
    space = {"optimizer.lr": Choice([0.1, 0.05])}
    sweep = Selection(job(SMALL, name="swept"), space, no_halving(trials=2, most_steps=6), seed=1)
    said = []
    done = go([job(JUDGED, strategy="spill", memory="1GiB"), sweep], show=said.append)
    assert done["small"].losses == reference.train(SMALL).losses
    assert_judged(done)
    measured = done["small"].facts["measured"]
    assert all(measured[name] > 0 for name in ("memory_bytes", "written_bytes", "seconds"))
    assert "peak memory" in done.report.read_text()
    rows = Record.read(done.directory).rows()["small"]
    assert all(row["seconds"] > 0 and row["samples_per_s"] > 0 for row in rows[1:])
    last = [place for place, line in enumerate(said) if line.startswith("small: step ")][-1]
    assert last < said.index("small: finished")
    assert any(line.startswith("small: expected ") and line.endswith(" a step") for line in said)
    trials = [name for name in done if name.startswith("swept")]
    assert len(trials) == 2
    assert all(done[name].finished for name in trials)
    (best,) = [name for name in trials if done[name].facts.get("best")]
    assert done[best].losses[-1] == min(done[name].losses[-1] for name in trials)
    assert "the best trial" in str(done[best])
    tried = json.loads((done.directory / "tasks" / "swept-sweep" / "trials.json").read_text())["trials"]
    assert set(tried) == set(trials)
    assert all(values["optimizer.lr"] in (0.1, 0.05) for values in tried.values())


def test_a_sweep_that_fails_is_a_failure_of_the_run(go):
    space = {"optimizer.no_such": Choice([0.1])}
    sweep = Selection(job(SMALL, name="swept", memory="1GiB"), space, no_halving(trials=1, most_steps=6))
    done = go(sweep)
    assert done["swept"].end == "failed"
    assert "no_such" in done["swept"].error
    assert not done.finished
    assert plait.run(resume=done.directory, show=False, limits=QUICK)["swept"].end == "failed"


def test_a_worker_that_is_killed_goes_on_from_its_checkpoint_to_the_same_bits(go, tmp_path):
    broken = breaking(tmp_path / "flag", at=4, how="killed")
    done = go(broken, strategy="data", devices=1, save_every=2)
    assert done["small"].losses == reference.train(SMALL).losses
    assert done["small"].restarts == 1
    (event,) = events(done, "broken")
    assert "SIGKILL" in event["text"]
    attempts = [
        json.loads(line)["attempt"] for line in (done.directory / "metrics.jsonl").read_text().splitlines()
    ]
    assert sorted(set(attempts)) == [0, 1]


def test_a_worker_that_is_silent_is_given_up(go, tmp_path):
    done = go(
        breaking(tmp_path / "flag", at=3, how="stopped"),
        strategy="data",
        limits=Limits(silence_s=3.0, backoff_s=0.05),
    )
    assert_close(done["small"].losses, reference.train(SMALL).losses)
    (event,) = events(done, "broken")
    assert "not been heard" in event["text"]


@pytest.mark.parametrize(("silence_s", "restarts"), [(3.0, 1), (18.0, 0)])
def test_data_that_lets_no_thread_run_needs_a_longer_silence_and_the_failure_says_so(
    go, tmp_path, silence_s, restarts
):
    flag = tmp_path / "flag"
    held = job(SMALL, data=functools.partial(holding_points, flag=str(flag), seconds=5.0))
    limits = Limits(silence_s=silence_s, backoff_s=0.05)
    go(held, strategy="data", devices=1, dry_run=True)  # measured, and kept
    flag.touch()
    done = go(held, strategy="data", devices=1, limits=limits)
    assert done.finished
    assert done["small"].restarts == restarts
    assert_close(done["small"].losses, reference.train(SMALL).losses)
    for event in events(done, "broken"):
        assert "has not been heard for" in event["text"]
        assert "(setting: --silence, limits.silence_s; works: 18)" in event["text"]


def test_one_job_that_raises_does_not_disturb_another(go, tmp_path):
    broken = breaking(tmp_path / "flag", at=2, how="always", name="broken")
    done = go([broken, SMALL], strategy="data")
    assert done["broken"].end == "failed"
    assert "the data is broken" in done["broken"].error
    assert done["small"].finished
    assert_close(done["small"].losses, reference.train(SMALL).losses)


@pytest.mark.parametrize("how", ["exits", "leaves"])
def test_a_job_whose_code_ends_the_process_has_not_finished(go, tmp_path, how):
    leaving = breaking(tmp_path / "flag", at=4, how=how, name="leaving")
    done = go(leaving, strategy="data", devices=1, save_every=1)
    assert done["leaving"].restarts == 1
    assert done.finished
    assert_close(done["leaving"].losses, reference.train(SMALL).losses)
    text = events(done, "broken")[0]["text"]
    assert ("sys.exit()" if how == "exits" else "left no result of leaving") in text


def test_a_loss_that_is_not_finite_is_final(go):
    hot = job(SMALL, data=functools.partial(points, broken_at=0), name="hot", steps=20)
    done = go(hot, strategy="data")
    assert done["hot"].end == "failed"
    assert done["hot"].restarts == 0
    assert "nonfinite" in done["hot"].error


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
import plait
from engine_jobs import slow
from plait.cluster import Cluster, Tier
if __name__ == "__main__":
    here = Cluster.uniform(devices_per_host=2, memory="1GiB", bandwidth="10gbit", latency="20us")
    done = plait.run(slow(0.05), here, directory={directory!r}, profiles={profiles!r}, strategy="data")
    sys.exit(130 if done.interrupted else 0)
"""


def started(tmp_path, directory):
    file = tmp_path / "train.py"
    paths = [path for path in sys.path if "tests" in path]
    file.write_text(SCRIPT.format(paths=paths, directory=str(directory), profiles=str(tmp_path / "profiles")))
    process = subprocess.Popen([sys.executable, str(file)], stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "step" in line and "loss" in line:
            return process
    raise AssertionError("it has not begun")


def test_a_run_that_is_asked_to_stop_goes_on_to_the_same_bits(tmp_path, go):
    directory = tmp_path / "run"
    process = started(tmp_path, directory)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode == 130
    assert not workers_of(directory)
    first = json.loads((directory / "jobs/small/result.json").read_text())
    assert first["end"] == "stopped"
    assert 0 < len(first["losses"]) < 6
    done = plait.run(resume=directory, show=False, limits=QUICK)
    assert_close(done["small"].losses, reference.train(SMALL).losses)
    assert done.finished


def test_a_job_whose_turn_had_not_come_is_not_forgotten_by_a_run_that_goes_on(go, tmp_path):
    jobs = [slow(0.02, name="first", steps=12), slow(0.0, name="second", seed=1)]

    def ask(line):
        if "first: started" in line:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = go(jobs, strategy="data", devices=1, show=ask)
    assert stopped.interrupted
    assert stopped["second"].steps == 0
    done = plait.run(resume=stopped.directory, show=False, limits=QUICK)
    assert done.finished
    assert_close(done["second"].losses, reference.train(jobs[1]).losses)
    (stopped.directory / "tasks/second/task.json").unlink()
    with pytest.raises(FileError, match=r"has no task\.json for second"):
        plait.run(resume=stopped.directory, show=False)


LOSING = """
import subprocess
from plait.engine.worker import _lost
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
_lost("the engine has hung up")
"""


def test_a_worker_that_lost_its_engine_ends_with_all_it_started_though_its_disk_is_full():
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "-c", LOSING], stdout=subprocess.PIPE, stderr=full, process_group=0, text=True
        )
    said, _ = process.communicate(timeout=100)  # which ends when the child has, too
    assert process.returncode == 76
    assert said.strip().isdecimal()


def test_attempts_that_made_no_step_are_counted(go):
    done = go(SMALL, strategy="data", devices=1)
    (done.directory / "metrics.jsonl").unlink()  # as of an engine that was killed before the first step
    with Record.open(done.directory) as record:
        assert _first_attempt(record) == 1


def test_an_engine_that_is_killed_leaves_nobody_behind_and_can_be_gone_on_with(tmp_path):
    directory = tmp_path / "run"
    process = started(tmp_path, directory)
    process.kill()
    process.wait()
    process.stderr.close()
    until = time.monotonic() + 60
    while workers_of(directory):
        assert time.monotonic() < until
        time.sleep(0.05)
    done = plait.run(resume=directory, show=False, limits=QUICK)
    assert_close(done["small"].losses, reference.train(SMALL).losses)


def test_what_cannot_be_run_is_refused_before_anything_starts(go, tmp_path):
    for settings, word in [
        ({"strategy": "magic"}, "magic"),
        ({"compress": 9}, "9 bits"),
        ({"engine": "slurm"}, "slurm"),
        ({"resume": tmp_path, "directory": None}, "has its jobs"),
        ({"save_every": 0}, "save_every"),
        ({"max_slowdown": 0.9}, "0.9 times its length"),
        ({"max_slowdown": float("nan")}, "nan times its length"),
    ]:
        with pytest.raises(UsageError, match=word):
            go(SMALL, **settings)
    with pytest.raises(UsageError, match="no jobs"):
        go([])
    with pytest.raises(UsageError, match="neither a job nor a sweep"):
        go(["train.py"])
    with pytest.raises(UsageError, match="two jobs are named 'small'"):
        go([SMALL, SMALL])
    assert not (tmp_path / "run").exists()


def test_what_fits_nowhere_is_refused_with_the_reason(tmp_path):
    nowhere = Cluster.uniform(memory="1GiB", bandwidth="10gbit")
    with pytest.raises(UsageError, match=r"small cannot be run here: .*spill: .*disk"):
        plait.run(job(SMALL, strategy="spill"), nowhere, profiles=tmp_path, show=False)


def test_a_directory_that_holds_a_run_is_refused(go):
    go(job(SMALL, steps=1), strategy="data")
    with pytest.raises(FileError, match="holds a run already"):
        go(SMALL)


def test_a_run_whose_directory_is_moved_ends_and_goes_on_from_there(go, tmp_path):
    place, moved = tmp_path / "run", tmp_path / "moved"

    def show(line):
        if line.startswith("small: step ") and not moved.exists():
            place.rename(moved)

    with pytest.raises(FileError, match="run is gone: it was deleted or moved"):
        go(slow(0.05, steps=12), strategy="data", devices=1, save_every=1, show=show)
    assert not workers_of(place)
    done = plait.run(resume=moved, show=False)
    assert done.finished
    assert done["small"].losses == reference.train(job(SMALL, steps=12)).losses


def test_a_dry_run_shows_the_plan_and_starts_nothing(go, tmp_path):
    lines = []
    done = go([SMALL, job(SMALL, name="other", optimizer=ADAM)], dry_run=True, show=lines.append)
    assert done.plan.why
    assert any("other:" in line for line in lines)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prints_the_plan(go, capsys):
    go(SMALL, strategy="data", devices=1, dry_run=True, show=None)
    out, err = capsys.readouterr()
    assert out.startswith("plan: data, fp32 on 1 device")
    assert "small: data on node0/0" in out
    assert "plan:" not in err
    assert "planning for 1 device" in err


def test_data_that_the_model_cannot_take_is_told_with_its_shape(go, tmp_path, capfd):
    wrong = job(SMALL, name="wrong", data=narrow_points)
    with pytest.raises(UsageError, match=r"job 'wrong': its model .*forward.* rows.*\[8, 5\]") as caught:
        go([SMALL, wrong])
    assert "mat1 and mat2 shapes cannot be multiplied" in caught.value.what
    assert caught.value.setting == "model, data"
    assert "Error" not in capfd.readouterr().err  # such as a traceback of torch's own
    assert not (tmp_path / "run").exists()


def test_background_jobs_train_behind_the_foreground(go):
    behind = slow(0.02, name="behind", priority="background", steps=20)
    done = go([job(SMALL, steps=4), behind], strategy="data")
    assert done.finished
    assert done["behind"].losses == reference.train(job(SMALL, steps=20)).losses
    # It has many more steps than the foreground, each slower, so it is alone before long.
    (event,) = [event for event in events(done, "decision") if "in the foreground" in event["text"]]
    assert event["job"] == "behind"
    assert os.getuid() != 0 or "normal priority" in event["text"]


def test_who_interrupts_once_more_is_told_how_to_go_on(go, tmp_path, monkeypatch):
    def interrupted(directory):
        raise KeyboardInterrupt

    lines = []
    monkeypatch.setattr("plait.engine.running.report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(job(SMALL, steps=1), strategy="data", devices=1, show=lines.append)
    assert lines[-1] == f"go on with: plait run --resume {tmp_path / 'run'}"


def test_why_a_worker_failed_is_told_though_its_own_log_is_on_a_full_disk(monkeypatch):
    class Teller:
        def tell(self, **message):
            self.message = message

    teller = Teller()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with contextlib.suppress(OSError):
            assert _failed(FileError("no room", setting="directory", works="room"), teller) == 1
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert "no room" in teller.message["error"]["text"]
