"""What planning and scheduling must know of a job, as plain data; no torch here.

``describe.py`` makes a :class:`Description` from a job whose weights do not exist yet, and
``runner.measure`` the :class:`Costs` of its blocks. A planner cuts the blocks into shards from these two,
and ``units.py`` lays out segments and says which of them a unit needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from plait.spill.segment import item_bytes
from plait.value import Value


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the model, by its first name."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Dense, in any order of the dimensions."""
    dtype: str
    trained: bool
    blocks: tuple[int, ...]
    """The blocks that use it, in training or evaluation; none for one that nothing uses."""
    state: tuple[tuple[str, bool, str], ...] = ()
    """The optimizer's state for it: name, whether it has the parameter's shape or is one number, type."""

    @property
    def nbytes(self) -> int:
        """The size of its values."""
        return prod(self.shape) * item_bytes(self.dtype)

    @property
    def state_bytes(self) -> int:
        """The size of the optimizer's state for it."""
        return sum((prod(self.shape) if like else 1) * item_bytes(dtype) for _, like, dtype in self.state)


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A buffer of the model, by its first name."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    saved: bool
    """Whether the model's state_dict holds it."""
    blocks: tuple[int, ...]
    changes: tuple[int, ...]
    """The blocks that change it in training."""

    @property
    def nbytes(self) -> int:
        """The size of its values."""
        return prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """A block of the chain: what it reads and writes."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kind: str
    """Blocks of one kind run the same program on the same shapes, so they cost the same."""


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """When a job is evaluated, and on how much."""

    every: int | None
    """Steps between evaluations; None: after the last step only."""
    rows: int
    batch: int
    """Rows at a time."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A job, as planning and scheduling see it."""

    job: str
    """Its name: the group of its segments."""
    digest: str
    """Of all that the job says."""
    base: str
    """Of what its initial weights come from: equal for jobs that could share what is frozen."""
    blocks: tuple[BlockShape, ...]
    parameters: tuple[Parameter, ...]
    """In the model's order."""
    buffers: tuple[Buffer, ...]
    values: tuple[Value, ...]
    """All that may cross a cut."""
    inputs: tuple[str, ...]
    """Values that come from the data: never stored."""
    outputs: tuple[str, ...]
    micro_batches: tuple[int, ...]
    """Rows of each micro-batch of a step."""
    steps: int
    """Of the whole job."""
    clips: bool
    """Gradients are clipped by their global norm, so every update waits for all backwards."""
    skips: bool
    """Steps that are not finite are left out, rather than ending the job."""
    evaluation: Evaluations | None = None
    aliases: tuple[tuple[str, str], ...] = ()
    """Further names of tied parameters and buffers in the model's state_dict, with the first of each."""
    eager: bool = False
    """The optimizer makes its state when it is made, not at its first step."""
    shares: bool = False
    """What is frozen is in a group of its own, for several jobs of the same base and cuts."""

    def __hash__(self) -> int:
        return hash((self.job, self.digest, self.shares))  # quick: much is looked up by description

    @property
    def rows(self) -> int:
        """Rows of the largest micro-batch."""
        return max(self.micro_batches)

    def value(self, name: str) -> Value:
        """A value by its name."""
        return next(value for value in self.values if value.name == name)

    def live(self, place: int) -> tuple[str, ...]:
        """Names of the values that cross the cut before a block, without the inputs (as ``Chain.live``)."""
        needed = set(self.outputs)
        for block in reversed(self.blocks[place:]):
            needed = (needed - set(block.writes)) | set(block.reads)
        made = dict.fromkeys(name for block in self.blocks[:place] for name in block.writes)
        return tuple(name for name in made if name in needed)

    def cut_bytes(self, place: int, rows: int) -> int:
        """Bytes of the values that cross the cut before a block."""
        return sum(self.value(name).nbytes(rows) for name in self.live(place))


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """What one block costs at the rows of a job's largest micro-batch."""

    forward_ms: float
    backward_ms: float
    """Of one micro-batch each."""
    thrift_ms: float
    """More time in backward, where what is cheap is made again."""
    update_ms: float
    """The optimizer's time for the parameters whose first block this is."""
    saved_bytes: int
    """What forward keeps for backward, without parameters, what it read and what it wrote."""
    thrift_bytes: int
    """The same, without what is cheap to make again."""
    transient_bytes: int
    """The most that a pass needs for a moment, beyond gradients and what is saved."""
    thrift_transient_bytes: int
    """The same where what is cheap is made again: it is there for a moment then."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a job's blocks, and of what is done once."""

    rows: int
    threads: int
    blocks: tuple[BlockCost, ...]
    loss_ms: float
    """The loss of one micro-batch, forward and backward."""
    output_bytes: int
    """What the loss needs beside the outputs: gradients of these, and what it saves."""


def saved_bytes(
    description: Description, costs: Costs, first: int, end: int, *, thrift: bool, rows: int | None = None
) -> int:
    """What the forward of blocks ``first`` to ``end``, as one shard, keeps of one micro-batch at most.

    What passes between the shard's blocks is no boundary value any more: it counts as saved.
    """
    rows = costs.rows if rows is None else rows
    kept = sum(b.thrift_bytes if thrift else b.saved_bytes for b in costs.blocks[first:end])
    crossing = set(description.live(end)) | set(description.live(first))
    inner = {name for block in description.blocks[first:end] for name in block.writes} - crossing
    return -(-kept * rows // costs.rows) + sum(description.value(name).nbytes(rows) for name in inner)


def cuts(shards: Sequence[tuple[int, int]]) -> list[int]:
    """Where shards, as (first, end), cut a chain: the argument of ``Chain.cut``."""
    return [first for first, _ in shards if first > 0]
