"""What to tell of a job whose own code raises: which job it is, and what its model was called with.

torch says which two matrices do not fit each other, deep in a layer; who wrote the job wants to know what of
the job does not fit. So the model is called once more, plainly, with the job's first batch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from plait.errors import PlaitError, UsageError

if TYPE_CHECKING:
    from plait.job import Job

_TRACING = "torch._subclasses.fake_tensor"
"""Who logs what goes wrong while torch 2.13 traces a model."""


@contextmanager
def hushed() -> Iterator[None]:
    """Keep torch from logging a traceback of what is told in one sentence afterwards."""
    logger = logging.getLogger(_TRACING)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def explained(jobs: Iterable[Job], error: Exception) -> Exception:
    """The error of the first job whose model or loss does not take what its data gives; else as it was."""
    for job in jobs:
        try:
            found = _misfit(job)
        except Exception:  # it cannot even be built: what was raised first says more
            return error
        if found is not None:
            return found
    return error


def _misfit(job: Job) -> UsageError | None:
    from plait.determinism import reproducible

    with reproducible(job.threads):
        batches, objective, model = job.build_batches(), job.build_objective(), job.build_model()
        batch = batches.fetch(batches.indices(0))
        args, kwargs = objective.model_inputs(batch)
        takes = f"{type(model).__name__}.forward{inspect.signature(model.forward)}"
        given = ", ".join([*map(_described, args), *(f"{n}={_described(v)}" for n, v in kwargs.items())])
        try:
            with objective.autocast():
                output = objective.call(model, args, kwargs)
        except Exception as error:
            return UsageError(
                f"job {job.name!r}: its model {takes} cannot take a batch of {job.batch} rows, "
                f"which it is called with as ({given}): {_reason(error)}",
                setting="model, data",
                works="samples of the shape that the model's first layer takes, or an `inputs` that makes it",
            )
        try:
            with objective.autocast():
                objective.mean(output, batch)
        except Exception as error:
            return UsageError(
                f"job {job.name!r}: its loss cannot take what the model gives, {_described(output)}, and a "
                f"batch of {_described(batch)}: {_reason(error)}",
                setting="loss, data",
                works="targets of the shape that the loss takes",
            )
    return None


def _described(value: Any) -> str:
    """A value by its shape and type, as far as that says something."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_described(part)}' for name, part in value.items())}}}"
    return type(value).__name__


def _reason(error: Exception) -> str:
    if isinstance(error, PlaitError):
        return error.what
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
