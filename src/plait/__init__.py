"""plait: train deep networks on small, shared, slow-to-talk hardware, on stock PyTorch.

The public names live here and are loaded on first use: ``import plait`` costs nothing, and what
needs no torch (plans, profiles, clusters, timelines) never imports it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.block import Block as Block
    from plait.chain import Chain as Chain
    from plait.cluster import Cluster as Cluster
    from plait.errors import PlaitError as PlaitError
    from plait.evaluation import Evaluation as Evaluation
    from plait.factory import Factory as Factory
    from plait.job import Job as Job
    from plait.profile import Profile as Profile
    from plait.timeline import Timeline as Timeline

__version__ = "0.1.0"

_HOME = {
    "Block": "plait.block",
    "Chain": "plait.chain",
    "Cluster": "plait.cluster",
    "Evaluation": "plait.evaluation",
    "Factory": "plait.factory",
    "Job": "plait.job",
    "PlaitError": "plait.errors",
    "Profile": "plait.profile",
    "Timeline": "plait.timeline",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
