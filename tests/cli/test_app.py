"""The command line as a whole: help, version, and how errors end a process."""

import os
import re
import signal
import subprocess
import sys

import pytest

import plait

MAIN = [sys.executable, "-c", "from plait.cli import main; main()"]


def plait_command(*words, command=MAIN, **environment):
    return subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=60,
    )


CHAPTERS = {
    "Look around": ["doctor", "demo"],
    "Train": ["run", "launch"],
    "Decide": ["profile", "plan", "sim"],
    "Measure": ["bench", "lab"],
}


def test_help_is_a_table_of_contents():
    done = plait_command("--help", COLUMNS="80")
    assert done.returncode == 0
    found, chapter = {}, None
    for line in done.stdout.splitlines():
        if match := re.match("╭─ ([A-Z][a-z ]+) ─", line):
            chapter = found.setdefault(match[1], [])
        elif line.startswith("│ "):
            chapter.append(line[2:10].strip())  # a second line of a command would be an empty name
    assert list(found.pop("Options"))
    assert list(found.items()) == list(CHAPTERS.items())


def test_every_command_is_in_a_chapter():
    from typer.main import get_command

    from plait.cli.app import app

    assert sorted(get_command(app).commands) == sorted(name for names in CHAPTERS.values() for name in names)


def test_the_module_is_the_command():
    as_module = [sys.executable, "-m", "plait"]
    assert plait_command("--version", command=as_module).stdout == f"plait {plait.__version__}\n"
    done = plait_command("profile", "gone.py", command=as_module)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("plait: ")


def test_version():
    assert plait_command("--version").stdout == f"plait {plait.__version__}\n"


QUICK = ["doctor", "--quick"]
PRINTING = [["--version"], ["--help"], QUICK, [*QUICK, "--json"], ["bench"], ["bench", "--json"]]


@pytest.mark.parametrize("words", PRINTING)
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*MAIN, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "plait: standard output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("words", PRINTING)
def test_a_closed_output_is_one_line_and_exit_code_2(words):
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *MAIN, *words], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.stderr.startswith("plait: standard output is closed (setting: standard output)")
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 2


def test_a_reader_that_has_enough_is_no_error_to_speak_of():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*MAIN, "bench", "--json"], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


LEAVING = """
import os, signal, sys
import plait.cli.app

def app():
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
        signal.pause() if len(sys.argv) == 2 else print("went on")
    finally:
        print("left in order")

plait.cli.app.app = app
plait.cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_blocks(number):
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, str(int(number))], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "left in order\n", "")


def test_nohup_is_heeded():
    command = ["nohup", sys.executable, "-c", LEAVING, str(int(signal.SIGHUP)), "and go on"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "went on\nleft in order\n")


@pytest.mark.parametrize("directory", ["/etc/passwd", "/proc/x"])
def test_a_demo_that_has_nowhere_to_write_is_refused(directory):
    done = plait_command("demo", "--directory", directory)
    assert done.returncode == 2
    assert done.stderr.startswith(f"plait: {directory} cannot be written: ")
    assert len(done.stderr.splitlines()) == 1


def test_an_error_of_plaits_own_is_one_line_and_exit_code_2():
    done = plait_command("profile", "gone.py")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("plait: ")


@pytest.mark.parametrize("words", [["nothing"], ["demo", "--no-such-option"]])
def test_a_wrong_command_ends_with_2(words):
    assert plait_command(*words).returncode == 2


def test_an_unknown_act_is_refused_with_the_known_ones():
    done = plait_command("demo", "nothing")
    assert done.returncode == 2
    assert "there is no act 'nothing'" in done.stderr
    assert "chain" in done.stderr


def test_help_imports_neither_torch_nor_pydantic():
    code = (
        "import sys; import plait.cli.app; sys.exit(bool({'torch', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
