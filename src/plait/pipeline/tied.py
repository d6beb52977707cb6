"""Weights that several stages hold: their gradients are summed, so that the copies stay equal.

A word embedding that is the output layer too lies on the first stage and on the last. Each has a copy,
begins with the same weights, finds its part of the gradient, and must step with the sum. The first stage that
holds a copy adds up, in the order of stages, and sends the sum to the others: all step with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.pipeline.spec import Spec
from plait.pipeline.wire import Wire


@dataclass(frozen=True)
class Shared:
    """Parameters that the same stages hold, two or more of them."""

    stages: tuple[int, ...]
    names: tuple[str, ...]
    """As the model calls them."""


def shared_of(module: nn.Module) -> tuple[nn.Module, Sequence[Shared]]:
    """A stage's module, without DDP around it, and what it says that several stages hold."""
    module = getattr(module, "module", module)
    shared: Sequence[Shared] = getattr(module, "shared", ())
    return module, shared


class TiedGradients:
    """Sums the gradients of one stage's tied parameters with those of the other stages that hold them.

    Which ones, a stage's module says in an attribute ``shared``; a module without it has none.
    """

    def __init__(self, stage: Any, wire: Wire) -> None:
        self._stage, self._wire = stage, wire

    @property
    def _groups(self) -> list[tuple[int, Shared, list[nn.Parameter]]]:
        """Those that this stage takes part in, in an order that is the same on all stages."""
        module, shared = shared_of(self._stage.submod)
        held = dict(module.named_parameters()) if shared else {}
        return [
            (number, each, [held[name] for name in each.names if held[name].requires_grad])
            for number, each in enumerate(shared)
            if self._stage.stage_index in each.stages
        ]

    @contextmanager
    def collecting(self, training: bool) -> Iterator[None]:
        """Sum what backwards within this context find, beside what was accumulated before."""
        groups = self._groups if training else []
        parameters = [parameter for _, _, some in groups for parameter in some]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
            for number, shared, some in groups:
                self._sum(number, shared, some)
        finally:
            for parameter, old in zip(parameters, before, strict=True):
                if old is not None:
                    parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)

    def _sum(self, number: int, shared: Shared, parameters: list[nn.Parameter]) -> None:
        first, *others = shared.stages
        own = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        if self._stage.stage_index == first:
            sums = own
            for place in others:
                arrived = self._receive(place, number, parameters)
                sums = [a + b for a, b in zip(sums, arrived, strict=True)]
            for place in others:
                self._wire.to(place).outbox.send("tied", self._wire.step, number, sums)
        else:
            self._wire.to(first).outbox.send("tied", self._wire.step, number, own)
            sums = self._receive(first, number, parameters)
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total
        self._wire.flush()

    def _receive(self, place: int, number: int, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        inbox = self._wire.to(place).inbox
        specs = tuple(Spec(tuple(p.shape), p.dtype, False) for p in parameters)
        inbox.expect("tied", self._wire.step, number, specs=specs)
        self._wire.wait(
            lambda: inbox.has("tied", number) or None, f"gradients of weights tied to stage {place}"
        )
        return [tensor.to(self._stage.device) for tensor in inbox.take("tied", number).tensors]
