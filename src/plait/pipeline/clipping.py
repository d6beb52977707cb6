"""Clips gradients by their norm over all stages, in which a weight that several stages hold counts once."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from plait.errors import UsageError
from plait.pipeline import compat
from plait.pipeline.council import Council
from plait.pipeline.tied import shared_of
from plait.pipeline.wire import wire_of

_TIMEOUT_S = 30.0
"""For a stage that no schedule of plait's has run."""


def clip_grad_norm_(pipeline: Any, max_norm: float) -> torch.Tensor:
    """Scale the gradients of all stages down where their norm together is above ``max_norm``.

    As `torch.nn.utils.clip_grad_norm_` of the whole model: all ranks call it, between a step and the
    optimizer's, each with its schedule or its stage, and all return the norm as it was before.

    >>> schedule.step(x)
    >>> norm = plait.pipeline.clip_grad_norm_(schedule, 1.0)
    >>> optimizer.step()
    """
    stage = pipeline._stage if isinstance(pipeline, PipelineScheduleSingle) else pipeline
    compat.check_stage(stage)
    number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if not (number and 0 < max_norm <= sys.float_info.max):
        raise UsageError(f"gradients cannot be clipped to {max_norm!r}", setting="max_norm", works="1.0")
    wire = wire_of(stage, timeout_s=_TIMEOUT_S)
    try:
        council = Council(wire, place=stage.stage_index, stages=stage.num_stages)
        words = council.gather(_norms(stage), "the norms of gradients")
        found = None if words is None else _total(words)
        total: torch.Tensor = council.tell(found, "the norm of all gradients")
        wire.flush()
    except BaseException as error:
        wire.give_up(error)
        raise
    nn.utils.clip_grads_with_norm_(stage.submod.parameters(), max_norm, total)
    return total.to(stage.device)


def _norms(stage: Any) -> torch.Tensor | None:
    """Of each gradient that no stage before this one tells; None where there are none."""
    module, shared = shared_of(stage.submod)
    told = {name for each in shared if stage.stage_index != each.stages[0] for name in each.names}
    norms = [
        torch.linalg.vector_norm(parameter.grad).cpu()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and name not in told
    ]
    return torch.stack(norms) if norms else None


def _total(words: list[torch.Tensor | None]) -> torch.Tensor:
    found = [word for word in words if word is not None]
    return torch.linalg.vector_norm(torch.cat(found)) if found else torch.zeros(())
