"""The machine that a run is on, as a cluster: detected, its link and disk measured once, and kept."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from plait.cluster import Cluster
from plait.destination import make_folder
from plait.errors import FileError
from plait.strategy.measuring import cache_folder, machine


def this_machine(*, devices: int | None, memory_bytes: int | None, directory: Path) -> Cluster:
    """This machine, with so many devices of so much memory each; None is all there is."""
    found = Cluster.detect(devices=devices, directory=directory)
    measured = _measured(found)
    # What is free changes from run to run; what a link carries does not.
    known = {tier.name: tier for tier in measured.tiers}
    tiers = tuple(
        replace(known[tier.name], capacity_bytes=tier.capacity_bytes, directory=tier.directory)
        if tier.name in known
        else tier
        for tier in found.tiers
    )
    own = tuple(
        each if memory_bytes is None else replace(each, memory_bytes=memory_bytes) for each in found.devices
    )
    return replace(found, devices=own, tiers=tiers, links=measured.links)


def _measured(found: Cluster) -> Cluster:
    host = found.hosts[0].name
    text = f"{machine()} {host} {len(found.devices)} {found.devices[0].kind}"
    folder = cache_folder().parent / "clusters"
    file = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.toml"
    if file.exists():
        try:
            return Cluster.load(file)
        except FileError:  # of another version
            file.unlink(missing_ok=True)
    measured = found.measure(("memory", "disk", "network"))
    make_folder(folder, setting="XDG_CACHE_HOME")
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        measured.save(part)
        part.replace(file)
    finally:  # a disk that is full leaves half of it
        part.unlink(missing_ok=True)
    return measured
