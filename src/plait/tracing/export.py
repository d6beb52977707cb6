"""Recording a model with `torch.export`: one graph a mode, with a dynamic batch dimension."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.compat import (
    batch_conditions,
    exporting_unnoticed,
    fake_parameters,
    no_custom_backward,
    tree_leaves,
    tree_map,
)
from plait.errors import PlaitError, UsageError
from plait.tracing import refusal
from plait.tracing.draws import Draws


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
    refusal.refuse_modules(model)
    # Export takes sizes 0 and 1 for constants, and equal tensors for one input: two rows, each its own.
    given = at_batch(args, kwargs, max(2, batch_of(args, kwargs)))
    rows, present = torch.export.Dim("batch"), batch_of(*given)

    def dynamic(leaf: Any) -> Any:
        is_batched = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == present
        return {0: rows} if is_batched else None

    shapes = (tree_map(dynamic, given[0]), tree_map(dynamic, given[1]))
    device = device_of(args, kwargs)
    faked = fake_parameters(model, device) if is_absent(model) else nullcontext()
    assigned: dict[str, None] = {}
    called = _Called(model, assigned.update)
    lines: list[str | None] = []
    try:
        with (
            undisturbed(model), _mode(model, training), faked, _quiet(),
            no_custom_backward(refusal.refuse_backward),
            batch_conditions(lambda: lines.append(refusal.line_of_model())),
        ):  # fmt: skip
            program = torch.export.export(called, given, dynamic_shapes=shapes, strict=False)
    except PlaitError:
        raise
    except Exception as error:  # whatever the model's code or torch raises while recording
        refused = refusal.untraceable(model, error, next(filter(None, lines), None))
        if refused is None:
            failure = _failure(model, args, kwargs, training=training)
            if failure is not None:
                raise refusal.unfit(model, args, kwargs, failure) from failure
            refused = refusal.unrecorded(model, error)
        raise refused from error
    autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    refusal.refuse_mixed_types(model, program.graph, autocast=autocast)
    return Recording(program, tuple(assigned))


def _failure(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool
) -> Exception | None:
    """How the model fails on the example inputs without any recording; None where it does not."""
    failure: Exception | None = None
    present = batch_of(args, kwargs)
    for batch in dict.fromkeys((present, max(2, present))):  # BatchNorm refuses a single row in training
        try:
            with _mode(model, training), _quiet(), rehearsal(model, *at_batch(args, kwargs, batch)) as given:
                model(*given[0], **given[1])
                return None
        except Exception as error:  # whatever the model's code raises
            failure = error
    return failure


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
        with exporting_unnoticed(), Draws():
            output = self.model(*args, **kwargs)
        after = dict(self.model.named_buffers())
        assigned = [name for name, old in before.items() if after.get(name) is not old]
        self._note(dict.fromkeys(assigned))
        for name in assigned:
            old, new = before[name], after.get(name)
            if new is None or new.shape != old.shape or new.dtype != old.dtype:
                raise refusal.changed_buffer(self.model, name, old, new)
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


def is_absent(model: nn.Module) -> bool:
    """Whether any of a model's tensors are on the meta device."""
    return any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@contextmanager
def rehearsal(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Inputs to run a model with, for what it shows: it and the random generators stay as they were.

    A model on the meta device is run with fake tensors.
    """
    with undisturbed(model):
        if is_absent(model):
            with fake_parameters(model, device_of(args, kwargs)) as fake, fake:
                yield tree_map(
                    lambda t: fake.from_tensor(t) if isinstance(t, torch.Tensor) else t, (args, kwargs)
                )
        else:
            with torch.random.fork_rng():
                yield args, kwargs


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, and without what torch prints and logs when it gives up."""
    printed = io.StringIO()
    names = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    levels = {log: log.level for log in map(logging.getLogger, names)}
    for log in levels:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(printed):
            warnings.simplefilter("ignore")
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for log, level in levels.items():
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
