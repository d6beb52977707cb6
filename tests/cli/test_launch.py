"""``plait launch``: torchrun with compression, and the exit codes of scripts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from plait.cli.launch import launch
from plait.errors import UsageError

SCRIPT = Path(__file__).parents[1] / "scripts" / "ddp.py"
COMMAND = [sys.executable, "-c", "from plait.cli import main; main()", "launch"]
LIGHT = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
words = ["worker", rank, os.environ["WORLD_SIZE"], os.environ["PLAIT_COMPRESS"], *sys.argv[1:]]
os.write(1, (" ".join(words) + "\\n").encode())  # at once, or the workers' words would mix
if len(sys.argv) > 2 and rank == "1":
    os.kill(os.getpid(), int(sys.argv[2])) if int(sys.argv[2]) < 10 else sys.exit(int(sys.argv[2]))
if sys.argv[1] == "wait":
    (pathlib.Path(__file__).parent / f"pid{rank}").write_text(str(os.getpid()))
    time.sleep(120)
"""


@pytest.fixture
def light(tmp_path):
    """A script that needs no torch."""
    script = tmp_path / "light.py"
    script.write_text(LIGHT)
    return script


def environment():
    kept = {name: value for name, value in os.environ.items() if name != "PLAIT_COMPRESS"}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def plait_launch(*words):
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        capture_output=True, text=True, check=False, env=environment(), timeout=240,
    )  # fmt: skip


def asked(*words, **given):
    """As far as a request goes that is refused before anything starts."""
    app = typer.Typer()
    app.command(context_settings={"allow_interspersed_args": False})(launch)
    return CliRunner().invoke(app, [str(word) for word in words], env={"PLAIT_COMPRESS": None, **given})


def test_a_script_is_trained_with_compressed_gradients():
    done = plait_launch("--bits", "4,decline=false", "--nproc-per-node", "2", "--", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("result ") == 2
    assert "plait: gradients of 2 parameters in 4 bits, of 2 exact" in done.stderr
    assert "times fewer" in done.stderr


def test_a_command_gets_its_own_words_and_ends_with_the_workers_exit_code(light):
    done = plait_launch("--nproc-per-node=2", "--", sys.executable, light, "--bits", "17")
    assert done.returncode == 17
    assert "worker 1 2 auto --bits 17" in done.stdout.splitlines()
    assert "plait: rank 1 ended first, with exit code 17" in done.stderr.splitlines()


def test_a_worker_that_a_signal_ends(light):
    done = plait_launch("--bits", "off", "--nproc-per-node", "2", light, "wait", int(signal.SIGKILL))
    assert done.returncode == 128 + signal.SIGKILL
    assert "worker 1 2 off wait 9" in done.stdout.splitlines()
    assert "plait: rank 1 ended first, by signal 9" in done.stderr.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_the_launcher_ends_the_workers(light, number):
    words = [*COMMAND, "--nproc-per-node", "2", "--", str(light), "wait"]
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
    )
    files = [light.parent / f"pid{rank}" for rank in (0, 1)]
    try:
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number, said
    assert f"plait: ended by {number.name}, and the workers with it" in said.splitlines()
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("words", "what", "setting"),
    [
        (["--bits", "9", "--", SCRIPT], "--bits='9': bits is 9", "--bits"),
        (["--bits", "bit=4", "--", SCRIPT], "there is no field 'bit'", "--bits"),
        (["--nnodes", "0", "--", SCRIPT], "'0' is no number of hosts", "--nnodes"),
        (["--nnodes", "3:2", "--", SCRIPT], "'3:2' is no number of hosts", "--nnodes"),
        (["--nnodes", "two", "--", SCRIPT], "'two' is no number of hosts", "--nnodes"),
        (["--", "gone.py"], "there is no script gone.py", "COMMAND"),
        (["--", "no-such-program"], "'no-such-program' is neither a Python script nor a program", "COMMAND"),
        (["--background", "--max-slowdown", "1", "--", "true"], "at 1 times its length", "max_slowdown"),
        (["--background", "--threads", "0", "--", "true"], "threads is 0", "threads"),
        (["--background", "--memory", "1KiB", "--", "true"], "less than a Python process needs", "memory"),
    ],
)
def test_what_is_refused_before_anything_starts(words, what, setting):
    error = asked(*words).exception
    assert isinstance(error, UsageError)
    assert what in error.what
    assert error.setting == setting
    assert error.works


def test_a_torch_that_would_not_load_plait_is_refused():
    error = asked("--", SCRIPT, TORCH_DEVICE_BACKEND_AUTOLOAD="0").exception
    assert isinstance(error, UsageError)
    assert error.setting == "TORCH_DEVICE_BACKEND_AUTOLOAD"


def test_an_option_that_torchrun_refuses_is_one_line():
    done = plait_launch("--bits", "off", "--nproc-per-node=some", "--", SCRIPT)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("plait: ")


def test_any_command_runs_in_the_background_with_its_exit_code(tmp_path):
    given = ["--background", "--threads", "1", "--end-with-foreground"]
    done = subprocess.run(
        [*COMMAND, *given, "--", "sh", "-c", "echo $PLAIT_PUBLISH $OMP_NUM_THREADS; exit 7"],
        capture_output=True, text=True, check=False, timeout=240,
        env={**environment(), "PLAIT_BURST_DIRECTORY": str(tmp_path / "published")},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, "background 1\n"), done.stderr
    began, ended = done.stderr.splitlines()
    assert began.startswith("plait: sh -c ")
    assert began.endswith(" 1.05 times as long at most")
    assert ended == "plait: no foreground step was seen beside it"
    assert not (tmp_path / "published").exists()


def test_what_ends_the_launcher_ends_the_background(light):
    words = [*COMMAND, "--background", "--", "sh", "-c", f"echo $$ > {light.parent}/pid; sleep 120"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment())
    file = light.parent / "pid"
    try:
        while not (file.exists() and file.read_text().strip()):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "plait: no foreground step was seen beside it" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)
