"""How commands print: tables and progress on a terminal, plain lines elsewhere, or JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Item = TypeVar("Item")


def console() -> Console:
    """A console on standard output, 100 columns wide where there is no terminal to ask."""
    return Console(width=None if sys.stdout.isatty() else 100, soft_wrap=False)


def print_json(result: Any) -> None:
    """Print a result as JSON, alone on standard output."""
    sys.stdout.write(json.dumps(result, indent=2, sort_keys=False) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under column heads; numbers are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold")
    kept = [[escape(str(cell)) for cell in row] for row in rows]
    for i, column in enumerate(columns):
        numeric = bool(kept) and all(
            row[i].strip()[:1] in set("-+.0123456789—") for row in kept if row[i].strip()
        )
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in kept:
        table.add_row(*row)
    console().print(table)


@contextmanager
def status(doing: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done on standard error; a spinner on a terminal, a line at the start elsewhere.

    Yields a function that changes the text. Only rank 0 shows anything.
    """
    if os.environ.get("RANK", "0") != "0":
        yield lambda text: None
    elif sys.stderr.isatty():
        with Console(stderr=True).status(doing) as shown:
            yield shown.update
    else:
        print(doing, file=sys.stderr)
        yield lambda text: None


def track(items: Sequence[Item], doing: str) -> Iterator[Item]:
    """Yield the items with a progress bar on standard error; plain lines where it is no terminal.

    Only rank 0 shows anything.
    """
    if os.environ.get("RANK", "0") != "0":
        yield from items
        return
    if sys.stderr.isatty():
        from rich.progress import track as rich_track

        yield from rich_track(items, description=doing, console=Console(stderr=True), transient=True)
        return
    print(f"{doing}: {len(items)} to do", file=sys.stderr)
    for done, item in enumerate(items, start=1):
        yield item
        if done == len(items) or done * 10 // len(items) > (done - 1) * 10 // len(items):
            print(f"{doing}: {done} of {len(items)}", file=sys.stderr)
