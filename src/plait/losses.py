"""Losses, weights and metrics to name in a job, and the convention that they share.

A loss is ``loss(output, batch)`` and returns the mean over something; its weight is ``weight(batch)``
and counts that something. Wherever a batch is cut, results combine as sum(w*l)/sum(w), which is the
loss of the whole batch exactly when the weight is the mean's own denominator. The losses here carry
theirs as an attribute, ``loss.weight``, and a job uses it unless told otherwise.

Where the labels of a batch are: ``batch["labels"]``, or the last of a tuple. Where the logits of an
output are: ``output.logits``, ``output["logits"]``, the first of a tuple, or the output itself.
Labels of -100 are ignored, as in torch and Hugging Face.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from plait.data import rows_of
from plait.errors import UsageError

IGNORED = -100
"""The label that does not count."""

Loss = TypeVar("Loss", bound=Callable[..., Any])


def rows(batch: Any) -> int:
    """Weight: how many rows the batch has."""
    return rows_of(batch)


def targets(batch: Any) -> Tensor:
    """Weight: how many labels count (are not -100)."""
    return (labels_of(batch) != IGNORED).sum()


def next_tokens(batch: Any) -> Tensor:
    """Weight: how many labels count when each position predicts the next one."""
    return (labels_of(batch)[:, 1:] != IGNORED).sum()


def _weighted_by(weight: Callable[[Any], Any]) -> Callable[[Loss], Loss]:
    def mark(loss: Loss) -> Loss:
        loss.weight = weight  # type: ignore[attr-defined]
        return loss

    return mark


@_weighted_by(targets)
def cross_entropy(output: Any, batch: Any) -> Tensor:
    """Mean cross entropy of logits against labels; the classes are the last dimension, or as in torch."""
    logits, labels = logits_of(output), labels_of(batch)
    if logits.shape[:-1] == labels.shape:
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
    if logits.shape[:1] + logits.shape[2:] == labels.shape:
        return functional.cross_entropy(logits, labels, ignore_index=IGNORED)
    raise UsageError(
        f"logits of shape {tuple(logits.shape)} do not belong to labels of shape {tuple(labels.shape)}",
        setting="loss",
        works=f"logits of shape {(*labels.shape, 'classes')}",
    )


@_weighted_by(next_tokens)
def next_token(output: Any, batch: Any) -> Tensor:
    """Mean cross entropy of each position's logits against the token after it (a language model's loss)."""
    logits, labels = logits_of(output), labels_of(batch)
    if logits.shape[:-1] != labels.shape:
        raise UsageError(
            f"logits of shape {tuple(logits.shape)} do not belong to tokens of shape {tuple(labels.shape)}",
            setting="loss",
            works=f"logits of shape {(*labels.shape, 'vocabulary')}",
        )
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )


@_weighted_by(rows)
def mean_squared_error(output: Any, batch: Any) -> Tensor:
    """Mean of the squared differences between the output and the labels, of one shape."""
    values, labels = logits_of(output), labels_of(batch)
    if values.shape != labels.shape:
        raise UsageError(
            f"outputs of shape {tuple(values.shape)} do not belong to labels of shape {tuple(labels.shape)}",
            setting="loss",
            works="one shape for both",
        )
    return functional.mse_loss(values, labels)


def model_loss(output: Any, batch: Any) -> Tensor:
    """The loss that the model itself computed from the labels it was given, as Hugging Face models do.

    A job that names it must name the weight as well, because the model does not tell what it took the
    mean over: ``plait.losses:next_tokens`` for causal language models, ``plait.losses:targets`` for
    masked ones, encoder-decoders and classifiers.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise UsageError(
            f"the model's output ({type(output).__name__}) has no loss",
            setting="loss",
            works="batches with 'labels' for a Hugging Face model, or a loss such as plait.losses:next_token",
        )
    return loss  # type: ignore[no-any-return]


@_weighted_by(targets)
def accuracy(output: Any, batch: Any) -> Tensor:
    """Metric: the share of the labels that count which the largest logit gets right."""
    logits, labels = logits_of(output), labels_of(batch)
    kept = labels != IGNORED
    return (logits.argmax(-1)[kept] == labels[kept]).double().mean()


def labels_of(batch: Any) -> Tensor:
    """The labels of a batch; a batch that is one tensor of tokens, or has only input_ids, is its own."""
    if isinstance(batch, Mapping):
        found = batch.get("labels", batch.get("input_ids"))
    else:
        found = batch[-1] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(found, Tensor):
        keys = f" with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        raise UsageError(
            f"a batch of type {type(batch).__name__}{keys} has no labels",
            setting="data",
            works="samples with 'labels', or tuples whose last element is the label",
        )
    return found


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(output, (tuple, list)):
        found = output[0]
    elif not isinstance(output, Tensor):
        found = getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise UsageError(
            f"the model's output ({type(output).__name__}) has no logits",
            setting="loss",
            works="an output with .logits, a tuple that starts with them, or a tensor",
        )
    return found


def nothing(output: Any) -> Tensor:
    """A loss of zero that still reaches everything the output depends on."""
    from plait.compat import tree_leaves

    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.sum().double() * 0.0 for leaf in leaves]).sum()
