"""Errors about what was given on the command line, in the words of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from plait.errors import PlaitError


@contextmanager
def named_as_options(context: typer.Context, **also: str) -> Iterator[None]:
    """Call a setting as it was given: ``--save-every`` for ``save_every``; what was not given stays.

    ``also`` are the options of settings that have another name, or one whether they are given or not.
    """
    try:
        yield
    except PlaitError as error:
        given = dict(also)
        for option in context.command.params:
            name = option.name or ""
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                given[name] = option.opts[0]
        if error.setting is not None:
            error.setting = ", ".join(given.get(name, name) for name in error.setting.split(", "))
        raise
