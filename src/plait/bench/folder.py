"""The folder of a report: Markdown, JSON, a page and its pictures, written again after every question."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from plait.bench.comparison import Comparison
from plait.bench.markdown import markdown
from plait.bench.suite import FILE, Suite
from plait.bench.summary import LIMITS, RATIOS, pictures, sections, title
from plait.destination import make_folder, not_written
from plait.errors import FileError
from plait.page import page

RUNS = Path("runs")
"""Where reports go by default."""
PICTURES = {RATIOS: "ratios.svg", LIMITS: "limits.svg"}
FILES = (FILE, "report.md", "report.html", *PICTURES.values())


def new_folder(path: Path | None = None) -> Path:
    """Make the folder of a new report; None is the first of runs/bench-DATE, runs/bench-DATE-2, ... left."""
    folder = _unused() if path is None else path
    there = [name for name in FILES if (folder / name).exists()]
    if there:
        raise FileError(
            f"{folder} has a {there[0]} already, which would be overwritten",
            setting="--report",
            works="a folder that is new or empty",
        )
    make_folder(folder, setting="--report")
    return folder


def _unused() -> Path:
    base = f"bench-{datetime.now(UTC):%Y-%m-%d}"
    number = 1
    while (found := RUNS / (base if number == 1 else f"{base}-{number}")).exists():
        number += 1
    return found


def write_report(folder: Path, suite: Suite, comparison: Comparison | None = None) -> None:
    """Write all files, each at once: whoever reads one meanwhile, or after a crash, finds it whole."""
    data = suite.to_json()
    if comparison is not None:
        data["comparison"] = comparison.to_json()
    heading, body = title(suite), sections(suite, comparison)
    texts = {
        FILE: json.dumps(data, indent=1) + "\n",
        "report.md": markdown(heading, body, PICTURES),
        "report.html": page(heading, body),
        **{PICTURES[picture.title]: picture.svg() + "\n" for picture in pictures(suite)},
    }
    for name, text in texts.items():
        unready = folder / f".{name}"
        try:
            unready.write_text(text, encoding="utf-8")
            os.replace(unready, folder / name)
        except OSError as error:
            raise not_written(folder / name, error, setting="--report") from None
        finally:
            with suppress(OSError):
                unready.unlink(missing_ok=True)
