"""Tensors that a model keeps without registering them, and whether a later call computes with them.

A recording holds for every call alike, so what one call leaves for the next would stand still in it. Many
attributes are harmless, though: an output kept to be looked at, a table that the first call makes, a weight
that a hook computes anew each time. To tell them apart the model is called again, and every operation is
watched: an attribute is carried over where an operation takes what an earlier call left there, and that
came from data or is replaced once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from plait.compat import TorchDispatchMode, WeakIdKeyDictionary, tree_leaves

_REGISTERED = {"_parameters", "_buffers", "_modules"}


def attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes, without the tables of what it registered."""
    return {name: value for name, value in vars(module).items() if name not in _REGISTERED}


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in an attribute, also those in a list, tuple or dict; parameters do not count."""
    found = tree_leaves(value)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)]


def buffers(model: nn.Module) -> frozenset[str]:
    """All names of the buffers that have a tensor."""
    return frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))


def held(model: nn.Module, registered: frozenset[str]) -> dict[str, list[torch.Tensor]]:
    """The tensors in the attributes of a model's modules, by the attribute's dotted name.

    Of the buffers, those which are not ``registered``: they were None before a call.
    """
    return {
        dotted: found
        for path, module in model.named_modules()
        for name, value in [*attributes(module).items(), *module._buffers.items()]
        if (dotted := f"{path}.{name}" if path else name) not in registered and (found := tensors(value))
    }


def replaced(before: Mapping[str, list[torch.Tensor]], after: Mapping[str, list[torch.Tensor]]) -> list[str]:
    """Names of the attributes that hold other tensors now."""
    names = dict.fromkeys([*before, *after])
    return [name for name in names if _ids(before.get(name, ())) != _ids(after.get(name, ()))]


def _ids(found: Iterable[torch.Tensor]) -> list[int]:
    return [id(tensor) for tensor in found]


class Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches calls of a model, and names the attributes that one carries over to another."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._registered = buffers(model)
        self._original = held(model, self._registered)
        data = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        self._from_data = WeakIdKeyDictionary(dict.fromkeys([*data, *model.parameters()]))
        self._taken: set[int] = set()
        self._watched: dict[int, torch.Tensor] = {}
        self.carried: dict[str, None] = {}

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call of the model."""
        before = held(self._model, self._registered)
        left = {name: before[name] for name in replaced(self._original, before) if name in before}
        self._watched = {id(tensor): tensor for found in left.values() for tensor in found}
        self._taken.clear()
        with self:
            yield
        again = replaced(before, held(self._model, self._registered))
        for name, found in left.items():
            taken = [tensor for tensor in found if id(tensor) in self._taken]
            if taken and (name in again or any(tensor in self._from_data for tensor in taken)):
                self.carried[name] = None

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note which tensors an operation takes, and whether its results come from data."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._taken.update(id(tensor) for tensor in given if id(tensor) in self._watched)
        results = operation(*args, **(kwargs or {}))
        if not _takes_sizes_only(operation) and any(tensor in self._from_data for tensor in given):
            for leaf in tree_leaves(results):
                if isinstance(leaf, torch.Tensor):
                    self._from_data[leaf] = None
        return results


def _takes_sizes_only(operation: Any) -> bool:
    """Whether an operation makes something new in the shape and type of what it is given."""
    name = str(operation.overloadpacket.__name__)
    return name.endswith("_like") or name.startswith("new_")
