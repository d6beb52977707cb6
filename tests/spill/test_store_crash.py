"""kill -9 at random moments: what comes back is the last commit of every group, and nothing else is left."""

import json
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from plait.spill.segment import PAGE_BYTES, Request
from plait.spill.store import Store

ROUNDS = [pytest.param(5, id="few"), pytest.param(100, id="many", marks=pytest.mark.soak)]
SOON_S = 30
MEMORY_BYTES = 600 * PAGE_BYTES

CHILD = """
import json, random, sys
import numpy as np
from plait.spill.segment import Request, Segment
from plait.spill.store import Store

directory, memory_bytes, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
store = Store.open(directory, memory_bytes=memory_bytes)
seeds = {group: dict(store.committed(group) or {"count": 0}) for group in ("one", "two")}
sizes = {
    f"{group}/{kind}/{i}": (50 + 60 * i) * 4096
    for group in seeds for kind in ("kept", "scratch") for i in range(5)
}

def define(group):
    for key, nbytes in sizes.items():
        if key.startswith(group):
            store.define(Segment(key=key, nbytes=nbytes, persistent="/kept/" in key))

for group in seeds:
    define(group)
pending = {}
while True:
    group = chance.choice(["one", "two"])
    keys = [key for key in sizes if key.startswith(group)]
    chosen = chance.sample(keys, 2)
    with store.request([Request(key, "write") for key in chosen]).result() as lease:
        for key in chosen:
            at, new = lease.places[key], chance.randrange(1 << 30)
            store.memory[at : at + sizes[key]] = np.random.Generator(np.random.PCG64(new)).bytes(sizes[key])
            if "/kept/" in key:
                seeds[group][key] = new
    if chance.random() < 0.4:
        if group in pending:
            future, count = pending.pop(group)
            future.result()
            print(json.dumps([group, count]), flush=True)
        seeds[group]["count"] += 1
        pending[group] = store.commit(group, seeds[group]), seeds[group]["count"]
        if chance.random() < 0.1:
            pending.pop(group)[0].result()
            store.revert(group)
            define(group)
"""


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_store_that_is_killed_comes_back_as_committed(tmp_path, rounds):
    chance = random.Random(rounds)
    directory = tmp_path / "store"
    counts = {"one": 0, "two": 0}
    for number in range(rounds):
        command = [sys.executable, "-c", CHILD, str(directory), str(MEMORY_BYTES), str(number)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(chance.randint(1, 8)):
            line = child.stdout.readline()
            assert line, "the child ended by itself"
            group, count = json.loads(line)
            counts[group] = max(counts[group], count)
        time.sleep(chance.random() * 0.05)
        child.kill()
        child.wait()
        for line in child.stdout.read().splitlines(keepends=True):
            if line.endswith("\n"):
                group, count = json.loads(line)
                counts[group] = max(counts[group], count)
        child.stdout.close()
        check(directory, counts)


def check(directory, counts):
    """Every group has the content that its note speaks of, and no commit that was reported is missing."""
    with Store.open(directory, memory_bytes=MEMORY_BYTES) as store:
        for group in store.groups():
            note = store.committed(group)
            assert note["count"] >= counts[group]
            counts[group] = note["count"]
            assert {s.key for s in store.segments(group)} == {f"{group}/kept/{i}" for i in range(5)}
            for segment in store.segments(group):
                if segment.key not in note:
                    continue
                with store.request([Request(segment.key, "read")]).result(SOON_S) as lease:
                    at = lease.places[segment.key]
                    seed = note[segment.key]
                    content = np.random.Generator(np.random.PCG64(seed)).bytes(segment.nbytes)
                    assert store.memory[at : at + segment.nbytes] == content
        names = {f"{group}.{ending}" for group in store.groups() for ending in ("segments", "manifest")}
    assert set(os.listdir(directory)) == names


def test_a_store_that_is_killed_before_its_first_commit_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path / "store"), str(MEMORY_BYTES), "0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "store" / "one.segments").exists():
        time.sleep(0.001)
    child.kill()
    child.wait()
    child.stdout.close()
    with Store.open(tmp_path / "store", memory_bytes=MEMORY_BYTES) as store:
        groups = store.groups()
        names = {f"{group}.{ending}" for group in groups for ending in ("segments", "manifest")}
        assert set(os.listdir(tmp_path / "store")) == {"store.lock", *names}
