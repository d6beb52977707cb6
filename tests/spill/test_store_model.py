"""The store against a dictionary: content is as last written, and after reopening as last committed."""

import random
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plait.spill.segment import PAGE_BYTES, Request, Segment
from plait.spill.store import Store

P = PAGE_BYTES
PAGES = 10
SOON_S = 30
NAMES = [f"{group}/{kind}/{i}" for group in ("one", "two") for kind in ("kept", "scratch") for i in range(4)]

SEEDS = st.integers(0, 10**6)


def content(seed, nbytes):
    return np.random.Generator(np.random.PCG64(seed)).bytes(nbytes)


class StoreIsADictionary(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="plait-store-"))
        self.store = Store.create(self.directory, memory_bytes=PAGES * P)
        self.pages, self.seeds, self.committed, self.pending = {}, {}, {}, {}
        self.leases, self.writes = [], 0

    def teardown(self):
        try:
            self.release_all()
            self.settle_commits()
            for key in sorted(self.seeds):
                self.check_stream(key)
        finally:
            self.store.close(keep=False)
            left = list(self.directory.iterdir())
            shutil.rmtree(self.directory)
        assert left == []

    def release_all(self):
        for held in self.leases:
            held.release()
        self.leases = []

    def settle_commits(self):
        for future, _, _ in self.pending.values():
            future.result(SOON_S)
        self.pending = {}

    @initialize(seed=SEEDS)
    def define(self, seed):
        """Whatever is not there is defined, with any size."""
        chance = random.Random(seed)
        for key in NAMES:
            if key not in self.pages:
                self.pages[key] = chance.randint(1, 6)
                self.store.define(self.segment(key))

    def segment(self, key):
        return Segment(key=key, nbytes=self.pages[key] * P, persistent="/kept/" in key)

    @rule(seed=SEEDS, count=st.integers(1, 8), keep=st.booleans())
    def units(self, seed, count, keep):
        """Ask for some segments, check and fill them, and keep some of them leased for a while."""
        chance = random.Random(seed)
        for _ in range(count):
            keys = chance.sample(NAMES, chance.randint(1, 4))
            while sum(self.pages[key] for key in keys) > PAGES:
                keys.pop()
            modes = {
                key: chance.choice(["read", "change", "write"] if key in self.seeds else ["write"])
                for key in keys
            }
            self.unit(modes)
            if not keep:
                self.leases.pop(chance.randrange(len(self.leases))).release()

    def unit(self, modes):
        future = self.store.request([Request(*item) for item in modes.items()])
        if self.leases and not future.done():
            self.release_all()
        held = future.result(SOON_S)
        assert held.places.keys() == modes.keys()
        for key, mode in modes.items():
            at, nbytes = held.places[key], self.pages[key] * P
            view = self.store.memory[at : at + nbytes]
            if mode != "write":
                assert view == content(self.seeds[key], nbytes)
            if mode != "read":
                self.writes += 1
                self.seeds[key] = self.writes
                view[:] = content(self.writes, nbytes)
        self.leases.append(held)

    @rule(seed=SEEDS)
    def expect(self, seed):
        chance = random.Random(seed)
        units = [chance.sample(NAMES, chance.randint(0, 3)) for _ in range(chance.randint(0, 8))]
        modes = ["read", "read", "change", "write"]
        self.store.expect([[Request(key, chance.choice(modes)) for key in unit] for unit in units])

    @precondition(lambda self: self.seeds)
    @rule(seed=SEEDS)
    def stream(self, seed):
        self.release_all()
        self.check_stream(random.Random(seed).choice(sorted(self.seeds)))

    def check_stream(self, key):
        assert b"".join(map(bytes, self.store.stream(key))) == content(self.seeds[key], self.pages[key] * P)

    @rule(group=st.sampled_from(["one", "two"]), seed=SEEDS, wait=st.booleans())
    def commit(self, group, seed, wait):
        self.units(seed, 6, keep=False)
        self.release_all()
        if group in self.pending:
            self.pending.pop(group)[0].result(SOON_S)
        state = {key: seed for key, seed in self.seeds.items() if key.startswith(f"{group}/kept")}
        pages = {key: count for key, count in self.pages.items() if key.startswith(f"{group}/kept")}
        self.committed[group] = (state, pages)
        self.pending[group] = self.store.commit(group, state), state, pages
        if wait:
            self.settle_commits()

    @rule(seed=SEEDS)
    def drop(self, seed):
        self.release_all()
        key = random.Random(seed).choice(NAMES)
        self.store.drop(key)
        self.pages.pop(key)
        self.seeds.pop(key, None)
        self.define(seed)

    @precondition(lambda self: self.writes > 10)
    @rule(group=st.sampled_from(["one", "two"]), seed=SEEDS)
    def drop_group(self, group, seed):
        self.release_all()
        self.store.drop_group(group)
        self.committed.pop(group, None)
        self.forget(group)
        self.define(seed)

    @rule(group=st.sampled_from(["one", "two"]), seed=SEEDS)
    def revert(self, group, seed):
        self.units(seed, 6, keep=False)
        self.release_all()
        self.store.revert(group)
        self.forget(group)
        self.recall(group)
        self.define(seed)

    @rule(keep_leases=st.booleans(), seed=SEEDS)
    def reopen(self, keep_leases, seed):
        self.units(seed, 6, keep=keep_leases)
        if not keep_leases:
            self.release_all()
        self.store.close(keep=True)
        self.leases, self.pending = [], {}
        self.store = Store.open(self.directory, memory_bytes=PAGES * P)
        for group in ("one", "two"):
            self.forget(group)
            self.recall(group)
        assert set(self.store.groups()) == set(self.committed)
        self.define(seed)

    def forget(self, group):
        self.pending.pop(group, None)
        for table in (self.pages, self.seeds):
            for key in [key for key in table if key.startswith(group)]:
                del table[key]

    def recall(self, group):
        state, pages = self.committed.get(group, ({}, {}))
        self.seeds |= state
        self.pages |= pages
        if group in self.committed:
            assert self.store.committed(group) == state
        for key in pages:
            self.store.define(self.segment(key))

    @invariant()
    def memory_is_within_bounds(self):
        assert self.store.statistics().peak_bytes <= PAGES * P


StoreIsADictionary.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # threads do not fail the same way twice: nothing to make smaller
)
TestStore = StoreIsADictionary.TestCase


class Versions:
    """What every segment should hold: who has a segment to himself says so."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.seeds = {}
        self.problems = []

    def check(self, store, key, at, seed):
        nbytes = self.sizes[key]
        if store.memory[at : at + nbytes] != content(seed, nbytes):
            found = bytes(store.memory[at : at + nbytes])
            was = [other for other in range(seed) if found == content(other, nbytes)][:1]
            raise AssertionError(f"{key} should be {seed}, and is {was or 'a mixture'}")


def worker(store, versions, group, seed, rounds):
    """Change segments of one group, read any, commit and look ahead, in random order."""
    chance = random.Random(seed)
    keys, own = sorted(versions.sizes), [key for key in versions.sizes if key.startswith(group)]
    commit = None
    for number in range(rounds):
        chosen = dict.fromkeys(chance.sample(keys, chance.randint(0, 2)), "read")
        chosen |= {
            key: chance.choice(["write", "change"]) for key in chance.sample(own, chance.randint(0, 2))
        }
        if chance.random() < 0.3:
            store.expect([[Request(key, "read") for key in chance.sample(keys, 2)] for _ in range(5)])
        with store.request([Request(*item) for item in chosen.items()]).result(SOON_S) as held:
            for key, at in held.places.items():
                if chosen[key] != "write":
                    versions.check(store, key, at, versions.seeds[key])
                if chosen[key] != "read":
                    new = seed * 1_000_000 + number
                    store.memory[at : at + versions.sizes[key]] = content(new, versions.sizes[key])
                    versions.seeds[key] = new
        if chance.random() < 0.15 and (commit is None or commit.done()):
            commit = store.commit(group, {key: versions.seeds[key] for key in own if "/kept/" in key})
    if commit is not None:
        commit.result(SOON_S)
    store.commit(group, {key: versions.seeds[key] for key in own if "/kept/" in key}).result(SOON_S)


@pytest.mark.parametrize(
    ("rounds", "blocks"),
    [
        (60, False),
        (7, True),
        pytest.param(5000, False, marks=pytest.mark.soak),
        pytest.param(500, True, marks=pytest.mark.soak),
    ],
)
def test_many_threads_never_see_other_bits(tmp_path, rounds, blocks):
    """Six threads on four times as many bytes as memory has; with ``blocks``, segments of several blocks."""
    chance = random.Random(rounds)
    unit = 5000 if blocks else 8
    groups = [f"group{i}" for i in range(3 if blocks else 6)]
    sizes = {
        f"{group}/{kind}/{i}": chance.randint(1, unit) * P
        for group in groups
        for kind in ("kept", "scratch")
        for i in range(2 if blocks else 5)
    }
    memory = max(sum(sizes.values()) // 4, 4 * max(sizes.values()))
    store = Store.create(tmp_path / "store", memory_bytes=memory)
    versions = Versions(sizes)
    for key, nbytes in sizes.items():
        store.define(Segment(key=key, nbytes=nbytes, persistent="/kept/" in key))
        with store.request([Request(key, "write")]).result(SOON_S) as held:
            at = held.places[key]
            store.memory[at : at + nbytes] = content(0, nbytes)
            versions.seeds[key] = 0

    def run(group, seed):
        try:
            worker(store, versions, group, seed, rounds)
        except BaseException as error:
            versions.problems.append(error)

    threads = [threading.Thread(target=run, args=(group, i + 1)) for i, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions.problems == []
    figures = store.statistics()
    assert figures.peak_bytes <= memory
    assert figures.evictions > 0
    store.close(keep=True)
    again = Store.open(tmp_path / "store", memory_bytes=memory)
    for group in groups:
        seeds = again.committed(group)
        assert seeds == {key: versions.seeds[key] for key in seeds}
        for key, seed in seeds.items():
            with again.request([Request(key, "read")]).result(SOON_S) as held:
                versions.check(again, key, held.places[key], seed)
    again.close(keep=False)


@pytest.mark.parametrize("seed", range(30))
def test_every_request_that_fits_is_granted_when_the_others_are_released(tmp_path, seed):
    """All are made at once, and leases are released in any order."""
    chance = random.Random(seed)
    store = Store.create(tmp_path / "store", memory_bytes=PAGES * P)
    sizes = {f"job/{i}": chance.choice([1, 1, 2, 3, 5, 9, 10]) for i in range(12)}
    for key, pages in sizes.items():
        store.define(Segment(key=key, nbytes=pages * P, persistent=chance.random() < 0.5))
        store.request([Request(key, "write")]).result(SOON_S).release()
    waiting, granted, changed = [], [], threading.Condition()

    def grant(future):
        with changed:
            granted.append(future.result())
            changed.notify()

    for _ in range(40):
        keys, room = [], PAGES
        for key in chance.sample(sorted(sizes), 4):
            if sizes[key] <= room:
                room -= sizes[key]
                keys.append(key)
        store.expect([[Request(key, "read")] for key in chance.sample(sorted(sizes), 6)])
        waiting.append(
            store.request([Request(key, chance.choice(["read", "change", "write"])) for key in keys])
        )
        waiting[-1].add_done_callback(grant)
    for _ in waiting:
        with changed:
            assert changed.wait_for(lambda: granted, SOON_S), "nobody gets anything any more"
            held = granted.pop(chance.randrange(len(granted)))
        held.release()
    store.close(keep=False)
