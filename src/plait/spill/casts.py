"""Shared weights under autocast: one cast for all that use it, wherever they run.

Autocast casts a weight once in a forward pass and lets every use of it have the same copy. So their
gradients are added up in the lower precision, at the copy, before the sum comes to the weight. Where the
uses are in several shards each has a copy of its own, and the sum travels from copy to copy: it is taken
before it leaves a shard's copy for the weight, put in first at the copy of the shard before, and only goes on
to the weight in the first shard that has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from plait.compat import TorchDispatchMode


class CastWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which of some parameters are cast."""

    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {leaf.data_ptr(): name for name, leaf in leaves.items()}
        self.cast: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._names:
            self.cast.add(self._names[args[0].data_ptr()])
        return func(*args, **(kwargs or {}))


def copy_of(leaf: torch.Tensor) -> Node | None:
    """The cast that made the copy of a parameter that autocast has now; to be called under that autocast."""
    probe = torch.matmul(leaf, leaf.new_empty(leaf.shape[-1], 0))
    waiting = [probe.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        for after, _ in node.next_functions:
            if getattr(after, "variable", None) is leaf and "ToCopy" in node.name():
                return node
            waiting.append(after)
    return None


def take(node: Node, into: dict[str, torch.Tensor], name: str) -> None:
    """Let the gradient of a copy come to ``into``, and not to the weight."""

    def keep(gradients: tuple[torch.Tensor | None, ...]) -> tuple[None]:
        if gradients[0] is not None:
            into[name] = gradients[0]
        return (None,)

    node.register_prehook(keep)


def edge(node: Node) -> GradientEdge:
    """Where a gradient of a copy is put in."""
    return GradientEdge(node, 0)
