"""plait: train deep networks on small, shared, slow-to-talk hardware, on stock PyTorch.

The public names live here and are loaded on first use: ``import plait`` costs nothing, and what
needs no torch (plans, profiles, clusters, timelines) never imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.lazy import exports

if TYPE_CHECKING:
    from plait.block import Block as Block
    from plait.chain import Chain as Chain
    from plait.cluster import Cluster as Cluster
    from plait.engine.running import run as run
    from plait.errors import PlaitError as PlaitError
    from plait.evaluation import Evaluation as Evaluation
    from plait.factory import Factory as Factory
    from plait.job import Job as Job
    from plait.profile import Profile as Profile
    from plait.strategy.planning import plan as plan
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
    "plan": "plait.strategy.planning",
    "run": "plait.engine.running",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = exports(__name__, _HOME)
