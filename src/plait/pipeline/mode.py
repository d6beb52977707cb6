"""A stage's module in evaluation for a while, and then back in the modes that all its parts were in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """Evaluation mode within this context.

    A module that switches more than its own parts, as that of a traced model, has them in ``switched``.
    """
    own = list(module.modules())
    modes = {part: part.training for each in own for part in (each, *getattr(each, "switched", ()))}
    try:
        if any(modes.values()):
            module.eval()
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
