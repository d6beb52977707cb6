"""What a run ran on: versions and machine, and no secret."""

import json
import platform

import plait
from plait.engine.environment import changed, environment, variables


def test_versions_and_machine_are_there():
    found = environment()
    json.dumps(found)
    assert found["python"] == platform.python_version()
    assert found["plait"] == plait.__version__
    assert found["torch"].startswith("2.")
    assert found["cores"] >= found["usable_cores"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert found["processor"]


def test_variables_that_matter_and_no_secret():
    given = {
        "OMP_NUM_THREADS": "2",
        "PLAIT_COMPRESS": "4",
        "PLAIT_ENGINE_TOKEN": "hush",
        "NCCL_SECRET_KEY": "hush",
        "HOME": "/home/me",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert variables(given) == {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "2", "PLAIT_COMPRESS": "4"}


def test_what_is_not_as_it_was():
    then = {"torch": "2.13.0", "host": "a", "gone": 1, "variables": {"OMP_NUM_THREADS": "1"}}
    now = {"torch": "2.13.1", "host": "a", "variables": {"OMP_NUM_THREADS": "2"}}
    assert changed(then, then) == []
    assert changed(then, now) == [
        "torch 2.13.0, now 2.13.1",
        "gone 1, now none",
        "OMP_NUM_THREADS 1, now 2",
    ]
