"""A model's tensors by name, shared by the model and every block that was cut from it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch
from torch import nn

from plait.errors import UsageError


class State:
    """Parameters, buffers and constants by the model's first name for each.

    The model is asked for a tensor whenever it is needed, so that one which the model replaced by itself is
    seen. One may be replaced here too, as when it is created or put back on the meta device; whoever holds
    it then holds the new one: the model, under all names of a tied weight, and all blocks of all chains.
    """

    def __init__(self, model: nn.Module, constants: Mapping[str, torch.Tensor] | None = None) -> None:
        self._constants = dict(constants or {})
        self._owners: dict[str, list[tuple[nn.Module, str]]] = {}
        self._blocks: dict[str, list[tuple[weakref.ref[nn.Module], str]]] = {}
        first = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        for owner in model.modules():
            for attribute, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
                if tensor is not None:
                    self._owners.setdefault(first[id(tensor)], []).append((owner, attribute))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._constants:
            return self._constants[name]
        owner, attribute = self._owners[name][0]
        table: Mapping[str, torch.Tensor | None] = (
            owner._parameters if attribute in owner._parameters else owner._buffers
        )
        tensor = table[attribute]
        assert tensor is not None, f"the model has dropped {name!r}"
        return tensor

    def is_saved(self, name: str) -> bool:
        """Whether the model's state_dict holds it, under this name or another."""
        return any(attribute not in owner._non_persistent_buffers_set
                   for owner, attribute in self._owners.get(name, ()))  # fmt: skip

    def hold(self, root: nn.Module, name: str) -> None:
        """Register a tensor in a block, under the model's dotted name."""
        *path, attribute = name.split(".")
        owner = root
        for part in path:
            below = owner._modules.get(part)
            if below is None:
                below = owner._modules[part] = _Level()
            owner = below
        if not self.is_saved(name):
            owner._non_persistent_buffers_set.add(attribute)
        self._blocks.setdefault(name, []).append((weakref.ref(owner), attribute))
        _put(owner, attribute, self[name])

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Let everyone who holds the named tensor hold another one."""
        if name in self._constants:
            self._constants[name] = tensor
        levels = [(holder(), attribute) for holder, attribute in self._blocks.get(name, ())]
        for owner, attribute in [*self._owners.get(name, ()), *levels]:
            if owner is not None:
                _put(owner, attribute, tensor)

    def fill(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor], device: torch.device | str
    ) -> None:
        """Let the named have what these tensors hold; buffers that are not among them come to the device."""
        for name in names:
            present = self[name]
            is_parameter = isinstance(present, nn.Parameter)
            if name in tensors:
                made = tensors[name].to(present.dtype)
                self.replace(name, nn.Parameter(made, present.requires_grad) if is_parameter else made)
            elif not is_parameter and not present.is_meta:
                self.replace(name, present.to(device))

    def release(self, names: Iterable[str]) -> None:
        """Put the named parameters back on the meta device."""
        for name in names:
            present = self[name]
            if isinstance(present, nn.Parameter) and not present.is_meta:
                absent = torch.empty_like(present, device="meta")
                self.replace(name, nn.Parameter(absent, present.requires_grad))

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a chain and its blocks cannot be copied or pickled",
            setting="chain",
            works="copy or pickle the model, and trace it again",
        )


class _Level(nn.Module):
    """A level of the model's names inside a block."""


def _put(owner: nn.Module, attribute: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        owner._parameters[attribute] = tensor
    else:
        owner._buffers[attribute] = tensor
