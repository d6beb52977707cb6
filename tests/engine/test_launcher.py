"""Processes as workers: they end with all that they started, and find the modules that this process finds."""

import os
import subprocess
import sys
import time
from pathlib import Path

from plait.cluster import Device
from plait.engine.launcher import LocalLauncher, ProcessWorker, import_path
from plait.engine.task import Task

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_worker_is_killed_with_all_that_it_started():
    process = subprocess.Popen([sys.executable, "-S", "-c", PARENT], stdout=subprocess.PIPE, process_group=0)
    child = int(process.stdout.readline())
    worker = ProcessWorker("here/0", process)
    assert worker.poll() is None
    assert alive(child)
    worker.kill()
    assert worker.poll() == -9
    end = time.monotonic() + 20
    while alive(child):
        assert time.monotonic() < end
        time.sleep(0.01)
    worker.kill()  # nothing happens to whoever has its number now
    process.stdout.close()


def test_what_left_the_group_of_a_worker_is_killed_too():
    """And what it started in turn; but nothing of another worker."""
    leaving = PARENT.replace('time.sleep(600)"])', 'time.sleep(600)"], start_new_session=True)')
    assert leaving != PARENT
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", leaving],
            stdout=subprocess.PIPE,
            process_group=0,
            env={**os.environ, "PLAIT_WORKER": mark},
        )
        for mark in ("one", "other")
    ]
    children = [int(process.stdout.readline()) for process in processes]
    workers = [
        ProcessWorker("here/0", process, mark)
        for process, mark in zip(processes, ("one", "other"), strict=True)
    ]
    assert os.getsid(children[0]) == children[0]
    workers[0].kill()
    assert not alive(children[0])
    assert alive(children[1])
    processes[1].kill()
    processes[1].wait()
    assert alive(children[1])  # a worker that is gone may have left something
    workers[1].kill()
    assert not alive(children[1])
    for process in processes:
        process.stdout.close()


def test_what_a_worker_prints_is_added_to_its_log(tmp_path):
    launcher = LocalLauncher([Device(name="here/0", host="here", memory_bytes=1 << 30)])
    log = tmp_path / "rank0.log"
    log.write_text("before\n")
    worker = launcher.start([str(tmp_path)], device="here/0", environment={}, log=log)
    worker.process.wait(60)
    assert worker.poll() == 2
    assert log.read_text().startswith("before\n")
    assert "task.json is not a task" in log.read_text()
    launcher.close()


def test_where_modules_are_is_told_to_workers():
    here = str(Path(__file__).parents[1])
    assert here in import_path().split(":")
    assert not any(path.startswith(sys.prefix) for path in import_path().split(":"))
    assert Task.__module__ == "plait.engine.task"
