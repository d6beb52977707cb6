"""A batch on its way through one stage: its micro-batches, and what was received and sent for each."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from plait.compat import tree_leaves
from plait.errors import UsageError
from plait.pipeline import spec
from plait.pipeline.note import Note
from plait.pipeline.record import StepRecord
from plait.pipeline.spec import Spec, Specs
from plait.pipeline.wire import Wire


class Batch:
    """A batch on its way through one stage."""

    def __init__(
        self,
        note: Note,
        record: StepRecord,
        *,
        mark: str,
        args: list[tuple[Any, ...]],
        kwargs: list[dict[str, Any]],
        targets: list[Any] | None,
        weights: Sequence[float],
        loss_kwargs: Mapping[str, Any] | None,
        keep_outputs: bool,
    ) -> None:
        self.signatures, self.sent_signatures = note.signatures, note.passed_on(mark).signatures
        self.training, self._reports, self.record = note.training, note.reports, record
        self.args, self.kwargs, self.targets = args, kwargs, targets
        self.weights, self.loss_kwargs, self.keep_outputs = weights, loss_kwargs, keep_outputs
        self.losses: list[torch.Tensor] = []
        self.inputs: dict[int, Specs] = {}
        """What was received, of micro-batches in flight."""
        self.outputs: dict[int, Specs] = {}
        """What was sent, of micro-batches in flight."""
        self._inputs = self._gradients = 0

    def expect_inputs(self, wire: Wire, until: int) -> None:
        """Post the receives of inputs before this one."""
        if wire.before is None:
            return
        for number in range(self._inputs, until):
            wire.before.inbox.expect("activation", wire.step, number, signature=self.signatures[number])
        self._inputs = max(self._inputs, until)

    def expect_gradients(self, wire: Wire, until: int) -> None:
        """Post the receives of gradients before this one."""
        if wire.after is None:
            return
        for number in range(self._gradients, until):
            specs = spec.gradients(self.outputs[number])
            wire.after.inbox.expect("gradient", wire.step, number, specs=specs)
        if self._reports and self._gradients < until == len(self.signatures):
            wire.after.inbox.expect("report", wire.step, 0)
        self._gradients = max(self._gradients, until)


def signature(piece: Any, training: bool) -> str:
    """Equal for micro-batches whose inputs look the same, so that all that follows from them does too."""
    looks = [str(Spec.of(leaf)) for leaf in tree_leaves(piece) if isinstance(leaf, torch.Tensor)]
    return hashlib.sha256(f"{training} {looks}".encode()).hexdigest()[:12]


def mark(module: torch.nn.Module) -> str:
    """Which weights of a stage learn: this decides which of its outputs need a gradient, and may change."""
    return "".join("01"[parameter.requires_grad] for parameter in module.parameters())


def rows(target: Any) -> int:
    """How many a batch or micro-batch has: the first dimension of its first tensor."""
    tensors = [leaf for leaf in tree_leaves(target) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return int(tensors[0].shape[0]) if tensors else 1


def cut_target(target: Any, count: int, batch_rows: int | None) -> list[Any]:
    """Cut tensors, or tensors nested in dicts and lists, as inputs are cut.

    Of a batch of so many rows, each may have one row in the target or several (tokens), but no part of one.
    """
    check_rows(target, count)
    if batch_rows is not None and rows(target) % batch_rows:
        raise UsageError(
            f"a target of {rows(target)} rows for a batch of {batch_rows}",
            setting="target",
            works=f"{batch_rows} rows, or a multiple of it",
        )
    pieces, _ = split_args_kwargs_into_chunks((target,), None, count)
    return [piece for (piece,) in pieces]


def weights(
    targets: Sequence[Any] | None, count: int, weight: Callable[[Any], float] | None
) -> Sequence[float]:
    """What each micro-batch's loss counts for: its share of all weights, or 1 where losses are summed."""
    if weight is None or targets is None:
        return (1.0,) * count
    found = [float(weight(target)) for target in targets]
    if not 0 < sum(found) < math.inf or min(found) < 0:
        raise UsageError(
            f"the weights of the micro-batches are {found}",
            setting="weight",
            works="numbers of zero or more, not all zero",
        )
    return [each / sum(found) for each in found]


def joined(first: Any, *rest: Any) -> Any:
    """Outputs of micro-batches as one: rows joined, what has none stacked, of no tensors the first."""
    if not isinstance(first, torch.Tensor):
        return first
    return torch.cat([first, *rest]) if first.dim() else torch.stack([first, *rest])


def check_rows(tensors: Any, count: int, *, stages: int | None = None) -> None:
    """Refuse tensors of which there is not a row for each micro-batch.

    With ``stages`` they are the batch itself: fewer micro-batches, but one a stage, would work too.
    """
    for leaf in tree_leaves(tensors):
        if isinstance(leaf, torch.Tensor) and (not leaf.dim() or leaf.shape[0] < count):
            rows = leaf.shape[0] if leaf.dim() else "no"
            works = f"{count} rows or more" if leaf.dim() else "tensors whose first dimension is the batch"
            if leaf.dim() and stages is not None and leaf.shape[0] >= stages:
                works = f"schedule.change(n_microbatches={rows}) on every rank, or {works}"
            raise UsageError(
                f"a tensor of {rows} rows for {count} micro-batches", setting="n_microbatches", works=works
            )


def check_declared(said: Any, specs: Specs, who: str) -> None:
    """Tensors as the user said they would be, but for the first dimension, which follows the micro-batch."""
    if said is None:
        return
    expected = [(tuple(meta.shape[1:]), meta.dtype) for meta in said]
    if expected != [(each.shape[1:], each.dtype) for each in specs]:
        declared = spec.text(Spec(tuple(meta.shape), meta.dtype, False) for meta in said)
        raise UsageError(
            f"{who} {spec.text(specs)}, and was said to: {declared}",
            setting="input_args, output_args",
            works="what the stage's module takes and gives, or neither (plait then finds out)",
        )


def check_loss(loss: Any, output: Any) -> None:
    """Refuse a loss that has no gradient where the output has, and what is no single number at all."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise UsageError(
            f"the loss of a micro-batch is {found}", setting="loss_fn", works="a tensor of one number"
        )
    learns = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
    if learns and not loss.requires_grad:
        raise UsageError(
            "the loss does not follow from the output by steps that have a gradient",
            setting="loss_fn",
            works="a loss of the output, computed with gradients enabled",
        )
