"""The wheel as a stranger gets it: what is in it, and the tutorial, run from it outside of the source tree.

The environment is new, and has plait from the wheel; the packages that plait needs are those of the
environment that runs the tests, made visible by a path file. Path files within that one are not heeded, so
the plait that is under development there stays out of sight.
"""

import email
import fcntl
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from plait import native

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tutorial.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MOST_BYTES = 2_000_000
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def sections():
    """The headings of the tutorial with the commands below each; installing is what the fixtures do."""
    found = {}
    for text in PAGE.read_text().split("\n## ")[1:]:
        lines = "".join(block for kind, block in FENCE.findall(text) if kind == "bash").splitlines()
        found[text.partition("\n")[0]] = [shlex.split(line, comments=True) for line in lines]
    assert [words[0] for words in found.pop("Install")] == ["python3", ".", "pip"]
    return {heading: commands for heading, commands in found.items() if commands}


def files():
    """The files that the tutorial has its reader save: a block's first line is the name."""
    blocks = [block for kind, block in FENCE.findall(PAGE.read_text()) if kind == "py"]
    return {block.splitlines()[0].removeprefix("# "): block for block in blocks}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built once, by the first of the processes that run the tests; its kernels were built for them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            offline = ["--no-deps", "--no-build-isolation", "--no-index"]
            subprocess.run([*PIP, "wheel", *offline, "--wheel-dir", folder, ROOT], check=True, timeout=280)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """The folder of a new environment that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True, timeout=120
    )
    (site,) = folder.glob("lib/python*/site-packages")
    others = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (site / "dependencies.pth").write_text("".join(path + "\n" for path in sorted(others)))
    for point in metadata.distribution("torch").entry_points:  # torchrun, as an installer writes it
        if point.group == "console_scripts":
            script = folder / "bin" / point.name
            script.write_text(f"#!{python}\nfrom {point.module} import {point.attr}\n{point.attr}()\n")
            script.chmod(0o755)
    return folder


@pytest.fixture
def shell(clean, tmp_path):
    """Run a command in an empty directory, as its user would after activating the environment."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "PLAIT"))
    }
    kept |= {
        "PATH": f"{clean / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(clean),
        "XDG_CACHE_HOME": str(clean / "cache"),  # no profile that was kept elsewhere
        "COLUMNS": "100",
    }
    place = tmp_path / "place"
    place.mkdir()

    def run(words):
        given = list(itertools.takewhile(lambda word: re.match("[A-Z_]+=", word), words))  # VARIABLE=value
        done = subprocess.run(
            words[len(given) :],
            cwd=place,
            env=kept | dict(word.split("=", 1) for word in given),
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    run.place = place
    return run


def test_what_is_in_the_wheel(wheel):
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as content:
        names = {name for name in content.namelist() if not name.endswith("/")}
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        read = {name.removeprefix(f"{info}/"): content.read(name).decode() for name in names if info in name}
    compiled = {name for name in names if name.endswith(".so")}
    modules = names - compiled - {f"{info}/{name}" for name in read}
    source = ROOT / "src"
    assert modules == {
        str(file.relative_to(source))
        for file in source.rglob("*")
        if file.is_file() and file.parent.name != "__pycache__"
    }
    assert "plait/py.typed" in modules
    # Where kernels can be built here, they are in the wheel, and that says for which machines it is.
    assert {name.partition(".")[0] for name in compiled} == (
        set() if native.folder() is None else {"plait/_native", "plait/_slab"}
    )
    assert ("none-any" in wheel.name) == (not compiled)
    assert read["licenses/LICENSE"] == (ROOT / "LICENSE").read_text()
    about = email.message_from_string(read["METADATA"])
    assert about["License-Expression"] == "Apache-2.0"
    assert "torch<2.14,>=2.13" in about.get_all("Requires-Dist")
    assert "[console_scripts]\nplait=plait.cli:main" in read["entry_points.txt"].replace(" = ", "=")


def test_plait_is_the_one_of_the_wheel(clean, shell):
    code = (
        "import plait, plait.native as n, plait_autoload as a; print(plait.__file__, a.__file__, n.folder())"
    )
    for path in shell(["python", "-c", code]).split():
        assert Path(path).is_relative_to(clean) or (path, native.folder()) == ("None", None)
    version = metadata.version("plait")
    assert (
        shell(["plait", "--version"]) == shell(["python", "-m", "plait", "--version"]) == f"plait {version}\n"
    )


def test_the_doctor_finds_nothing_wrong_with_it(shell):
    said = json.loads(shell(["plait", "doctor", "--quick", "--json"]))
    assert said["works"] is True
    found = {finding["name"]: finding["state"] for finding in said["findings"]}
    assert found["unmodified scripts"] == "ok"  # torch finds the entry point
    assert found["kernels"] == ("ok" if native.missing() is None else "without")


SAID = {
    "What can this machine do?": ["plait works here"],
    "A first training": ["first: finished after 50 steps", "report: runs/first/report.html"],
    "A script of your own, with gradients in 4 bits": ["gradients of 2 parameters in 4 bits", "times fewer"],
    "Decide before you train": ["F+B ms at 32", "│ data, fp32", "stage1 │", "blocks x width"],
    "Train as you decided": ["first: burst on ", "first: finished after 50 steps"],
    "Two models in little memory": [
        "rate-0.01: finished after 20 steps",
        "rate-0.003: finished after 20 steps",
    ],
}
"""What each section's commands print, among other things."""


@pytest.mark.parametrize("heading", SAID)
def test_the_tutorial(heading, shell):
    for name, text in files().items():
        (shell.place / name).write_text(text)
    commands = sections()
    assert commands.keys() == SAID.keys()
    printed = "".join(map(shell, commands[heading]))
    for words in SAID[heading]:
        assert words in printed
