"""What the tests of background work share: a folder of their own, and a machine without control groups."""

import pytest


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Where processes of this test publish, apart from all others of this machine."""
    monkeypatch.setenv("PLAIT_BURST_DIRECTORY", str(tmp_path / "published"))
    monkeypatch.delenv("PLAIT_PUBLISH", raising=False)
    return tmp_path / "published"


@pytest.fixture(params=["groups", "no groups"])
def groups(request, monkeypatch):
    """Both kinds of machines; one without control groups is there for everybody to try."""
    if request.param == "no groups":
        monkeypatch.setattr("plait.burst.cgroup.find_trees", list)
        return False
    from plait.burst.cgroup import find_trees

    if not any("idle" in tree.uses for tree in find_trees()):
        pytest.skip("no control groups may be made here")
    return True
