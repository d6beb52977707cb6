"""A chain from modules as they stand: an `nn.Sequential` taken apart, or a list of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.func import functional_call

from plait.block import Block, Layout, Mode, Step, frozen
from plait.errors import TraceError, UsageError
from plait.state import State
from plait.tracing.export import at_batch, batch_of, rehearsal
from plait.value import Value, line

_Group = tuple[str, Sequence[nn.Module]]
"""A name, and modules that are called one after the other."""


def of_sequential(model: nn.Sequential, args: tuple[Any, ...]) -> Layout | None:
    """Take an `nn.Sequential` apart, nested ones too; a module without weights joins the one before it.

    None where something else than one tensor passes from a module to the next.
    """
    groups: list[tuple[str, list[nn.Module]]] = []
    weighted = True
    for name, module in _flatten(model, ""):
        has = any(parameter.ndim > 1 for parameter in module.parameters())
        if not groups or (has and weighted):
            groups.append((name, []))
            weighted = False
        groups[-1][1].append(module)
        weighted = weighted or has
    rows = _propagate(model, groups, args, tuples=False)
    return None if rows is None else _layout(model, groups, args, rows)


def _flatten(module: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():  # a module that is there twice is run twice
        assert child is not None, name
        if is_plain(child):
            yield from _flatten(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def is_plain(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module is a Sequential that does nothing but call its modules."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
             module._backward_pre_hooks)  # fmt: skip
    return type(module) is nn.Sequential and len(module) > 0 and not any(hooks)


def of_blocks(modules: Sequence[nn.Module], args: tuple[Any, ...] | None) -> Layout:
    """A block a module; the number and sizes of the tensors between come from a run of the example."""
    for place, leaf in enumerate(args or ()):
        if not isinstance(leaf, torch.Tensor):
            raise UsageError(
                f"example input {place} is a {type(leaf).__name__}, not a tensor",
                setting="example_inputs",
                works="a tensor, or a tuple of tensors",
            )
    model = nn.Sequential(*modules)
    model.training = any(module.training for module in modules)
    groups = [(str(place), [module]) for place, module in enumerate(modules)]
    return _layout(model, groups, args, None if args is None else _propagate(model, groups, args))


@dataclass(frozen=True)
class _Row:
    """What one group gave for the example."""

    values: list[Value]
    changes: tuple[bool, ...]
    """For each tensor it was given, whether it changed it in place."""


def _layout(
    model: nn.Module, groups: Sequence[_Group], args: tuple[Any, ...] | None, rows: list[_Row] | None
) -> Layout:
    inputs = ("input:0",) if args is None else tuple(f"input:{place}" for place in range(len(args)))
    values: dict[str, Value] = {}
    if rows is not None:
        values.update({n: replace(v, name=n) for n, v in zip(inputs, rows[0].values, strict=True)})
    state, still = State(model), frozen(model)
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    blocks: list[Block] = []
    reads = inputs
    for place, (name, modules) in enumerate(groups):
        row = None if rows is None else rows[place + 1]
        count = 1 if row is None else len(row.values)
        writes = (name,) if count == 1 else tuple(f"{name}:{i}" for i in range(count))
        if row is not None:
            values.update({n: replace(v, name=n) for n, v in zip(writes, row.values, strict=True)})
        changes = (False,) * len(reads) if row is None else row.changes
        modes = (_Run.of(modules, changes, names, still, training=training) for training in (True, False))
        step = Step(reads, writes, *(Mode(run.state, run) for run in modes))
        blocks.append(Block(name, [step], reads, writes, state))
        reads = writes

    def unpack(given: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        if keywords or len(given) != len(inputs):
            raise UsageError(
                f"the chain takes {len(inputs)} positional inputs; it got {len(given)}, {sorted(keywords)}",
                setting="example_inputs",
                works="call it with the inputs it was made with",
            )
        return list(given)

    return Layout(
        model=model, state=state, blocks=tuple(blocks), inputs=inputs, outputs=reads, values=values,
        frozen=still, unpack=unpack, pack=lambda leaves: leaves[0] if len(leaves) == 1 else tuple(leaves),
        example=None if args is None else (args, {}),
    )  # fmt: skip


@dataclass(frozen=True)
class _Run:
    """Modules called one after the other, as a stateless program in one mode."""

    modules: Sequence[nn.Module]
    changes: tuple[bool, ...]
    """For each value read, whether the modules change it in place: they get a copy then."""
    own: tuple[dict[str, str], ...]
    """For each module, its own names of its tensors, and the model's."""
    state: tuple[str, ...]
    modes: dict[nn.Module, bool]

    @classmethod
    def of(
        cls,
        modules: Sequence[nn.Module],
        changes: tuple[bool, ...],
        names: dict[int, str],
        still: frozenset[nn.Module],
        *,
        training: bool,
    ) -> _Run:
        own = tuple({key: names[id(tensor)] for key, tensor in _tensors(m).items()} for m in modules)
        state = tuple(dict.fromkeys(name for known in own for name in known.values()))
        modes = {child: training and child not in still for module in modules for child in module.modules()}
        return cls(modules, changes, own, state, modes)

    def __call__(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(self.changes)
        given: Any = tuple(
            value.clone() if changed else value
            for value, changed in zip(arguments[:count], self.changes, strict=True)
        )
        held = dict(zip(self.state, arguments[count:], strict=True))
        for child, mode in self.modes.items():
            child.training = mode
        for module, own in zip(self.modules, self.own, strict=True):
            present = _tensors(module)
            other = {key: held[name] for key, name in own.items() if present[key] is not held[name]}
            given = functional_call(module, other, given) if other else _call(module, given)
        return given if isinstance(given, tuple) else (given,)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers by its own names, tied ones under each."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _call(module: nn.Module, given: Any) -> Any:
    return module(*given) if isinstance(given, tuple) else module(given)


def _propagate(
    model: nn.Module, groups: Sequence[_Group], args: tuple[Any, ...], *, tuples: bool = True
) -> list[_Row] | None:
    """What comes before the first group and after each, from runs of the example at two batch sizes.

    None where ``tuples`` is not set and a module returns something else than one tensor.
    """
    batch = max(2, batch_of(args, {}))  # BatchNorm refuses a single row
    runs = [_run(model, groups, at_batch(args, {}, size)[0], tuples) for size in (batch, batch + 1)]
    rows = []
    for small, large in zip(*(run or [] for run in runs), strict=True):
        pairs = zip(small[0], large[0], strict=True)
        rows.append(_Row([_value(a, b, batch) for a, b in pairs], small[1]))
    return rows or None


def _run(
    model: nn.Module, groups: Sequence[_Group], args: tuple[Any, ...], tuples: bool
) -> list[tuple[tuple[torch.Tensor, ...], tuple[bool, ...]]] | None:
    """The tensors before the first group and after each, with which of its inputs the group changed."""
    rows: list[tuple[tuple[torch.Tensor, ...], tuple[bool, ...]]] = []
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        args, _ = stack.enter_context(rehearsal(model, args, {}))
        given: Any = args
        rows.append((args, ()))
        for name, modules in groups:
            inputs = given if isinstance(given, tuple) else (given,)
            versions = [tensor._version for tensor in inputs]
            try:
                for module in modules:
                    given = _call(module, given)
                    if not tuples and not isinstance(given, torch.Tensor):
                        return None
            except Exception as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise TraceError(
                    f"block {name!r} fails on the example inputs: {reason}",
                    setting="blocks",
                    works="blocks of which each takes what the one before returned",
                ) from error
            outputs = given if isinstance(given, tuple) else (given,)
            if not all(isinstance(leaf, torch.Tensor) for leaf in outputs):
                raise TraceError(
                    f"block {name!r} returns something else than a tensor or a tuple of tensors",
                    setting="blocks",
                    works="a block that returns a tensor or a tuple of tensors",
                )
            changes = (tensor._version != version for tensor, version in zip(inputs, versions, strict=True))
            rows.append((outputs, tuple(changes)))
    return rows


def _value(small: torch.Tensor, large: torch.Tensor, batch: int) -> Value:
    return Value(
        name="",
        dtype=str(small.dtype).removeprefix("torch."),
        itemsize=small.element_size(),
        dimensions=line(small.shape, large.shape, batch),
        differentiable=small.requires_grad,
    )
