"""Clocks of two processes, asked for over a socket."""

import json
import socket
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError, WorkerError
from plait.timeline import Timeline, answer_clock, estimate_offset, measure_clock

AHEAD_NS = 5_000_000_000

# A process whose clock is five seconds ahead of ours (both read the machine's monotonic clock): it answers
# for its clock, then records a span for each byte that it is sent and sends its timeline.
PEER = f"""
import json, socket, sys, time
from plait.timeline import Timeline, answer_clock

def clock():
    return time.perf_counter_ns() + {AHEAD_NS}

peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60)
answer_clock(peer, clock=clock)
timeline = Timeline(clock=clock)
while peer.recv(1) == b"w":
    with timeline.span("device0", "work"):
        time.sleep(0.002)
    peer.sendall(b"d")
peer.sendall(json.dumps(timeline.to_json()).encode())
"""


@settings(deadline=None)
@given(
    st.integers(-(2**62), 2**62),
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1),
)
def test_the_true_offset_is_within_the_bound(ahead_ns: int, rounds: list[tuple[int, int, int]]) -> None:
    """Each round: when it starts, how long the question travels, how long the answer does."""
    seen = [(at, at + there + ahead_ns, at + there + back) for at, there, back in rounds]
    found = estimate_offset(seen)
    slack = abs(ahead_ns) * 1e-15 / 1e6 + 1e-12
    assert abs(found.offset_ms - -ahead_ns / 1e6) <= found.error_ms + slack
    assert found.error_ms == min(there + back for _, there, back in rounds) / 2e6


def test_an_estimate_needs_rounds_that_go_forward() -> None:
    with pytest.raises(UsageError, match="no round"):
        estimate_offset([])
    with pytest.raises(UsageError, match="received at 3 ns, before it was asked for at 5 ns"):
        estimate_offset([(5, 0, 3)])


def test_two_processes_are_brought_to_one_clock() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        child = subprocess.Popen([sys.executable, "-c", PEER, str(server.getsockname()[1])])
        try:
            peer, _ = server.accept()
            with peer:
                peer.settimeout(60)
                found = measure_clock(peer, rounds=32)
                mine = Timeline()
                for _ in range(3):
                    with mine.span("device0", "ask"):
                        peer.sendall(b"w")
                        assert peer.recv(1) == b"d"
                peer.shutdown(socket.SHUT_WR)
                text = b"".join(iter(lambda: peer.recv(65536), b""))
            assert child.wait(60) == 0
        finally:
            child.kill()
            child.wait()
    theirs = Timeline.from_json(json.loads(text))
    assert abs(found.offset_ms - -AHEAD_NS / 1e6) <= found.error_ms

    merged = Timeline.merge([mine, theirs], offsets_ms=[0, found.offset_ms], names=["asker", "worker"])
    asked = [s for s in merged.spans if s.track == "asker/device0"]
    worked = [s for s in merged.spans if s.track == "worker/device0"]
    assert len(asked) == len(worked) == 3
    for outer, inner in zip(asked, worked, strict=True):
        assert outer.start_ms - found.error_ms <= inner.start_ms
        assert inner.end_ms <= outer.end_ms + found.error_ms


def test_a_peer_that_goes_away_is_an_error() -> None:
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(WorkerError, match="the peer was lost while its clock was asked for"):
        measure_clock(here)
    here, there = socket.socketpair()
    here.close()
    with there, pytest.raises(WorkerError, match="the peer was lost"):
        answer_clock(there)


def test_a_peer_that_keeps_silent_is_an_error() -> None:
    here, there = socket.socketpair()
    here.settimeout(0.01)
    with here, there, pytest.raises(WorkerError, match=r"the peer was lost .*timed out"):
        measure_clock(here)


def test_a_peer_that_talks_of_something_else_is_an_error() -> None:
    here, there = socket.socketpair()
    here.sendall(b"GET /")
    with here, there, pytest.raises(WorkerError, match="sent b'G' where it should ask for the clock"):
        answer_clock(there)


def test_no_rounds_are_refused() -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(UsageError, match=r"0 rounds of asking.*works: 16"):
        measure_clock(here, rounds=0)


def test_the_connection_stays_usable() -> None:
    here, there = socket.socketpair()
    with here, there:
        answering = threading.Thread(target=answer_clock, args=(there,))
        answering.start()
        found = measure_clock(here, rounds=4)
        answering.join()
        here.sendall(b"next")
        assert there.recv(4) == b"next"
    assert abs(found.offset_ms) <= found.error_ms
