"""Plays plans on a modelled cluster: what a run would take on hardware that one does not have.

The public names live here and are loaded on first use, so importing the package needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.lazy import exports

if TYPE_CHECKING:
    from plait.sim.adapting import play_adaptive as play_adaptive
    from plait.sim.background import Background as Background
    from plait.sim.burst import play_burst as play_burst
    from plait.sim.data import play_data as play_data
    from plait.sim.data_plan import DataPlan as DataPlan
    from plait.sim.device import Device as Device
    from plait.sim.device import Work as Work
    from plait.sim.network import Cross as Cross
    from plait.sim.network import Network as Network
    from plait.sim.pipeline import play_pipeline as play_pipeline
    from plait.sim.played import Played as Played
    from plait.sim.scene import Circumstances as Circumstances
    from plait.sim.simulation import Simulation as Simulation
    from plait.sim.spill import play_spill as play_spill
    from plait.sim.spilled_job import SpilledJob as SpilledJob
    from plait.sim.tier import Disk as Disk
    from plait.sim.tier import Memory as Memory
    from plait.sim.trace import Trace as Trace
    from plait.sim.trace import host_traces as host_traces

_HOME = {
    "Background": "plait.sim.background",
    "Circumstances": "plait.sim.scene",
    "Cross": "plait.sim.network",
    "DataPlan": "plait.sim.data_plan",
    "Device": "plait.sim.device",
    "Disk": "plait.sim.tier",
    "Memory": "plait.sim.tier",
    "Network": "plait.sim.network",
    "Played": "plait.sim.played",
    "Simulation": "plait.sim.simulation",
    "SpilledJob": "plait.sim.spilled_job",
    "Trace": "plait.sim.trace",
    "Work": "plait.sim.device",
    "host_traces": "plait.sim.trace",
    "play_adaptive": "plait.sim.adapting",
    "play_burst": "plait.sim.burst",
    "play_data": "plait.sim.data",
    "play_pipeline": "plait.sim.pipeline",
    "play_spill": "plait.sim.spill",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = exports(__name__, _HOME)
