"""How a job turns a model's output into something to differentiate: inputs, loss, weight, precision."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from plait import losses
from plait.compat import tree_leaves
from plait.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The functions of a job that run in every step, imported and ready."""

    loss: Callable[[Any, Any], Any]
    """``loss(output, batch)``: a mean."""
    weight: Callable[[Any], Any]
    """``weight(batch)``: the mean's denominator."""
    inputs: Callable[[Any], Any]
    """``inputs(batch)``: what the model is called with, a dict for keywords or a tuple."""
    bf16: bool
    """Forward and loss run under bf16 autocast."""

    def model_inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments that the model is called with for a batch."""
        given = self.inputs(batch)
        if isinstance(given, Mapping):
            return (), dict(given)
        return (tuple(given), {}) if isinstance(given, (tuple, list)) else ((given,), {})

    def call(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output for its inputs; inputs that it cannot take are told from its own mistakes."""
        try:
            return model(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            odd = {type(leaf).__name__ for leaf in tree_leaves((args, kwargs)) if not _usable(leaf)}
            if odd:
                raise UsageError(
                    f"the model cannot be called with {', '.join(sorted(odd))} in a batch: {reason(error)}",
                    setting="data",
                    works="samples of tensors and numbers, or a collate that makes tensors of them",
                ) from error
            mismatch = _mismatch(model, args, kwargs)
            if mismatch is not None:
                names = ", ".join([*(f"argument {i + 1}" for i in range(len(args))), *kwargs])
                raise UsageError(
                    f"the model cannot be called with {names}, which is what a batch holds: {mismatch}",
                    setting="inputs",
                    works="inputs(batch) that returns what forward takes: a dict for keywords, or a tuple",
                ) from error
            raise

    def autocast(self, device: str = "cpu") -> AbstractContextManager[Any]:
        """The precision of forward and loss; enter a new one for each unit of work, for it caches weights."""
        return torch.autocast(device, dtype=torch.bfloat16) if self.bf16 else nullcontext()

    def weigh(self, batch: Any) -> float:
        """The weight of a batch, checked."""
        weight = float(self.weight(batch))
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(
                f"the weight of a batch is {weight}", setting="weight", works="a finite number, 0 or more"
            )
        return weight

    def mean(self, output: Any, batch: Any) -> Tensor:
        """The loss of a batch, checked."""
        with explained("the loss", setting="loss", works="such as plait.losses:cross_entropy"):
            loss = self.loss(output, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise UsageError(
                f"the loss returned {described(loss)}",
                setting="loss",
                works="a mean: one floating-point number",
            )
        return loss.reshape(())

    def share(
        self, output: Any, batch: Any, *, weight: float, total: float, world: int = 1
    ) -> tuple[Tensor, float]:
        """One micro-batch's part of the step's loss: the tensor to call ``backward`` on, and its value.

        ``weight`` is this micro-batch's, ``total`` that of the whole step over all ranks. The parts of a
        step add up to sum(w*l)/sum(w). The tensor is scaled by ``world`` where gradients will be averaged
        over as many ranks; the value is not. A micro-batch of weight zero has no mean: its part is zero
        and so are its gradients.
        """
        if weight == 0:
            return losses.nothing(output), 0.0
        mean = self.mean(output, batch)
        return mean * (weight * world / total), float(mean.detach()) * (weight / total)


@contextmanager
def explained(what: str, *, setting: str, works: str) -> Iterator[None]:
    """Say of a loss or metric that trips over its arguments what those are, and where it tripped."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        raise UsageError(
            f"{what} failed when called with the model's output and the whole batch: {reason(error)}",
            setting=setting,
            works=f"a function of (output, batch), {works}",
        ) from error


def reason(error: Exception) -> str:
    """What an error of somebody else's says, in one line, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{' '.join(str(error).split())[:300]} ({Path(frame.filename).name}:{frame.lineno})"


def described(value: Any) -> str:
    """A value that was returned where one number was wanted."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:100]


def _usable(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (Tensor, bool, int, float))


def _mismatch(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a model's forward does not take these arguments, if it does not."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    try:
        inspect.signature(getattr(inner, "forward", inner)).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def all_inputs(batch: Any) -> Any:
    """What a model is called with: a dict as keywords, a tuple without its last element, a tensor itself."""
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return tuple(batch[:-1])
    return batch


def inputs_without_labels(batch: Any) -> Any:
    """The same, without the labels of a dict, for a model whose loss is computed outside of it."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}
    return all_inputs(batch)
