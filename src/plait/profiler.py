"""Measures what the blocks of a chain cost, one block at a time.

Time: each block runs alone on values that its predecessors really produced, forward and backward, first
unmeasured to warm up, then repeated; the median counts. Bytes saved for backward are the storages that
autograd packs, each counted once over the whole chain, without parameters and the model's inputs.
Transient bytes come from torch's own record of allocations: the peak of a pass less the larger of what
is held before and after it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from plait.around import Around
from plait.block import Block
from plait.chain import Chain
from plait.compat import allocations, storage_key
from plait.errors import UsageError
from plait.profile import BlockProfile, Profile, Times
from plait.visit import Visit

_WARM_UP = 2
_LONG_MS = 200.0
"""Of fetching: data that takes so long is not made to wait for any further."""


@dataclass(frozen=True)
class _Sample:
    """What one block did at one batch size."""

    times: Times
    saved: int
    transient: int
    output: int


def measure(
    chain: Chain,
    batch_sizes: Sequence[int],
    *,
    optimizer: Callable[[Any], Any] | None,
    repetitions: int,
    threads: int | None,
    progress: Callable[[str], None] | None,
    around: Around | None = None,
) -> Profile:
    """Measure every block; see `Profile.measure`. ``around`` is what a job's steps do beside."""
    sizes = sorted(set(batch_sizes))
    if not sizes or sizes[0] < 1:
        raise UsageError(
            f"cannot measure batch sizes {list(batch_sizes)}", setting="batch_sizes", works="(1, 2, 4)"
        )
    if repetitions < 1:
        raise UsageError(f"cannot repeat {repetitions} times", setting="repetitions", works="5")
    if threads is not None and threads < 1:
        raise UsageError(f"cannot run on {threads} threads", setting="threads", works="1")
    shared = frozenset(chain.tied)
    samples: list[dict[int, _Sample]] = [{} for _ in chain]
    with _undisturbed(chain, threads):
        used = torch.get_num_threads()
        fetching = {} if around is None else _fetching_ms(around, sizes, repetitions)
        for batch in sizes:
            args, kwargs = chain.example(batch)
            values = chain.start(*args, **kwargs)
            kept = set(chain.inputs)
            visits = _Visits(chain, shared, None if around is None else around.at(batch))
            for place, block in enumerate(chain):
                if progress is not None:
                    progress(f"batch {batch}, block {place + 1} of {len(chain)}: {block.name}")
                with _present(chain, place):
                    sample, written = _run(block, values, visits, kept, repetitions)
                if place == 0 and fetching:
                    forward = sample.times.forward + fetching[batch]
                    sample = replace(sample, times=replace(sample.times, forward=forward))
                samples[place][batch] = sample
                values.update(written)
                alive = chain.live(place + 1)
                values = {name: value for name, value in values.items() if name in alive}
        rows = []
        counted: set[str] = set()
        for place, block in enumerate(chain):
            with _present(chain, place):
                row = _row(chain, block, samples[place], counted, optimizer, repetitions)
                if around is not None and around.objective.bf16 and len(sizes) > 1:
                    row = replace(row, saved_bytes_per_sample=_saved_slope(samples[place]))
                rows.append(row)
        device = next((parameter.device.type for parameter in chain.parameters()), "cpu")
    name = type(chain.model).__name__
    return Profile(blocks=tuple(rows), model=name, device="cpu" if device == "meta" else device, threads=used)


@dataclass(frozen=True)
class _Visits:
    """How the blocks of a chain are visited at one batch size, as the sample around them has it."""

    chain: Chain
    shared: frozenset[str]
    around: Around | None

    def __call__(self, block: Block, values: Mapping[str, Any]) -> Visit:
        if self.around is None:
            return Visit(block, values, shared=self.shared)
        return self.around.visit(self.chain, block, values, shared=self.shared)


def _run(
    block: Block, values: dict[str, Any], visits: _Visits, kept: set[str], repetitions: int
) -> tuple[_Sample, dict[str, Any]]:
    """Run one block at one batch size, several times for its time and once each for its bytes."""
    forward, backward = [], []
    visit = visits(block, values)
    written = visit.writes
    gradients = _gradients(written, visits.chain)
    for turn in range(_WARM_UP + repetitions):
        began = time.perf_counter()
        visit = visits(block, values)
        _wait(block)
        middle = time.perf_counter()
        visit.backward(dict(gradients))
        _wait(block)
        ended = time.perf_counter()
        _forget_gradients(block)
        if turn >= _WARM_UP:
            forward.append((middle - began) * 1e3)
            backward.append((ended - middle) * 1e3)
    saved = _saved_bytes(block, values, kept, visits)
    transient = _transient_bytes(block, values, gradients, visits)
    times = Times(
        forward=statistics.median(forward),
        backward=statistics.median(backward),
        forward_spread=_middle_half(forward),
        backward_spread=_middle_half(backward),
        repetitions=repetitions,
    )
    output = sum(value.nbytes for value in written.values())
    return _Sample(times, saved, transient, output), written


def _fetching_ms(around: Around, sizes: Sequence[int], repetitions: int) -> dict[int, float]:
    """How long fetching takes, by batch size: measured for the fewest and the most, on a line between."""
    found = {rows: ms for rows in (sizes[0], sizes[-1])
             if (ms := _fetch_ms(around, rows, repetitions)) is not None}  # fmt: skip
    if not found:
        return dict.fromkeys(sizes, 0.0)
    few, most = min(found), max(found)
    slope = max(0.0, found[most] - found[few]) / (most - few) if few < most else found[most] / most
    return {size: found[most] - slope * (most - size) for size in sizes}


def _fetch_ms(around: Around, rows: int, repetitions: int) -> float | None:
    """The median over several steps, so that few rows are fetched twice; once, where that takes long.

    None where so many rows make no batch, or one of them is broken: what training asks for, it tells itself.
    """
    took: list[float] = []
    for step in range(1 + repetitions):
        began = time.perf_counter()
        try:
            around.fetch(rows, step)
        except Exception:
            return None
        took.append((time.perf_counter() - began) * 1e3)
        if sum(took) > _LONG_MS:
            break
    return statistics.median(took[1:] or took)


def _gradients(written: dict[str, Any], chain: Chain) -> dict[str, torch.Tensor]:
    """What comes back for the values written: ones. Of a model that returns its loss, only the loss's."""
    results = {name: value for name, value in written.items() if name in chain.outputs}
    scalars = {name for name, value in results.items() if value.ndim == 0 and value.requires_grad}
    return {
        name: torch.ones_like(value)
        for name, value in written.items()
        if value.requires_grad and (not scalars or name in scalars or name not in results)
    }


def _saved_bytes(block: Block, values: dict[str, Any], counted: set[str], visits: _Visits) -> int:
    """Bytes of the storages that forward keeps for backward; values by name, each counted once."""
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[storage_key(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        visit = visits(block, values)
    for name in block.state_names:
        kept.pop(storage_key(block.state(name)), None)
    for name, value in [*((name, values[name]) for name in block.reads), *visit.writes.items()]:
        if isinstance(value, torch.Tensor) and storage_key(value) in kept:
            if name in counted:
                del kept[storage_key(value)]
            counted.add(name)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _transient_bytes(
    block: Block, values: dict[str, Any], gradients: dict[str, torch.Tensor], visits: _Visits
) -> int:
    """The larger of forward's and backward's need beyond what is held before or after it."""
    with allocations() as forward:
        visit = visits(block, values)
    with allocations() as backward:
        visit.backward(dict(gradients))
    _forget_gradients(block)
    return max(_above_ends(forward), _above_ends(backward))


def _above_ends(changes: Sequence[int]) -> int:
    """The peak of what is held, above the larger of its start and its end."""
    levels = [0, *accumulate(changes)]
    return max(levels) - max(0, levels[-1])


def _row(
    chain: Chain,
    block: Block,
    samples: dict[int, _Sample],
    counted: set[str],
    optimizer: Callable[[Any], Any] | None,
    repetitions: int,
) -> BlockProfile:
    own = [n for n in block.state_names if isinstance(block.state(n), nn.Parameter) and n not in counted]
    counted.update(own)
    parameters = [block.state(name) for name in own]
    state_bytes, optimizer_ms = _optimizer_cost(parameters, optimizer, repetitions)
    small, large = min(samples), max(samples)
    slope = 0 if small == large else (samples[large].transient - samples[small].transient) / (large - small)
    per_sample = max(0, math.ceil(slope))
    makers = {name: other.name for other in chain for name in other.writes}
    sources = tuple(dict.fromkeys(makers[name] for name in block.reads if name in makers))
    place = chain.blocks.index(block)
    before = (chain[place - 1].name,) if place else ()
    return BlockProfile(
        name=block.name,
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        optimizer_bytes=state_bytes,
        tied=tuple(name for name in block.state_names if name in chain.tied),
        output_bytes_per_sample=math.ceil(samples[large].output / large),
        saved_bytes_per_sample=math.ceil(samples[large].saved / large),
        transient_bytes=max(0, samples[large].transient - per_sample * large),
        transient_bytes_per_sample=per_sample,
        optimizer_milliseconds=optimizer_ms,
        milliseconds={batch: sample.times for batch, sample in samples.items()},
        inputs=None if sources == before else sources,
    )


def _saved_slope(samples: dict[int, _Sample]) -> int:
    """What each row more saves: beside that, autocast saves copies of the weights, whatever the rows."""
    few, most = min(samples), max(samples)
    return max(0, math.ceil((samples[most].saved - samples[few].saved) / (most - few)))


def _optimizer_cost(
    parameters: Sequence[torch.Tensor], factory: Callable[[Any], Any] | None, repetitions: int
) -> tuple[int, float]:
    """Bytes of state and milliseconds of a step, on copies of the parameters."""
    copies = [
        nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters if parameter.requires_grad
    ]
    if not copies:
        return 0, 0.0
    for copy in copies:
        copy.grad = torch.ones_like(copy)
    optimizer = torch.optim.AdamW(copies, fused=True) if factory is None else factory(copies)
    times = []
    for turn in range(_WARM_UP + repetitions):
        began = time.perf_counter()
        optimizer.step()
        if turn >= _WARM_UP:
            times.append((time.perf_counter() - began) * 1e3)
    state = (value for row in optimizer.state.values() for value in row.values())
    return sum(v.nbytes for v in state if isinstance(v, torch.Tensor)), statistics.median(times)


@contextmanager
def _undisturbed(chain: Chain, threads: int | None) -> Iterator[None]:
    """Leave gradients, buffers, random generators and the number of threads as they were."""
    gradients = {name: parameter.grad for name, parameter in chain.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in chain.model.named_buffers()}
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    for parameter in chain.parameters():
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(before)
        for name, parameter in chain.named_parameters():
            parameter.grad = gradients[name]
        for name, buffer in chain.model.named_buffers():
            buffer.copy_(buffers[name])


@contextmanager
def _present(chain: Chain, place: int) -> Iterator[None]:
    """Let a block that is on the meta device exist while it is measured."""
    if any(chain[place].state(name).is_meta for name in chain[place].state_names):
        chain.create(place, seed=0)
        try:
            yield
        finally:
            chain.release(place)
    else:
        yield


def _forget_gradients(block: Block) -> None:
    for parameter in block.parameters():
        parameter.grad = None


def _wait(block: Block) -> None:
    """On a GPU, work is only done once the device says so."""
    if any(parameter.is_cuda for parameter in block.parameters()):
        torch.cuda.synchronize()


def _middle_half(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low
