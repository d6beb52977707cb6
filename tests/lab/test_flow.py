from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.lab.command import alone
from plait.lab.flow import fetch, main


@pytest.fixture
def port() -> Iterator[int]:
    with subprocess.Popen([*alone("flow.py"), "serve", "127.0.0.1"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.kill()


def test_fetches_once_or_until_enough(port: int) -> None:
    assert len(fetch("127.0.0.1", port, 1000, seconds=0.0, most=1)) == 1
    taken = fetch("127.0.0.1", port, 3 * 2**20 + 1, seconds=600.0, most=4)
    assert len(taken) == 4
    assert all(seconds > 0 for seconds in taken)


def test_prints_what_it_took(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fetch", "127.0.0.1", str(port), "5000", "--seconds", "600", "--most", "2"])
    assert len(json.loads(capsys.readouterr().out)) == 2


def connections(port: int) -> int:
    """How many are connected to a port of this machine."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_a_sender_that_dies_is_an_error() -> None:
    with subprocess.Popen([*alone("flow.py"), "serve", "127.0.0.1"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        number = int(server.stdout.readline())
        drain = subprocess.Popen(
            [*alone("flow.py"), "drain", "127.0.0.1", str(number), "--streams", "2"], stderr=subprocess.PIPE
        )
        while connections(number) < 2:
            assert drain.poll() is None
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            drain.wait(0.2)  # it fetches for as long as there is a sender
        server.kill()
        _, said = drain.communicate(timeout=30)
    assert b"ConnectionResetError" in said or b"bytes missing" in said
