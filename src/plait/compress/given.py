"""What users hand in, checked for its type: arguments, fields of a configuration, saved states."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from plait.errors import FileError, UsageError

WHOLE, NUMBER = Integral, Real
"""What counts as a number; those of numpy do."""
_SAVED = "what state_dict() gave"


def expect(value: object, *kinds: type | None, setting: str, works: str) -> None:
    """Refuse a value that is of none of these types; a Boolean is no number, and None stands for itself."""
    if value is None and None in kinds:
        return
    # A Boolean is a whole number to Python, but nobody who writes one means a number.
    if isinstance(value, bool):
        fits = bool in kinds
    else:
        fits = isinstance(value, tuple(kind for kind in kinds if kind is not None))
    if not fits:
        what = f"{setting} is {reprlib.repr(value)}, of type {type(value).__name__}"
        raise UsageError(what, setting=setting, works=works)


def saved(state: object, format: str) -> Mapping[str, Any]:
    """A saved state, if it is one and of this format."""
    if not isinstance(state, Mapping) or state.get("format") != format:
        form = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        raise FileError(f"a state of format {form!r}, not {format!r}", setting="state", works=_SAVED)
    return state


def entry(state: object, name: str, *kinds: type | None) -> Any:
    """A field of a saved state, if it is there and of one of these types."""
    if not isinstance(state, Mapping) or name not in state:
        raise FileError(f"the state has no {name!r}", setting="state", works=_SAVED)
    try:
        expect(state[name], *kinds, setting=name, works=_SAVED)
    except UsageError as error:
        raise damaged(error.what) from None
    return state[name]


def damaged(what: str) -> FileError:
    """The error for a state that says what cannot be."""
    return FileError(f"the state is damaged: {what}", setting="state", works=_SAVED)
