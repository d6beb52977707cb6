"""Commits: what comes back after them, whatever is written meanwhile."""

import os
import random
import threading

import pytest
from store_letters import SOON_S, P, define, lease, read, segment, write

from plait.errors import FileError, UsageError
from plait.spill.store import Store


def test_a_commit_is_what_comes_back(make):
    store = make(pages=3)
    define(store, "ab")
    store.define(segment("job/scratch", persistent=False))
    store.define(segment("job/empty"))
    store.define(segment("other/x"))
    write(store, a="a", b="b", scratch="s")
    note = {"step": 3, "losses": [0.1, float("inf")], "nested": {"x": None}}
    store.commit("job", note).result(SOON_S)
    write(store, "change", a="A")
    store.close(keep=True)

    again = make(pages=3, how=Store.open)
    assert again.groups() == ("job",)
    assert again.committed("job") == note
    assert again.committed("other") is None
    assert {s.key for s in again.segments("job")} == {"job/a", "job/b", "job/empty"}
    assert again.segments("other") == ()
    define(again, "ab")
    assert read(again, "a", "b") == "ab"
    with pytest.raises(UsageError, match="job/empty cannot be read: nothing has been written"):
        lease(again, empty="read")
    write(again, empty="e")
    again.commit("job", {"step": 4}).result(SOON_S)
    again.close(keep=True)
    last = make(pages=3, how=Store.open)
    assert read(last, "a", "b", "empty") == "abe"


def test_the_group_can_go_on_while_it_is_committed(make):
    store = make(pages=3)
    define(store, "abcd")
    for step in range(20):
        for name in "abcd":
            write(store, **{name: chr(ord("a") + step)})
        commit = store.commit("job", {"step": step})
        for name in "abcd":
            write(store, "change", **{name: "z"})
        commit.result(SOON_S)
        store.revert("job")
        assert "".join(read(store, name) for name in "abcd") == chr(ord("a") + step) * 4
        assert store.committed("job") == {"step": step}


def test_writing_after_a_commit_leaves_the_commit_as_it_is(make):
    store = make(pages=1)
    define(store, "ab")
    for round_ in range(3):
        write(store, a="a")
        write(store, b="b")
        store.commit("job", {"round": round_}).result(SOON_S)
        for letter in "xyz":
            write(store, "change", a=letter)
            write(store, "change", b=letter)
        store.revert("job")
        assert read(store, "a") + read(store, "b") == "ab"


def test_threads_may_revert_define_and_commit_the_same_group(make):
    store = make(pages=3)
    problems = []

    def work(number):
        chance = random.Random(number)
        for _ in range(25):
            try:
                define(store, "ab", pages=2)
                with lease(store, **{chance.choice("ab"): "write"}):
                    pass
                chance.choice([store.revert, store.drop_group, lambda name: store.commit(name, {})])("job")
            except UsageError:
                pass  # another one was faster
            except BaseException as error:
                problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    store.drop_group("job")
    define(store, "a")
    write(store, a="a")
    assert read(store, "a") == "a"


def test_reverting_without_a_commit_leaves_nothing(make, tmp_path):
    store = make()
    define(store, "ab")
    write(store, a="a")
    store.revert("job")
    store.revert("unknown")
    assert store.groups() == ()
    assert os.listdir(tmp_path / "store") == ["store.lock"]
    define(store, "a")
    with pytest.raises(UsageError, match="nothing has been written"):
        lease(store, a="read")


def test_a_constant_takes_one_slot(make):
    store = make()
    store.define(segment("job/a"), constant=True)
    assert store.statistics().disk_bytes == P
    write(store, a="x")
    write(store, "change", a="y")
    store.commit("job", {}).result(SOON_S)
    with pytest.raises(UsageError, match="job/a is constant, and was committed"):
        lease(store, a="change")
    store.close(keep=True)
    again = make(how=Store.open)
    assert read(again, "a") == "y"
    with pytest.raises(UsageError, match="is constant"):
        lease(again, a="write")


def test_what_is_being_changed_cannot_be_committed_or_dropped(make):
    store = make()
    define(store, "a")
    with lease(store, a="write"):
        for call in (
            lambda: store.commit("job", {}),
            lambda: store.drop("job/a"),
            lambda: store.revert("job"),
        ):
            with pytest.raises(
                UsageError, match=r"while job/a is being changed|job/a cannot be dropped while"
            ):
                call()
    store.commit("job", {}).result(SOON_S)


def test_committed_state_is_not_overwritten(make):
    store = make()
    define(store, "a")
    write(store, a="a")
    store.commit("job", {}).result(SOON_S)
    store.close(keep=True)
    with pytest.raises(FileError, match="holds committed state of job, which would be lost"):
        make()
    with pytest.raises(UsageError, match=r"holds 8.00 KiB, and the budget is 4.00 KiB"):
        make(how=Store.open, disk_bytes=P)
    assert read(make(how=Store.open, disk_bytes=2 * P), "a") == "a"
