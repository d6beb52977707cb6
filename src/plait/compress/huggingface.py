"""Compressed gradients in the Trainer of Hugging Face: one callback.

    trainer = Trainer(..., callbacks=[CompressCallback(bits=4)])

The Trainer shows its callbacks the model itself, not the DistributedDataParallel around it. So the callback
waits for the first module that is called while training and has the model inside; that is what computes, on
all workers together, before any gradient is there. A model in FSDP2 is shown as it is.

Checkpoints of the Trainer get a file more, with what compression has to remember: a run that is resumed goes
on with the same bits.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from plait.compress.attachment import Attachment
from plait.compress.compression import Compression
from plait.compress.hook import attach, attachment_of
from plait.errors import UsageError
from plait.extras import install

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError(f"the callback is for Hugging Face's Trainer: {install('hf')}") from error

if TYPE_CHECKING:
    from plait.compress.sharded import ShardedAttachment

STATE = "plait_compress.pt"
"""The file in the Trainer's checkpoints."""
_log = logging.getLogger(__name__)


class CompressCallback(TrainerCallback):
    """Compresses the gradients that a Trainer's workers exchange, and puts what that saves into its log.

    The keywords are the fields of :class:`~plait.compress.compression.Compression`. Every entry of the log
    gets ``compress_bits`` (sent for each number, of 32), ``compress_sent_bytes`` and ``compress_plain_bytes``
    (of one worker, since its first step). With a single process there is nothing to compress, and nothing is.
    """

    def __init__(self, **fields: Any) -> None:
        self.compression = Compression.of(fields)
        self.attachment: Attachment | ShardedAttachment | None = None
        """What compresses the gradients, from the first forward pass on."""
        self._waiting: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Wait for the first forward pass in training."""
        if args.world_size < 2:
            _log.info("one process trains alone: there are no gradients to exchange")
            return
        model: nn.Module = others["model"]
        folder = _folder(args, state) if state.global_step else None
        if any(isinstance(part, FSDPModule) for part in model.modules()):
            self._attach(model, folder)
            return

        def first(module: nn.Module, inputs: object) -> None:
            called = getattr(module, "_orig_mod", module)  # which torch.compile may be around
            if isinstance(called, DistributedDataParallel) and any(p is model for p in called.modules()):
                self._stop_waiting()
                self._attach(called, folder)

        self._stop_waiting()
        self._waiting = register_module_forward_pre_hook(first)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Refuse to go on where a whole step has exchanged nothing that can be compressed."""
        if self._waiting is not None:
            self._stop_waiting()
            raise UsageError(
                f"{args.world_size} workers have trained a step without DistributedDataParallel or FSDP2: "
                "nothing was compressed",
                setting="callbacks",
                works="a Trainer started by torchrun, without DeepSpeed and FSDP's first version",
            )

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Add what compression sends and saves to an entry of the log."""
        logs: dict[str, Any] = others["logs"]
        if self.attachment is None or not {"loss", "train_loss"} & logs.keys():
            return
        report = self.attachment.report()
        facts = {
            "compress_bits": round(report.mean_bits, 3),
            "compress_sent_bytes": report.total.sent_bytes,
            "compress_plain_bytes": report.total.plain_bytes,
        }
        logs.update(facts)
        state.log_history[-1].update(facts)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Put the state of compression beside the optimizer's; all workers come here together."""
        if self.attachment is None or args.save_only_model:
            return
        attached, folder = self.attachment, _folder(args, state)
        whole = {"everyone": True} if isinstance(attached, Attachment) else {}
        saved = attached.state_dict(**whole)
        if args.should_save and folder.is_dir():
            torch.save(saved, folder / STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The attachment stays, with its report; another run of the same Trainer goes on with it."""
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None

    def _attach(self, model: nn.Module, folder: Path | None) -> None:
        if self.attachment is None or attachment_of(model) is not self.attachment:
            self.attachment = attach(model, compression=self.compression)
        if folder is not None:
            state = _read(folder / STATE)
            if state is not None:
                self.attachment.load_state_dict(state)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _read(file: Path) -> Any:
    """What the first worker finds, on all workers: they must not differ in where they begin."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        if file.exists():
            found = [torch.load(file, map_location="cpu", weights_only=True)]
        else:
            _log.warning("there is no %s: error feedback and bits begin anew", file)
    dist.broadcast_object_list(found)
    return found[0]
