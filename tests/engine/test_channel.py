"""Workers and engine over real sockets: who is heard, who is not, and what silence means."""

import contextlib
import queue
import socket
import time

import pytest

from plait.engine.channel import BEAT_S, Board, Caller, Line

ME = Caller(task="gpt", attempt=2, rank=1)


@pytest.fixture
def board():
    listening = socket.create_server(("127.0.0.1", 0))
    made = Board(listening, "secret")
    made.address = listening.getsockname()[:2]
    yield made
    made.close()


def call(board, caller=ME, token="secret", lost=None, silence_s=5.0):
    return Line(board.address, token, caller, silence_s=silence_s, lost=lost or (lambda why: None))


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_words_arrive_in_order_and_the_engine_can_ask_to_stop(board):
    line = call(board)
    for step in range(100):
        line.tell(row={"step": step})
    heard = [board.inbox.get(timeout=10) for _ in range(101)]
    assert heard[0].message == {"hello": True}
    assert [said.message["row"]["step"] for said in heard[1:]] == list(range(100))
    assert {said.caller for said in heard} == {ME}
    assert not line.stop.is_set()
    board.tell("another", {"stop": True})
    board.tell("gpt", {"stop": True})
    assert line.stop.wait(10)
    assert not line.alone.is_set()
    board.tell("gpt", {"alone": True})
    assert line.alone.wait(10)
    line.close()


def test_a_worker_that_lives_is_never_silent_for_long_and_one_that_is_gone_is(board):
    line = call(board)
    until(lambda: board.silent_s(ME) is not None)
    begun = time.monotonic()
    longest = 0.0
    while time.monotonic() < begun + 3 * BEAT_S:
        longest = max(longest, board.silent_s(ME))
        time.sleep(0.02)
    assert longest < 3 * BEAT_S
    line.close()
    until(lambda: board.silent_s(ME) > 3 * BEAT_S)


def test_a_stranger_is_not_heard(board):
    ends = []
    line = call(board, token="guessed", lost=ends.append)
    until(lambda: ends)
    line.tell(row={"step": 1})
    with pytest.raises(queue.Empty):
        board.inbox.get(timeout=0.3)
    strange = (
        b"GET / HTTP/1.1\r\n\r\n",
        b'["token"]\n',
        b"x" * 10_000,
        b"\n",
        b"[" * 4000 + b"\n",
        b'{"token":"\\ud800"}\n',
        b'{"token":"secret"}\n',
        b'{"token":"secret","task":"gpt","attempt":"x","rank":0}\n',
    )
    for words in strange:
        with socket.create_connection(board.address) as raw:
            raw.sendall(words)
            raw.settimeout(10)
            with contextlib.suppress(ConnectionResetError):  # it hung up before it had read all
                assert raw.recv(10) == b""
    line = call(board)  # and others still are
    assert board.inbox.get(timeout=10).caller == ME
    line.close()


def test_a_stranger_that_says_nothing_is_hung_up_on(board, monkeypatch):
    monkeypatch.setattr("plait.engine.channel._HELLO_S", 0.2)
    with socket.create_connection(board.address) as raw:
        raw.settimeout(10)
        assert raw.recv(10) == b""


def test_a_worker_notices_that_its_engine_has_gone():
    listening = socket.create_server(("127.0.0.1", 0))
    board = Board(listening, "secret")
    board.address = listening.getsockname()[:2]
    ends = []
    line = call(board, lost=ends.append)
    board.inbox.get(timeout=10)
    board.close()
    until(lambda: ends)
    assert len(ends) == 1
    line.close()


def test_a_worker_notices_an_engine_that_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ends = []
        line = Line(mute.getsockname()[:2], "secret", ME, silence_s=1.0, lost=ends.append)
        until(lambda: ends)
        assert "nothing was heard of the engine for 1 s" in ends[0]
        line.close()


def test_an_end_that_was_meant_is_no_loss(board):
    ends = []
    line = call(board, lost=ends.append)
    line.tell(result="gpt")
    line.close()
    assert [board.inbox.get(timeout=10).message for _ in range(2)] == [{"hello": True}, {"result": "gpt"}]
    assert ends == []
