"""The pulse of ranks in one store; threads stand for ranks."""

import json
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
    assert "rank 1 has shown no sign of life for" in first.blame(0.0).what
    assert "it was computing the forward of micro-batch 7" in first.blame(0.0).what
    assert first.blame(time.monotonic()) is None  # it has only begun to wait
    until(lambda: third.blame(0.0) is not None)
    assert "rank 1" in third.blame(0.0).what
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


def test_a_store_that_is_gone_is_noticed(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store, made = watches(timeout_s=1.0)
    for each in made[1:]:
        each.close()
        each.thread.join()
    made[0]._store = None  # what a lost connection comes to: every call fails
    until(lambda: made[0].blame(0.0) is not None)
    assert "rank 0, which keeps the store of the process group, is gone" in made[0].blame(0.0).what
    assert made[0].blame(time.monotonic()) is None  # it has only begun to wait
    assert "which keeps the store" in made[0].gone(2, "closed").what  # for which the peer may have ended, too
    assert made[0].complain("gone") == "gone"
    del store


def party(store, name, rank, timeout_s=1.0):
    changed = threading.Condition()
    return Watch(store, rank=rank, ranks=[0, 1, 2], timeout_s=timeout_s, changed=changed, party=name)


def a_store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_who_has_not_begun_is_not_blamed_and_who_has_left_only_by_who_waits_for_it():
    store = a_store()
    first, third = party(store, "a", 0), party(store, "a", 2)
    third.doing = "between two steps"
    until(lambda: first.last_word(2) == "between two steps")
    third.close()
    until(lambda: 2 in first.left)
    assert first.last_word(2) == "leaving, after it was between two steps"
    begun = time.monotonic()
    until(lambda: time.monotonic() > begun + 2.0)
    assert first.blame(begun) is None
    assert first.blame(begun, on=1) is None
    assert first.blame(begun, on=2).what == "rank 2 has left; before, it was between two steps"
    assert first.gone(2, "closed").what.startswith("rank 2 has left")
    assert first.gone(1, "closed").what == "rank 1 is gone (closed); when last heard of it was starting"
    first.close()


def test_a_farewell_from_before_this_rank_began_is_an_old_one_and_one_after_counts_though_never_heard():
    store = a_store()
    old = party(store, None, 1)
    old.close()
    old.thread.join()
    first = party(store, None, 0)
    until(lambda: first.rounds > 2)
    assert first.left == {}
    brief = json.dumps({"who": "another", "left": "between two steps"})
    store.set("plait/watch/pulse/1", brief)  # it began and left between two looks
    until(lambda: 1 in first.left)
    assert first.gone(1, "closed").what == "rank 1 has left; before, it was between two steps"
    first.close()


def test_who_waits_for_one_model_does_nothing_for_another():
    store = a_store()
    first = party(store, "a", 0)
    here, there = party(store, "a", 1), party(store, "b", 1)
    here.doing, there.doing = "in step 2", "waiting for rows in step 3"
    until(lambda: first.unchanged(3 * BEAT_S).get(1) == "waiting for rows in step 3 of another model")
    here.doing = "waiting for gradients"
    until(lambda: first.last_word(1) == "waiting for gradients")
    there.close()
    there.thread.join()
    until(lambda: first.unchanged(3 * BEAT_S).get(1) == "waiting for gradients")
    assert first.left == {}
    for each in (first, here):
        each.close()


def test_ranks_that_should_have_the_same_and_do_not():
    store = a_store()
    first, second = party(store, "a", 0), party(store, "a", 1)
    first.alike, second.alike = {"step": 3, "rows": 8}, {"step": 2, "rows": 4}
    until(lambda: first.rounds > 3)
    assert first.unlike() is None
    second.alike = {"step": 3, "rows": 4}
    until(lambda: first.unlike() == (1, {"step": 3, "rows": 4}))
    first.alike = {"step": 3, "rows": 4}
    assert first.unlike() is None
    for each in (first, second):
        each.close()


def test_who_keeps_the_store_stays_until_all_know_why_it_gave_up(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = a_store()
    made = [party(store, "a", rank) for rank in range(3)]
    until(lambda: made[0].last_word(2) == "starting" and made[0].rounds)
    made[0].complain("it broke")
    made[0].linger()
    assert [each.complaint for each in made] == ["it broke"] * 3
    for each in made:
        each.close()


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
