"""Measures what the blocks of a job cost, with one block in memory at a time.

Blocks of one kind (the same program on the same shapes) are measured once. Each runs as it will in training,
on tensors in segments, so what it saves is what a device will have to keep.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from plait import deferred
from plait.chain import Chain
from plait.compat import allocations
from plait.data import Batches
from plait.job import Job
from plait.objective import Objective
from plait.spill.description import BlockCost, Costs, Description
from plait.spill.saving import CASTS, CHEAP, Saving, store
from plait.spill.segment import Segment
from plait.spill.update import Updater
from plait.spill.views import Views, name_of
from plait.visit import SHARED, Boundary, Visit

_LONG_S = 0.5
"""What takes longer than this is not repeated as often: it varies less."""


@dataclass(frozen=True)
class _Sample:
    """What one kind of block costs, and what it wrote."""

    cost: BlockCost
    written: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Run:
    """One forward and backward."""

    forward_ms: float
    backward_ms: float
    saved_bytes: int
    written: tuple[torch.Tensor, ...]


def measure(job: Job, chain: Chain, batches: Batches, description: Description, *, repetitions: int) -> Costs:
    """The costs of every block at the rows of the job's largest micro-batch."""
    objective = job.build_objective()
    batch = batches.fetch(range(description.rows))
    args, kwargs = objective.model_inputs(batch)
    values: dict[str, Any] = chain.start(*args, **kwargs)
    updates = _Updates(job, chain, description)
    samples: dict[str, _Sample] = {}
    costs = []
    for place, (block, shape) in enumerate(zip(chain, description.blocks, strict=True)):
        if shape.kind not in samples:
            bench = _Bench(chain, place, values, objective, job.seed)
            samples[shape.kind] = bench.sample(repetitions, set(chain.outputs))
        sample = samples[shape.kind]
        costs.append(_with_update(sample.cost, updates.milliseconds(place)))
        values.update(zip(block.writes, sample.written, strict=True))
        values = {name: values[name] for name in chain.live(place + 1)}
    loss_ms, output_bytes = _loss(chain, objective, values, batch)
    return Costs(
        rows=description.rows,
        threads=job.threads,
        blocks=tuple(costs),
        loss_ms=loss_ms,
        output_bytes=output_bytes,
    )


def _with_update(cost: BlockCost, update_ms: float) -> BlockCost:
    return BlockCost(**{**vars(cost), "update_ms": update_ms})


class _Bench:
    """A block with its parameters and what it reads in memory."""

    def __init__(
        self, chain: Chain, place: int, values: dict[str, Any], objective: Objective, seed: int
    ) -> None:
        block = chain[place]
        self._block, self._objective = block, objective
        block.train()
        read = {n: values[n] for n in block.reads if isinstance(values[n], torch.Tensor)}
        self._others = {n: values[n] for n in block.reads if n not in read}
        held = {name: block.state(name) for name in block.state_names}
        tensors = [
            *((f"state:{n}", t) for n, t in held.items()),
            *((f"value:{n}", t) for n, t in read.items()),
        ]
        rows = [(name, (t.numel(),), name_of(t.dtype)) for name, t in tensors]
        segment = Segment.pack("present", rows, persistent=False)
        size = segment.nbytes + sum(self._room(chain, name, values) for name in block.writes)
        self._memory = torch.empty(size, dtype=torch.uint8)  # not touched before it is needed
        lent: Any = self._memory.numpy()
        self._views = Views(memoryview(lent))
        self._places = {"present": 0, "written": segment.nbytes}
        self._views.use(self._places)
        entries = {entry.name: entry for entry in segment.entries}
        self._state, self._values = {}, dict(self._others)
        for name, tensor in tensors:
            entry = entries[name]
            lying = self._views.entry("present", entry).as_strided(tensor.shape, _strides(tensor))
            kind, _, own = name.partition(":")
            if kind == "value":
                lying.copy_(tensor.detach())
                self._values[own] = lying.detach().requires_grad_(tensor.requires_grad)
                continue
            made = tensor
            if tensor.is_meta:
                made = deferred.create(chain.model, [own], seed=seed)[own]
            lying.copy_(made.detach())
            self._state[own] = lying.detach().requires_grad_(tensor.requires_grad)
        tied = chain.tied
        self._shared = frozenset(n for n in held if n in tied and held[n].requires_grad)
        self._awaited = {n for n in self._shared if tied[n][0] == place}
        """What other blocks give a gradient for before this one does."""

    @staticmethod
    def _room(chain: Chain, name: str, values: dict[str, Any]) -> int:
        rows = next(v.shape[0] for v in values.values() if isinstance(v, torch.Tensor) and v.ndim)
        return chain.values[name].nbytes(rows) + (1 << 16)

    def sample(self, repetitions: int, outputs: Collection[str | None]) -> _Sample:
        casts = CASTS if self._objective.bf16 else ()
        kept = self._repeat(casts, repetitions, outputs)
        thrifty = self._repeat(CHEAP, repetitions, outputs)
        with_hooks = [run.forward_ms + run.backward_ms for run in thrifty]
        without = [run.forward_ms + run.backward_ms for run in kept]
        cost = BlockCost(
            forward_ms=statistics.median(run.forward_ms for run in kept),
            backward_ms=statistics.median(run.backward_ms for run in kept),
            thrift_ms=max(0.0, statistics.median(with_hooks) - statistics.median(without)),
            update_ms=0.0,
            saved_bytes=kept[0].saved_bytes,
            thrift_bytes=thrifty[0].saved_bytes,
            transient_bytes=self._transient(casts, outputs),
            thrift_transient_bytes=self._transient(CHEAP, outputs),
        )
        written = tuple(w.detach().clone().requires_grad_(w.requires_grad) for w in kept[0].written)
        return _Sample(cost, written)

    def _repeat(
        self, again: Collection[Any], repetitions: int, outputs: Collection[str | None]
    ) -> list[_Run]:
        """Once to warm up, then repeated; something long is not."""
        began = time.perf_counter()
        first = self._run(again, outputs)
        if time.perf_counter() - began > _LONG_S:
            return [first, self._run(again, outputs)][-1:]
        return [self._run(again, outputs) for _ in range(repetitions)]

    def _run(self, again: Collection[Any], outputs: Collection[str | None]) -> _Run:
        began = time.perf_counter()
        visit, saving = self._forward(again)
        middle = time.perf_counter()
        written = tuple(visit.writes.values())
        at = 0
        for value in written:
            place = store(self._shifted(at), "written", value.detach())
            if place is not None:
                saving.written(value, place)
            at += value.nbytes
        nbytes = saving.nbytes
        saving.close()
        gradients = _ones(visit.writes, outputs)
        self._views.use(self._places)
        halfway = time.perf_counter()
        self._backward(visit, gradients)
        ended = time.perf_counter()
        return _Run((middle - began) * 1e3, (ended - halfway) * 1e3, nbytes, written)

    def _shifted(self, at: int) -> Views:
        """The same memory, with room for the next value that is written."""
        self._views.use({**self._places, "written": self._places["written"] + (at + 63) // 64 * 64})
        return self._views

    def _forward(self, again: Collection[Any]) -> tuple[Visit, Saving]:
        saving = Saving(self._views, again=again)
        with saving.forward(), self._objective.autocast():
            visit = Visit(self._block, self._values, shared=self._shared, state=self._state)
        return visit, saving

    def _backward(self, visit: Visit, gradients: dict[str, torch.Tensor]) -> None:
        visit.backward(gradients)
        for tensor in self._state.values():
            tensor.grad = None

    def _transient(self, again: Collection[Any], outputs: Collection[str | None]) -> int:
        with allocations() as forward:
            visit, saving = self._forward(again)
        gradients = _ones(visit.writes, outputs)
        gradients.update({SHARED + name: torch.ones_like(self._state[name]) for name in self._awaited})
        saving.close()
        with allocations() as backward:
            visit.backward(gradients)
        for tensor in self._state.values():
            tensor.grad = None
        return max(_above_ends(forward), _above_ends(backward))


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's strides, if it has no gaps, else those of a copy of it."""
    dense = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
    return dense.stride()


def _ones(written: dict[str, Any], outputs: Collection[str | None]) -> dict[str, torch.Tensor]:
    """What comes back for the values written: ones. Of a model that returns its loss, only the loss's."""
    results = {name: value for name, value in written.items() if name in outputs}
    scalars = {name for name, value in results.items() if value.ndim == 0 and value.requires_grad}
    return {
        name: torch.ones_like(value)
        for name, value in written.items()
        if value.requires_grad and (not scalars or name in scalars or name not in results)
    }


def _above_ends(changes: Sequence[int]) -> int:
    """The peak of what is held, above the larger of its start and its end."""
    levels = [0, *accumulate(changes)]
    return max(levels) - max(0, levels[-1])


def _loss(chain: Chain, objective: Objective, values: dict[str, Any], batch: Any) -> tuple[float, int]:
    """Milliseconds of the loss of a micro-batch, forward and backward, and what it needs at its peak."""
    weight = max(objective.weigh(batch), 1e-30)
    began = time.perf_counter()
    with allocations() as changes:
        end = Boundary()
        with objective.autocast():
            output = chain.finish({name: end.enter(name, values[name]) for name in chain.live(len(chain))})
            part, _ = objective.share(output, batch, weight=weight, total=weight)
        if part.requires_grad:
            part.backward()  # type: ignore[no-untyped-call]
        del output, part
    elapsed = (time.perf_counter() - began) * 1e3
    return elapsed, max(accumulate(changes, initial=0))


class _Updates:
    """The optimizer's time for parameters, each shape once."""

    def __init__(self, job: Job, chain: Chain, description: Description) -> None:
        trained = [(name, p) for name, p in chain.named_parameters() if p.requires_grad]
        self._updater = Updater(job, trained)
        self._parameters = [p for p in description.parameters if p.trained and p.blocks]
        self._tensors = dict(trained)
        self._known: dict[Any, float] = {}

    def milliseconds(self, block: int) -> float:
        """For the parameters whose first block this is."""
        total = 0.0
        for parameter in self._parameters:
            if parameter.blocks[0] == block:
                key = (parameter.shape, parameter.dtype, parameter.state)
                if key not in self._known:
                    self._known[key] = self._time(parameter.name)
                total += self._known[key]
        return total

    def _time(self, name: str) -> float:
        absent = self._tensors[name]
        leaf = nn.Parameter(torch.zeros_like(absent, device="cpu"))
        leaf.grad = torch.ones_like(leaf)
        state = self._updater.update(name, leaf, {})
        began = time.perf_counter()
        self._updater.update(name, leaf, state)
        return (time.perf_counter() - began) * 1e3
