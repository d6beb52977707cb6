"""What is being done before the first step, in a few words, for whoever waits for it.

    with heard_by(print):
        reference.train(job)      # building the model, then: taking step 1

A model may take a minute to be built, traced and restored, in which nothing else would be said. Whoever does
one of these says so here; where nobody listens, nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_hearer: ContextVar[Callable[[str], object] | None] = ContextVar("plait_doing", default=None)


def say(what: str) -> None:
    """Say what begins now."""
    hearer = _hearer.get()
    if hearer is not None:
        hearer(what)


@contextmanager
def heard_by(hearer: Callable[[str], object]) -> Iterator[None]:
    """Have a function called with what is said within the block, on the same thread."""
    before = _hearer.set(hearer)
    try:
        yield
    finally:
        _hearer.reset(before)
