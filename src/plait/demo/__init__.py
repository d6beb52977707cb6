"""What ``plait demo`` shows: one act a strand, each a real run that prints what it measured."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Act:
    """A part of the demo: ``module.act(directory)`` plays it and prints as it goes."""

    name: str
    title: str
    module: str

    def play(self, directory: Path) -> None:
        """Run it; what it writes goes into the directory."""
        importlib.import_module(self.module).act(directory)


ACTS = (
    Act("chain", "A model as a chain: GPT-2 learns English block by block", "plait.demo.chain"),
    Act("compress", "A thin wire: gradients in 4 bits between two hosts", "plait.demo.compress"),
    Act("spill", "A small memory: four GPT-2s take turns in 1.5 GiB", "plait.demo.spill"),
    Act("pipeline", "A shared network: GPT-2 in two stages regroups micro-batches", "plait.demo.pipeline"),
    Act("burst", "Idle devices: layers as wide as they pay, a second job in the gaps", "plait.demo.burst"),
    Act("run", "All in one call: a GPT, a sweep under a memory budget, a job behind them", "plait.demo.run"),
)
