"""Folders of Ray clusters that were ours."""

import os
import subprocess
import sys

from plait.engine.ray_connection import _clear


def test_folders_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    owners = {"plait-ray-a": dead.pid, "plait-ray-b": os.getpid(), "plait-ray-c": None, "other": dead.pid}
    for name, owner in owners.items():
        (tmp_path / name / "session").mkdir(parents=True)
        if owner is not None:
            (tmp_path / name / "owner").write_text(str(owner))
    _clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "plait-ray-b", "plait-ray-c"]
