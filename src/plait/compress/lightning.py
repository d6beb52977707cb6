"""Compressed gradients in Lightning: a strategy in the place of its ``DDPStrategy``.

    trainer = lightning.Trainer(..., strategy=CompressedDDPStrategy(bits=4))

Checkpoints of the Trainer hold, beside the optimizers' states, what compression has to remember: a run that
is resumed goes on with the same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from plait.compress.compression import Compression
from plait.compress.hook import attach_ddp
from plait.errors import UsageError
from plait.extras import install

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(f"the strategy is for Lightning: {install('lightning')}") from error

if TYPE_CHECKING:
    from plait.compress.attachment import Attachment

STATE = "plait_compress"
"""The entry in Lightning's checkpoints."""


class CompressedDDPStrategy(DDPStrategy):
    """Lightning's DDP with compressed gradients.

    The keywords are the fields of :class:`~plait.compress.compression.Compression`, and all that
    ``DDPStrategy`` takes: ``CompressedDDPStrategy(bits=4, find_unused_parameters=True)``.
    """

    def __init__(self, **given: Any) -> None:
        if given.get("ddp_comm_hook") is not None:
            raise UsageError(
                "a communication hook, and gradients that are compressed by one",
                setting="ddp_comm_hook",
                works="None, or Lightning's own DDPStrategy",
            )
        known = {
            name
            for owner in (DDPStrategy, DistributedDataParallel)
            for name in inspect.signature(owner).parameters
        }
        self.compression = Compression.of({name: each for name, each in given.items() if name not in known})
        super().__init__(**{name: each for name, each in given.items() if name in known})
        self.attachment: Attachment | None = None
        """What compresses the gradients, while fitting and, for its report, afterwards."""

    def configure_ddp(self) -> None:
        """Wrap the model as Lightning does, and compress what it exchanges; on all workers together."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel), "it was just wrapped"
        self.attachment = attach_ddp(self.model, self.compression)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save with the state of compression, unless the weights alone are saved."""
        if self.attachment is not None and "optimizer_states" in checkpoint:
            checkpoint[STATE] = self.attachment.state_dict(everyone=True)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore what the next steps depend on: the optimizers, and compression where it was saved."""
        super().load_optimizer_state_dict(checkpoint)
        if self.attachment is not None and STATE in checkpoint:
            self.attachment.load_state_dict(checkpoint[STATE])
