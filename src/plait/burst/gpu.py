"""Background work on a GPU, behind the foreground there, too. By the book: there was no GPU to run it on.

- Low stream priority: CUDA's lowest is the default, 0, and the foreground may ask for a higher one (a
  negative number), so background work stays on streams of priority 0 (:func:`background_stream`), and the
  foreground takes :func:`foreground_stream`.
- A limit on outstanding work: a paused process has queued kernels that still run. :class:`Outstanding`
  lets the host run ahead of the device by a few steps at most.
- Collectives: kernels that wait for the network hold their multiprocessors. The multiplexer pauses the
  host process as on a CPU, which ends the background within the outstanding steps.
- Where an MPS server runs, its clients have priorities: 1 is below normal.

CUDA C++ Programming Guide, "Stream Priorities"; Multi-Process Service, "CUDA_MPS_CLIENT_PRIORITY".
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPE = "/tmp/nvidia-mps"


def environment() -> dict[str, str]:
    """What a background process is given so that an MPS server, if there is one, puts it behind."""
    pipe = Path(os.environ.get(_MPS_PIPE, _DEFAULT_PIPE))
    return {"CUDA_MPS_CLIENT_PRIORITY": "1"} if (pipe / "control").exists() else {}


def foreground_stream() -> torch.cuda.Stream:
    """A stream that goes before those of background work on the same GPU."""
    import torch

    return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


def background_stream() -> torch.cuda.Stream:
    """A stream of the lowest priority."""
    import torch

    return torch.cuda.Stream(priority=0)  # type: ignore[no-untyped-call]


class Outstanding:
    """Keeps the host at most ``steps`` ahead of the GPU; call it after each step."""

    def __init__(self, steps: int = 1) -> None:
        self._steps = steps
        self._events: deque[Any] = deque()

    def __call__(self) -> None:
        """Note the end of a step, and wait for the one that is too far back; nothing on a CPU."""
        import torch

        if not torch.cuda.is_available():
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
        if len(self._events) > self._steps:
            self._events.popleft().synchronize()
