"""Hosts on one machine: network namespaces with shaped links, memory limits and pinned cores.

    from plait.lab import Lab

    with Lab(hosts=4, rate="1gbit", memory="2GiB") as lab:
        outcome = lab.run(["python", "train.py"])

Nothing here imports torch, and the names below are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.lazy import exports

if TYPE_CHECKING:
    from plait.lab.bandwidth import Transfer as Transfer
    from plait.lab.bandwidth import measure_bandwidth as measure_bandwidth
    from plait.lab.host import Host as Host
    from plait.lab.lab import Lab as Lab
    from plait.lab.leftover import Leftover as Leftover
    from plait.lab.leftover import clean as clean
    from plait.lab.memory import MemoryGroup as MemoryGroup
    from plait.lab.trace import Trace as Trace
    from plait.lab.traffic import Flow as Flow
    from plait.lab.workers import Outcome as Outcome

_HOME = {
    "Flow": "plait.lab.traffic",
    "Host": "plait.lab.host",
    "Lab": "plait.lab.lab",
    "Leftover": "plait.lab.leftover",
    "MemoryGroup": "plait.lab.memory",
    "Outcome": "plait.lab.workers",
    "Trace": "plait.lab.trace",
    "Transfer": "plait.lab.bandwidth",
    "clean": "plait.lab.leftover",
    "measure_bandwidth": "plait.lab.bandwidth",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = exports(__name__, _HOME)
