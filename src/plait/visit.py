"""Block by block, forward and backward, with the same bits as the whole model at once.

A visit is one block's forward, kept for its backward. Blocks are visited in order and left in reverse;
in between only named values and named gradients pass, so they may lie on disk, on another host, or wait
for another model's turn.

Why the bits stay: autograd adds the gradients of a tensor in the order in which its uses run backward,
and a sum of floats depends on its order. So the gradient that later blocks have already given for a value
is not added to this block's own sum afterwards; it is put in first, as the seed of an alias that all uses
in this block go through. Parameters that several blocks share are treated as values in the same way, and
reach their ``.grad`` once, when the first block is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from plait.block import Block
from plait.chain import Chain
from plait.errors import UsageError
from plait.timeline import Timeline

_SHARED = "parameter:"


class Visit:
    """One block's forward from given values, and its backward from given gradients."""

    def __init__(
        self, block: Block, values: Mapping[str, Any], *, shared: frozenset[str] = frozenset()
    ) -> None:
        """Run the block forward; ``shared`` names the parameters that other blocks use too."""
        self.block = block
        self._leaves: dict[str, torch.Tensor] = {}
        self._aliases: dict[str, torch.Tensor] = {}
        given = [self._enter(name, values[name]) for name in block.reads]
        state: dict[str, torch.Tensor] = {}
        for name in block.state_names:
            tensor = block.state(name)
            is_shared = name in shared and isinstance(tensor, nn.Parameter)
            state[name] = self._enter(_SHARED + name, tensor) if is_shared else tensor
        with torch.enable_grad():
            self._written = dict(zip(block.writes, block.call(given, state), strict=True))

    def _enter(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        leaf = value.detach().requires_grad_()
        self._leaves[name] = leaf
        self._aliases[name] = leaf.view_as(leaf)
        return self._aliases[name]

    @property
    def writes(self) -> dict[str, Any]:
        """The values written, cut off from the graph; those that need a gradient say so."""
        return {name: v.detach().requires_grad_(v.requires_grad) for name, v in self._written.items()}

    def backward(self, gradients: dict[str, torch.Tensor]) -> None:
        """Take the gradients of what was written out of the dict, and put those of what was read in."""
        roots, seeds = [], []
        for name, value in self._written.items():
            gradient = gradients.pop(name, None)
            if gradient is not None and value.requires_grad:
                roots.append(value)
                seeds.append(gradient)
        for name, alias in self._aliases.items():
            gradient = gradients.pop(name, None)
            if gradient is not None:
                roots.append(alias)
                seeds.append(gradient)
        if roots:
            torch.autograd.backward(roots, seeds)
        for name, leaf in self._leaves.items():
            if leaf.grad is not None:
                gradients[name] = leaf.grad
        self._written.clear()
        self._aliases.clear()
        self._leaves.clear()


class Walk:
    """A whole forward and backward over a chain, block by block.

    >>> walk = Walk(chain)
    >>> output = walk.forward(x)          # as the model returns it, cut off from the graph
    >>> walk.backward(loss_function(output, y))
    """

    def __init__(self, chain: Chain, timeline: Timeline | None = None, *, track: str = "device") -> None:
        """``timeline`` gets a span for each block's forward and backward, on ``track``."""
        self.chain = chain
        self.timeline, self.track = timeline, track
        self._shared = frozenset(chain.tied)
        self._visits: list[Visit] = []
        self._sources: dict[str, torch.Tensor] = {}
        self._results: dict[str, torch.Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Visit every block; the output is cut off from the graph: call ``backward`` with the loss."""
        values = self.chain.start(*args, **kwargs)
        self._sources = {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and v.requires_grad}
        self._visits = []
        for place, block in enumerate(self.chain):
            with self._span("forward", block):
                visit = Visit(block, values, shared=self._shared)
            self._visits.append(visit)
            values.update(visit.writes)
            values = {name: values[name] for name in self.chain.live(place + 1)}
        self._results = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        return self.chain.finish(values)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss of the output to the parameters' ``.grad``."""
        if not self._visits:
            raise UsageError(
                "backward needs a forward before it", setting="walk", works="one backward a forward"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: value.grad for name, value in self._results.items() if value.grad is not None}
        while self._visits:
            visit = self._visits.pop()
            with self._span("backward", visit.block):
                visit.backward(gradients)
        self._results.clear()
        sources = dict(self._sources)
        sources.update({_SHARED + n: p for n, p in self.chain.named_parameters() if n in self._shared})
        reached = [name for name in gradients if name in sources]
        if reached:
            torch.autograd.backward([sources[n] for n in reached], [gradients[n] for n in reached])

    def _span(self, name: str, block: Block) -> AbstractContextManager[Any]:
        return (
            nullcontext() if self.timeline is None else self.timeline.span(self.track, name, block=block.name)
        )
