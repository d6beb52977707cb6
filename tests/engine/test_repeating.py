"""What a run's page says of repeating it: carried out, it plans the same."""

import pytest
from engine_jobs import SMALL
from made_runs import job

import plait
from plait.cluster import Cluster
from plait.engine.reading import Reading
from plait.engine.record import CLUSTER, Record
from plait.engine.repeating import snippet

HERE = Cluster.uniform(devices_per_host=2, memory="1GiB", bandwidth="10gbit", latency="20us")


def asked(directory, monkeypatch):
    """What the snippet of a run calls plait.run with."""
    found = []
    monkeypatch.setattr(plait, "run", lambda *args, **settings: found.append((args, settings)))
    exec(snippet(Reading.of(Record.read(directory))), {})
    return found[0]


def test_the_snippet_asks_for_the_cluster_and_the_memory_of_the_run(tmp_path, monkeypatch):
    config = {"engine": "ray", "strategy": "auto", "compress": 4, "devices": 1, "memory": 2 << 30}
    with Record.create(tmp_path / "run", config=config | {"save_every": None}, plan={}, jobs=[job("gpt")]):
        HERE.take(1).save(tmp_path / "run" / CLUSTER)
    (jobs,), settings = asked(tmp_path / "run", monkeypatch)
    assert [one.name for one in jobs] == ["gpt"]
    wanted = {"cluster": HERE.take(1), "engine": "ray", "strategy": "auto", "compress": 4, "memory": 2 << 30}
    assert settings == wanted


def test_a_run_that_left_no_cluster_is_asked_for_without_one(tmp_path, monkeypatch):
    config = {"engine": "local", "strategy": "data"}
    Record.create(tmp_path / "run", config=config, plan={}, jobs=[]).close()
    assert asked(tmp_path / "run", monkeypatch)[1] == {"strategy": "data"}


@pytest.mark.parametrize("given", [{"devices": 1, "memory": "512MiB"}, {"objective": "throughput"}])
def test_the_snippet_plans_the_same(tmp_path, monkeypatch, given):
    again = plait.run
    own = {"profiles": tmp_path / "profiles", "show": False}
    first = again(SMALL, HERE, directory=tmp_path / "run", write="torchrun", **own, **given)
    (jobs,), settings = asked(tmp_path / "run", monkeypatch)
    second = again(jobs, directory=tmp_path / "again", dry_run=True, **own, **settings)
    assert second.plan.to_json() == first.plan.to_json()
    assert settings["cluster"] == first.plan.cluster
