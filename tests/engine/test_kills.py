"""Workers that are killed at random while short jobs train: all finish, none is lost, none runs twice."""

import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from engine_jobs import breaking, slow, wide, workers_of

import plait
from plait import Chain, reference
from plait.burst import BurstPlan
from plait.cluster import Cluster
from plait.engine import Limits
from plait.engine.launcher import import_path
from plait.engine.result import JobResult
from plait.engine.task import Task

HERE = Cluster.uniform(devices_per_host=2, memory="1GiB", bandwidth="10gbit", latency="20us")


class Killer(threading.Thread):
    """Ends a worker with SIGKILL, some time after it has made steps, until there were enough."""

    def __init__(self, directory, count, chance):
        super().__init__(daemon=True)
        self.directory, self.count, self.chance = directory, count, chance
        self.killed = 0
        self.over = threading.Event()

    def run(self):
        metrics = self.directory / "metrics.jsonl"
        while self.killed < self.count and not self.over.is_set():
            before = metrics.stat().st_size if metrics.exists() else 0
            while not self.over.is_set() and (not metrics.exists() or metrics.stat().st_size == before):
                time.sleep(0.01)
            self.over.wait(self.chance.random() * 0.5)
            found = workers_of(self.directory)
            if found and not self.over.is_set():
                os.kill(self.chance.choice(found), signal.SIGKILL)
                self.killed += 1
                while not self.over.is_set() and not self.told():
                    time.sleep(0.02)

    def told(self):
        """Whether the engine has noticed all of them: two at once would be one restart."""
        lines = (self.directory / "events.jsonl").read_text().splitlines()
        return sum(json.loads(line)["kind"] == "broken" for line in lines) >= self.killed


@pytest.mark.parametrize(
    "count", [pytest.param(5, id="few"), pytest.param(100, id="many", marks=pytest.mark.soak)]
)
def test_jobs_whose_workers_are_killed_all_finish_with_the_losses_of_plain_training(count, tmp_path):
    jobs = [slow(0.01, name=f"job-{i}", steps=15 * count, seed=i) for i in range(2)]
    directory = tmp_path / "run"
    killer = Killer(directory, count, random.Random(count))
    killer.start()
    done = plait.run(
        jobs,
        HERE,
        directory=directory,
        profiles=tmp_path / "profiles",
        strategy="data",
        save_every=3,
        limits=Limits(
            backoff_s=0.01, restarts=count, silence_s=120
        ),  # some die before they have gained a checkpoint
        show=False,
    )
    killer.over.set()
    killer.join()
    assert killer.killed == count
    assert done.finished
    assert sum(result.restarts for result in done.values()) == count
    for job in jobs:
        assert done[job.name].losses == pytest.approx(reference.train(job).losses, rel=1e-10)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for job in jobs:
        attempts = [row["attempt"] for row in rows if row["job"] == job.name]
        assert attempts == sorted(attempts)  # none that was given up was heard again
        steps = {row["step"] for row in rows if row["job"] == job.name}
        assert steps == set(range(job.steps))
    assert not workers_of(directory)


def losses_of(run, strategy, *, killed_at):
    """Of two workers with gradients in 4 bits, which torchrun starts anew where one is killed."""
    broken = breaking(
        run.with_suffix(".calls"),
        at=killed_at,
        how="killed",
        model=functools.partial(wide, width=64),
        precision="fp32",
        steps=8,
    )
    blocks = [block.name for block in Chain.of_job(broken)]
    plan = BurstPlan.of(blocks, [2] * len(blocks), batch=broken.batch).to_json()
    task = Task(
        name="small",
        kind="train",
        strategy=strategy,
        jobs=(broken.to_json(),),
        devices=("here/0", "here/1"),
        plan=plan if strategy == "burst" else None,
        compress=4,
        save_every=3,
    )
    folder = run / "tasks" / "small"
    folder.mkdir(parents=True)
    task.save(folder)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [sys.executable, *words, "-m", "plait.engine.worker", folder],
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["bits"] < 32 for row in rows)
    return JobResult.load(run / "jobs" / "small").losses, [row["step"] for row in rows]


@pytest.mark.parametrize("strategy", ["data", "burst"])
def test_gradients_are_rounded_as_in_a_run_in_which_no_worker_was_killed(strategy, tmp_path):
    whole, steps = losses_of(tmp_path / "whole", strategy, killed_at=-1)
    assert steps == list(range(8))
    killed, steps = losses_of(tmp_path / "killed", strategy, killed_at=10)  # in step 4
    assert steps == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert killed == whole
