"""Block by block, forward and backward, with the same bits as the whole model at once.

A visit is one block's forward, kept for its backward. Blocks are visited in order and left in reverse;
in between only named values and named gradients pass, so they may lie on disk, on another host, or wait
for another model's turn.

Why the bits stay: autograd adds the gradients of a tensor in the order in which its uses run backward,
and a sum of floats depends on its order. So the gradient that later blocks have already given for a value
is not added to this block's own sum afterwards; it is put in first, at the boundary that all uses in this
block go through. Parameters that several blocks share are treated as values in the same way, and
reach their ``.grad`` once, when the first block is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from plait.block import Block
from plait.chain import Chain
from plait.errors import UsageError
from plait.timeline import Timeline

SHARED = "parameter:"
"""Before the name of a shared parameter where its gradient travels as a value's does."""


class _Boundary(torch.autograd.Function):
    """Passes a value on, and keeps the gradient that comes back as it is.

    A leaf's ``.grad`` would do, but it takes on the leaf's memory layout, and sums of a gradient in another
    layout have other bits.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, keep: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.keep = keep
        # Not view_as, which writes the strides of dimensions of size 1 anew: a batch of one in channels-last
        # would no longer be seen as such, and a convolution would take another path, with other bits.
        return torch.ops.aten.alias.default(value)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.keep(gradient)
        return None, None


class Boundary:
    """Values as seen from one side: uses of them are recorded up to here, and their gradients collected."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def enter(self, name: str, value: Any) -> Any:
        """The value, cut off from what made it; a gradient for it will be found under the name."""
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        keep = partial(self.gradients.__setitem__, name)
        return _Boundary.apply(value.detach().requires_grad_(), keep)  # type: ignore[no-untyped-call]


class Visit:
    """One block's forward from given values, and its backward from given gradients."""

    def __init__(
        self,
        block: Block,
        values: Mapping[str, Any],
        *,
        shared: frozenset[str] = frozenset(),
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Run the block forward; ``shared`` names the parameters that other blocks use too.

        With ``state``, parameters and buffers come from outside, and stay outside: a gradient that is given
        for a shared parameter is added first, and the sum is left in the ``.grad`` of the tensor given.
        """
        self.block = block
        self._boundary = Boundary()
        self._places: dict[str, GradientEdge] = {}
        self._read = {name: self._boundary.enter(name, values[name]) for name in block.reads}
        if state is None:
            state = {name: block.state(name) for name in block.state_names}
            state.update({n: self._boundary.enter(SHARED + n, state[n]) for n in shared.intersection(state)})
        self._read.update({SHARED + name: state[name] for name in shared.intersection(state)})
        written = block.call([self._read[name] for name in block.reads], state)
        self._written: dict[str, Any] = dict(zip(block.writes, written, strict=True))

    def let_go(self) -> None:
        """Hold the values written no longer, only their places in the graph; ``writes`` is then empty."""
        self._places = {n: get_gradient_edge(v) for n, v in self._written.items() if v.requires_grad}
        self._written = {}

    @property
    def writes(self) -> dict[str, Any]:
        """The values written, cut off from the graph; those that need a gradient say so."""
        return {name: v.detach().requires_grad_(v.requires_grad) for name, v in self._written.items()}

    def backward(
        self,
        gradients: dict[str, torch.Tensor],
        inside: Iterable[tuple[GradientEdge, torch.Tensor]] = (),
    ) -> None:
        """Take the gradients of what was written out of the dict, and put those of what was read in.

        ``inside`` are gradients to put in at places of the block's own graph.
        """
        roots: list[Any] = []
        seeds: list[torch.Tensor] = []
        for place, gradient in inside:
            roots.append(place)
            seeds.append(gradient)
        for name, value in {**self._read, **self._written, **self._places}.items():
            given = gradients.pop(name, None)
            if given is not None and (isinstance(value, GradientEdge) or value.requires_grad):
                roots.append(value)
                seeds.append(given)
        if roots:
            torch.autograd.backward(roots, seeds)
        gradients.update(self._boundary.gradients)
        self._written.clear()
        self._places.clear()
        self._read.clear()
        self._boundary.gradients.clear()


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
        self._end = Boundary()

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
        self._end = Boundary()
        return self.chain.finish({name: self._end.enter(name, value) for name, value in values.items()})

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss of the output to the parameters' ``.grad``."""
        if not self._visits:
            raise UsageError(
                "backward needs a forward before it", setting="walk", works="one backward a forward"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = self._end.gradients
        while self._visits:
            visit = self._visits.pop()
            with self._span("backward", visit.block):
                visit.backward(gradients)
        sources = dict(self._sources)
        sources.update({SHARED + n: p for n, p in self.chain.named_parameters() if n in self._shared})
        reached = [name for name in gradients if name in sources]
        if reached:
            torch.autograd.backward([sources[n] for n in reached], [gradients[n] for n in reached])

    def _span(self, name: str, block: Block) -> AbstractContextManager[Any]:
        return (
            nullcontext() if self.timeline is None else self.timeline.span(self.track, name, block=block.name)
        )
