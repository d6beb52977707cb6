"""Gradients of the ranks that run a block are added up while the rest of the backward pass goes on.

Buckets are cut from the plan alone, the same on all ranks: parameters in the order in which their last block
ends its backward pass, those of one width together until a bucket is full. One thread reduces bucket after
bucket. All ranks do so in the same order, in which any two find the buckets that they share, so none can wait
for another in a circle. A parameter that several blocks use is reduced once, over the widest of them.

Rows that move take the wire first: while they do, no new piece of a bucket is begun.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.burst.crew import Crew
from plait.burst.lane import Errand
from plait.collective import Collective, Keyed, ring_bytes
from plait.errors import UsageError

BUCKET_BYTES = 1 << 18
"""Smaller ones wait for the next block of their width, so that tiny blocks do not pay for a message each."""
_PIECE_BYTES = 8 << 20
"""What is reduced at once: the most that rows wait for."""
_GATE_S = 0.5


@dataclass(frozen=True)
class Trained:
    """A parameter that is trained, and when its gradient is whole."""

    name: str
    bytes: int
    dtype: torch.dtype
    width: int
    """Of the widest block that uses it."""
    place: int
    """The first block that uses it: the last in the backward pass."""


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced together."""

    width: int
    names: tuple[str, ...]
    place: int
    """The block whose backward pass makes it whole."""


def buckets(parameters: Sequence[Trained], *, bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """All ranks' buckets, in the order in which they are reduced; parameters of width 1 need none."""
    found: list[Bucket] = []
    some: list[Trained] = []

    def close() -> None:
        if some:
            found.append(Bucket(some[0].width, tuple(each.name for each in some), some[-1].place))
            some.clear()

    for each in sorted(parameters, key=lambda each: -each.place):
        if each.width == 1:
            continue
        if some and (some[0].width, some[0].dtype) != (each.width, each.dtype):
            close()
        if some and some[-1].place != each.place and sum(one.bytes for one in some) >= bucket_bytes:
            close()
        some.append(each)
    close()
    return found


@dataclass
class _Reduced:
    """A bucket under way."""

    bucket: Bucket
    label: str
    """The block whose end started it."""
    flat: torch.Tensor
    errand: Errand


class GradientSync:
    """Adds up the gradients of one rank's parameters with the other ranks', step after step."""

    def __init__(
        self,
        crew: Crew,
        collective: Collective,
        order: Sequence[Bucket],
        parameters: Mapping[str, nn.Parameter],
        *,
        free: threading.Event,
    ) -> None:
        """``free`` is set while no rows move."""
        self._crew, self._collective = crew, collective
        self._parameters = dict(parameters)
        self._mine = [bucket for bucket in order if crew.rank < bucket.width]
        self._names = [name for bucket in order for name in bucket.names]
        """Of all ranks, so that flags are at the same places everywhere."""
        for width in sorted({bucket.width for bucket in order}):
            crew.open("sync", width)
        self._lane = crew.lane("sync")
        self._step = 0
        self._free = free
        self._waiting: list[Bucket] = []
        self._under_way: list[_Reduced] = []
        self._before: dict[str, torch.Tensor] = {}
        self._found: set[str] = set()

    def begin(self, step: int) -> None:
        """Set aside what was accumulated before: only this step's gradients are added up."""
        self._step = step
        self._waiting = list(self._mine)
        self._under_way, self._before, self._found = [], {}, set()
        for bucket in self._mine:
            for name in bucket.names:
                gradient = self._parameters[name].grad
                if gradient is not None:
                    self._before[name] = gradient
                    self._parameters[name].grad = None

    def ready(self, place: int, label: str) -> None:
        """Start reducing what is whole once the backward pass of a block has ended, here or elsewhere."""
        while self._waiting and self._waiting[0].place >= place:
            self._start(self._waiting.pop(0), label)

    @property
    def flags(self) -> list[float]:
        """Which parameters have a gradient on this rank, of all that are reduced; 0 on all ranks is none."""
        return [float(name in self._found) for name in self._names]

    def finish(self) -> list[tuple[str, Errand]]:
        """Wait until all is reduced; what the wire did, by the block whose end started it."""
        self._crew.finish([each.errand for each in self._under_way], "gradients to be added up")
        return [(each.label, each.errand) for each in self._under_way]

    def deliver(self, flags: Sequence[float]) -> None:
        """Put the sums into the parameters, given the flags of all ranks added up."""
        used = {name for name, flag in zip(self._names, flags, strict=True) if flag}
        for each in self._under_way:
            parameters = [self._parameters[name] for name in each.bucket.names]
            parts = torch.split(each.flat, [parameter.numel() for parameter in parameters])
            for name, parameter, part in zip(each.bucket.names, parameters, parts, strict=True):
                # A parameter that no rank has a gradient for keeps none, as on one device.
                parameter.grad = _laid_like(parameter, part) if name in used else None
        for name, gradient in self._before.items():
            new = self._parameters[name].grad
            self._parameters[name].grad = gradient if new is None else gradient.add_(new)
        self._under_way, self._before = [], {}

    def close(self) -> None:
        """End the thread."""
        self._lane.close()

    def _start(self, bucket: Bucket, label: str) -> None:
        gradients = []
        for name in bucket.names:
            parameter = self._parameters[name]
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            elif gradient.layout != torch.strided:
                raise UsageError(
                    f"parameter {name!r} has a sparse gradient", setting="sparse", works="sparse=False"
                )
            else:
                self._found.add(name)
            gradients.append(gradient.detach().reshape(-1))
            parameter.grad = None
        flat = torch.cat(gradients) if len(gradients) > 1 else gradients[0].contiguous()
        errand = self._lane.do(self._reduction(flat, bucket), f"adding up gradients of {label}")
        self._under_way.append(_Reduced(bucket, label, flat, errand))

    def _reduction(self, flat: torch.Tensor, bucket: Bucket) -> Any:
        group, step = self._crew.group("sync", bucket.width), self._step

        def reduce() -> None:
            for number, piece in enumerate(torch.split(flat, max(1, _PIECE_BYTES // flat.element_size()))):
                while not self._free.wait(_GATE_S):
                    self._crew.check()
                collective = self._collective
                if isinstance(collective, Keyed):  # by what is reduced when, not by what this process did
                    collective = collective.at(step, f"{bucket.names[0]} {number}")
                work = collective.all_reduce(piece, group)
                work.wait()
                self._crew.count(_sent_bytes(work, piece, bucket.width))

        return reduce


def _sent_bytes(work: Any, piece: torch.Tensor, width: int) -> int:
    """What an all-reduce has sent from here: compressed ones count it, and torch's are a ring."""
    report = getattr(work, "report", None)
    return ring_bytes(piece.nbytes, width) if report is None else int(report.sent_bytes)


def _laid_like(parameter: nn.Parameter, flat: torch.Tensor) -> torch.Tensor:
    """A gradient that lies in memory as its parameter does: fused optimizers walk both side by side."""
    gradient = flat.view(parameter.shape)
    return gradient if parameter.is_contiguous() else torch.empty_like(parameter).copy_(gradient)


def check(collective: Collective) -> None:
    """Refuse what does not add up."""
    reduction = getattr(collective, "reduction", "sum")
    if not isinstance(collective, Collective) or reduction != "sum":
        what = f"the {reduction}" if isinstance(collective, Collective) else f"{type(collective).__name__}"
        raise UsageError(
            f"gradients of uneven shares must be added up, and the collective given is {what}",
            setting="collective",
            works="TorchCollective(), or plait.compress's CompressedCollective(bits=4): a sum",
        )
