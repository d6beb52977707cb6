"""The parameters and buffers that one stage holds, and the state of the whole model from those of all stages.

Each stage creates its own blocks' parameters and no others. What several stages use is held by each of them,
and saved by the first; what no block uses is held by the first stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import nn

from plait import deferred
from plait.errors import UsageError
from plait.pipeline.stage import Stages
from plait.state import State
from plait.tracing.graph import first_names


class Holding:
    """What one stage holds, by the model's first name for each tensor."""

    def __init__(self, stages: Stages, place: int, *, seed: int, device: torch.device) -> None:
        """Create the parameters of the stage that do not exist yet, from (seed, name)."""
        self._chain, self._place = stages.chain, place
        self.model = stages.chain.model
        """With parameters of this stage alone; those of the others are on the meta device."""
        self._names = first_names(self.model)
        users: dict[str, list[int]] = {name: [] for name in self._names.values()}
        for number, block in enumerate(self._chain):
            for name in block.state_names:
                if name in users:
                    users[name].append(number)
        self._users = {name: places or [0] for name, places in users.items()}
        self._check()
        self._chain.create(place, seed=seed, device=device)
        if place == 0:
            self._create_unused([name for name, places in users.items() if not places], seed, device)
        own = set(self._chain[place].state_names)
        for number, block in enumerate(self._chain):
            if own.isdisjoint(block.state_names):  # what a factory has loaded, for instance
                self._chain.release(number)

    def _check(self) -> None:
        """Refuse a model whose state is more than its tensors: no stage could say what the others' is."""
        other = next((name for name in self.model.state_dict() if name not in self._names), None)
        if other is not None:
            raise UsageError(
                f"{other!r} in the model's state_dict is none of its parameters and buffers",
                setting="strategy",
                works="data or burst, for a model that saves a state of its own kind",
            )

    def _create_unused(self, names: Iterable[str], seed: int, device: torch.device) -> None:
        state = State(self.model)
        absent = [name for name in names if state[name].is_meta]
        made = deferred.create(self.model, absent, seed=seed, device=device) if absent else {}
        state.fill(absent, made, device)

    # --- parameters ---------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The stage's own, in the model's order."""
        found = dict(self.model.named_parameters())
        return {name: found[name] for name in self.names(self._place)}

    @property
    def trained(self) -> list[nn.Parameter]:
        """Those of them that learn."""
        return [parameter for parameter in self.parameters.values() if parameter.requires_grad]

    def names(self, place: int) -> list[str]:
        """The names of the parameters that a stage holds."""
        return [name for name, _ in self.model.named_parameters() if place in self._users[name]]

    def saves(self, name: str) -> bool:
        """Whether it is this stage that saves a tensor, of those that hold it."""
        return self._users[name][0] == self._place

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters of the model; those of other stages only look alike and take no memory."""
        own = self.parameters
        return [(name, own[name] if name in own else _like(p)) for name, p in self.model.named_parameters()]

    # --- the norm of all gradients ------------------------------------------------------------------

    def norms(self) -> dict[str, float]:
        """The norm of each gradient that no stage before this one tells."""
        return {
            name: float(torch.linalg.vector_norm(parameter.grad))
            for name, parameter in self.parameters.items()
            if parameter.grad is not None and self.saves(name)
        }

    def total_norm(self, norms: Mapping[str, float]) -> float:
        """The norm of all gradients from those of each, in the model's order: as one device finds it."""
        found = [norms[name] for name, _ in self.model.named_parameters() if name in norms]
        return float(torch.linalg.vector_norm(torch.tensor(found, dtype=self._dtype)))

    def clip(self, most: float, norm: float) -> None:
        """Scale this stage's gradients down where the norm of all is above the most that it may be."""
        total = torch.tensor(norm, dtype=self._dtype)
        nn.utils.clip_grads_with_norm_(self.trained, most, total)

    @property
    def _dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, (p.dtype for p in self.model.parameters() if p.requires_grad))

    # --- the model's state --------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """This stage's part of the model's state."""
        return {name: tensor for name, tensor in self._saved().items() if self.saves(name)}

    def whole(self, parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The model's ``state_dict`` from the parts of all stages."""
        found = {name: tensor for part in parts for name, tensor in part.items()}
        return {name: found[self._names[name]] for name in self.model.state_dict()}

    def split(self, state: Mapping[str, Any], stages: int) -> list[dict[str, torch.Tensor]]:
        """By stage, what it needs of the model's ``state_dict``; one of another model is a RuntimeError."""
        built = self.model.state_dict()
        for what, names in (
            ("Missing", built.keys() - state.keys()),
            ("Unexpected", state.keys() - built.keys()),
        ):
            if names:
                raise RuntimeError(f"{what} key(s) in state_dict: {', '.join(sorted(names))}")
        parts: list[dict[str, torch.Tensor]] = [{} for _ in range(stages)]
        for name, tensor in built.items():
            if state[name].shape != tensor.shape:
                shapes = f"{tuple(state[name].shape)}, and the model's is {tuple(tensor.shape)}"
                raise RuntimeError(f"size mismatch for {name}: its shape is {shapes}")
            for place in self._users[self._names[name]]:
                parts[place][self._names[name]] = state[name]
        return parts

    def load(self, part: Mapping[str, torch.Tensor]) -> None:
        """Take what :meth:`split` has for this stage."""
        held = self._saved()
        with torch.no_grad():
            for name, tensor in part.items():
                held[name].copy_(tensor)

    def complete(self, state: Mapping[str, torch.Tensor]) -> nn.Module:
        """The whole model, in host memory, from its ``state_dict``; the stage cannot go on afterwards."""
        tensors = State(self.model)
        found = {self._names[name]: tensor for name, tensor in state.items()}
        for name, parameter in list(self.model.named_parameters()):
            if self._place not in self._users[name]:
                tensors.replace(name, nn.Parameter(found[name].cpu(), parameter.requires_grad))
        for name in dict(self.model.named_buffers()):
            if name in found and not self.saves(name):
                tensors.replace(name, found[name].cpu())
        return self.model.cpu()

    def _saved(self) -> dict[str, torch.Tensor]:
        """The tensors of the model's state that this stage holds."""
        state = self.model.state_dict()
        held = {self._names[name]: tensor for name, tensor in state.items()}
        return {name: tensor for name, tensor in held.items() if self._place in self._users[name]}


def _like(parameter: nn.Parameter) -> nn.Parameter:
    """One that looks the same, in the memory of a single number; optimizers refuse the meta device."""
    alone = torch.zeros((), dtype=parameter.dtype)
    return nn.Parameter(alone.expand(parameter.shape), requires_grad=parameter.requires_grad)
