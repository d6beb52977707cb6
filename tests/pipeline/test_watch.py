"""The pulse of ranks in one store; threads stand for ranks."""

import threading
import time

import torch.distributed as dist

from plait.pipeline.watch import Watch


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def watches(timeout_s=1.5):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    changed = threading.Condition()
    made = [
        Watch(store, token="t", rank=rank, ranks=[0, 1, 2], timeout_s=timeout_s, changed=changed)
        for rank in range(3)
    ]
    return store, made


def test_who_is_silent_is_blamed_with_its_last_word():
    _store, (first, second, third) = watches()
    second.doing = "computing the forward of micro-batch 7"
    until(lambda: first.last_word(1) == "computing the forward of micro-batch 7")
    assert first.blame(0.0) is None
    second.close()
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
    assert made[0].complain("it broke") == "it broke"
    assert made[2].complain("no, it was I") == "it broke"
    until(lambda: made[1].complaint == "it broke")
    for each in made:
        each.close()


def test_a_store_that_is_gone_is_noticed():
    store, made = watches(timeout_s=1.0)
    until(lambda: made[0].last_word(1) != "unknown")
    for each in made[1:]:
        each.close()
        each.thread.join()
    made[0]._store = None  # what a lost connection comes to: every call fails
    until(lambda: made[0].blame(0.0) is not None)
    assert "the store of the process group" in made[0].blame(0.0)
    assert made[0].complain("gone") == "gone"
    del store
