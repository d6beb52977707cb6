"""The pulse of ranks in one store; threads stand for ranks."""

import threading
import time

import torch.distributed as dist

from plait.watch import BEAT_S, Watch


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def watches(timeout_s=1.5):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    changed = threading.Condition()
    made = [
        Watch(store, rank=rank, ranks=[0, 1, 2], timeout_s=timeout_s, changed=changed) for rank in range(3)
    ]
    return store, made


def stop(watch):
    """What becomes of a process that is stopped, or whose cable is cut: it beats no more."""
    watch._store = None
    watch.thread.join()


def test_who_is_silent_is_blamed_with_its_last_word():
    _store, (first, second, third) = watches()
    second.doing = "computing the forward of micro-batch 7"
    until(lambda: first.last_word(1) == "computing the forward of micro-batch 7")
    assert first.blame(0.0) is None
    stop(second)
    until(lambda: first.blame(0.0) is not None)
    assert "rank 1 has shown no sign of life for" in first.blame(0.0)
    assert "it was computing the forward of micro-batch 7" in first.blame(0.0)
    assert first.blame(time.monotonic()) is None  # it has only begun to wait
    until(lambda: third.blame(0.0) is not None)
    assert "rank 1" in third.blame(0.0)
    for each in (first, third):
        each.close()


def test_the_first_complaint_is_everyones():
    _store, made = watches()
    for each in made:
        each.share("a name")
    assert made[0].complain("it broke") == "it broke"
    assert made[2].complain("no, it was I") == "it broke"
    until(lambda: made[1].complaint == "it broke")
    for each in made:
        each.close()


def test_a_store_that_is_gone_is_noticed():
    store, made = watches(timeout_s=1.0)
    for each in made[1:]:
        each.close()
        each.thread.join()
    made[0]._store = None  # what a lost connection comes to: every call fails
    until(lambda: made[0].blame(0.0) is not None)
    assert "the store of the process group" in made[0].blame(0.0)
    assert made[0].complain("gone") == "gone"
    del store


def test_who_has_not_begun_is_not_blamed_nor_who_said_farewell():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    changed = threading.Condition()
    first, third = (
        Watch(store, rank=rank, ranks=[0, 1, 2], timeout_s=1.0, changed=changed) for rank in (0, 2)
    )
    third.doing = "computing"
    until(lambda: first.last_word(2) == "computing")
    third.close()
    until(lambda: first.last_word(2) == "starting")  # it is as if it had not been there
    begun = time.monotonic()
    until(lambda: time.monotonic() > begun + 2.0)
    assert first.blame(begun) is None
    first.close()


def test_who_is_silent_and_who_does_the_same_for_long_is_known():
    _store, (first, second, third) = watches()
    second.doing = "waiting for rows"
    until(lambda: first.unchanged(BEAT_S).get(1) == "waiting for rows")
    second.doing = "in step 4"
    until(lambda: first.last_word(1) == "in step 4")
    assert 1 not in first.unchanged(60.0)
    assert first.silent(60.0) == []
    stop(second)
    until(lambda: first.silent(2 * BEAT_S) == [1])
    for each in (first, third):
        each.close()
