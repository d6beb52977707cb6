"""Compression under FSDP2: gradients in few bits on their way to the worker that holds their part.

    fully_shard(model)
    attachment = attach_fsdp(model, Compression(bits=4))

- **Gradients** are sent by a compressed reduce-scatter. What a worker adds up and keeps is not compressed
  again, so there is one rounding where an all-reduce has two.
- **Weights** are gathered as torch does it, or with ``gather_bits``. These are rounded to the nearest: the
  same weights give the same bytes, so forward and backward pass agree, on all workers. The optimizer goes on
  with the exact ones.
- **Hybrid sharding** adds an all-reduce among the workers that hold the same part; it is compressed too.

Norms, biases and small parameters stay exact in all three. There is no error feedback: a worker would have to
remember what was lost of the whole model's gradient, which is what sharding saves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from plait.compress import communicator
from plait.compress.call import stop_recording
from plait.compress.compression import NEEDS_FEEDBACK, Compression
from plait.compress.given import entry, expect, saved
from plait.compress.report import Report, Summary
from plait.compress.rules import EXACT, select
from plait.compress.shard_group import agree_all, groups_of
from plait.compress.shard_traffic import ShardTraffic
from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.timeline import Timeline

FORMAT = "plait.compress.sharded/1"
_log = logging.getLogger(__name__)


def attach_fsdp(
    module: nn.Module, compression: Compression, timeline: Timeline | None = None
) -> ShardedAttachment:
    """Compress what a sharded model sends; called by all workers, after all calls of ``fully_shard``."""
    _check(compression)
    groups = groups_of(module)
    everything = [each.parameter for group in groups for each in group.parameters]
    trainable = [each.parameter for group in groups for each in group.parameters if each.trainable]
    smallest = compression.smallest
    chosen = select(trainable, compression.bits, compression.rules, smallest=smallest)
    bits = {each.parameter.name: int(each.bits) for each in chosen}
    weights: dict[str, int] = {}
    if compression.gather_bits is not None:
        # Bits of a rule are for gradients, but who says "exact" of a parameter means its weights too.
        exact = [rule for rule in compression.rules if rule.bits == EXACT]
        selected = select(everything, compression.gather_bits, exact, smallest=smallest)
        weights = {each.parameter.name: int(each.bits) for each in selected}
    agree_all(groups, compression.facts(), compression.settings.timeout_s)
    if timeline is not None:
        communicator.record(timeline)
    traffics = [ShardTraffic(group, compression, bits, weights) for group in groups]
    if compression.decline:
        for traffic in traffics:
            traffic.decline()
    attachment = ShardedAttachment(traffics, timeline)
    if dist.get_rank() == 0:
        _log.info("%s", attachment)
    return attachment


@dataclass(frozen=True, kw_only=True)
class ShardedSummary(Summary):
    """What compression did to a sharded model; ``total`` is the sum of the three exchanges."""

    gather_bits: dict[str, int]
    """In force for weights, by parameter; empty where torch gathers them."""
    scatter: Report
    """The reduce-scatter of gradients."""
    gather: Report
    """The all-gather of weights."""
    reduce: Report
    """The all-reduce among replicas."""

    @property
    def nothing_pays(self) -> bool:
        """Whether neither gradients nor weights are compressed, because that is faster."""
        return super().nothing_pays and set(self.gather_bits.values()) <= {EXACT}

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        reports = {each.name: getattr(self, each.name) for each in fields(self)}
        return super().to_json() | {
            name: report.to_json() for name, report in reports.items() if isinstance(report, Report)
        }


class ShardedAttachment:
    """Compresses what one sharded model sends; made by :func:`plait.compress.attach`."""

    def __init__(self, traffics: Sequence[ShardTraffic], timeline: Timeline | None = None) -> None:
        self._traffics, self._timeline = tuple(traffics), timeline
        self._attached = True
        for traffic in self._traffics:
            traffic.install()

    @property
    def bits(self) -> dict[str, int]:
        """The bits in force for gradients, by parameter; 32 is uncompressed."""
        return {name: bits for traffic in self._traffics for name, bits in traffic.bits.items()}

    @property
    def gather_bits(self) -> dict[str, int]:
        """The bits in force for weights, by parameter; empty where torch gathers them."""
        return {name: bits for traffic in self._traffics for name, bits in traffic.gather_bits.items()}

    @property
    def declined(self) -> frozenset[int]:
        """The widths that are not used, somewhere at least, because no compression is faster."""
        every = (each for traffic in self._traffics for each in traffic.declined.values())
        return frozenset(bits for widths in every for bits in widths)

    @property
    def memory_bytes(self) -> int:
        """What buffers of messages have come to; nothing else is kept between steps."""
        return communicator.memory_bytes()

    def report(self) -> ShardedSummary:
        """What compression saved and took so far, on this worker."""
        sums: dict[str, Any] = {each: Report() for each in ("scatter", "gather", "reduce", "total")}
        for traffic in self._traffics:
            for exchange, report in traffic.reports().items():
                sums[exchange].add(report)
                sums["total"].add(report)
        measured = [dict(traffic.errors) for traffic in self._traffics]
        return ShardedSummary(
            steps=max((traffic.step for traffic in self._traffics), default=0),
            bits=self.bits,
            gather_bits=self.gather_bits,
            errors={name: error for errors in measured for name, error in errors.items()},
            exposed_s=sum(traffic.exposed_s for traffic in self._traffics),
            memory_bytes=self.memory_bytes,
            declined=tuple(sorted(self.declined)),
            **sums,
        )

    def __str__(self) -> str:
        lossy = [bits for bits in self.bits.values() if bits != EXACT]
        weights = [bits for bits in self.gather_bits.values() if bits != EXACT]
        if not lossy and not weights:
            why = "uncompressed is faster on this network" if self.declined else "no parameter is selected"
            return f"plait leaves all {len(self.bits)} parameters of a sharded model uncompressed: {why}"
        return (
            f"plait compresses gradients of {len(lossy)} of {len(self.bits)} parameters of a sharded model, "
            f"and weights of {len(weights)}"
        )

    def detach(self) -> None:
        """Stop compressing: FSDP does what it did before."""
        if self._attached:
            self._attached = False
            for traffic in self._traffics:
                traffic.group.replace()
            stop_recording(self._timeline)

    def state_dict(self, *, everyone: bool = False, to: int | None = None) -> dict[str, Any]:
        """What a checkpoint needs, so that a resumed run has the same bits.

        All workers have the same, and so has a world of another size: ``everyone`` and ``to`` change nothing.
        """
        groups = {traffic.group.name: traffic.state_dict() for traffic in self._traffics}
        return {"format": FORMAT, "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        groups = entry(saved(state, FORMAT), "groups", Mapping)
        own = {traffic.group.name: traffic for traffic in self._traffics}
        for name in [*groups, *own]:
            if (name in groups) != (name in own):
                raise UsageError(
                    f"only the {'state' if name in groups else 'model'} has a sharded module {name!r}",
                    setting="state",
                    works=f"that of a model with {', '.join(map(repr, own))}",
                )
        for name, traffic in own.items():
            traffic.check_state(groups[name])
        for name, traffic in own.items():
            traffic.load_state_dict(groups[name])
            if self._attached:
                traffic.install()


def _check(compression: Compression) -> None:
    """Refuse what sharding cannot have."""
    expect(compression, Compression, setting="compression", works="Compression(bits=4)")
    given = [("bits", compression.bits), *((f"rules, {rule}", rule.bits) for rule in compression.rules)]
    if compression.replay is not None:
        raise UsageError("a schedule of bits for a sharded model", setting="replay", works="replay=None")
    if compression.error_feedback:
        raise UsageError(
            "error feedback in a sharded model would keep its whole gradient on every worker",
            setting="error_feedback",
            works="error_feedback=False, with bits=4 or more",
        )
    if not getattr(compression.codec, "unbiased", True) and compression.error_feedback is None:
        raise UsageError(
            f"{compression.codec} in a sharded model, where there is no error feedback",
            setting="codec",
            works="codec=None, or error_feedback=False to go without",
        )
    for setting, bits in given:
        if bits == "auto":
            raise UsageError('bits="auto" in a sharded model', setting=setting, works="bits=4")
        if bits < NEEDS_FEEDBACK and compression.error_feedback is None:
            raise UsageError(
                f"{bits} bits in a sharded model, where there is no error feedback",
                setting=setting,
                works=f"bits={NEEDS_FEEDBACK}, or error_feedback=False to go without",
            )
