"""``plait demo``: acts that show plait at work; `make run` plays the last one, ``run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.errors import UsageError


def demo(
    act: Annotated[
        str | None,
        typer.Argument(help="One act: chain, compress, spill, pipeline, burst or run; default: all."),
    ] = None,
    directory: Annotated[Path, typer.Option(help="Where timelines and reports go.")] = Path("runs/demo"),
) -> None:
    """Show plait at work: small real runs, a minute or two on two cores."""
    from plait.cli.console import console
    from plait.demo import ACTS
    from plait.destination import make_folder

    chosen = [known for known in ACTS if act in (None, known.name)]
    if not chosen:
        raise UsageError(f"there is no act {act!r}", setting="ACT", works=", ".join(a.name for a in ACTS))
    make_folder(directory, setting="--directory")
    for place, known in enumerate(chosen, start=1):
        console().rule(f"{place} of {len(chosen)}: {known.title}", align="left")
        known.play(directory)
