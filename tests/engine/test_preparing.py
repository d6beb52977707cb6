"""Where a run goes that was given no place."""

from dataclasses import replace
from pathlib import Path

import pytest

from plait.cluster import Cluster
from plait.engine.preparing import new_directory, told, unfinished
from plait.engine.record import Record
from plait.engine.task import Task
from plait.engine.workload import Workload
from plait.errors import FileError
from plait.strategy.workload import WorkloadPlan
from reference_jobs import BASE, job


def workload():
    return Workload.of([job(BASE, name="gpt")])


def test_whoever_claims_a_directory_has_it_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [new_directory(workload(), claim=True).name for _ in range(3)] == ["gpt", "gpt-2", "gpt-3"]


def test_a_look_claims_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new_directory(workload(), claim=False).name == "gpt"
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(FileError, match="runs/gpt"):
        new_directory(workload(), claim=True)


@pytest.mark.parametrize(
    ("kinds", "goes_on"),
    [
        (["started"], True),  # killed, or still under way
        (["started", "stopped"], True),
        (["started", "stopped", "started", "finished"], False),
        (["started", "failed"], False),
    ],
)
def test_an_earlier_run_of_the_same_jobs_that_has_not_finished_is_found(tmp_path, kinds, goes_on):
    earlier, new = tmp_path / "gpt", tmp_path / "gpt-2"
    with Record.create(earlier, config={}, plan={}, jobs=workload().jobs) as record:
        for kind in kinds:
            record.event(kind, "", job="gpt")
    assert unfinished(new, workload()) == (earlier if goes_on else None)
    assert unfinished(new, Workload.of([job(BASE, name="other")])) is None
    assert unfinished(tmp_path / "nowhere" / "gpt", workload()) is None


def test_a_folder_of_somebody_else_beside_a_new_run_is_passed_over(tmp_path, monkeypatch):
    with Record.create(tmp_path / "gpt", config={}, plan={}, jobs=workload().jobs) as record:
        record.event("started", "", job="gpt")
    (tmp_path / "private").mkdir()
    real = Path.is_file

    def is_file(path):  # root may look into any folder
        if path.parent.name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert unfinished(tmp_path / "gpt-2", workload()) == tmp_path / "gpt"


def test_a_plan_says_from_when_on_a_background_job_gets_what_is_left():
    made = WorkloadPlan(
        cluster=Cluster.uniform(devices_per_host=1, memory="1GiB", bandwidth="1gbit", latency="20us"),
        objective="makespan", ways=(), comparisons={}, bound_ms=0.0, bound_samples_per_s=0.0, why="alone",
    )  # fmt: skip
    front = Task(
        name="front", kind="train", strategy="data", jobs=(job(BASE, name="front").to_json(),),
        devices=("a",), expected_step_ms=20.0,
    )  # fmt: skip
    behind = replace(front, name="behind", priority="background")
    assert list(told(made, [front, behind])) == [
        "plan: alone",
        "  front: data on a, 20 ms a step expected",
        "  behind: data behind a, 20 ms a step of what is left there, once it has started",
    ]
