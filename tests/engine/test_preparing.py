"""Where a run goes that was given no place."""

import pytest

from plait.engine.preparing import new_directory
from plait.engine.workload import Workload
from plait.errors import FileError
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
