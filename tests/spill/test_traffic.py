"""The threads that move blocks: what matters most first, errors and cancelling without loose ends."""

import threading

import pytest

from plait.spill.traffic import Pool, Transfer

SOON_S = 30


@pytest.fixture
def pool():
    made = Pool(1, "test")
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("plait test")]


class Blocks:
    """A transfer whose pieces wait for a gate, and note that they were moved."""

    def __init__(self, name, log, *, count=3, priority=0, gate=None, error=None):
        self.ended = threading.Event()

        def piece(number):
            if gate is not None:
                assert gate.wait(SOON_S)
            log.append(f"{name}{number}")
            if error is not None:
                raise error
            return 10

        pieces = [lambda n=n: piece(n) for n in range(count)]
        self.transfer = Transfer(pieces, lambda _: self.ended.set(), priority=priority)


def test_all_blocks_are_moved_and_counted(pool):
    log = []
    blocks = Blocks("a", log)
    pool.submit(blocks.transfer)
    assert blocks.ended.wait(SOON_S)
    assert log == ["a0", "a1", "a2"]
    assert blocks.transfer.moved_bytes == 30
    assert blocks.transfer.error is None


def test_what_matters_most_goes_first_and_of_equals_who_came_first(pool):
    log, gate = [], threading.Event()
    first = Blocks("first", log, count=2, priority=2, gate=gate)
    pool.submit(first.transfer)
    while not first.transfer._active:
        pass  # its first block is under way
    others = [Blocks(name, log, count=1, priority=p) for name, p in (("c", 3), ("a", 1), ("b", 1), ("d", 9))]
    for other in others:
        pool.submit(other.transfer)
    others[3].transfer.priority = 0
    gate.set()
    for blocks in (first, *others):
        assert blocks.ended.wait(SOON_S)
    assert log == ["first0", "d0", "a0", "b0", "first1", "c0"]


def test_an_error_ends_a_transfer_and_no_other(pool):
    log = []
    bad, good = Blocks("bad", log, error=OSError("no")), Blocks("good", log)
    pool.submit(bad.transfer)
    pool.submit(good.transfer)
    assert bad.ended.wait(SOON_S)
    assert good.ended.wait(SOON_S)
    assert log == ["bad0", "good0", "good1", "good2"]
    assert str(bad.transfer.error) == "no"


def test_a_cancelled_transfer_ends_when_nothing_of_it_moves(pool):
    log, gate = [], threading.Event()
    running, waiting = Blocks("running", log, gate=gate), Blocks("waiting", log)
    pool.submit(running.transfer)
    pool.submit(waiting.transfer)
    while not running.transfer._active:
        pass
    pool.cancel(running.transfer)
    pool.cancel(waiting.transfer)
    assert not running.ended.wait(0.01)
    gate.set()
    assert running.ended.wait(SOON_S)
    assert waiting.ended.wait(SOON_S)
    assert log == ["running0"]
    assert running.transfer.moved_bytes == 10


def test_closing_waits_for_what_was_submitted():
    log = []
    pool = Pool(2, "test")
    blocks = [Blocks(name, log, count=5) for name in "abc"]
    for one in blocks:
        pool.submit(one.transfer)
    pool.close()
    assert all(one.ended.is_set() for one in blocks)
    assert len(log) == 15
