from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli.lab import app
from plait.errors import FileError, UsageError
from plait.lab.label import Label, start_ticks
from plait.lab.leftover import members
from plait.lab.network import missing

PYTHON = [sys.executable, "-S", "-c"]


@pytest.fixture
def namespaces() -> None:
    lacking = missing()
    if lacking is not None:
        pytest.skip(f"{lacking} is missing: no network namespaces here")


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_LAB_LOOPBACK", "1")


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_run_gives_each_host_a_worker(loopback: None) -> None:
    code, out, _ = call("run", "--hosts", "3", "--", *PYTHON, "import os; print(os.environ['RANK'])")
    assert code == 0
    assert sorted(out.splitlines()) == ["host0 | 0", "host1 | 1", "host2 | 2"]


def test_options_after_the_command_are_the_commands(loopback: None) -> None:
    code, out, _ = call(
        "run", "--hosts", "1", sys.executable, "-S", "-c", "import sys; print(sys.argv[1:])", "--hosts"
    )
    assert code == 0
    assert out == "host0 | ['--hosts']\n"


def test_run_ends_as_the_first_worker_that_failed(loopback: None) -> None:
    code = "import os, time; os._exit(9) if os.environ['RANK'] == '1' else time.sleep(600)"
    exit_code, _, said = call("run", "--hosts", "2", "--", *PYTHON, code)
    assert exit_code == 9
    assert "rank 1 failed first, with exit code 9" in said
    exit_code, _, said = call("run", "--hosts", "1", "--", *PYTHON, "import os; os.kill(os.getpid(), 11)")
    assert exit_code == 128 + 11
    assert "signal SIGSEGV" in said


def test_run_as_json_keeps_standard_output_clean(loopback: None, tmp_path: Path) -> None:
    code, out, said = call("run", "--hosts", "2", "--json", "--", "echo", "hello")
    result = json.loads(out)
    assert code == 0
    assert result["format"] == "plait.lab.run/1"
    assert result["exit_codes"] == [0, 0]
    assert result["loopback"] is True
    assert "host1 | hello" in said
    code, out, _ = call("run", "--hosts", "2", "--logs", str(tmp_path), "--", "echo", "hello")
    assert (code, out) == (0, "")
    assert (tmp_path / "host1.log").read_text() == "hello\n"


def test_run_takes_all_its_options(namespaces: None, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("0 1gbit\n1 100mbit\n")
    core = str(min(os.sched_getaffinity(0)))
    options = ["--rate", "1gbit", "--trace", str(tmp_path / "trace"), "--cores", core, "--per-host", "2"]
    code, out, _ = call(
        "run", "--hosts", "2", *options, "--", *PYTHON, "import os; print(os.sched_getaffinity(0))"
    )
    assert code == 0
    assert sorted(out.splitlines()) == [f"host{h}.{w} | {{{core}}}" for h in (0, 1) for w in (0, 1)]


def test_a_worker_over_its_memory_is_explained(namespaces: None) -> None:
    from plait.lab.memory import can_limit

    if not can_limit():
        pytest.skip("cgroups may not be written here")
    code, out, said = call(
        "run", "--hosts", "1", "--memory", "64MiB", "--json", "--", *PYTHON, "b'x' * 2**28"
    )
    assert code == 137
    assert "host 0 reached its memory limit of 64.00 MiB: 1 killed" in said
    assert json.loads(out)["hosts"][0]["oom_kills"] == 1


@pytest.mark.parametrize(
    "options",
    [
        ["--hosts", "0"],
        ["--hosts", "300"],
        ["--rate", "-1gbit"],
        ["--rate", "0mbit"],
        ["--rate", "1e300gbit"],
        ["--rate", "1e20bit"],
        ["--memory", "1MiB"],
        ["--memory", "16777216TiB"],
        ["--memory", "1e30GiB"],
        ["--cores", "4095"],
        ["--per-host", "0"],
    ],
)
def test_run_refuses_what_cannot_be(loopback: None, options: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        call("run", *options, "--", "true")
    assert caught.value.setting is not None
    assert caught.value.works is not None


@pytest.mark.parametrize("logs", ["/etc/passwd", "/etc/passwd/x", "/proc/x"])
def test_run_refuses_logs_that_cannot_be_written_before_there_is_a_lab(
    monkeypatch: pytest.MonkeyPatch, loopback: None, logs: str
) -> None:
    monkeypatch.setattr("plait.lab.Lab.__enter__", lambda lab: pytest.fail("the lab was built"))
    with pytest.raises(FileError, match=f"{logs} cannot be written: ") as caught:
        call("run", "--hosts", "1", "--logs", logs, "--", "true")
    assert caught.value.setting == "--logs"


def test_a_disk_that_is_full_ends_a_run_with_the_log_named(loopback: None, tmp_path: Path) -> None:
    (tmp_path / "host0.log").symlink_to("/dev/full")
    with pytest.raises(FileError, match=r"host0\.log cannot be written: No space left on device"):
        call("run", "--hosts", "1", "--logs", str(tmp_path), "--", "echo", "hello")


def test_run_without_a_command_is_a_usage_error() -> None:
    code, _, said = call("run", "--hosts", "2")
    assert code == 2
    assert "Missing argument" in said


def test_check_measures_every_pair(namespaces: None) -> None:
    code, out, _ = call("check", "--hosts", "2", "--rate", "40mbit,2gbit", "--size", "64KiB,128KiB", "--json")
    result = json.loads(out)
    assert result["format"] == "plait.lab.check/1"
    assert code == (0 if result["holds"] else 1)
    assert [(c["hosts"], c["size_bytes"]) for c in result["checks"]] == [(2, 65536), (2, 131072)] * 2
    for check in result["checks"]:
        assert [(t["source"], t["target"]) for t in check["transfers"]] == [(0, 1), (1, 0)]
        judged = check["transfers"][0]["asked_bytes_per_second"] == 5e6
        assert check["holds"] == (all(t["holds"] for t in check["transfers"]) if judged else None)


def test_check_fails_where_rates_cannot_be_kept(loopback: None) -> None:
    code, out, said = call("check", "--hosts", "2", "--rate", "100mbit", "--size", "1KiB")
    assert code == 1
    assert "not shaped" in out
    verdict = (
        "100mbit was asked, and links that are not shaped (PLAIT_LAB_LOOPBACK is set) cannot keep it: fails"
    )
    assert verdict in out
    assert "PLAIT_LAB_LOOPBACK is set" in said
    code, out, _ = call("check", "--hosts", "2", "--rate", "none", "--size", "1KiB")
    assert code == 0
    assert "was asked" not in out
    code, out, _ = call("check", "--hosts", "2", "--rate", "none", "--size", "1KiB", "--json")
    assert code == 0
    assert json.loads(out)["checks"][0]["holds"] is None


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (["--hosts", "1"], "hosts"),
        (["--hosts", "two"], "--hosts"),
        (["--size", "0"], "size"),
        (["--size", "big"], "size"),
        (["--rate", "-1gbit"], "rate"),
    ],
)
def test_check_refuses_what_cannot_be(loopback: None, options: list[str], setting: str) -> None:
    with pytest.raises(UsageError) as caught:
        call("check", "--hosts", "2", *options) if "--hosts" not in options else call("check", *options)
    assert caught.value.setting == setting


def test_clean_says_what_it_removed() -> None:
    owner = subprocess.Popen(["sleep", "600"])
    started = start_ticks(owner.pid)
    assert started is not None
    dead = dataclasses.replace(Label.new(), pid=owner.pid, started=started)
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, "PLAIT_LAB": str(dead)})
    owner.kill()
    owner.wait()
    code, out, _ = call("clean")
    assert code == 0
    assert f"{dead}: removed 1 processes, 0 namespaces, 0 memory groups" in out
    assert process.wait() == -signal.SIGKILL
    _, out, _ = call("clean", "--json")
    assert str(dead) not in out
    assert json.loads(out)["format"] == "plait.lab.clean/1"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_run_in_order(namespaces: None, number: signal.Signals, code: int) -> None:
    worker = "import os, time; print(os.environ['PLAIT_LAB'], flush=True); time.sleep(600)"
    command = [sys.executable, "-c", "from plait.cli import main; main()", "lab"]
    with subprocess.Popen(
        [*command, "run", "--hosts", "2", "--rate", "1gbit", "--", *PYTHON, worker],
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        label = Label.find(run.stdout.readline().partition(" | ")[2])
        assert label is not None
        assert len(members(label)) >= 1
        run.send_signal(number)
        assert run.wait(60) == code
    # In order: by the time that the command has ended, all is gone.
    assert members(label) == set()
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert str(label) not in names
