from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.errors import FileError, LabError, PlaitError, UsageError, WorkerError
from plait.lab import Lab, MemoryGroup, Trace, clean, measure_bandwidth
from plait.lab.label import Label
from plait.lab.leftover import members
from plait.lab.network import NAMESPACES

CONTRACT = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME"
SHOW_CONTRACT = f"import os; print(*(os.environ[name] for name in '{CONTRACT}'.split()))"
MEET = """
import os, socket
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(where) as server:
        print(sorted(server.accept()[0].recv(9).decode() for _ in range(world - 1)))
else:
    while True:
        try:
            socket.create_connection(where).sendall(f"rank {rank}".encode())
            break
        except ConnectionRefusedError:
            pass
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def left_of(lab: Lab) -> list[str]:
    label = Label.find(lab.label)
    assert label is not None
    spaces = NAMESPACES.iterdir() if NAMESPACES.exists() else []
    names = [path.name for path in spaces if path.name.startswith(lab.label)]
    groups = [
        str(host.memory.directory) for host in lab.hosts if host.memory and host.memory.directory.exists()
    ]
    return [*names, *groups, *map(str, members(label))]


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


def arriving(lab: Lab, host: int) -> float:
    """Bytes per second that reach a host, over a moment."""
    begin, before = time.monotonic(), lab.hosts[host].received_bytes
    time.sleep(0.4)
    return (lab.hosts[host].received_bytes - before) / (time.monotonic() - begin)


def wait_until(lab: Lab, host: int, rate_bytes_per_second: float) -> None:
    deadline = time.monotonic() + 30
    while lab.hosts[host].rate_bytes_per_second != rate_bytes_per_second:
        assert time.monotonic() < deadline, "the trace was not followed"
        time.sleep(0.01)


def test_a_trace_that_halves_the_rate_is_visible(namespaces: None) -> None:
    with Lab(hosts=2, rate="40mbit") as lab, lab.compete(0, 1):
        before = max(arriving(lab, 1) for _ in range(3))
        lab.follow(Trace.parse("0.1 20mbit"))
        wait_until(lab, 1, 2.5e6)
        after = max(arriving(lab, 1) for _ in range(3))
    assert 0.25 < after / before < 0.75


def test_a_lab_follows_its_trace_from_the_first_worker_on(namespaces: None, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("0 40mbit\n0.05 20mbit 1\n")
    with Lab(hosts=2, rate="80mbit", trace=tmp_path / "trace") as lab:
        assert [host.rate_bytes_per_second for host in lab.hosts] == [10e6, 10e6]
        lab.start(0, ["sleep", "60"])
        wait_until(lab, 1, 2.5e6)
        assert lab.hosts[0].rate_bytes_per_second == 5e6


def test_a_cut_link_is_visible_and_so_is_its_return(namespaces: None) -> None:
    with Lab(hosts=2, rate="80mbit") as lab, lab.compete(0, 1):
        assert arriving(lab, 1) > 0
        lab.cut(1)
        time.sleep(0.1)
        assert arriving(lab, 1) == 0
        lab.restore(1)
        deadline = time.monotonic() + 30
        while arriving(lab, 1) == 0:
            assert time.monotonic() < deadline, "nothing arrives over the restored link"


def test_what_cannot_flow_over_a_cut_link_is_said(namespaces: None) -> None:
    with Lab(hosts=2) as lab:
        lab.cut(0)
        with pytest.raises(LabError, match="no traffic can flow from host 0 to host 1"):
            lab.compete(0, 1)
        assert lab.run(["true"]).exit_code == 0  # the host itself lives on
    assert left_of(lab) == []


def test_rates_change_host_by_host_and_both_ways(namespaces: None) -> None:
    with Lab(hosts=2, rate="80mbit") as lab:
        for slow, flow in ((0, (0, 1)), (1, (0, 1))):  # the sender's port, then the receiver's
            lab.set_rate("80mbit")
            with lab.compete(*flow):
                full = arriving(lab, 1)
                lab.set_rate("8mbit", host=slow)
                time.sleep(0.1)
                assert arriving(lab, 1) < 0.5 * full
        lab.set_rate(None)
        assert [host.rate_bytes_per_second for host in lab.hosts] == [None, None]


def test_a_link_that_is_slowed_far_down_under_traffic_lives_on(namespaces: None) -> None:
    # What waits in its queue was cut for the fast link, in packets larger than the slow one's bucket.
    with Lab(hosts=2, rate="2gbit") as lab, lab.compete(0, 1, streams=4):
        assert arriving(lab, 1) > 0
        lab.set_rate("8mbit")
        time.sleep(0.5)  # far longer than what was on its way needs
        assert 0 < arriving(lab, 1) < 3e6


def test_a_competing_flow_takes_no_more_than_its_rate_and_stops(namespaces: None) -> None:
    with Lab(hosts=2, rate="80mbit") as lab:
        with lab.compete(0, 1, streams=2, rate="8mbit") as flow:
            assert 0 < arriving(lab, 1) < 3e6
            flow.stop()
        time.sleep(0.1)
        assert arriving(lab, 1) < 1e4


def test_every_ordered_pair_is_measured_and_none_beats_its_link(namespaces: None) -> None:
    with Lab(hosts=3, rate="80mbit") as lab:
        lab.set_rate("40mbit", host=2)
        transfers = list(measure_bandwidth(lab, 2**19, seconds=0.0))
    assert [(t.source, t.target) for t in transfers] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    for transfer in transfers:
        assert transfer.asked_bytes_per_second == (5e6 if 2 in (transfer.source, transfer.target) else 10e6)
        assert transfer.bytes_per_second == 2**19 / min(transfer.seconds)
        assert transfer.of_asked is not None
        assert transfer.of_asked < 1.1
    assert left_of(lab) == []


def test_two_labs_do_not_disturb_each_other(namespaces: None) -> None:
    with Lab(hosts=2, rate="80mbit") as one:
        sleeper = one.start(1, ["sleep", "600"])
        with Lab(hosts=2) as other:
            assert other.run(python(MEET), show=lambda line: None, timeout_seconds=60).exit_code == 0
            assert other.label != one.label
        assert not [leftover for leftover in clean() if leftover.label == one.label]
        assert sleeper.poll() is None
        assert one.run(python(MEET), show=lambda line: None, timeout_seconds=60).exit_code == 0


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
