"""Freed blocks are kept and used again, never beyond the limit: in real processes that load the library."""

import json
import os
import subprocess
import sys

import pytest

from plait import native
from plait.spill import slab

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="the compiled libraries were not built")

MIB = 1 << 20


def run(code, **environment):
    """What a script prints as JSON in a process that keeps its large blocks."""
    script = f"""
import ctypes, json, os, random, threading
from plait.spill import slab
slab.settle()
MIB = 1 << 20
libc = ctypes.CDLL(None)
libc.malloc_usable_size.restype = libc.realloc.restype = ctypes.c_void_p
libc.malloc_usable_size.argtypes = libc.free.argtypes = [ctypes.c_void_p]
libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
def new(nbytes):  # as torch asks for a tensor
    at = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(at), ctypes.c_size_t(64), ctypes.c_size_t(nbytes)) == 0
    return at.value
def old(mib):     # one that was freed
    at = new(mib * MIB)
    libc.free(at)
    return at
{code}
"""
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, **slab.environment(), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)


def test_a_freed_block_is_used_again_by_one_of_its_size_and_no_other():
    found = run("""
slab.limit(64 * MIB)
first = old(8)
smaller, larger, near = new(4 * MIB), new(9 * MIB), new(8 * MIB - 5)
print(json.dumps([first % (2 * MIB), smaller == first, larger == first, near == first, slab.held_bytes()]))
""")
    assert found == [0, False, False, True, (8 + 4 + 9) * MIB]


def test_nothing_is_kept_without_a_limit_and_all_is_given_back_when_it_falls():
    found = run("""
held = []
old(8); held.append(slab.held_bytes())
slab.limit(20 * MIB)
old(8); old(10); held.append(slab.held_bytes())
old(12); held.append(slab.held_bytes())      # 8 went first, then 10 had to go, too
slab.limit(0); held.append(slab.held_bytes())
new(8 * MIB); held.append(slab.held_bytes())  # in use: beyond any limit
print(json.dumps([n // MIB for n in held]))
""")
    assert found == [0, 18, 12, 0, 8]


def test_what_is_kept_is_resident_and_what_is_given_back_is_not():
    found = run("""
def resident():
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) // 1024
slab.limit(256 * MIB)
before = resident()
at = new(128 * MIB); ctypes.memset(at, 1, 128 * MIB); libc.free(at); kept = resident() - before
slab.limit(0); after = resident() - before
print(json.dumps([kept, after]))
""")
    assert 120 <= found[0] <= 140
    assert found[1] <= 10


def test_threads_that_allocate_and_free_at_once_never_share_a_block():
    found = run("""
slab.limit(48 * MIB)
bad = []
def work(seed):
    source, kept = random.Random(seed), []
    for i in range(60):
        size = source.randint(1, 5) * MIB
        at = new(size)
        ctypes.memset(at, seed, size)
        kept.append((at, size))
        if len(kept) > 3:
            at, size = kept.pop(source.randrange(4))
            if ctypes.string_at(at, size).strip(bytes([seed])):
                bad.append(seed)
            libc.free(at)
    for at, _ in kept:
        libc.free(at)
threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
[t.start() for t in threads]; [t.join() for t in threads]
print(json.dumps([bad, slab.held_bytes() <= 48 * MIB]))
""")
    assert found == [[], True]


def test_the_c_library_may_be_asked_about_such_a_block_and_move_it():
    found = run("""
at = new(3 * MIB)
ctypes.memset(at, 7, 3 * MIB)
size = libc.malloc_usable_size(at)
held = slab.held_bytes()
moved = libc.realloc(at, 5 * MIB)
same = ctypes.string_at(moved, 3 * MIB) == bytes([7]) * (3 * MIB)
after = slab.held_bytes()
libc.free(moved)
print(json.dumps([size, held, same, after]))
""")
    assert found == [3 * MIB, 3 * MIB, True, 0]


def test_a_process_started_by_such_a_process_is_an_ordinary_one():
    found = run("""
print(json.dumps([slab.held_bytes(), os.environ.get("LD_PRELOAD")]))
""")
    assert found == [0, None]


def test_whoever_replaces_the_c_library_keeps_their_replacement(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/another.so")
    assert slab.environment() == {}


def test_without_the_library_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("PLAIT_NATIVE", "0")
    assert slab.environment() == {}
    slab.limit(1 << 30)
    assert slab.held_bytes() is None
