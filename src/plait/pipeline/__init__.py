"""Pipelines that adapt while somebody else uses the network: orders, schedules, links and a tuner.

The public names live here and are loaded on first use, so importing the package needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.lazy import exports

if TYPE_CHECKING:
    from plait.pipeline.adaptive import AdaptiveSchedule as AdaptiveSchedule
    from plait.pipeline.clipping import clip_grad_norm_ as clip_grad_norm_
    from plait.pipeline.orders import Order as Order
    from plait.pipeline.schedule import ScheduleKFKB as ScheduleKFKB
    from plait.pipeline.stage import Stages as Stages
    from plait.pipeline.stage import stages as stages
    from plait.pipeline.training import train as train
    from plait.pipeline.tuner import Tuning as Tuning

_HOME = {
    "AdaptiveSchedule": "plait.pipeline.adaptive",
    "Order": "plait.pipeline.orders",
    "ScheduleKFKB": "plait.pipeline.schedule",
    "Stages": "plait.pipeline.stage",
    "Tuning": "plait.pipeline.tuner",
    "clip_grad_norm_": "plait.pipeline.clipping",
    "stages": "plait.pipeline.stage",
    "train": "plait.pipeline.training",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = exports(__name__, _HOME)
