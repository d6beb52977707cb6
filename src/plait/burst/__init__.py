"""Each block only as wide as it pays, and background work on what that leaves idle.

The public names live here and are loaded on first use, so importing the package needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.lazy import exports

if TYPE_CHECKING:
    from plait.burst.burst_plan import BurstPlan as BurstPlan
    from plait.burst.frontier import Frontier as Frontier
    from plait.burst.handle import background as background
    from plait.burst.multiplex import Multiplexer as Multiplexer
    from plait.burst.network import Network as Network
    from plait.burst.phases import Publisher as Publisher
    from plait.burst.planner import plan as plan
    from plait.burst.runtime import BurstParallel as BurstParallel
    from plait.burst.training import train as train

_HOME = {
    "BurstParallel": "plait.burst.runtime",
    "BurstPlan": "plait.burst.burst_plan",
    "Frontier": "plait.burst.frontier",
    "Multiplexer": "plait.burst.multiplex",
    "Network": "plait.burst.network",
    "Publisher": "plait.burst.phases",
    "background": "plait.burst.handle",
    "plan": "plait.burst.planner",
    "train": "plait.burst.training",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = exports(__name__, _HOME)
