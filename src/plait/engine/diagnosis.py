"""What to tell of a job whose own code raises: which job it is, which part of it, and what that was given.

torch says which two matrices do not fit each other, deep in a layer; who wrote the job wants to know what of
the job does not fit. So its parts are made once more, plainly; the model is called with the job's first
batch, and the optimizer asked for a step. A model for which there is no room here is not: what was raised
first is told then.
"""

from __future__ import annotations

import inspect
import logging
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from plait.cluster.machine import memory_available_bytes
from plait.errors import FileError, PlaitError, UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from plait.factory import Factory
    from plait.job import Job

_TRACING = "torch._subclasses.fake_tensor"
"""Who logs what goes wrong while torch 2.13 traces a model."""
OPTIMIZERS = "arguments that it takes, such as lr=0.001"
_SHAPES = "samples of the shape that the model's first layer takes, or an `inputs` that makes it"
_OF_SHAPES = ("shape", "mat1", "size", "dimension")
"""Words of torch's errors about shapes."""
_COPIES = 4
"""Of the weights, for which there must be room where a model is tried: gradients, state and a step."""


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


@contextmanager
def explaining(jobs: Iterable[Job]) -> Iterator[None]:
    """Tell what jobs raise while they are measured or planned in one sentence, and log no traceback of it."""
    try:
        with hushed():
            yield
    except (UsageError, FileError):
        raise
    except Exception as error:
        found = explained(jobs, error)
        if found is error:
            raise
        raise found from error


def explained(jobs: Iterable[Job], error: Exception) -> Exception:
    """The error of the first job of which a part cannot be made or does not fit; else as it was."""
    for job in jobs:
        try:
            found = _misfit(job)
        except Exception:  # that cannot be told apart: what was raised first says more
            return error
        if found is not None:
            return found
    return error


def cited(error: BaseException) -> str:
    """What an error of somebody else's says, in one line, and where: the last line that is not installed."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    frames = traceback.extract_tb(error.__traceback__)
    installed = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
    own = [frame for frame in frames if not frame.filename.startswith(installed)] or frames[-1:]
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else text


def blamed(job: Job, part: str, works: str, error: Exception) -> UsageError:
    """That a part of a job raises."""
    target = cast("Factory", getattr(job, part)).target
    return UsageError(
        f"job {job.name!r}: its {part} {target} raised {cited(error)}", setting=part, works=works
    )


@contextmanager
def _using(job: Job, part: str, works: str) -> Iterator[None]:
    """Say which part of a job raises."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        raise blamed(job, part, works, error) from error


def _misfit(job: Job) -> UsageError | None:
    from plait.deferred import construct
    from plait.determinism import reproducible

    with reproducible(job.threads):
        try:
            objective = job.build_objective()
            with _using(job, "data", "a function of (seed) that returns a data set"):
                batches = job.build_batches()
                batch = batches.fetch(batches.indices(0))
            with _using(job, "inputs", "a function of (batch): a dict for keywords, or a tuple"):
                args, kwargs = objective.model_inputs(batch)
            with _using(job, "model", "a function that returns an nn.Module when it is called"):
                absent = construct(job.make_model, seed=job.seed)
                if _COPIES * sum(p.nbytes for p in absent.parameters()) > memory_available_bytes():
                    return None
                model = job.build_model()
            with _using(job, "optimizer", OPTIMIZERS):
                optimizer = job.build_optimizer(model.named_parameters())
        except UsageError as error:
            return error
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
                works=_SHAPES if _about_shapes(error) else "a forward that takes such a batch",
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
        return _unsteppable(job, model, optimizer)


def _unsteppable(job: Job, model: nn.Module, optimizer: Optimizer) -> UsageError | None:
    """Why an optimizer takes no step of its own, with a gradient in every parameter; None if it does."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except Exception as error:
        return UsageError(
            f"job {job.name!r}: its optimizer {type(optimizer).__name__} cannot step by itself, given dense "
            f"gradients: {cited(error)}",
            setting="optimizer",
            works="one whose step() needs no closure, such as torch.optim.AdamW",
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
    return error.what if isinstance(error, PlaitError) else cited(error)


def _about_shapes(error: Exception) -> bool:
    """Whether torch cannot bring two shapes together; its errors have no type that says so."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_SHAPES)
