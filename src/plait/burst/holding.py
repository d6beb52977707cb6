"""Which parameters and buffers a rank holds under a plan: those of the blocks that it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from plait import deferred
from plait.burst.sync import Trained
from plait.chain import Chain
from plait.errors import UsageError
from plait.state import State

IDLE = "plait.idle"
"""The name of an empty parameter that a rank has which trains none: no optimizer is made from nothing."""


class Holding:
    """The parameters of one rank, by the model's names, in the model's order."""

    def __init__(self, chain: Chain, device: torch.device, seed: int | None) -> None:
        self._chain, self._device, self._seed = chain, device, seed
        self._order = [name for name, _ in chain.named_parameters()]
        self._shapes = dict(chain.named_parameters())
        self._users: dict[str, list[int]] = {name: [] for name in self._order}
        for place, block in enumerate(chain):
            for name in block.state_names:
                if name in self._users:
                    self._users[name].append(place)
        self._idle = nn.Parameter(torch.empty(0, 0, device=device))  # a matrix, as Muon wants
        self.parameters: dict[str, nn.Parameter] = {}
        self._trained: set[str] = set()

    def widths(self, widths: Sequence[int]) -> dict[str, int]:
        """How many ranks hold each parameter: as many as run the widest block that uses it.

        One that no block uses is held by rank 0.
        """
        return {name: max((widths[p] for p in users), default=1) for name, users in self._users.items()}

    def trained(self, widths: Sequence[int]) -> list[Trained]:
        """All ranks' parameters that get gradients."""
        held = self.widths(widths)
        return [
            Trained(
                name, shape.numel() * shape.element_size(), shape.dtype, held[name], min(self._users[name])
            )
            for name, shape in self._shapes.items()
            if shape.requires_grad and self._users[name]
        ]

    def facts(self, widths: Sequence[int]) -> dict[str, Any]:
        """What of it must be the same on all ranks, in short."""
        trained = self.trained(widths)
        digest = hashlib.blake2b(repr(trained).encode(), digest_size=8).hexdigest()
        return {"trained parameters": {"count": len(trained), "digest of names and sizes": digest}}

    def check(self) -> None:
        """Refuse parameters that were frozen, or are trained, since it was settled whose gradients move."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad != (name in self._trained):
                then, now = ("trained", "frozen") if name in self._trained else ("frozen", "trained")
                raise UsageError(
                    f"parameter {name!r} was {then} when the plan was taken up, and is {now} now",
                    setting="requires_grad",
                    works="requires_grad_() on every rank's model, before BurstParallel is made",
                )

    @property
    def dtype(self) -> torch.dtype:
        """Of the norm of all gradients: all trained parameters' together, the same on every rank."""
        some = [shape.dtype for shape in self._shapes.values() if shape.requires_grad]
        return reduce(torch.promote_types, some or [torch.get_default_dtype()])

    def take(self, widths: Sequence[int], rank: int) -> None:
        """Hold what a plan gives this rank, and let go of the rest; new parameters have no values yet.

        The first time, those that the chain has are kept, and those on the meta device created.
        """
        first = not self.parameters
        mine = [name for name, width in self.widths(widths).items() if rank < width]
        if first:
            self._create([place for place, width in enumerate(widths) if rank < width])
            if rank == 0:
                self._create_unused()
            self._shapes = dict(self._chain.named_parameters())
        found: dict[str, nn.Parameter] = {}
        for name in mine:
            shape = self._shapes[name]
            if name in self.parameters:
                found[name] = self.parameters[name]
            elif first and not shape.is_meta:
                found[name] = shape
            else:
                made = torch.empty_like(shape, device=self._device)
                found[name] = nn.Parameter(made, shape.requires_grad)
        self.parameters = {name: found[name] for name in self._order if name in found}
        self._trained = {name for name, parameter in found.items() if parameter.requires_grad}
        if rank:  # the first rank's chain stays whole
            for place, width in enumerate(widths):
                if rank >= width:
                    self._chain.release(place)
            self._shapes = {name: _absent(parameter) for name, parameter in self._chain.named_parameters()}

    def _create(self, places: Iterable[int]) -> None:
        for place in places:
            absent = [n for n in self._chain[place].state_names if self._chain[place].state(n).is_meta]
            if absent:
                seed = self._needed_seed(f"block {self._chain[place].name!r}", absent[0])
                self._chain.create(place, seed=seed, device=self._device)

    def _create_unused(self) -> None:
        """Those that no block uses: the optimizer and checkpoints have them all the same."""
        absent = [name for name, users in self._users.items() if not users and self._shapes[name].is_meta]
        if absent:
            model, seed = self._chain.model, self._needed_seed("the model", absent[0])
            made = deferred.create(model, absent, seed=seed, device=self._device)
            State(model).fill(absent, made, self._device)

    def _needed_seed(self, whose: str, absent: str) -> int:
        if self._seed is None:
            raise UsageError(
                f"{whose} does not exist yet: its {absent!r} is on the meta device",
                setting="seed",
                works="seed=0, from which every rank creates the blocks that it runs",
            )
        return self._seed

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """What an optimizer is made from; of a model that is frozen as a whole, nothing that is trained."""
        some = list(self.parameters.items())
        whole = 0 < len(some) == len(self._order)
        return some if self._trained or whole else [*some, (IDLE, self._idle)]

    def state(self, place: int) -> dict[str, torch.Tensor]:
        """The tensors that a block runs with."""
        block = self._chain[place]
        return {
            name: self.parameters[name] if name in self.parameters else block.state(name)
            for name in block.state_names
        }

    def buffers(self, place: int) -> list[torch.Tensor]:
        """The tensors of a block that change without being trained: BatchNorm's statistics."""
        block = self._chain[place]
        state = (block.state(name) for name in block.state_names if name not in self._users)
        return [tensor for tensor in state if not tensor.is_meta]


def _absent(parameter: nn.Parameter) -> nn.Parameter:
    """Its shape alone."""
    if parameter.is_meta:
        return parameter
    return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
