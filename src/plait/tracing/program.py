"""A group of graph operations as a stateless function: values and state in, values out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from plait.compat import linear, nesting, unnesting
from plait.errors import TraceError
from plait.tracing.graph import Graph
from plait.tracing.nodes import batched, is_size


class Program:
    """Builds a stateless function from a group of operations: values read, then state, in; values out."""

    def __init__(
        self, graph: Graph, group: Sequence[fx.Node], *, reads: Sequence[fx.Node], writes: Sequence[fx.Node]
    ) -> None:
        self._whole, self._group, self._reads, self._writes = graph, group, reads, writes
        self._graph = fx.Graph()
        self._made: dict[fx.Node, Any] = {}

    def build(self) -> tuple[tuple[str, ...], Callable[..., tuple[torch.Tensor, ...]]]:
        """The names of the state that the function takes, and the function."""
        for node in self._reads:
            self._made[node] = self._graph.placeholder(f"value_{node.name}")
        used = self._used_state()
        for node in used:
            self._made[node] = self._graph.placeholder(f"state_{node.name}")
        for node in self._group:
            self._copy(node)
        self._graph.output(tuple(self._made[node] for node in self._writes))
        for node in self._graph.nodes:
            node.meta.clear()  # shapes and source lines of the recording, which nothing needs any more
        names = tuple(self._whole.names[node] for node in used)
        function = fx.GraphModule(self._whole.module, self._graph)
        return names, unnesting(function) if any(nesting(node.target) for node in self._group) else function

    def _used_state(self) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        for arg in (arg for node in self._group for arg in node.all_input_nodes):
            if arg in self._whole.names:
                found[arg] = None
            elif arg in self._whole.remade:
                found[self._whole.root[arg]] = None
        return list(found)

    def _get(self, node: fx.Node) -> Any:
        if node not in self._made:
            size = linear(node.meta.get("val")) if is_size(node) else None
            if size is None:
                self._copy(node)
            else:
                self._made[node] = self._size(*size)
        return self._made[node]

    def _copy(self, node: fx.Node) -> None:
        self._made[node] = self._graph.node_copy(node, self._get)

    def _size(self, per_sample: int, constant: int) -> fx.Node | int:
        """A size that follows the batch, from the batch dimension of a value that is read."""
        if not per_sample:
            return constant
        call = self._graph.call_function
        for node in self._reads:
            found = batched(node)
            if found is not None:
                place, factor = found
                batch = call(torch.ops.aten.sym_size.int, (self._made[node], place))
                if factor != 1:
                    batch = call(operator.floordiv, (batch, factor))
                return call(operator.add, (call(operator.mul, (batch, per_sample)), constant))
        raise TraceError(
            "the model computes with its batch size, but takes no tensor with a batch dimension",
            setting="example_inputs",
            works="tensors with the batch first",
        )


def needs_batch(graph: Graph, nodes: Iterable[fx.Node]) -> bool:
    """Whether any node has an argument that follows the batch size."""
    for arg in (arg for node in nodes for arg in node.all_input_nodes):
        size = linear(arg.meta.get("val")) if is_size(arg) else None
        if size is not None:
            if size[0]:
                return True
        elif (is_size(arg) or arg in graph.remade) and needs_batch(graph, [arg]):
            return True
    return False
