"""A store whose segments hold a letter each, so that what is read can be told apart."""

import time

from plait.spill.segment import PAGE_BYTES, Request, Segment

P = PAGE_BYTES
SOON_S = 30
"""Longer than anything takes here; what takes longer hangs."""


def segment(key, pages=1, persistent=True):
    return Segment(key=key, nbytes=pages * P, persistent=persistent)


def lease(store, **modes):
    """A lease of segments of the group ``job``."""
    return store.request([Request(f"job/{key}", mode) for key, mode in modes.items()]).result(SOON_S)


def write(store, mode="write", **letters):
    """Fill segments with a letter each."""
    with lease(store, **dict.fromkeys(letters, mode)) as held:
        for key, letter in letters.items():
            size = next(s.nbytes for s in store.segments("job") if s.key == f"job/{key}")
            at = held.places[f"job/{key}"]
            store.memory[at : at + size] = letter.encode() * size


def read(store, *keys):
    """What segments are filled with, as a word."""
    with lease(store, **dict.fromkeys(keys, "read")) as held:
        word = ""
        for key in keys:
            size = next(s.nbytes for s in store.segments("job") if s.key == f"job/{key}")
            at = held.places[f"job/{key}"]
            content = bytes(store.memory[at : at + size])
            assert content == content[:1] * size, f"{key} is a mixture"
            word += content[:1].decode()
        return word


def define(store, names, **options):
    for name in names:
        store.define(segment(f"job/{name}", **options))


def until(store, condition):
    """The figures when they are so."""
    deadline = time.monotonic() + SOON_S
    while not condition(figures := store.statistics()):
        assert time.monotonic() < deadline, figures
        time.sleep(0.001)
    return figures
