"""The command line as a whole: help, version, and how errors end a process."""

import os
import subprocess
import sys

import pytest

import plait


def plait_command(*words, **environment):
    command = [sys.executable, "-c", "from plait.cli import main; main()", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=60
    )


def test_help_lists_the_commands():
    done = plait_command("--help")
    assert done.returncode == 0
    for name in ("demo", "profile", "lab", "bench", "doctor"):
        assert name in done.stdout


def test_version():
    assert plait_command("--version").stdout == f"plait {plait.__version__}\n"


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
