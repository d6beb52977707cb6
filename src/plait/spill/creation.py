"""Brings a shard's weights and buffers into being, straight in their segments.

The model as a whole never exists: each parameter is made by itself, from (seed, its name) as the constructor
would have initialised it, or read from safetensors files, and copied to its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait import deferred, weights
from plait.errors import FileError
from plait.spill.adopted import Adopted
from plait.spill.describe import construct
from plait.spill.segment import Entry
from plait.spill.units import Head, Report, Unit
from plait.spill.update import initial_state
from plait.spill.views import Views
from plait.tracing.graph import first_names


def create(adopted: Adopted, views: Views, unit: Unit, head: Head) -> Report:
    """Fill the segments that come to be with a shard."""
    homes, present = adopted.homes, {}
    segments = {segment.key: segment for segment in homes.persistent}
    for key in homes.created[unit.shard]:
        if key not in views:  # what is frozen was made by another job
            continue
        segment = segments[key]
        if "/moments" in key:
            present[key] = _create_state(adopted, views, key, segment.entries)
        elif "/buffers/" in key:
            _create_buffers(adopted, views, key, segment.entries)
        else:
            _create_parameters(adopted, views, key, segment.entries)
    return Report(present=present)


def _create_parameters(adopted: Adopted, views: Views, key: str, entries: Sequence[Entry]) -> None:
    strides = {p.name: p.stride for p in adopted.description.parameters}
    held = dict(adopted.chain.named_parameters())
    for entry in entries:
        place = views.entry(key, entry, strides[entry.name])
        if adopted.weights is not None:
            made = _read(adopted, entry)
        elif held[entry.name].is_meta:
            made = deferred.create(adopted.chain.model, [entry.name], seed=adopted.job.seed)[entry.name]
        else:  # the model's factory had it loaded
            made = held[entry.name].detach()
        place.copy_(made)


def _create_buffers(adopted: Adopted, views: Views, key: str, entries: Sequence[Entry]) -> None:
    model = adopted.chain.model
    if adopted.job.seed != adopted.traced.seed:  # some may be drawn at random
        model = construct(adopted.job)
    held = dict(model.named_buffers())
    known = {buffer.name: buffer for buffer in adopted.description.buffers}
    for entry in entries:
        from_file = adopted.weights is not None and known[entry.name].saved
        made = _read(adopted, entry) if from_file else held[entry.name]
        views.entry(key, entry, known[entry.name].stride).copy_(made)


def _read(adopted: Adopted, entry: Entry) -> torch.Tensor:
    """A tensor from the file that the job starts from, under any of its names."""
    assert adopted.weights is not None, "there is a file"
    others = [n for n, first in first_names(adopted.chain.model).items() if first == entry.name]
    found = weights.read(adopted.weights, [entry.name], aliases={entry.name: others})[entry.name]
    if tuple(found.shape) != entry.shape:
        raise FileError(
            f"{adopted.weights} has {entry.name!r} with shape {tuple(found.shape)}, and the model wants "
            f"{entry.shape}",
            setting="weights",
            works="weights of the same configuration",
        )
    return found


def _create_state(adopted: Adopted, views: Views, key: str, entries: Sequence[Entry]) -> str:
    """The state of an optimizer that makes it at once."""
    homes = adopted.homes
    by_name = {p.name: p for p in adopted.description.parameters}
    bits = []
    made: dict[str, dict[str, torch.Tensor]] = {}
    for entry in entries:
        name, _, kind = entry.name.rpartition("|")
        if name not in made:
            home = homes.parameters[name]
            made = {
                name: initial_state(
                    adopted.job, name, views.entry(home.key, home.entry, by_name[name].stride)
                )
            }
        found = made[name].get(kind)
        if found is not None:
            stride = by_name[name].stride if found.shape == by_name[name].shape else ()
            views.entry(key, entry, stride).copy_(found)
        bits.append("0" if found is None else "1")
    return "".join(bits)
