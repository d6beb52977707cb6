"""What an actor does for a device, without Ray: processes that are started, heard and ended whole."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.engine.ray_seat import Seat, interface_of

ADDRESS = "127.0.0.1"


def start(seat, number, code, environment=None, folder="/"):
    seat.start(number, ["-c", code], address=ADDRESS, environment=environment or {}, folder=folder)


def hear(seat, number, end=None):
    """All that a worker prints and its exit code, or what it prints up to some text, and None."""
    printed, late = b"", time.monotonic() + 60
    while time.monotonic() < late:
        for which, piece, code in seat.news(1.0):
            assert which == number
            printed += piece
            if code is not None or (end is not None and printed.endswith(end)):
                return printed.decode(), code
    pytest.fail(f"worker {number} has not ended; it printed {printed[-200:]}")


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pid):
    end = time.monotonic() + 30
    while lives(pid):
        assert time.monotonic() < end, f"process {pid} still runs"
        time.sleep(0.01)
    return True


def test_a_worker_has_its_environment_its_folder_and_its_exit_code(tmp_path):
    seat = Seat()
    code = (
        "import os, sys; print(os.environ['RANK'], os.getcwd(), flush=True); os.write(2, b'oh'); sys.exit(75)"
    )
    start(seat, 1, code, {"RANK": "7"}, str(tmp_path))
    assert hear(seat, 1) == (f"7 {tmp_path}\noh", 75)
    start(
        seat, 2, "import os; print(os.getcwd() == os.environ['THERE'])", {"THERE": os.getcwd()}, "/not/here"
    )
    assert hear(seat, 2) == ("True\n", 0)


def test_gloo_is_told_the_interface_unless_somebody_has(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    seat = Seat()
    code = "import os; print(os.environ['GLOO_SOCKET_IFNAME'])"
    start(seat, 1, code)
    assert hear(seat, 1) == ("lo\n", 0)
    start(seat, 2, code, {"GLOO_SOCKET_IFNAME": "eth7"})
    assert hear(seat, 2) == ("eth7\n", 0)
    assert interface_of("192.0.2.1") is None  # an address for documentation, nobody's


def test_much_output_comes_whole_and_in_order():
    seat = Seat()
    start(seat, 1, "import sys; [print(i) for i in range(200_000)]; sys.exit(4)")
    printed, code = hear(seat, 1)
    assert code == 4
    assert printed.split() == [str(i) for i in range(200_000)]


def test_a_signal_reaches_the_worker_and_one_that_has_ended_is_left_alone():
    seat = Seat()
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); "
    code += "print('up', flush=True); time.sleep(60)"
    start(seat, 1, code)
    assert hear(seat, 1, b"up\n") == ("up\n", None)
    seat.signal(1, signal.SIGTERM)
    assert hear(seat, 1) == ("", 75)
    seat.signal(1, signal.SIGTERM)
    seat.end([1, 99])


CHILD = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); "


def test_killing_a_worker_kills_what_it_started():
    seat = Seat()
    start(seat, 1, CHILD + "time.sleep(600)")
    child = int(hear(seat, 1, b"\n")[0])
    assert lives(child)
    seat.end([1])
    assert hear(seat, 1) == ("", -signal.SIGKILL)
    assert gone(child)


def test_what_a_worker_leaves_running_ends_with_it():
    seat = Seat()
    start(seat, 1, CHILD)
    printed, code = hear(seat, 1)
    assert code == 0
    assert gone(int(printed))


def test_workers_end_when_the_actor_is_killed(tmp_path):
    script = (
        "import sys, time\n"
        "from plait.engine.ray_seat import Seat\n"
        "seat = Seat()\n"
        f"worker = 'import os; print(os.getpid(), flush=True); ' + {CHILD!r} + 'time.sleep(600)'\n"
        f"seat.start(1, ['-c', worker], address={ADDRESS!r}, environment={{}}, folder='/')\n"
        "while True:\n"
        "  for _, piece, _ in seat.news(1.0):\n"
        "    sys.stdout.write(piece.decode()); sys.stdout.flush()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as actor:
        worker, child = (int(actor.stdout.readline()) for _ in range(2))
        assert lives(worker)
        assert lives(child)
        actor.kill()
    assert gone(worker)
    assert gone(child)


def test_an_actor_that_is_gone_already_is_not_outlived():
    keeper = Path(sys.modules[Seat.__module__].__file__).with_name("ray_keeper.py")
    ended = subprocess.Popen(["true"])
    ended.wait()
    run = [sys.executable, "-I", "-S", str(keeper)]
    assert subprocess.run([*run, str(ended.pid), "true"], check=False).returncode == 125
    assert subprocess.run([*run, "1", "true"], check=False).returncode == 125  # not its parent
    unknown = subprocess.run(
        [*run, str(os.getpid()), "/not/a/program"],
        check=False,
        capture_output=True,
        text=True,
        process_group=0,
    )
    assert unknown.returncode == 127
    assert "/not/a/program" in unknown.stderr
