"""Reading some of a model's tensors from safetensors files, without reading the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from plait.errors import FileError

_INDEX = "model.safetensors.index.json"


def read(
    path: str | Path, names: Iterable[str], *, aliases: Mapping[str, Iterable[str]], device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Read tensors by name from a safetensors file, or from a folder as Hugging Face saves it.

    A tied parameter may be stored under any of its names: ``aliases`` gives the others.
    """
    where = _where(Path(path))
    found: dict[str, torch.Tensor] = {}
    wanted: dict[Path, list[tuple[str, str]]] = {}
    for name in names:
        stored = next((n for n in (name, *aliases.get(name, ())) if n in where), None)
        if stored is None:
            raise FileError(
                f"{path} holds no tensor {name!r} among its {len(where)}",
                setting="weights",
                works="a file saved from this model",
            )
        wanted.setdefault(where[stored], []).append((name, stored))
    for file, pairs in wanted.items():
        with _opened(file, device) as opened:
            for name, stored in pairs:
                try:
                    found[name] = opened.get_tensor(stored)
                except SafetensorError as error:
                    raise _unreadable(file, error) from None
    return found


def _where(path: Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    if path.is_file():
        with _opened(path, "cpu") as opened:
            return dict.fromkeys(opened.keys(), path)
    index = path / _INDEX
    if index.is_file():
        try:
            listed = json.loads(index.read_text())["weight_map"]
            return {name: path / file for name, file in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"{index} is no index of tensors: {error}", setting="weights", works=_INDEX
            ) from None
    single = path / "model.safetensors"
    if single.is_file():
        return _where(single)
    works = "a .safetensors file, or the folder of one"
    raise FileError(f"no safetensors file at {path}", setting="weights", works=works)


def _opened(file: Path, device: str) -> Any:
    try:
        return safe_open(str(file), framework="pt", device=device)
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> FileError:
    works = "a whole safetensors file"
    return FileError(f"{file} cannot be read: {error}", setting="weights", works=works)
