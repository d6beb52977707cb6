"""Without root, or without the tools, hosts share the loopback, and one line says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lab_workers import python

from plait.errors import LabError
from plait.lab import Lab, MemoryGroup, Trace, measure_bandwidth
from plait.lab.label import Label


def test_a_loopback_lab_says_what_is_missing_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAIT_LAB_LOOPBACK", "1")
    with Lab(hosts=2, rate="1gbit") as lab:
        assert lab.loopback
        for act in (
            lambda: lab.cut(0),
            lambda: lab.restore(0),
            lambda: lab.set_rate("1mbit"),
            lambda: lab.follow(Trace.parse("0 1mbit")),
        ):
            with pytest.raises(LabError, match="PLAIT_LAB_LOOPBACK is set"):
                act()
        with pytest.raises(LabError, match="no links"):
            _ = lab.hosts[0].sent_bytes
        assert [transfer.of_asked for transfer in measure_bandwidth(lab, 1000, seconds=0.0)] == [None, None]
    said = capfd.readouterr().err
    assert said == (
        "plait lab: PLAIT_LAB_LOOPBACK is set: hosts share this machine's loopback, links are not shaped\n"
    )


def test_without_iproute2_there_is_a_loopback_lab(
    namespaces: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Lab(hosts=2) as lab:
        assert lab.run(python("pass")).exit_code == 0
    assert "plait lab: ip and tc (Debian package iproute2) is missing: " in capfd.readouterr().err
    with pytest.raises(LabError, match="needs ip and tc"):
        Lab(loopback=False)


UNPRIVILEGED = """
import sys
from plait.lab import Lab
with Lab(hosts=2, rate="1gbit", memory="64MiB") as lab:
    print(lab.run([sys.executable, "-S", "-c", "import os; print(os.getuid())"]).exit_codes)
"""


def as_nobody(code: str) -> subprocess.CompletedProcess[str]:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("root and setpriv are missing: cannot become another user")
    # The capability only lets it read an interpreter that is installed below root's home.
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    become += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    return subprocess.run(
        [*become, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_another_user_than_root_gets_a_loopback_lab() -> None:
    done = as_nobody(UNPRIVILEGED)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["(0, 0)", "host0 | 65534", "host1 | 65534"]
    assert done.stderr == (
        "plait lab: root is missing: hosts share this machine's loopback, "
        "links are not shaped, and memory is not limited\n"
    )


def test_what_root_left_behind_is_not_in_another_users_way(memory_groups: None) -> None:
    here = Label.new()
    dead = Label(pid=here.pid, started=here.started + 1, pid_namespace=here.pid_namespace, token="0f0f0f")
    with MemoryGroup("64MiB", name=f"{dead}-host0") as group:
        process = subprocess.Popen(["sleep", "600"])
        group.add(process.pid)
        done = as_nobody(UNPRIVILEGED + "from plait.lab import clean; clean()")
        if process.poll() is not None:
            pytest.skip("a lab of root's on this machine has swept what this test left behind")
        assert "(0, 0)" in done.stdout
        assert (
            f"process {process.pid} of {dead} is another user's; works: plait lab clean, as root"
            in done.stderr
        )
    assert process.wait() == -9
