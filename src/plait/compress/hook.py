"""Compressed gradients in DistributedDataParallel: attach, and train as before.

    ddp = DistributedDataParallel(model)
    attachment = plait.compress.attach(ddp, bits=4)
    ...
    print(attachment.report())

DDP hands over a bucket of gradients as soon as it is complete and goes on with the backward pass; the
communication thread reduces it meanwhile. Parameters are told apart by what they are, not by where they lie
in a bucket, so buckets may be rebuilt. DDP cannot forget a hook, so it gets one that passes on to whatever is
attached at the time.
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from plait.compress.attachment import Attachment, Bucket, Hook
from plait.compress.compression import Compression
from plait.compress.given import expect
from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.compress.sharded import ShardedAttachment
    from plait.timeline import Timeline


class Trampoline:
    """The one hook that DDP has, whose target can change."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.target: Hook = self.plain

    def plain(self, bucket: Bucket) -> Future[torch.Tensor]:
        """What DDP does without a hook."""
        return allreduce_hook(self._group, bucket)


# DDP looks at these annotations, and wants its own class there.
def _pass_on(trampoline: Trampoline, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    return trampoline.target(bucket)


_trampolines: "weakref.WeakKeyDictionary[nn.Module, Trampoline]" = weakref.WeakKeyDictionary()


def attach(
    model: nn.Module,
    *,
    compression: Compression | None = None,
    timeline: "Timeline | None" = None,
    **fields: Any,
) -> "Attachment | ShardedAttachment":
    """Compress the gradients of a model in DistributedDataParallel or FSDP2 from now on.

    The keywords are the fields of :class:`~plait.compress.compression.Compression`: ``bits``, ``rules``,
    ``error_feedback`` and so on; ``compression`` gives them all at once. All workers call this together, with
    the same; a difference is an error on all of them. With a ``timeline``, packing, waiting and unpacking
    are recorded there.
    """
    if compression is not None and fields:
        raise UsageError(
            f"both a compression and {', '.join(fields)}", setting="compression", works="one of the two"
        )
    expect(model, nn.Module, setting="model", works="DistributedDataParallel(model)")
    expect(compression, Compression, None, setting="compression", works="Compression(bits=4)")
    if "bits" in fields and fields.get("codec") is not None:
        what = f"both {fields['bits']} bits and {fields['codec']}"
        raise UsageError(what, setting="codec", works="one of the two")
    chosen = Compression.of(fields) if compression is None else compression
    if isinstance(model, DistributedDataParallel):
        return attach_ddp(model, chosen, timeline)
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        from plait.compress.sharded import attach_fsdp

        attachment = attach_fsdp(model, chosen, timeline)
        model._plait_attachment = attachment  # type: ignore[assignment]  # which holds the model too
        return attachment
    raise UsageError(
        f"a {type(model).__name__} has no gradients to exchange",
        setting="model",
        works="DistributedDataParallel(model), or a model after fully_shard(model)",
    )


def attach_ddp(
    ddp: DistributedDataParallel, compression: Compression, timeline: "Timeline | None" = None
) -> Attachment:
    """Compress the gradients that a DistributedDataParallel exchanges."""
    trampoline = _trampolines.get(ddp)
    present = getattr(trampoline and trampoline.target, "__self__", None)
    if isinstance(present, Attachment):
        if present.automatic is None:
            raise UsageError(
                "gradients of this model are compressed already", setting="model", works="detach() it first"
            )
        present.detach()
    attachment = Attachment(ddp.module, ddp.process_group, compression, timeline)
    if trampoline is None:
        trampoline = Trampoline(ddp.process_group)
        try:
            ddp.register_comm_hook(trampoline, _pass_on)
        except RuntimeError as error:
            raise UsageError(
                f"this model's gradients have a hook already: {error}".splitlines()[0],
                setting="model",
                works="a DistributedDataParallel without register_comm_hook",
            ) from None
        _trampolines[ddp] = trampoline
    attachment.plain, trampoline.target = trampoline.plain, attachment.reduce
    attachment.on_detach = lambda: setattr(trampoline, "target", trampoline.plain)
    if isinstance(present, Attachment) and present.automatic is not None:
        present.automatic(attachment)
    return attachment


def attachment_of(model: nn.Module) -> "Attachment | ShardedAttachment | None":
    """What compresses the gradients of a model, also where the environment asked for it; None if nothing."""
    trampoline = _trampolines.get(model)
    if trampoline is None:
        return getattr(model, "_plait_attachment", None)
    attached = getattr(trampoline.target, "__self__", None)
    return attached if isinstance(attached, Attachment) else None


def hand_over(ddp: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> bool:
    """Let another hook have the gradients of a model that is attached; False where none is."""
    trampoline = _trampolines.get(ddp)
    if trampoline is None:
        return False
    attached = getattr(trampoline.target, "__self__", None)
    if isinstance(attached, Attachment):
        attached.detach()
    trampoline.target = lambda bucket: hook(state, bucket)
    return True
