"""Where each tensor of a job lives: its segment, by kind and shard; pure.

A tensor's home is the first shard that uses it. What several shards use and change (a tied weight) has a
segment to itself, so that no shard must bring in another one's weights for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from plait.spill.description import Buffer, Description, Parameter
from plait.spill.plan import Activations
from plait.spill.segment import ALIGNMENT_BYTES, SHARED, Entry, Segment, padded

PARAMETER = "parameter:"
"""Before the name of a tied parameter where its gradient travels as a value's does."""
CAST = "cast:"
"""The same for the gradient of the copy that autocast makes of it."""


class ShardPlan(Protocol):
    """Consecutive blocks that are in memory together."""

    @property
    def first(self) -> int:
        """Its first block."""

    @property
    def end(self) -> int:
        """The block after its last one."""

    @property
    def activations(self) -> Activations:
        """What becomes of what its forward saves."""

    @property
    def saved_bytes(self) -> int:
        """Room for what is saved of the largest micro-batch, where it is spilled."""


class Plan(Protocol):
    """The part of a plan that says how a job is cut."""

    @property
    def shards(self) -> Sequence[ShardPlan]:
        """In order, from block 0 to the last one."""


@dataclass(frozen=True)
class Home:
    """A tensor's place."""

    key: str
    entry: Entry


@dataclass(frozen=True)
class Passing:
    """A value that is written by one shard and read by others."""

    name: str
    writer: int
    readers: tuple[int, ...]
    differentiable: bool


class Homes:
    """The segments of a job under a plan."""

    def __init__(self, description: Description, edges: Sequence[tuple[int, int]]) -> None:
        self.description = description
        self.count = len(edges)
        """How many shards there are."""
        self._shard_of = {block: s for s, (first, end) in enumerate(edges) for block in range(first, end)}
        self._edges = tuple(edges)
        self.job = description.job
        self.parameters: dict[str, Home] = {}
        self.buffers: dict[str, Home] = {}
        self.states: dict[tuple[str, str], Home] = {}
        """By parameter and name of the optimizer's state."""
        self.persistent: list[Segment] = []
        self.by_shard: list[list[Parameter]] = [[] for _ in edges]
        """The parameters that each shard uses."""
        self.at_home: list[list[Parameter]] = [[] for _ in edges]
        """The trained parameters that each shard updates: those whose home it is."""
        self.tied: dict[str, tuple[int, ...]] = {}
        """Trained parameters that several shards use, with those shards."""
        self.changed: list[list[Buffer]] = [[] for _ in edges]
        """The buffers that each shard changes in training."""
        self.created: list[list[str]] = [[] for _ in edges]
        """The segments that come to be with each shard."""
        self._place_parameters()
        self._place_buffers()
        self.passing = self._passing()
        self.reads = [[p for p in self.passing.values() if s in p.readers] for s in range(self.count)]
        self.writes = [[p for p in self.passing.values() if p.writer == s] for s in range(self.count)]

    def shards_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The shards that hold some blocks."""
        return tuple(sorted({self._shard_of[block] for block in blocks}))

    def _place_parameters(self) -> None:
        groups: dict[str, tuple[int, list[Parameter]]] = {}
        counts = {"tied": 0, "frozen-tied": 0}
        for parameter in self.description.parameters:
            users = self.shards_of(parameter.blocks)
            for s in users:
                self.by_shard[s].append(parameter)
            kind = "weights" if parameter.trained else "frozen"
            where = str(users[0]) if users else "rest"
            if len(users) > 1:
                kind = "tied" if parameter.trained else "frozen-tied"
                where = str(counts[kind])
                counts[kind] += 1
                if parameter.trained:
                    self.tied[parameter.name] = users
            if parameter.trained and users:
                self.at_home[users[0]].append(parameter)
            prefix = self.job if parameter.trained else self._frozen_group
            key = f"{prefix}/{kind}/{where}"
            groups.setdefault(key, (users[0] if users else 0, []))[1].append(parameter)
        for key, (s, parameters) in groups.items():
            segment = Segment.pack(key, [(p.name, p.shape, p.dtype) for p in parameters], persistent=True)
            self.persistent.append(segment)
            self.created[s].append(key)
            self.parameters.update({entry.name: Home(key, entry) for entry in segment.entries})
            self._place_state(key, s, parameters)

    def _place_state(self, key: str, s: int, parameters: Sequence[Parameter]) -> None:
        """The optimizer's state of the parameters of one segment."""
        rows = [
            (f"{p.name}|{name}", p.shape if like else (), dtype)
            for p in parameters
            for name, like, dtype in p.state
            if p.trained and (p.blocks or self.description.eager)
        ]
        if not rows:
            return
        moments = moments_key(key)
        segment = Segment.pack(moments, rows, persistent=True)
        self.persistent.append(segment)
        if self.description.eager:
            self.created[s].append(moments)
        for entry in segment.entries:
            name, _, state = entry.name.rpartition("|")
            self.states[name, state] = Home(moments, entry)

    @property
    def _frozen_group(self) -> str:
        if not self.description.shares:
            return self.job
        cuts = hashlib.sha256(repr((self.description.base, self._edges)).encode()).hexdigest()
        return f"{SHARED}{cuts[:16]}"  # no job has such a name

    def _place_buffers(self) -> None:
        groups: dict[str, tuple[int, list[Buffer]]] = {}
        for buffer in self.description.buffers:
            users = self.shards_of(buffer.blocks)
            for s in self.shards_of(buffer.changes):
                self.changed[s].append(buffer)
            where = str(users[0]) if users else "rest"
            home = users[0] if users else 0
            groups.setdefault(f"{self.job}/buffers/{where}", (home, []))[1].append(buffer)
        for key, (s, buffers) in groups.items():
            segment = Segment.pack(key, [(b.name, b.shape, b.dtype) for b in buffers], persistent=True)
            self.persistent.append(segment)
            self.created[s].append(key)
            self.buffers.update({entry.name: Home(key, entry) for entry in segment.entries})

    def _passing(self) -> dict[str, Passing]:
        description, found = self.description, {}
        writers = {
            name: self._shard_of[b] for b, block in enumerate(description.blocks) for name in block.writes
        }
        readers: dict[str, set[int]] = {name: set() for name in writers}
        for b, block in enumerate(description.blocks):
            for name in block.reads:
                if name in readers:
                    readers[name].add(self._shard_of[b])
        for name in description.outputs:  # the loss is computed with the last shard
            if name in readers:
                readers[name].add(self.count - 1)
        for name, writer in writers.items():
            later = tuple(sorted(s for s in readers[name] if s > writer))
            if later:
                found[name] = Passing(name, writer, later, description.value(name).differentiable)
        return found

    # --- what a shard needs -------------------------------------------------------------------------------

    def parameter_keys(self, s: int) -> list[str]:
        """Segments of all parameters that a shard uses."""
        return list(dict.fromkeys(self.parameters[p.name].key for p in self.by_shard[s]))

    def buffer_keys(self, s: int) -> dict[str, bool]:
        """Segments of the buffers that a shard uses, and whether it changes something in them in training."""
        changed = {buffer.name for buffer in self.changed[s]}
        keys: dict[str, bool] = {}
        for buffer in self.description.buffers:
            if s in self.shards_of(buffer.blocks):
                key = self.buffers[buffer.name].key
                keys[key] = keys.get(key, False) or buffer.name in changed
        return keys

    def update_keys(self, s: int) -> list[tuple[str, str | None]]:
        """The segments that a shard's update changes: weights, and their moments where there are any."""
        weights = dict.fromkeys(self.parameters[p.name].key for p in self.at_home[s])
        with_moments = {home.key for home in self.states.values()}
        return [(key, m if (m := moments_key(key)) in with_moments else None) for key in weights]

    def returns(self, s: int) -> bool:
        """Whether a shard has a backward: something in it, or before it, is trained."""
        return any(p.trained for p in self.by_shard[s]) or any(p.differentiable for p in self.reads[s])

    def tied_in(self, s: int) -> list[str]:
        """The tied trained parameters that a shard uses."""
        return [name for name, users in self.tied.items() if s in users]

    # --- scratch ------------------------------------------------------------------------------------------

    def value_segment(self, kind: str, name: str, m: int) -> Segment:
        """Room for a value, or the gradient of a value or tied parameter, of one micro-batch."""
        if name.startswith((PARAMETER, CAST)):  # a gradient of a copy in lower precision takes less
            own = name.partition(":")[2]
            size = next(p for p in self.description.parameters if p.name == own).nbytes
        else:
            size = self.description.value(name).nbytes(self.description.micro_batches[m])
        return _room(f"{self.job}/{kind}/{name}/{m}", size)

    def evaluation_segment(self, name: str, batch: int, rows: int) -> Segment:
        """Room for a value of one batch of an evaluation."""
        return _room(f"{self.job}/value/{name}/e{batch}", self.description.value(name).nbytes(rows))

    def gradient_segment(self, s: int) -> Segment:
        """Room for the gradients of the parameters that a shard updates."""
        rows = [(p.name, p.shape, p.dtype) for p in self.at_home[s]]
        return Segment.pack(f"{self.job}/grads/{s}", rows, persistent=False)

    def before_segment(self, s: int, m: int) -> Segment:
        """Room for the buffers that a shard changes, as they were before a micro-batch."""
        rows = [(b.name, b.shape, b.dtype) for b in self.changed[s]]
        return Segment.pack(f"{self.job}/before/{s}/{m}", rows, persistent=False)

    def saved_segment(self, s: int, m: int, nbytes: int) -> Segment:
        """Room for what a shard's forward saves of one micro-batch."""
        return _room(f"{self.job}/saved/{s}/{m}", nbytes + 1024 * ALIGNMENT_BYTES)


def moments_key(key: str) -> str:
    """The segment with the optimizer's state of the parameters in a segment."""
    job, kind, where = key.split("/")
    return f"{job}/moments/{where}" if kind == "weights" else f"{job}/moments-tied/{where}"


def _room(key: str, nbytes: int) -> Segment:
    return Segment(key=key, nbytes=padded(max(nbytes, 1)), persistent=False)


def homes(description: Description, plan: Plan) -> Homes:
    """Where everything lives; the same object for the same description and cuts."""
    return _homes(description, tuple((shard.first, shard.end) for shard in plan.shards))


@lru_cache(maxsize=64)
def _homes(description: Description, edges: tuple[tuple[int, int], ...]) -> Homes:
    return Homes(description, edges)
