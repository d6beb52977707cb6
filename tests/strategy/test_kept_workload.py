"""The plan of several jobs is read from its file as it was written."""

import json

import pytest
from chains import CODECS, MIB, chain, cluster, demand, with_disk

from plait.errors import FileError
from plait.strategy import plan
from plait.strategy.kept_workload import KeptWorkload

HEAVY = chain(parameters=40 * MIB, scale=8.0)
JOBS = [
    demand("big", HEAVY, steps=20),
    demand("small", chain(4), batch=8, steps=5),
    demand("behind", chain(2), batch=4, steps=3, priority="background"),
]


@pytest.fixture(scope="module")
def made():
    return plan(JOBS, with_disk(cluster(2)), codecs=CODECS, strategies=["data", "burst"])


def test_placements_plans_and_bits_are_those_that_were_planned(made, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(made.to_json()))
    kept = KeptWorkload.read(file)
    assert kept.devices == ("node0/0", "node1/0")
    assert kept.batches == {"big": 16, "small": 8, "behind": 4}
    assert kept.why == made.why
    assert (kept.way.name, kept.way.makespan_ms) == (made.chosen.name, made.makespan_ms)
    assert kept.way.timeline == made.timeline
    for ours, theirs in zip(kept.way.placements, made.placements, strict=True):
        for name in ("job", "how", "devices", "start_ms", "end_ms", "done"):
            assert getattr(ours, name) == getattr(theirs, name)
        for name in ("strategy", "name", "batch", "step_ms", "plan", "bits", "devices"):
            assert getattr(ours.option, name) == getattr(theirs.option, name)
    assert 4 in {placement.option.bits for placement in kept.way.placements}


def test_another_file_is_none_of_its_business(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"format": "plait.plan.data/1"}))
    assert KeptWorkload.read(file) is None
    file.write_text("[]")
    assert KeptWorkload.read(file) is None


def test_what_is_not_whole_is_refused(made):
    data = json.loads(json.dumps(made.to_json()))
    with pytest.raises(FileError, match=r"p\.json.*KeyError 'devices'"):
        KeptWorkload.from_json({k: v for k, v in data.items() if k != "devices"}, source="p.json")
    with pytest.raises(FileError, match="format"):
        KeptWorkload.from_json({**data, "format": "other"})
    data["ways"][0]["placements"][0]["plan"]["devices"] = 0
    with pytest.raises(FileError, match=r"job '.*devices"):
        KeptWorkload.from_json(data)
    with pytest.raises(FileError, match="jobs that fit"):
        KeptWorkload.from_json({**data, "ways": []})
