"""Workers that are killed at random while short jobs train: all finish, none is lost, none runs twice."""

import json
import os
import random
import signal
import threading
import time

import pytest
from engine_jobs import slow, workers_of

import plait
from plait import reference
from plait.cluster import Cluster
from plait.engine import Limits

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
