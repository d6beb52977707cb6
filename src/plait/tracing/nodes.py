"""What a node of an exported graph is: a size, a view or change of another's storage, batched or not."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from plait.compat import linear

ELEMENTWISE = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.div.Tensor,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.sub.Tensor,
    torch.ops.aten.where.self,
}
CONCATENATE = {torch.ops.aten.cat.default, torch.ops.aten.concat.default, torch.ops.aten.stack.default}
_MAY_ALIAS = {operator.getitem, torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default}


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number that follows from the batch size alone."""
    value = node.meta.get("val")
    if isinstance(value, (torch.Tensor, list, tuple)) or value is None:
        return False
    expression: Any = getattr(getattr(value, "node", None), "expr", None)
    symbols = () if expression is None else expression.free_symbols
    return all(str(symbol).startswith("s") for symbol in symbols)


def source_of(node: fx.Node) -> fx.Node | None:
    """The argument whose storage a node's result shares; None where it has its own."""
    if node.target in _MAY_ALIAS:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    if (inner := _inner(node)) is not None:
        roots = _inner_roots(*inner)
        (output,) = (n for n in inner[0].nodes if n.op == "output")
        return next((roots[n] for n in output.all_input_nodes if roots.get(n) is not None), None)
    aliases = _aliased_arguments(node)
    return aliases[0][0] if aliases else None


def sources(node: fx.Node, *, differentiable: bool = False) -> Iterator[fx.Node]:
    """A node, what its storage is shared with, and so on up; ``differentiable``: as far as gradients flow."""
    above: fx.Node | None = node
    while above is not None:
        yield above
        above = None if differentiable and stops_gradients(above) else source_of(above)


def changed_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node changes in place."""
    if (inner := _inner(node)) is not None:
        roots = _inner_roots(*inner)
        changed = [roots.get(n) for below in inner[0].nodes for n in changed_by(below)]
        return [n for n in changed if n is not None]
    return [argument for argument, writes in _aliased_arguments(node) if writes]


def _aliased_arguments(node: fx.Node) -> list[tuple[fx.Node, bool]]:
    """The arguments whose storage a result shares, each with whether it is changed."""
    schema = getattr(node.target, "_schema", None)
    found: list[tuple[fx.Node, bool]] = []
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, fx.Node):
                    found.append((one, bool(argument.alias_info.is_write)))
    return found


def _inner(node: fx.Node) -> tuple[fx.Graph, list[fx.Node]] | None:
    """The graph inside a node (what ran under ``no_grad``, or ``autocast``) and the arguments it gets."""
    for place, argument in enumerate(node.args):
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            below = getattr(node.graph.owning_module, str(argument.target), None)
            if isinstance(below, fx.GraphModule):
                return below.graph, [a for a in node.args[place + 1 :] if isinstance(a, fx.Node)]
    return None


def _inner_roots(graph: fx.Graph, arguments: list[fx.Node]) -> dict[fx.Node, fx.Node | None]:
    """The argument from outside that each node of an inner graph shares its storage with."""
    given = iter(arguments)
    roots: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            roots[node] = next(given, None)
        elif node.op == "call_function" and (source := source_of(node)) is not None:
            roots[node] = roots.get(source)
    return roots


def has_size(node: fx.Node) -> bool:
    """Whether a node is a tensor of which every dimension is a multiple of the batch and a constant."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(linear(size) is not None for size in value.shape)


def batched(node: fx.Node) -> tuple[int, int] | None:
    """The first dimension of a node that is a multiple of the batch, and the multiple."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        for place, size in enumerate(value.shape):
            found = linear(size)
            if found is not None and found[0] > 0 and found[1] == 0:
                return place, found[0]
    return None


def stops_gradients(node: fx.Node) -> bool:
    """Whether no gradient flows from a node's result to its arguments, though both are floats."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return node.args[0] is False
    name = getattr(getattr(node.target, "_schema", None), "name", "").removeprefix("aten::")
    return name in ("detach", "detach_") or name.endswith("_like") or name.startswith("new_")
