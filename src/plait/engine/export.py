"""The weights of a checkpoint as a safetensors file, which any program that knows the model reads.

The names are those of the model's ``state_dict``. A tied weight is there once, under its first name, with the
others in the file's metadata, as ``safetensors.torch.save_model`` writes and ``load_model`` reads it. (Jobs
that spill write theirs by themselves, in pieces: :mod:`plait.spill.export`.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait import checkpoint
from plait.errors import FileError

if TYPE_CHECKING:
    import torch

NAME = "model.safetensors"
"""What the file is called beside its checkpoint."""


def export(source: str | Path, path: str | Path | None = None) -> Path:
    """Write the weights of a checkpoint, or of the one in a folder; by default beside it."""
    file = checkpoint.find(source)
    model = checkpoint.load(file).get("model")
    if not isinstance(model, Mapping) or not model:
        raise FileError(
            f"checkpoint {file} has no model: it is not one of a job",
            setting="checkpoint",
            works="a checkpoint that a trainer wrote",
        )
    return save_weights(model, file.with_name(NAME) if path is None else Path(path))


def save_weights(model: Mapping[str, Any], path: Path) -> Path:
    """Write a model's ``state_dict``; the file is whole or not there, and what was there stays until then."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    kept, aliases = _untied(model)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        save_file(kept, partial, metadata={"format": "pt", **aliases})
        _flush(partial)
        partial.replace(path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:  # which wraps what the disk refuses
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise FileError(
            f"{path} cannot be written: {reason}",
            setting="directory",
            works="a folder that may be written, on a disk with room for the weights",
        ) from None
    return path


def _untied(model: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor under the first of its names, in memory of its own; and the other names with that one."""
    import torch

    kept: dict[str, torch.Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.items():
        if not isinstance(tensor, torch.Tensor):  # what a module keeps by get_extra_state
            continue
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and first.setdefault(same, name) != name:
            aliases[name] = first[same]
        else:
            alone = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
            kept[name] = tensor if alone else tensor.detach().cpu().contiguous().clone()
    return kept, aliases


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
