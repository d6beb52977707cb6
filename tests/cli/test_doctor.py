"""plait doctor: what is found, what is missing with its remedy, and exit codes that a script can use."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from plait import native
from plait.cli import hardware, software
from plait.cli.doctor import doctor
from plait.cli.finding import Finding
from plait.cli.software import Torch
from plait.cluster import disk
from plait.errors import UsageError

app = typer.Typer()
app.command()(doctor)


def report(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["--json", *options])
    assert result.exit_code == 0, result.output
    said: dict[str, Any] = json.loads(result.stdout)
    assert (said["format"], said["works"]) == ("plait.doctor/1", True)
    return said


def findings(*options: str) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in report(*options)["findings"]}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All that the doctor can say."""
    here = tmp_path_factory.mktemp("here")
    said = report("--measure", "--directory", str(here))
    assert list(here.iterdir()) == []
    return said


def test_this_machine_works(measured: dict[str, Any]) -> None:
    found = {finding["name"]: finding for finding in measured["findings"]}
    assert found["python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"]["found"].startswith(importlib.metadata.version("torch"))
    assert found["torch"]["found"].endswith("(needed: >=2.13,<2.14)")
    assert found["kernels"]["found"].startswith(native.isa())
    assert found["gloo"]["state"] == "ok"
    assert found["unmodified scripts"]["state"] == "ok"
    assert found["cores"]["figures"]["usable"] >= 1
    assert found["memory bandwidth"]["figures"]["read_bytes_per_s"] > 0
    assert found["shared memory"]["figures"]["page_bytes"] >= 4096
    assert found["disk bandwidth"]["figures"]["write_bytes_per_s"] > 0
    also = {"nccl", "processor", "memory", "disk", "gpus", "lab network", "control groups", "background work"}
    assert also <= set(found)
    assert {"extra hf", "extra ray"} <= set(found)


def test_measuring(measured: dict[str, Any]) -> None:
    cluster = measured["cluster"]
    assert all(device["gflops"] > 0 for device in cluster["devices"])
    assert all(tier["read_bytes_per_s"] > 0 for tier in cluster["tiers"])


def test_quick_asks_and_measures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('quick imports no torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = findings("--quick")
    assert not {"gloo", "nccl", "memory bandwidth", "disk bandwidth"} & set(found)
    assert {"torch", "kernels", "processor", "disk", "gpus", "lab network"} <= set(found)


def test_what_is_asked_makes_sense() -> None:
    result = CliRunner().invoke(app, ["--quick", "--measure"])
    assert isinstance(result.exception, UsageError)
    assert result.exception.setting == "--quick, --measure"


def test_plain_lines_without_a_terminal() -> None:
    result = CliRunner().invoke(app, ["--quick"])
    assert result.exit_code == 0
    first, *_, last = result.stdout.splitlines()
    assert first.split() == ["ok", "python", ".".join(map(str, sys.version_info[:3]))]
    assert last.startswith("plait works here, with")


@pytest.mark.parametrize(("state", "explained"), [("ok", "so"), ("without", None), ("fault", None)])
def test_what_is_missing_and_only_that_is_explained(state: Any, explained: str | None) -> None:
    with pytest.raises(AssertionError, match=f"x is {state}"):
        Finding(name="x", state=state, found="y", consequence=explained, remedy=explained)


# Software.


def test_a_torch_that_cannot_be_imported_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Something else of that name where the user happens to be is not what `plait` imports.
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "torch.py").write_text("raise RuntimeError('a script of the user')")
    monkeypatch.chdir(tmp_path / "here")
    result = CliRunner().invoke(app, ["--json"])
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    (fault,) = [finding for finding in said["findings"] if finding["state"] == "fault"]
    assert (fault["name"], said["works"]) == ("import torch", False)
    assert fault["found"] == "OSError: libcudart.so.13: cannot open shared object file"


@pytest.mark.parametrize(
    ("torch", "states"),
    [
        (Torch(version="2.13.0+cu130", cuda="13.0", nccl="2.27.5"), {"gloo": "ok", "nccl": "ok"}),
        (Torch(version="2.13.0+cpu"), {"gloo": "ok", "nccl": "without"}),
        (Torch(version="2.13.0+odd", gloo=False), {"gloo": "without", "nccl": "without"}),
    ],
)
def test_backends(torch: Torch, states: dict[str, str]) -> None:
    found = list(software.backends(torch))
    assert {finding.name: finding.state for finding in found} == states
    for finding in found:
        assert (torch.version in finding.found) == (finding.state == "without")


@pytest.mark.parametrize(
    ("value", "state", "consequence", "remedy"),
    [
        ("0", "without", "PLAIT_NATIVE=0", "unset PLAIT_NATIVE"),
        ("python", "without", "PLAIT_NATIVE=python", "unset PLAIT_NATIVE"),
        ("scalar", "without", "without vector instructions", ""),
        ("neon", "fault", "'neon' is not an implementation", "unset PLAIT_NATIVE"),
    ],
)
def test_kernels_that_were_turned_off(
    monkeypatch: pytest.MonkeyPatch, value: str, state: str, consequence: str, remedy: str
) -> None:
    if value == "scalar" and native.missing():
        pytest.skip(str(native.missing()))
    monkeypatch.setenv("PLAIT_NATIVE", value)
    found = software.kernels()
    assert found.state == state
    assert consequence in str(found.consequence)
    assert remedy in str(found.remedy)


def test_an_unknown_kernel_is_the_only_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_NATIVE", "neon")
    result = CliRunner().invoke(app, ["--quick"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "plait cannot work here: kernels"


NOT_BUILT = """
import sys
sys.modules["plait._native"] = None  # as where it was not built: importing it fails
from plait.cli.software import kernels
print(kernels().consequence, "|", kernels().remedy)
"""


def test_kernels_that_were_not_built() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PLAIT_NATIVE"}
    done = subprocess.run(
        [sys.executable, "-c", NOT_BUILT], capture_output=True, text=True, check=True, env=environment
    )
    consequence, remedy = done.stdout.split("|")
    assert "the compiled kernels were not built" in consequence
    assert remedy.strip() == "a C++17 compiler, then install plait again"


def test_scripts_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    found = software.scripts()
    assert found.state == "without"
    assert "PLAIT_COMPRESS does nothing" in str(found.consequence)
    assert found.remedy == "unset TORCH_DEVICE_BACKEND_AUTOLOAD"


def test_ray_that_lets_everyone_in(monkeypatch: pytest.MonkeyPatch) -> None:
    if software.installed("ray") is None:
        pytest.skip("Ray is not installed")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    (found,) = software.ray()
    assert (found.state, found.found) == ("ok", "authentication by token, cluster at 10.0.0.7:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", "Disabled")
    (found,) = software.ray()
    assert found.state == "without"
    assert found.found.startswith("authentication by disabled")
    assert "run programs" in str(found.consequence)


def test_a_python_that_is_too_old() -> None:
    assert software.python((3, 10, 4)) == Finding(
        name="python",
        state="fault",
        found="3.10.4",
        consequence="plait does not run",
        remedy="Python 3.11 or later",
    )


def run_with_requirements(tmp_path: Path, *requirements: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor where plait's metadata asks for these packages."""
    info = tmp_path / "plait-99.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: plait", "Version: 99"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    code = "import typer; from plait.cli.doctor import doctor; a = typer.Typer(); a.command()(doctor); a()"
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-c", code, "--quick"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_a_missing_package_is_a_fault(tmp_path: Path) -> None:
    done = run_with_requirements(tmp_path, "no-such-package>=1", "numpy>=2.0")
    assert done.returncode == 1
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    at = lines.index(["fault", "no-such-package", "not installed"])
    assert lines[at + 1] == ["so:", "plait", "does not run"]
    assert lines[at + 2] == ["remedy:", "pip", "install 'no-such-package>=1'"]
    assert done.stdout.splitlines()[-1] == "plait cannot work here: no-such-package"


def test_an_untested_version_is_said(tmp_path: Path) -> None:
    typer_version = importlib.metadata.version("typer")
    done = run_with_requirements(
        tmp_path, "numpy<1.5,>=1.0", "typer[all]>=0.1; extra == 'hf'", "typer>=99; extra == 'tune'"
    )
    assert done.returncode == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    numpy_version = importlib.metadata.version("numpy")
    assert f"without numpy {numpy_version}, where numpy<1.5,>=1.0 is needed" in lines
    assert f"ok extra hf typer {typer_version}" in lines
    assert f"without extra tune typer {typer_version}, where typer>=99 is needed" in lines
    # Its metadata has no entry point, as a plait that is run from its sources.
    assert "without unmodified scripts out of reach" in lines


@pytest.mark.parametrize(
    ("requirement", "version", "admitted"),
    [
        ("torch<2.14,>=2.13", "2.13.0+cpu", True),
        ("torch<2.14,>=2.13", "2.13.1.post1", True),
        ("torch<2.14,>=2.13", "2.14.0", False),
        ("torch<2.14,>=2.13", "2.9.1", False),
        ("rich>=14", "14.0", True),
        ("rich", "1", True),
    ],
)
def test_versions_are_compared_by_their_numbers(requirement: str, version: str, admitted: bool) -> None:
    assert software.admits(requirement, version) is admitted


# Hardware.


def test_a_directory_in_memory_frees_none() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    finding = findings("--quick", "--directory", "/dev/shm")["disk"]
    assert finding["state"] == "without"
    assert "frees none" in finding["consequence"]
    speed = hardware.disk_bandwidth(Path("/dev/shm"))
    assert speed.state == "without"
    assert "page cache" in str(speed.consequence)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--quick", "--directory", str(tmp_path / "none")])
    assert result.exit_code != 0
    assert "cannot be used: No such file" in str(result.exception)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without the powers of root, if the tests have them."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


def test_a_disk_that_cannot_be_measured_is_no_fault() -> None:
    full = hardware.disk_bandwidth(Path("/proc"))
    with as_nobody():
        foreign = hardware.disk_bandwidth(Path("/usr"))
    assert full.found == "not measured: /proc has no room"
    assert foreign.found == "/usr cannot be written: Permission denied"
    for found in (full, foreign):
        assert found.state == "without"
        assert found.consequence == "nothing can be spilled there"


@pytest.mark.parametrize(("speed", "sizes_mib"), [(20e6, [4]), (1e9, [4, 64])])
def test_a_slow_disk_is_asked_for_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speed: float, sizes_mib: list[int]
) -> None:
    asked = []

    def probe(directory: Path, *, most_bytes: int) -> disk.DiskSpeed:
        asked.append(most_bytes >> 20)
        return disk.DiskSpeed(read_bytes_per_s=2 * speed, write_bytes_per_s=speed, direct=True)

    monkeypatch.setattr(disk, "probe_disk", probe)  # there is no slow disk here
    assert hardware.disk_bandwidth(tmp_path).state == "ok"
    assert asked == sizes_mib


CUDA = Torch(version="2.13.0+cu130", cuda="13.0", gpus=("A100", "A100"), nccl="2.27.5")


@pytest.mark.parametrize(
    ("count", "torch", "state", "said"),
    [
        (0, None, "without", "everything runs on the CPU"),
        (0, CUDA, "without", "everything runs on the CPU"),
        (2, None, "ok", "2; torch was not asked"),
        (2, CUDA, "ok", "A100, A100"),
        (4, CUDA, "without", "sees 2 of them"),
        (2, Torch(version="2.13.0+cpu"), "without", "torch 2.13.0+cpu is built without CUDA"),
    ],
)
def test_gpus(count: int, torch: Torch | None, state: str, said: str) -> None:
    found = hardware.gpus(count, torch)
    assert found.state == state
    assert said in (found.consequence or found.found)


@pytest.mark.parametrize(
    ("idle", "freeze", "said"),
    [(True, True, None), (False, True, "SCHED_IDLE"), (True, False, "SIGSTOP"), (False, False, "; SIGSTOP")],
)
def test_background_work(idle: bool, freeze: bool, said: str | None) -> None:
    found = hardware.background(idle, freeze)
    assert found.state == ("ok" if said is None else "without")
    assert said is None or said in str(found.consequence)
