"""Which settings of an optimizer change the work of a step, and which only its numbers.

A learning rate of 0.1 costs what one of 0.2 does; a momentum of 0 saves the buffer that one of 0.9 keeps. So
of a number with a fraction only its sign counts: zero switches work off, and what is below zero is mostly
refused. Whole numbers count as they are, for they count something (Muon's ``ns_steps``, the ``history_size``
of L-BFGS), and so do names and switches (``fused``, ``amsgrad``, ``nesterov``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.factory import Factory


def work(optimizer: Factory) -> dict[str, Any]:
    """An optimizer as plain data, the same for all that do the same work."""
    return {"call": optimizer.target, "arguments": _work(optimizer.arguments)}


def _work(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _work(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_work(part) for part in value]
    if isinstance(value, float):
        return 0 if value == 0 else "above 0" if value > 0 else "below 0"
    return value
