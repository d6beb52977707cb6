"""What a search has tried, in its task's folder: by trial, the settings that were searched over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from plait.document import fields_of, read_json
from plait.engine.record import write_whole
from plait.errors import FileError

FORMAT = "plait.trials/1"
FILE = "trials.json"


def save_trials(folder: Path, trials: Mapping[str, Mapping[str, object]]) -> None:
    """Write it, whole or not at all; what JSON cannot say becomes text. A full disk must not end a search."""
    with suppress(FileError):
        write_whole(
            folder / FILE, json.dumps({"format": FORMAT, "trials": trials}, indent=1, default=str) + "\n"
        )


def load_trials(folder: Path) -> dict[str, dict[str, Any]]:
    """Read it; empty where there is none."""
    file = folder / FILE
    if not file.exists():
        return {}
    works = "a folder under tasks/ of a run"
    found = fields_of(read_json(file, works=works, setting="folder"), format=FORMAT, source=str(file))
    trials = found.get("trials")
    if not isinstance(trials, dict) or not all(isinstance(values, dict) for values in trials.values()):
        raise FileError(f"{file}: field 'trials' is missing", setting="trials", works=works)
    return trials
