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
    PATCHING,
    batch_conditions,
    exporting_unnoticed,
    fake_parameters,
    no_custom_backward,
    no_inference_mode,
    tree_leaves,
    tree_map,
)
from plait.errors import PlaitError, UsageError
from plait.tracing import kept, refusal
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
    """Record the model in one mode; one thread at a time, as warnings and stderr belong to all of them."""
    refusal.refuse_modules(model)
    with PATCHING:
        return _export(model, args, kwargs, training=training)


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Recording:
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
    replaced: dict[str, None] = {}
    called = _Called(model, assigned.update, replaced.update)
    lines: list[str | None] = []
    try:
        with (
            undisturbed(model), _mode(model, training), faked, _quiet(),
            no_custom_backward(refusal.refuse_backward), no_inference_mode(refusal.refuse_inference_mode),
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
    if replaced:
        _refuse_carried(model, args, kwargs)
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


def _refuse_carried(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a model of which a call computes with what an earlier one left without registering it."""
    given = at_batch(args, kwargs, max(2, batch_of(args, kwargs)))
    try:
        with _quiet(), rehearsal(model, *given) as inputs:
            watch = kept.Kept(model, inputs)
            for training in (True, False, True, False):  # each mode after each
                with _mode(model, training), watch.call():
                    model(*inputs[0], **inputs[1])
    except Exception as error:  # whatever the model's code raises
        raise refusal.unfit(model, args, kwargs, error) from error
    for name in watch.carried:
        raise refusal.carried_attribute(model, name)


class _Called(nn.Module):
    """Calls the model so that everything it does is an operation on its inputs and its state.

    Positional and keyword inputs come packed. A buffer that the model assigned anew is written in place,
    and a parameter or buffer that it returns is returned as a view. What is neither tensor nor number nor
    text in the output, such as a cache for generation, becomes None.
    """

    def __init__(
        self,
        model: nn.Module,
        note_assigned: Callable[[dict[str, None]], None],
        note_replaced: Callable[[dict[str, None]], None],
    ) -> None:
        """Notes are told the names of buffers assigned, and of what else holds other tensors than before.

        They go out by calls, as export resets what a module keeps.
        """
        super().__init__()
        self.model = model
        self._note_assigned, self._note_replaced = note_assigned, note_replaced

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, registered = dict(self.model.named_buffers()), kept.buffers(self.model)
        held = kept.held(self.model, registered)
        with exporting_unnoticed(), Draws():
            output = self.model(*args, **kwargs)
        after = dict(self.model.named_buffers())
        assigned = [name for name, old in before.items() if after.get(name) is not old]
        self._note_assigned(dict.fromkeys(assigned))
        self._note_replaced(dict.fromkeys(kept.replaced(held, kept.held(self.model, registered))))
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
    absent = object()
    owners = list(model.modules())
    tables = [(table, dict(table)) for owner in owners for table in (owner._buffers, vars(owner))]
    values = [v for owner in owners for v in (*owner._buffers.values(), *kept.attributes(owner).values())]
    contents = [(tensor, tensor.detach().clone()) for value in values for tensor in kept.tensors(value)]
    lists = [(value, value.copy()) for value in values if isinstance(value, (list, dict))]
    try:
        yield
    finally:
        for value, before in lists:
            if kept.tensors(value) or kept.tensors(before):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(before)
        for table, before in tables:
            for name in dict.fromkeys([*before, *table]):
                was, now = before.get(name, absent), table.get(name, absent)
                if was is now or not (kept.tensors(was) or kept.tensors(now)):
                    continue
                if was is absent:
                    del table[name]
                else:
                    table[name] = was
        for tensor, content in contents:
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
    with PATCHING, undisturbed(model):
        if is_absent(model):
            with fake_parameters(model, device_of(args, kwargs)) as fake, fake:
                yield tree_map(
                    lambda t: fake.from_tensor(t, static_shapes=True) if isinstance(t, torch.Tensor) else t,
                    (args, kwargs),
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
