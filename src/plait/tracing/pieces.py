"""An exported graph as pieces: each a stateless program with the values that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from plait.compat import TreeSpec, linear
from plait.errors import TraceError
from plait.tracing.cutter import cuts
from plait.tracing.graph import Graph
from plait.tracing.nodes import batched, has_size
from plait.tracing.program import Program, needs_batch
from plait.value import Value


@dataclass(frozen=True)
class Piece:
    """One block as the tracer sees it."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    state: tuple[str, ...]
    """Names of the parameters, buffers and constants it uses, as the model has them."""
    program: Callable[..., tuple[torch.Tensor, ...]]
    """Called with the values read, then the state."""


@dataclass(frozen=True)
class Traced:
    """A model's graph cut into pieces, in one mode."""

    inputs: tuple[str, ...]
    pieces: tuple[Piece, ...]
    values: dict[str, Value]
    """Of all that crosses a cut; not of an input that is no tensor, nor of an output of another growth."""
    outputs: tuple[str | None, ...]
    """The value of each flat output; None where the model returns a constant."""
    output_constants: tuple[Any, ...]
    output_spec: TreeSpec
    constants: dict[str, torch.Tensor]
    """Tensors that the model's code makes from literals, or keeps without registering them."""


def traced(graph: Graph) -> Traced:
    """Cut a graph and build the pieces."""
    edges = [0, *cuts(graph), len(graph.operations)]
    groups = [graph.operations[a:b] for a, b in pairwise(edges)]
    last = graph.last_uses(outputs=True)
    values = {node: _input_name(node) for node in graph.inputs}
    source = next((node for node in graph.inputs if batched(node) is not None), None)
    pieces = []
    for name, group, edge in zip(_names(graph, groups), groups, edges[1:], strict=True):
        inside = set(group)
        reads = list(dict.fromkeys(a for node in group for a in graph.reads(node) if a not in inside))
        if source is not None and not any(batched(node) for node in reads) and needs_batch(graph, group):
            reads.append(source)
        writes = [node for node in group if last.get(node, -1) >= edge]
        for place, node in enumerate(writes):
            values[node] = name if len(writes) == 1 else f"{name}:{place}"
        state, program = Program(graph, group, reads=reads, writes=writes).build()
        taken = tuple(values[node] for node in reads)
        pieces.append(Piece(name, taken, tuple(values[node] for node in writes), state, program))
    for place, output in enumerate(graph.outputs):
        if isinstance(output, fx.Node) and output not in values:
            raise TraceError(
                f"output {place} of the model is a number that follows its batch size, not a tensor",
                setting="model",
                works="return tensors and constants",
            )
    differentiable = graph.differentiable()
    return Traced(
        inputs=tuple(values[node] for node in graph.inputs),
        pieces=tuple(pieces),
        values={name: _value(name, node, node in differentiable) for node, name in values.items()
                if has_size(node)},
        outputs=tuple(values[a] if isinstance(a, fx.Node) else None for a in graph.outputs),
        output_constants=tuple(None if isinstance(a, fx.Node) else a for a in graph.outputs),
        output_spec=graph.output_spec,
        constants=graph.constants,
    )  # fmt: skip


def _input_name(node: fx.Node) -> str:
    """``input:labels`` for a keyword, ``input:0`` for a positional one: no module's name has a colon."""
    prefix = "kwargs_" if node.name.startswith("kwargs_") else "args_"
    return "input:" + node.name.removeprefix(prefix)


def _value(name: str, node: fx.Node, differentiable: bool) -> Value:
    tensor = node.meta["val"]
    return Value(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=tensor.element_size(),
        dimensions=tuple(linear(size) or (0, 0) for size in tensor.shape),
        differentiable=differentiable,
    )


def _names(graph: Graph, groups: Sequence[Sequence[fx.Node]]) -> list[str]:
    """A name for each group of operations from its module's path, numbered where several share one."""
    weighted = {graph.operations[place] for place in graph.weighted()}
    names: list[str] = []
    for group in groups:
        path = ".".join(_module_path([node for node in group if node in weighted])) or "block"
        count = sum(name.partition("#")[0] == path for name in names)
        names.append(f"{path}#{count + 1}" if count else path)
    return names


def _module_path(nodes: Sequence[fx.Node]) -> list[str]:
    """The innermost module around all nodes, as a path."""
    stacks = [stack for node in nodes if (stack := node.meta.get("nn_module_stack"))]
    paths = [next(reversed(stack.values()))[0].split(".")[1:] for stack in stacks]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return common
