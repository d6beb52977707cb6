from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.errors import WorkerError
from plait.lab import Outcome
from plait.lab.workers import Process, end, supervise


def start(code: str) -> Process:
    return subprocess.Popen(
        [sys.executable, "-S", "-u", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )


def watch(
    *codes: str, grace_seconds: float = 10.0, timeout_seconds: float | None = 60.0
) -> tuple[Outcome, list[str]]:
    lines: list[str] = []
    processes = [start(code) for code in codes]
    writers = [lambda line, rank=rank: lines.append(f"{rank} {line}") for rank in range(len(codes))]
    outcome = supervise(processes, writers, grace_seconds=grace_seconds, timeout_seconds=timeout_seconds)
    assert all(process.poll() is not None for process in processes)
    return outcome, lines


def test_all_succeed_and_every_line_is_passed_on() -> None:
    outcome, lines = watch(
        "print('a'); print('b', end='')", "import sys; print('é' * 3); sys.stderr.write('down\\n')"
    )
    assert outcome == Outcome(exit_codes=(0, 0), first_failed=None)
    assert outcome.exit_code == 0
    assert sorted(lines) == ["0 a", "0 b", "1 down", "1 ééé"]


def test_much_output_does_not_block() -> None:
    _, lines = watch("for i in range(50000): print(i)")
    assert lines == [f"0 {i}" for i in range(50000)]


def test_the_first_to_fail_ends_the_others() -> None:
    outcome, lines = watch(
        "import time; time.sleep(600)", "print('bad'); raise SystemExit(7)", "import time; time.sleep(600)"
    )
    assert outcome == Outcome(exit_codes=(-signal.SIGTERM, 7, -signal.SIGTERM), first_failed=1)
    assert outcome.exit_code == 7
    assert lines == ["1 bad"]


def test_one_that_will_not_end_is_killed_after_the_grace(tmp_path: Path) -> None:
    ready = str(tmp_path / "ready")
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    stubborn += f"; open({ready!r}, 'w'); time.sleep(600)"
    failing = f"import os\nwhile not os.path.exists({ready!r}): pass\nraise SystemExit(3)"
    outcome, _ = watch(stubborn, failing, grace_seconds=0.2)
    assert outcome == Outcome(exit_codes=(-signal.SIGKILL, 3), first_failed=1)


def test_a_worker_that_dies_of_a_signal_gives_a_shells_exit_code() -> None:
    outcome, _ = watch("import os; os.kill(os.getpid(), 9)")
    assert outcome.exit_codes == (-9,)
    assert outcome.exit_code == 137


def test_a_grandchild_that_keeps_the_pipe_open_does_not_hold_up_the_end() -> None:
    child = "import subprocess; subprocess.Popen(['sleep', '5'], start_new_session=True)"
    outcome, lines = watch(child + "; print('done')")
    assert outcome.exit_code == 0
    assert lines == ["0 done"]


def test_nor_does_one_that_goes_on_writing() -> None:
    # It ends by itself when the pipe is closed.
    endless = "['sh', '-c', 'while :; do echo y; done'], start_new_session=True"
    outcome, _ = watch(f"import subprocess; subprocess.Popen({endless}); input()")
    assert outcome.exit_code == 1  # there was no input


def test_too_long_a_run_is_ended_and_named() -> None:
    process = start("import time; time.sleep(600)")
    with pytest.raises(WorkerError, match=r"ranks \[0\] were still running after 0.2 s") as caught:
        supervise([process], [print], grace_seconds=10.0, timeout_seconds=0.2)
    assert process.poll() == -signal.SIGTERM
    assert caught.value.setting == "timeout_seconds"


def test_end_takes_the_whole_process_group() -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid); p.wait()"
    parent = start(code)
    assert parent.stdout is not None
    grandchild = os.pidfd_open(int(parent.stdout.readline()))
    end([parent], grace_seconds=10.0)
    assert parent.poll() is not None
    assert select.select([grandchild], [], [], 30)[0]  # readable: it has ended
    os.close(grandchild)
    parent.stdout.close()
