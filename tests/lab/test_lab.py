from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from lab_workers import MEET, left_of, python

from plait.errors import FileError, LabError, PlaitError, UsageError, WorkerError
from plait.lab import Lab, Trace, clean, measure_bandwidth

CONTRACT = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME"
SHOW_CONTRACT = f"import os; print(*(os.environ[name] for name in '{CONTRACT}'.split()))"


@pytest.fixture(params=["namespaces", "loopback"])
def loopback(request: pytest.FixtureRequest) -> bool:
    """Both kinds of lab promise the same to a worker."""
    if request.param == "namespaces":
        request.getfixturevalue("namespaces")
    return bool(request.param == "loopback")


def test_workers_have_the_torchrun_contract(loopback: bool) -> None:
    lines: list[str] = []
    with Lab(hosts=2, loopback=loopback) as lab:
        outcome = lab.run(python(SHOW_CONTRACT), per_host=2, show=lines.append)
        address = lab.hosts[0].address
    assert outcome.exit_codes == (0, 0, 0, 0)
    told = dict(line.split(" | ") for line in lines)
    interface = "lo" if loopback else "lab0"
    port = told["host0.0"].split()[5]
    for rank, name in enumerate(["host0.0", "host0.1", "host1.0", "host1.1"]):
        assert told[name] == f"{rank} 4 {rank % 2} 2 {address} {port} {interface}"
    assert left_of(lab) == []


def test_workers_reach_each_other_run_after_run(loopback: bool) -> None:
    lines: list[str] = []
    with Lab(hosts=3, rate=None if loopback else "1gbit", loopback=loopback) as lab:
        for _ in range(2):
            assert lab.run(python(MEET), show=lines.append, timeout_seconds=60).exit_code == 0
    assert lines == ["host0 | ['rank 1', 'rank 2']"] * 2


def test_output_goes_to_files_when_asked(loopback: bool, tmp_path: Path) -> None:
    with Lab(hosts=2, loopback=loopback) as lab:
        lab.run(python("import os; print('I am', os.environ['RANK'])"), logs=tmp_path / "logs")
    files = sorted((tmp_path / "logs").iterdir())
    assert [(file.name, file.read_text()) for file in files] == [
        ("host0.log", "I am 0\n"),
        ("host1.log", "I am 1\n"),
    ]


def test_the_first_failure_ends_the_run_and_leaves_nothing(loopback: bool) -> None:
    code = "import os, sys, time; sys.exit(5) if os.environ['RANK'] == '1' else time.sleep(600)"
    with Lab(hosts=3, loopback=loopback) as lab:
        outcome = lab.run(python(code))
        assert outcome.first_failed == 1
        assert outcome.exit_code == 5
        with pytest.raises(WorkerError, match=r"ranks \[0, 1, 2\] were still running"):
            lab.run(["sleep", "600"], timeout_seconds=0.2)
    assert left_of(lab) == []


def test_a_failing_block_leaves_nothing_not_even_what_hid(loopback: bool) -> None:
    hide = "import subprocess; subprocess.Popen(['sleep', '601.7'], start_new_session=True)"
    lab = Lab(hosts=2, loopback=loopback)

    def fail() -> None:
        with lab:
            lab.start(0, python(hide)).wait()
            assert len(left_of(lab)) == (1 if loopback else 4)  # what hid, and three namespaces
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert left_of(lab) == []


def test_environment_and_directory_of_a_process(loopback: bool, tmp_path: Path) -> None:
    with Lab(hosts=1, loopback=loopback) as lab:
        process = lab.start(
            0,
            python(
                "import os; print(os.environ['COLOUR'], os.getcwd(), os.getpgid(0) == os.getpid(), end='')"
            ),
            env={"COLOUR": "blue"},
            directory=tmp_path,
            stdout=subprocess.PIPE,
        )
        said, _ = process.communicate()
        assert said.decode() == f"blue {tmp_path} True"
        assert process.returncode == 0


def test_nothing_shows_outside_the_hosts(namespaces: None) -> None:
    with Lab(hosts=2, rate="100mbit") as lab:
        outside = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
        assert not {line.split()[0].partition("@")[0] for line in outside.splitlines()} & {
            "lab0",
            "port0",
            "switch0",
        }
        lines: list[str] = []
        lab.run(
            python("import socket; print(socket.gethostname(), socket.gethostbyname('host1'))"),
            show=lines.append,
        )
        assert sorted(lines) == ["host0 | host0 198.18.0.2", "host1 | host1 198.18.0.2"]


def test_cores_and_memory_of_a_host(namespaces: None, memory_groups: None) -> None:
    cores = sorted(os.sched_getaffinity(0))
    each = f"{cores[0]}:{cores[-1]}"
    lines: list[str] = []
    with Lab(hosts=2, memory="64MiB", cores=each) as lab:
        lab.run(python("import os; print(*os.sched_getaffinity(0))"), show=lines.append)
        greedy = "import os; x = b'x' * (2**28 if os.environ['RANK'] == '1' else 2**20)"
        outcome = lab.run(python(greedy), show=lines.append)
    assert sorted(lines) == [f"host0 | {cores[0]}", f"host1 | {cores[-1]}"]
    assert outcome.exit_codes[1] == -9
    assert [host.oom_kills for host in lab.hosts] == [0, 1]
    assert [host.cores for host in lab.hosts] == [(cores[0],), (cores[-1],)]
    assert all(host.memory_peak_bytes is not None for host in lab.hosts)
    assert left_of(lab) == []


def test_without_a_limit_memory_is_not_measured() -> None:
    with Lab(hosts=1, loopback=True) as lab:
        assert lab.hosts[0].memory_peak_bytes is None
        assert lab.hosts[0].oom_kills is None


def test_two_labs_do_not_disturb_each_other(namespaces: None) -> None:
    with Lab(hosts=2, rate="80mbit") as one:
        sleeper = one.start(1, ["sleep", "600"])
        with Lab(hosts=2) as other:
            assert other.run(python(MEET), show=lambda line: None, timeout_seconds=60).exit_code == 0
            assert other.label != one.label
        assert not [leftover for leftover in clean() if leftover.label == one.label]
        assert sleeper.poll() is None
        assert one.run(python(MEET), show=lambda line: None, timeout_seconds=60).exit_code == 0


@pytest.mark.parametrize(
    ("settings", "error", "setting"),
    [
        ({"hosts": 0}, UsageError, "hosts"),
        ({"hosts": -1}, UsageError, "hosts"),
        ({"hosts": 251}, UsageError, "hosts"),
        ({"rate": "-1gbit"}, UsageError, "rate"),
        ({"rate": 0}, UsageError, "rate"),
        ({"rate": "quick"}, UsageError, "rate"),
        ({"memory": "1MiB"}, UsageError, "memory"),
        ({"memory": "-1"}, UsageError, "memory"),
        ({"cores": "4095"}, UsageError, "cores"),
        ({"trace": "/absent"}, FileError, "trace"),
        ({"trace": Trace.parse("0 1gbit 2"), "hosts": 2}, FileError, "trace"),
    ],
)
def test_a_lab_that_cannot_be_is_refused_at_once(
    settings: dict[str, object], error: type[PlaitError], setting: str
) -> None:
    with pytest.raises(error) as caught:
        Lab(**settings)  # type: ignore[arg-type]
    assert caught.value.setting == setting
    assert caught.value.works is not None


def test_acts_that_cannot_be_are_refused(loopback: bool) -> None:
    with Lab(hosts=2, loopback=loopback) as lab:
        for act, setting in (
            (lambda: lab.start(2, ["true"]), "host"),
            (lambda: lab.start(-1, ["true"]), "host"),
            (lambda: lab.compete(0, 0), "target"),
            (lambda: lab.compete(0, 5), "host"),
            (lambda: lab.compete(0, 1, streams=0), "streams"),
            (lambda: lab.compete(0, 1, rate=-1), "rate"),
            (lambda: lab.run([]), "command"),
            (lambda: lab.run([""]), "command"),
            (lambda: lab.run("true"), "command"),
            (lambda: lab.run(["no-such-program"]), "command"),
            (lambda: lab.run(["./no/such/program"]), "command"),
            (lambda: lab.run(["true"], per_host=0), "per_host"),
            (lambda: measure_bandwidth(lab, 0), "size"),
        ):
            with pytest.raises(UsageError) as caught:
                act()
            assert caught.value.setting == setting
            assert caught.value.works is not None
        if not loopback:
            for act in (lambda: lab.cut(7), lambda: lab.set_rate("1mbit", host=7), lambda: lab.set_rate(-1)):
                with pytest.raises(UsageError):
                    act()
            with pytest.raises(FileError, match="host 7"):
                lab.follow(Trace.parse("0 1mbit 7"))
    with Lab(hosts=1, loopback=loopback) as lab, pytest.raises(UsageError, match="no link to measure"):
        measure_bandwidth(lab, 1000)


def test_a_lab_is_used_inside_its_block_and_once() -> None:
    lab = Lab(hosts=1, loopback=True)
    for act in (
        lambda: lab.start(0, ["true"]),
        lambda: lab.set_rate("1mbit"),
        lambda: lab.follow(Trace.parse("0 1mbit")),
        lambda: lab.cut(0),
    ):
        with pytest.raises(LabError, match="not open"):
            act()
    with lab:
        pass
    with pytest.raises(LabError, match="not open"):
        lab.run(["true"])
    with pytest.raises(LabError, match="entered once"):
        lab.__enter__()
