"""Processes as workers: they end with all that they started, and find the modules that this process finds."""

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
