"""Compares the strands for one job, or for many, on one cluster, and picks.

The public names live here and are loaded on first use, so importing the package needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.lazy import exports

if TYPE_CHECKING:
    from plait.strategy.change import Change as Change
    from plait.strategy.codecs import Codecs as Codecs
    from plait.strategy.comparison import Comparison as Comparison
    from plait.strategy.comparison import compare as compare
    from plait.strategy.demand import Demand as Demand
    from plait.strategy.kept_plan import KeptPlan as KeptPlan
    from plait.strategy.measuring import profile_of as profile_of
    from plait.strategy.option import Option as Option
    from plait.strategy.planning import plan as plan
    from plait.strategy.workload import Placement as Placement
    from plait.strategy.workload import Way as Way
    from plait.strategy.workload import WorkloadPlan as WorkloadPlan

_HOME = {
    "Change": "plait.strategy.change",
    "Codecs": "plait.strategy.codecs",
    "Comparison": "plait.strategy.comparison",
    "Demand": "plait.strategy.demand",
    "KeptPlan": "plait.strategy.kept_plan",
    "Option": "plait.strategy.option",
    "Placement": "plait.strategy.workload",
    "Way": "plait.strategy.workload",
    "WorkloadPlan": "plait.strategy.workload",
    "compare": "plait.strategy.comparison",
    "plan": "plait.strategy.planning",
    "profile_of": "plait.strategy.measuring",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = exports(__name__, _HOME)
