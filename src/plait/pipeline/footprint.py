"""What a stage really holds: resident memory on a CPU, allocated memory on a GPU, and what autograd saves.

The sizes that decide which orders fit are measured in training itself: what is there before a step, what the
forward of one micro-batch leaves behind for its backward, and the peak of each step, against which the sum of
the parts is checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plait.compat import storage_key
from plait.heap import return_freed
from plait.pipeline.candidate import Candidate
from plait.pipeline.memory import StageMemory, stage_bytes

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CALIBRATED_STEP = 2
"""By then the optimizer has made its state, and libraries theirs."""
_SETTLED_STEPS = 3
"""What is there before a step is looked at in the first ones."""
_EVERY_STEPS = 64
"""So often is looked again at what is there before a step."""


class Gauge:
    """How much memory is in use now, and was at most since it was last asked to begin."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def follow(self) -> None:
        """From now on let memory in use follow the tensors in use: what is freed goes back at once.

        The C library would keep large tensors for later ones of the same size, and a limit would be passed by
        what it keeps. This holds for the whole process, which pays with a page fault for each new page.
        """
        if self._device is None:
            return_freed()

    def begin(self, *, trim: bool = False) -> int:
        """Bytes in use now; with ``trim``, memory that the C library merely keeps is given back first."""
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        if trim:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            _CLEAR.write_text("5")  # the peak is forgotten
        return _field("VmRSS")

    def peak(self) -> int:
        """Bytes in use at most since ``begin``."""
        if self._device is not None:
            return torch.cuda.max_memory_allocated(self._device)
        return _field("VmHWM")


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise OSError(f"{_STATUS} has no {name}")


class Footprint:
    """The sizes of one stage, as its steps show them."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage
        self._gauge = Gauge(torch.device(stage.device))
        self._steps = 0
        self._saved: dict[int, int] = {}
        self.memory = StageMemory()
        """What is known so far."""
        self.peak_bytes = 0
        """At most in use during the last step."""

    def begin(self, *, limited: bool) -> None:
        """A step begins; ``limited``: memory is to be kept within a limit, and not only looked at."""
        if limited:
            self._gauge.follow()
        self._steps += 1
        look = self._steps <= _SETTLED_STEPS or self._steps % _EVERY_STEPS == 0
        resident = self._gauge.begin(trim=look)
        if look:
            learning = [p for p in self._stage.submod.parameters() if p.requires_grad]
            to_come = sum(parameter.nbytes for parameter in learning if parameter.grad is None)
            self.memory = replace(self.memory, static_bytes=resident + to_come)

    def end(self, candidate: Candidate) -> None:
        """A step of the candidate has ended: what it took beyond the sum of the parts is a part too."""
        self.peak_bytes = self._gauge.peak()
        beyond = self.peak_bytes - stage_bytes(candidate, self._stage.stage_index, self.memory)
        if self._steps == _CALIBRATED_STEP and beyond > 0:
            # The weights and what belongs to them are there: this is what a pass needs for a moment.
            self.memory = replace(self.memory, transient_bytes_per_row=beyond / candidate.rows)
        elif self._steps > _CALIBRATED_STEP and beyond > 0:
            self.memory = replace(self.memory, transient_bytes=self.memory.transient_bytes + beyond)

    @contextmanager
    def first_forward(self) -> Iterator[None]:
        """Count what autograd saves in the forward of one micro-batch, parameters apart."""
        self._saved.clear()
        own = {storage_key(p) for p in self._stage.submod.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if storage_key(tensor) not in own:
                self._saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield

    def after_first_forward(
        self, rows: int, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]
    ) -> None:
        """Sizes for one row, from a micro-batch of so many: what was received, saved, and sent."""
        for tensor in (*received, *sent):
            self._saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        self.memory = replace(
            self.memory,
            saved_bytes_per_row=sum(self._saved.values()) / rows,
            input_bytes_per_row=sum(tensor.nbytes for tensor in received) / rows,
            output_bytes_per_row=sum(tensor.nbytes for tensor in sent) / rows,
        )
        self._saved.clear()
