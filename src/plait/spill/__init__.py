"""Models larger than memory, many at once: shards take turns in memory, exactly as if they had fitted.

The public names live here and are loaded on first use, so importing the package needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.lazy import exports

if TYPE_CHECKING:
    from plait.spill.fitting import fit as fit
    from plait.spill.handle import Fitting as Fitting
    from plait.spill.outcome import Outcome as Outcome
    from plait.spill.outcome import Outcomes as Outcomes
    from plait.spill.plan import SpillPlan as SpillPlan
    from plait.spill.rules import asha as asha
    from plait.spill.rules import halving as halving
    from plait.spill.rules import hyperband as hyperband
    from plait.spill.rules import no_halving as no_halving
    from plait.spill.sampling import Grid as Grid
    from plait.spill.sampling import Optuna as Optuna
    from plait.spill.searching import search as search
    from plait.spill.selection import Selection as Selection
    from plait.spill.space import Choice as Choice
    from plait.spill.space import Real as Real
    from plait.spill.space import Whole as Whole

_HOME = {
    "Fitting": "plait.spill.handle",
    "Outcome": "plait.spill.outcome",
    "Outcomes": "plait.spill.outcome",
    "Choice": "plait.spill.space",
    "Grid": "plait.spill.sampling",
    "Optuna": "plait.spill.sampling",
    "Real": "plait.spill.space",
    "Selection": "plait.spill.selection",
    "SpillPlan": "plait.spill.plan",
    "Whole": "plait.spill.space",
    "asha": "plait.spill.rules",
    "fit": "plait.spill.fitting",
    "halving": "plait.spill.rules",
    "hyperband": "plait.spill.rules",
    "no_halving": "plait.spill.rules",
    "search": "plait.spill.searching",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = exports(__name__, _HOME)
