"""Stores for tests: real ones, and one that catches whoever holds on to memory that he has given back."""

import random
import threading
from concurrent.futures import Future

import pytest

from plait.spill.description import BlockCost, BlockShape, Costs, Description, Parameter
from plait.spill.segment import Extent
from plait.spill.store import Store
from plait.value import Value

PAGE = 4096


@pytest.fixture
def make(tmp_path):
    """Opens stores, which are closed again: ``make(pages=..., how=Store.open)``."""
    made = []

    def create(pages=4, how=Store.create, **options):
        store = how(tmp_path / "store", memory_bytes=pages * PAGE, **options)
        made.append(store)
        return store

    yield create
    for store in made:
        store.close(keep=False)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("plait")]


class _Lease:
    def __init__(self, store, places, requests):
        self.places, self._store, self._requests = places, store, requests
        self.extents = {each.key: Extent(store.sizes[each.key], each.mode) for each in requests}

    def release(self):
        self._store.take_back(self.places, self._requests)


class ShiftingStore:
    """In memory, with the interface of `plait.spill.store.Store`.

    A segment lies at another place in every lease, and what is given back is written over with garbage. What
    was only read must not have changed, and what is asked for to be written holds garbage at first.
    """

    def __init__(self, nbytes=1 << 22, seed=0):
        self._bytes = bytearray(nbytes)
        self.memory = memoryview(self._bytes)
        self.contents, self.sizes, self.persistent, self.notes = {}, {}, set(), {}
        self._random = random.Random(seed)
        self._leased = 0
        self.peak = 0

    def define(self, segment, *, constant=False):
        assert segment.nbytes % PAGE == 0
        assert self.sizes.setdefault(segment.key, segment.nbytes) == segment.nbytes, segment.key
        if segment.persistent:
            self.persistent.add(segment.key)

    def drop(self, key):
        del self.sizes[key]
        self.contents.pop(key, None)

    def expect(self, upcoming):
        for requests in upcoming:
            for request in requests:
                size = self.sizes.get(request.key, request.nbytes)
                assert size > 0, f"{request.key} is expected, and neither defined nor of a size that is told"

    def request(self, requests):
        assert not self._leased, "one lease at a time"
        assert len({request.key for request in requests}) == len(requests)
        order = list(requests)
        self._random.shuffle(order)
        at, places = PAGE * self._random.randrange(8), {}
        for request in order:
            size = self.sizes[request.key]
            places[request.key] = at
            if request.mode == "write":
                self.memory[at : at + size] = self._random.randbytes(size)
            else:
                assert request.key in self.contents, f"{request.key} was never written"
                self.memory[at : at + size] = self.contents[request.key]
            at += size + PAGE * self._random.randrange(3)
        self.peak = max(self.peak, at)
        assert at <= len(self._bytes), f"{at} bytes do not fit"
        self._leased += 1
        future = Future()
        future.set_result(_Lease(self, places, order))
        return future

    def take_back(self, places, requests):
        self._leased -= 1
        for request in requests:
            at, size = places[request.key], self.sizes[request.key]
            now = bytes(self.memory[at : at + size])
            if request.mode == "read":
                assert now == self.contents[request.key], f"{request.key} was read, and changed"
            self.contents[request.key] = now
            self.memory[at : at + size] = self._random.randbytes(size)

    def commit(self, group, note):
        assert not self._leased
        scratch = [k for k in self.sizes if k not in self.persistent and k.startswith(f"{group}/")]
        assert not scratch, f"a commit with {scratch} left"
        self.notes[group] = note
        future = Future()
        future.set_result(None)
        return future

    def committed(self, group):
        return self.notes.get(group)

    def stream(self, key):
        content = memoryview(self.contents[key])
        for at in range(0, len(content), PAGE):
            yield content[at : at + PAGE]


@pytest.fixture
def shifting():
    """Makes such stores: ``shifting(nbytes=..., seed=...)``."""
    return ShiftingStore


def _sketch(blocks, *, tied=(), clips=False, micro_batches=(1,), value_pages=1):
    """A chain of blocks, given as dicts of pages and milliseconds."""
    parameters = [
        Parameter(
            name=f"w{i}",
            shape=(block.get("weights", 1) * PAGE // 4,),
            stride=(1,),
            dtype="float32",
            trained=block.get("trained", True),
            blocks=(i, *(tied if i == 0 else ())),
            state=(("momentum", True, "float32"),) * block.get("moments", 0),
        )
        for i, block in enumerate(blocks)
    ]
    values = [Value(f"v{i}", "float32", 4, ((value_pages * PAGE // 4, 0),), True) for i in range(len(blocks))]
    description = Description(
        job="job",
        digest="",
        base="",
        blocks=tuple(
            BlockShape(name=f"b{i}", reads=(f"v{i - 1}",) if i else ("x",), writes=(f"v{i}",), kind=str(i))
            for i in range(len(blocks))
        ),
        parameters=tuple(parameters),
        buffers=(),
        values=tuple(values),
        inputs=("x",),
        outputs=(f"v{len(blocks) - 1}",),
        micro_batches=micro_batches,
        steps=10,
        clips=clips,
        skips=False,
    )
    costs = Costs(
        rows=max(micro_batches),
        threads=1,
        loss_ms=0.0,
        output_bytes=0,
        blocks=tuple(
            BlockCost(
                forward_ms=block.get("forward", 1),
                backward_ms=2 * block.get("forward", 1),
                thrift_ms=0.25,
                update_ms=0.5,
                saved_bytes=block.get("saved", 2) * PAGE,
                thrift_bytes=block.get("saved", 2) * PAGE // 2,
                transient_bytes=block.get("transient", 1) * PAGE,
                thrift_transient_bytes=block.get("thrift_transient", 1 + block.get("transient", 1)) * PAGE,
            )
            for block in blocks
        ),
    )
    return description, costs


@pytest.fixture(scope="session")
def sketch():
    """A description and costs of a chain of blocks, given as dicts of pages and milliseconds."""
    return _sketch
