"""Recording a model with `torch.export`: one graph a mode, with a dynamic batch dimension."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.compat import (
    exporting_unnoticed,
    fake_parameters,
    no_custom_backward,
    tree_leaves,
    tree_map,
)
from plait.errors import PlaitError, TraceError, UsageError

_TWO_WAYS_OUT = (
    "take the Python branch on data out of forward (torch.where instead of if), "
    "or give the blocks yourself with Chain.of([block, ...])"
)


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The batch size of example inputs: the first dimension of the first tensor that has one."""
    for leaf in tree_leaves((tuple(args), dict(kwargs))):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            if leaf.shape[0] == 0:
                raise UsageError(
                    "the example inputs have a batch of zero", setting="example_inputs", works="2 rows"
                )
            return int(leaf.shape[0])
    raise UsageError(
        "the example inputs hold no tensor with a batch dimension",
        setting="example_inputs",
        works="a tuple of tensors, each with the batch first",
    )


def device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """The device of the example inputs: where the model will run."""
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    return next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))


def at_batch(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs with their rows repeated, or cut, to another batch size; every tensor its own."""
    present = batch_of(args, kwargs)

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.ndim or leaf.shape[0] != present:
            return leaf.detach().clone()
        return leaf.detach()[torch.arange(batch, device=leaf.device) % present]

    return tree_map(resized, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Recording:
    """A model as `torch.export` recorded it in one mode."""

    program: Any
    """An `ExportedProgram` whose inputs are the pair (args, kwargs)."""
    assigned: tuple[str, ...]
    """Names of the buffers that the model assigns anew; the recording writes them in place at its end."""


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Recording:
    """Record the model in one mode."""
    # Export takes sizes 0 and 1 for constants, and equal tensors for one input: two rows, each its own.
    args, kwargs = at_batch(args, kwargs, max(2, batch_of(args, kwargs)))
    rows, present = torch.export.Dim("batch"), batch_of(args, kwargs)

    def dynamic(leaf: Any) -> Any:
        is_batched = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == present
        return {0: rows} if is_batched else None

    shapes = (tree_map(dynamic, args), tree_map(dynamic, kwargs))
    absent = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    faked = fake_parameters(model, device_of(args, kwargs)) if absent else nullcontext()
    assigned: dict[str, None] = {}
    called = _Called(model, assigned.update)
    try:
        with undisturbed(model), _mode(model, training), faked, _quiet(), no_custom_backward(_refuse):
            program = torch.export.export(called, (args, kwargs), dynamic_shapes=shapes, strict=False)
            return Recording(program, tuple(assigned))
    except PlaitError:
        raise
    except Exception as error:  # whatever the model's code or torch raises while recording
        raise _untraceable(model, str(error) or type(error).__name__) from error


def _untraceable(model: nn.Module, reason: str) -> TraceError:
    """The error for a model that torch gave up on: its reason in one sentence, and the line of the code."""
    lines = [text.strip() for text in reason.splitlines() if text.strip()]
    line = next((text.removeprefix("- ") for text in lines if text.startswith("- ")), lines[0])
    line = re.split(r"(?<=[.!])\s", line)[0]
    where = re.search(r'raised this error:\s+File "([^"]+)", line (\d+)', reason)
    at = f" ({where[1]}, line {where[2]})" if where else ""
    return TraceError(
        f"{type(model).__name__} cannot be traced: {line}{at}", setting="model", works=_TWO_WAYS_OUT
    )


def _refuse(what: str) -> None:
    """Refuse what changes gradients on their way back: only the forward operations are recorded."""
    raise TraceError(
        f"the model changes gradients in backward ({what}), which a recording of its forward would lose",
        setting="model",
        works="write it with tensor operations, or give the blocks yourself with Chain.of([block, ...])",
    )


class _Called(nn.Module):
    """Calls the model so that everything it does is an operation on its inputs and its state.

    Positional and keyword inputs come packed. A buffer that the model assigned anew is written in place,
    and a parameter or buffer that it returns is returned as a view. What is neither tensor nor number nor
    text in the output, such as a cache for generation, becomes None.
    """

    def __init__(self, model: nn.Module, note: Callable[[dict[str, None]], None]) -> None:
        """``note`` is told the names of the buffers assigned; export resets what a module keeps."""
        super().__init__()
        self.model = model
        self._note = note

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = dict(self.model.named_buffers())
        with exporting_unnoticed():
            output = self.model(*args, **kwargs)
        after = dict(self.model.named_buffers())
        assigned = [name for name, old in before.items() if after.get(name) is not old]
        self._note(dict.fromkeys(assigned))
        for name in assigned:
            old, new = before[name], after.get(name)
            if new is None or new.shape != old.shape or new.dtype != old.dtype:
                was, now = (None if t is None else f"{tuple(t.shape)} {t.dtype}" for t in (old, new))
                raise _untraceable(self.model, f"buffer {name!r} changes from {was} to {now}")
        # All new values first: one buffer may become what another was.
        updates = [(before[name], after[name].detach().clone()) for name in assigned]
        for old, new in updates:
            old.copy_(new)
        own = {id(tensor) for tensor in [*self.model.parameters(), *before.values(), *after.values()]}

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return leaf.view_as(leaf) if id(leaf) in own else leaf
            return leaf if isinstance(leaf, (bool, int, float, str, torch.SymInt)) else None

        return tree_map(plain, output)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave a model's buffers, and the tensors it keeps without registering them, as they were."""
    tables = [table for owner in model.modules() for table in (owner._buffers, vars(owner))]
    before = [
        {name: (t, t.detach().clone()) for name, t in table.items() if isinstance(t, torch.Tensor)}
        for table in tables
    ]
    absent = [{name for name, value in table.items() if value is None} for table in tables]
    try:
        yield
    finally:
        for table, held, none in zip(tables, before, absent, strict=True):
            for name in [name for name, value in table.items() if isinstance(value, torch.Tensor)]:
                if name in none:
                    table[name] = None
                elif name not in held:
                    del table[name]
            for name, (tensor, content) in held.items():
                table[name] = tensor
                if not tensor.is_meta:
                    with torch.no_grad():
                        tensor.copy_(content)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, and without the graph that torch prints when it gives up."""
    printed, log = io.StringIO(), logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(printed):
            warnings.simplefilter("ignore")
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        log.setLevel(level)


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the model into a mode, and back again."""
    modes = {module: module.training for module in model.modules()}
    if not training:
        model.eval()
    elif not model.training:
        model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
