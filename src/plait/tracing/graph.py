"""An exported graph, read for cutting: operations in order, whose storage is whose, and what is used when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from plait.errors import TraceError
from plait.tracing import refusal
from plait.tracing.export import Recording
from plait.tracing.nodes import (
    CONCATENATE,
    ELEMENTWISE,
    changed_by,
    is_size,
    source_of,
    sources,
    stops_gradients,
)

_DROPPED = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}
_TENSORS = {InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR}


class Graph:
    """One exported graph. A place is a position in ``operations``; a cut at it falls before it."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        exported = recording.program
        self.module: fx.GraphModule = exported.graph_module
        self.output_spec = exported.call_spec.out_spec
        self.names: dict[fx.Node, str] = {}
        """Placeholders of parameters, buffers and constants, with the model's names."""
        self.parameters: dict[fx.Node, nn.Parameter] = {}
        self.inputs: list[fx.Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors that the model's code makes from literals, or keeps without registering them."""
        self._read_signature(model, exported)
        self.operations: list[fx.Node] = []
        self.remade: set[fx.Node] = set()
        """Views of buffers and constants: each piece makes them for itself."""
        self.root: dict[fx.Node, fx.Node] = {node: node for node in [*self.names, *self.inputs]}
        """The first node with the same storage; a view of a parameter is the first of its own."""
        self.viewed: dict[fx.Node, fx.Node] = {node: node for node in self.parameters}
        """The parameter that a node is, or is a view of."""
        self._copy_changed_inputs()
        self.updates = [self._update(name) for name in recording.assigned]
        """For each buffer that the model assigns: the first node that has to do with it, and its update."""
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        specs = zip(output.args[0], exported.graph_signature.output_specs, strict=True)
        self.outputs: list[Any] = [a for a, spec in specs if spec.kind == OutputKind.USER_OUTPUT]
        """A node for each tensor that the model returns, and constants as they are."""
        self._sort_nodes()
        if not self.operations:
            works = "a model that computes"
            raise TraceError("the model has no tensor operation", setting="model", works=works)
        self.position = {node: place for place, node in enumerate(self.operations)}
        self.position.update(dict.fromkeys(self.inputs, -1))

    def _read_signature(self, model: nn.Module, exported: Any) -> None:
        names, parameters = first_names(model), dict(model.named_parameters())
        placeholders = {node.name: node for node in self.module.graph.nodes if node.op == "placeholder"}
        for spec in exported.graph_signature.input_specs:
            node = placeholders[spec.arg.name]
            target = (spec.target or "").removeprefix("model.")
            if spec.kind == InputKind.USER_INPUT:
                self.inputs.append(node)
                continue
            if spec.kind not in _TENSORS:
                raise refusal.own_object(model, exported.constants.get(spec.target))
            self.names[node] = names.get(target, target)
            if spec.kind == InputKind.PARAMETER:
                self.parameters[node] = parameters[self.names[node]]
            elif spec.kind == InputKind.CONSTANT_TENSOR:
                self.constants[target] = exported.constants[spec.target]

    def _copy_changed_inputs(self) -> None:
        """Let an input that the model changes in place be read as a copy: no block changes what it reads."""
        changed = {origin for node in self.module.graph.nodes for argument in changed_by(node)
                   for origin in sources(argument) if origin in self.inputs}  # fmt: skip
        for node in changed:
            self._copied(node, list(node.users))

    def _copied(self, node: fx.Node, users: Sequence[fx.Node]) -> fx.Node:
        """Insert a copy of a node before the first of some users of it, and let these use the copy."""
        graph = self.module.graph
        with graph.inserting_before(next(n for n in graph.nodes if n in users)):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = node.meta["val"]
        for user in users:
            user.replace_input_with(node, copy)
        return copy

    def _update(self, name: str) -> tuple[fx.Node, fx.Node]:
        """Let a buffer that the model assigns be read as a copy, and be written once its new value is known.

        The recording writes it in place at the end. What it held until then may be kept for backward, and
        its new value need not cross all the cuts until the end.
        """
        graph = self.module.graph
        (buffer,) = (node for node, known in self.names.items() if known == name)
        update = next(n for n in reversed(buffer.users) if n.target is torch.ops.aten.copy_.default)
        (_, clone), readers = update.all_input_nodes, [user for user in buffer.users if user is not update]
        (detach,) = clone.all_input_nodes
        needed = [*detach.all_input_nodes, *([self._copied(buffer, readers)] if readers else [])]
        order = {node: place for place, node in enumerate(graph.nodes)}
        last = max(needed, key=lambda node: order[node])
        for node in (update, clone, detach):
            last.append(node)
        return needed[1] if readers else update, update

    def _sort_nodes(self) -> None:
        """Tell operations from views of buffers and from sizes, both of which each piece makes for itself."""
        for node in self.module.graph.nodes:
            if node.op != "call_function" or node.target in _DROPPED:
                continue
            source = source_of(node)
            if source in self.viewed:
                self.viewed[node] = self.viewed[source]
            of_state = source in self.names or source in self.remade
            self.root[node] = node if source is None or source in self.parameters else self.root[source]
            is_output = any(user.op == "output" for user in node.users)
            if of_state and source not in self.parameters and not is_output and not changed_by(node):
                self.remade.add(node)
            elif not is_size(node):
                self.operations.append(node)

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The inputs and operations that a node reads, not through sizes."""
        return [arg for arg in node.all_input_nodes if arg in self.position]

    def weighted(self) -> list[int]:
        """The places of the operations that compute with a weight: a parameter of two or more dimensions."""

        def computes(node: fx.Node) -> bool:
            if node in self.viewed or node.target in ELEMENTWISE or node.target in CONCATENATE:
                return False
            read = (self.viewed[arg] for arg in node.all_input_nodes if arg in self.viewed)
            return any(self.parameters[parameter].ndim > 1 for parameter in read)

        return [place for place, node in enumerate(self.operations) if computes(node)]

    def last_uses(self, *, outputs: bool) -> dict[fx.Node, int]:
        """The last place that reads each input and operation; with ``outputs``, the end for what is one."""
        last: dict[fx.Node, int] = {}
        for place, node in enumerate(self.operations):
            for arg in self.reads(node):
                last[arg] = place
        if outputs:
            end = len(self.operations)
            last.update({a: end for a in self.outputs if isinstance(a, fx.Node) and a in self.position})
        return last

    def first_use(self, node: fx.Node) -> int:
        """The first place that reads a node."""
        return min(self.position[user] for user in node.users if user in self.position)

    def differentiable(self) -> set[fx.Node]:
        """The nodes that a gradient comes back for."""
        found = {node for node, parameter in self.parameters.items() if parameter.requires_grad}
        while True:
            before = len(found)
            for node in self.operations:
                kind = getattr(node.meta.get("val"), "dtype", torch.float)  # of several tensors, any
                continuous = kind.is_floating_point or kind.is_complex
                reached = any(arg in found for arg in node.all_input_nodes)
                if reached and continuous and not stops_gradients(node):
                    found.add(node)
                    for changed in changed_by(node):
                        found.update(sources(changed, differentiable=True))
            if len(found) == before:  # a change in place reaches earlier views of the same tensor
                return found


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer to the first of its names: tied weights have several."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for listing in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in listing:
            names[name] = first.setdefault(id(tensor), name)
    return names
