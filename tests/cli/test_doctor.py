"""plait doctor: what is found, what is missing with its remedy, and exit codes that a script can use."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from plait import native
from plait.cli.doctor import _admits, doctor

app = typer.Typer()
app.command()(doctor)


def findings(*options: str) -> dict[str, dict[str, str]]:
    result = CliRunner().invoke(app, ["--json", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["format"] == "plait.doctor/1"
    assert report["works"] is True
    return {finding["name"]: finding for finding in report["findings"]}


def test_this_machine_works() -> None:
    found = findings()
    assert found["python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"]["found"] == importlib.metadata.version("torch")
    assert found["kernels"]["found"].startswith(native.isa())
    assert {"cores", "memory", "disk", "gpus", "lab network", "control groups", "extra ray"} <= set(found)
    for finding in found.values():
        # What is missing says what that means and what to do about it; what is there says nothing.
        assert bool(finding["consequence"]) == bool(finding["remedy"]) == (finding["state"] != "ok")


def test_plain_lines_without_a_terminal() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["ok", "python", ".".join(map(str, sys.version_info[:3]))]


def test_without_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_NATIVE", "0")
    finding = findings()["kernels"]
    assert finding["state"] == "without"
    assert finding["found"].startswith("python")
    assert "PLAIT_NATIVE" in finding["consequence"]
    assert "compiler" in finding["remedy"]


def test_a_directory_in_memory_frees_none() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    finding = findings("--directory", "/dev/shm")["disk"]
    assert finding["state"] == "without"
    assert "frees none" in finding["consequence"]


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--directory", str(tmp_path / "none")])
    assert result.exit_code != 0
    assert "cannot be used: No such file" in str(result.exception)


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
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )


def test_a_missing_package_is_a_fault(tmp_path: Path) -> None:
    done = run_with_requirements(tmp_path, "no-such-package>=1", "numpy>=2.0")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    at = lines.index("fault   no-such-package not installed")
    assert lines[at + 1].strip() == "so: plait does not run"
    assert lines[at + 2].strip() == "remedy: pip install 'no-such-package>=1'"


def test_an_untested_version_is_said(tmp_path: Path) -> None:
    done = run_with_requirements(tmp_path, "numpy<1.5,>=1.0", "typer[all]>=0.1; extra == 'hf'")
    assert done.returncode == 0
    version = importlib.metadata.version("numpy")
    assert f"numpy           {version}, where numpy<1.5,>=1.0 is tested" in done.stdout
    assert f"ok      extra hf        typer {importlib.metadata.version('typer')}" in done.stdout


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
    assert _admits(requirement, version) is admitted


def test_measuring(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--json", "--measure", "--directory", str(tmp_path)])
    assert result.exit_code == 0
    cluster = json.loads(result.stdout)["cluster"]
    assert all(device["gflops"] > 0 for device in cluster["devices"])
    assert all(tier["read_bytes_per_s"] > 0 for tier in cluster["tiers"])
    assert list(tmp_path.iterdir()) == []
