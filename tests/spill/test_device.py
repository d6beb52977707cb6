"""Devices: real processes that serve calls, see shared memory, and end with those who started them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from plait.errors import UsageError
from plait.job import Job
from plait.spill.device import Device, DeviceLost

SERVES = "plait_test_device:Servant"
SERVANT = """
import os, time
from plait.errors import UsageError

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

class Servant:
    def __init__(self, memory, kind):
        self.memory, self.kind = memory, kind
    def map(self, memory):
        self.memory = memory
    def add(self, a, b):
        return a + b
    def place(self):
        return os.getpid(), sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]
    def write(self, offset, content):
        self.memory[offset : offset + len(content)] = content
    def refuse(self):
        raise UsageError("no", setting="this", works="that")
    def odd(self):
        raise Odd(1, 2)
    def unpicklable(self):
        return lambda: 0
    def wait(self):
        time.sleep(600.25)
    def die(self, number):
        os.kill(os.getpid(), number)
        time.sleep(600)
    def found(self, job):
        return job.make_model()
"""


@pytest.fixture
def device(tmp_path, monkeypatch):
    (tmp_path / "plait_test_device.py").write_text(SERVANT)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Device(3, cores=[min(os.sched_getaffinity(0))], threads=1, runner=SERVES)
    made.start()
    yield made
    made.stop()


def test_calls_run_in_order_and_bring_results_and_errors(device):
    sums = [device.call("add", i, 1) for i in range(20)]
    assert [future.result(60) for future in sums] == [i + 1 for i in range(20)]
    with pytest.raises(UsageError, match=r"no \(setting: this\); works: that") as refused:
        device.call("refuse").result(60)
    assert "in refuse" in refused.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        device.call("odd").result(60)
    with pytest.raises(Exception, match="pickle"):
        device.call("unpicklable").result(60)
    pid, cores, threads = device.call("place").result(60)
    assert (pid, cores, threads) == (device.pid, [min(os.sched_getaffinity(0))], "1")


def test_large_messages_both_ways_do_not_lock_up(device):
    text = "x" * 3_000_000
    futures = [device.call("add", text, "y") for _ in range(8)]
    assert all(len(future.result(60)) == len(text) + 1 for future in futures)


def test_a_device_sees_shared_memory(device):
    fd = os.memfd_create("plait-test")
    try:
        os.ftruncate(fd, 1 << 20)
        device.map(fd, 1 << 20).result(60)
        device.call("write", 4096, b"hello").result(60)
        assert os.pread(fd, 5, 4096) == b"hello"
    finally:
        os.close(fd)


def test_a_device_that_dies_fails_its_calls_and_later_ones(device):
    first, second = device.call("die", signal.SIGKILL), device.call("add", 1, 1)
    with pytest.raises(DeviceLost, match=r"device 3 was killed by signal 9 \(SIGKILL\) before .* 'die'"):
        first.result(60)
    with pytest.raises(DeviceLost, match="before it was done with 'add'"):
        second.result(60)
    with pytest.raises(DeviceLost, match=r"device 3 was killed .* 'add'"):
        device.call("add", 1, 1).result(60)
    device.stop()


def test_a_device_that_computes_is_ended_at_once(device):
    future = device.call("wait")
    device.stop()
    with pytest.raises(DeviceLost):
        future.result(60)
    device.stop()


def test_a_terminal_s_interrupt_does_not_end_a_device(device):
    device.call("add", 1, 1).result(60)
    os.kill(device.pid, signal.SIGINT)
    assert device.call("add", 1, 1).result(60) == 2


def test_devices_end_with_the_process_that_started_them(tmp_path):
    (tmp_path / "plait_test_device.py").write_text(SERVANT)
    code = f"""
        import time
        from plait.spill.device import Device
        device = Device(0, runner={SERVES!r})
        device.start()
        device.call("add", 1, 1).result(60)
        device.call("wait")
        print(device.pid, flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


GUARD = {"guarded": "if __name__ == '__main__':", "bare": "if True:"}


@pytest.mark.parametrize("guard", GUARD)
def test_a_script_s_functions_are_found_whether_it_guards_its_main_part_or_not(guard, tmp_path):
    (tmp_path / "plait_test_device.py").write_text(SERVANT)
    script = tmp_path / "scrïpt.py"
    script.write_text(
        textwrap.dedent(f"""
        from torch import nn
        from plait.job import Job
        from plait.spill.device import Device, ScriptStop, in_device

        def model():
            return nn.Linear(2, 3)

        def fit():
            if in_device():
                raise ScriptStop
            device = Device(0, runner={SERVES!r})
            device.start()
            job = Job(
                name="a", model=model, data="builtins:list", loss="plait.losses:mean_squared_error",
                optimizer="torch.optim:SGD", batch=1, steps=1,
            )
            print(device.call("found", job).result(60))
            device.stop()

        {GUARD[guard]}
            fit()
    """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Linear(in_features=2, out_features=3, bias=True)"


def test_a_job_of_an_imported_module_needs_no_script(device, tmp_path):
    (tmp_path / "plait_test_models.py").write_text("from torch.nn import Identity as model\n")
    job = Job(
        name="a", model="plait_test_models:model", data="builtins:list", optimizer="torch.optim:SGD",
        loss="plait.losses:mean_squared_error", batch=1, steps=1,
    )  # fmt: skip
    assert str(device.call("found", job).result(60)) == "Identity()"
