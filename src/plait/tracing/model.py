"""A chain from any model: recorded by `torch.export` in both modes and cut into blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from plait.block import Block, Layout, Mode, Step, frozen
from plait.compat import tree_flatten, tree_unflatten
from plait.errors import TraceError, UsageError
from plait.state import State
from plait.tracing.export import export
from plait.tracing.graph import Graph
from plait.tracing.pieces import Piece, Traced, traced
from plait.value import Value


def of_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout:
    """Record a model in both modes and cut it into blocks."""
    training, evaluation = (
        traced(Graph(model, export(model, args, kwargs, training=mode))) for mode in (True, False)
    )
    _check_same_cut(model, training, evaluation)
    constants, names = _constants(training.constants, evaluation.constants)
    state = State(model, constants)
    blocks = []
    for piece, twin in zip(training.pieces, evaluation.pieces, strict=True):
        modes = Mode(piece.state, piece.program), Mode(_renamed(twin, names), twin.program)
        step = Step(piece.reads, piece.writes, *modes)
        blocks.append(Block(piece.name, [step], piece.reads, piece.writes, state))
    order = tuple(kwargs)
    examples, structure = tree_flatten((args, kwargs))

    def unpack(given: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        if set(keywords) == set(order):
            keywords = {name: keywords[name] for name in order}
        leaves, shape = tree_flatten((given, keywords))
        if shape != structure:
            raise UsageError(
                f"the chain was called with {len(given)} positional inputs and keywords {sorted(keywords)}, "
                f"and was traced with {len(args)} and {sorted(order)}",
                setting="example_inputs",
                works="call it with the inputs it was traced with",
            )
        _check_inputs(training.inputs, leaves, examples, training.values)
        return leaves

    def pack(leaves: list[Any]) -> Any:
        flat = [constant if name is None else leaf for name, leaf, constant
                in zip(training.outputs, leaves, training.output_constants, strict=True)]  # fmt: skip
        return tree_unflatten(flat, training.output_spec)

    return Layout(
        model=model, state=state, blocks=tuple(blocks), inputs=training.inputs, outputs=training.outputs,
        values=training.values, frozen=frozen(model), unpack=unpack, pack=pack, example=(args, kwargs),
    )  # fmt: skip


def _constants(
    training: Mapping[str, torch.Tensor], evaluation: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The constants of both modes, and new names for those of evaluation that differ under one name."""
    names = {}
    for name, tensor in evaluation.items():
        same = training.get(name, tensor)
        if same is not tensor and not torch.equal(same, tensor):
            names[name] = f"{name}:evaluation"
    return {**{names.get(name, name): t for name, t in evaluation.items()}, **training}, names


def _renamed(piece: Piece, names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(names.get(name, name) for name in piece.state)


def _check_inputs(
    names: Sequence[str], leaves: Sequence[Any], examples: Sequence[Any], values: Mapping[str, Value]
) -> None:
    """Refuse what the recording does not hold for: other sizes, types and flags than those traced with."""
    works = "call it with inputs like those it was traced with, or trace it again"
    batch: int | None = None
    for name, leaf, example in zip(names, leaves, examples, strict=True):
        if not isinstance(example, torch.Tensor):
            if type(leaf) is not type(example) or leaf != example:
                raise UsageError(
                    f"{name} is {leaf!r}, and the chain was traced with {example!r}",
                    setting="inputs",
                    works=works,
                )
            continue
        value = values[name]
        if not isinstance(leaf, torch.Tensor) or str(leaf.dtype) != f"torch.{value.dtype}":
            kind = leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise UsageError(
                f"{name} is {kind}, and the chain was traced with {example.dtype}",
                setting="inputs",
                works=works,
            )
        if value.batch_dimension == 0 and leaf.ndim and batch is None:
            batch = int(leaf.shape[0])
            if batch == 0:
                raise UsageError(f"{name} has a batch of zero", setting="inputs", works="one row or more")
        if tuple(leaf.shape) != value.shape(batch or 1):
            expected = ["batch" if per_sample else constant for per_sample, constant in value.dimensions]
            among = "" if batch is None else f" in a batch of {batch}"
            raise UsageError(
                f"{name} has shape {tuple(leaf.shape)}{among}, and the chain was traced for "
                f"({', '.join(str(size) for size in expected)})",
                setting="inputs",
                works=works,
            )


def _check_same_cut(model: nn.Module, training: Traced, evaluation: Traced) -> None:
    """Raise unless both modes fall into the same blocks, with the same values between them."""

    def values(traced: Traced, piece: Piece) -> list[Value]:
        known = (traced.values[name] for name in piece.writes if name in traced.values)
        return [replace(value, differentiable=True) for value in known]

    problem = None
    counts = len(training.pieces), len(evaluation.pieces)
    if counts[0] != counts[1]:
        problem = f"{counts[0]} blocks in training, {counts[1]} in evaluation"
    for one, other in zip(training.pieces, evaluation.pieces, strict=False):
        if (one.name, one.reads) != (other.name, other.reads):
            problem = f"{one.name!r} reads {one.reads}, in evaluation {other.name!r} reads {other.reads}"
        elif values(training, one) != values(evaluation, other):
            problem = f"{one.name!r} writes {one.writes}, in evaluation {other.writes} or other sizes"
        if problem:
            break
    results = [(t.outputs, t.output_constants, t.output_spec) for t in (training, evaluation)]
    if not problem and results[0] != results[1]:
        problem = "it returns something else in evaluation than in training"
    if problem:
        raise TraceError(
            f"{type(model).__name__} is not the same chain in both modes: {problem}",
            setting="model",
            works="give the blocks yourself with Chain.of([block, ...])",
        )
