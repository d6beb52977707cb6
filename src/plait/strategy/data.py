"""Data parallelism as options: every device has the whole model, gradients cross in fp32, 4 bits or auto.

The step on k devices, for the k that makes it shortest (or a smaller one that makes it hardly longer):

    step = forward of the largest share + backward with its reductions (plait.strategy.overlap) + optimizer

and a device holds

    2 or 3 x weights + optimizer state + share x saved activations + the largest transient

that is the weights, their gradients, with several devices the buckets into which DDP copies these, and, with
``auto``, as much again for the error feedback. Reductions are priced by :mod:`plait.collective` (fp32, in a
ring) and :mod:`plait.compress.price` (compressed), bucket by bucket as DDP makes them.

``auto`` chooses bits by the gradients it sees. Before there are any, every block's are taken to be normal and
of one size, which gives about the reference bits everywhere; where fp32 is faster, auto declines.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from plait.burst.candidates import candidates
from plait.burst.costs import Floats, at
from plait.compress.adapt import Adaptation
from plait.compress.allocation import Allocation, allocate
from plait.compress.observation import LayerError
from plait.errors import UsageError
from plait.profile import Profile
from plait.sim.data import ring_link
from plait.sim.data_plan import DataPlan, buckets
from plait.sim.reduction import Reduction, Ring, codec_of
from plait.strategy.codecs import Codecs, Mixed
from plait.strategy.demand import Demand
from plait.strategy.option import Bits, Option
from plait.strategy.overlap import Overlap, Piece, overlap
from plait.strategy.site import Site, covering, enough
from plait.units import format_bytes

BITS = 4
"""Of the compressed option."""
_TINY_BITS = 8
"""Blocks so small that they stay uncompressed are counted at these: next to nothing either way."""


def plain(demand: Demand, site: Site, *, exactly: bool = False) -> Option:
    """Data parallelism in fp32, on as many devices as pay; on one, plain training.

    With ``exactly``, here and below, on all devices of the site and no fewer.
    """
    return _best(demand, site, _Kind(name="data, fp32", bits=None, reduction=Ring(), least=1), exactly)


def compressed(
    demand: Demand, site: Site, codecs: Codecs, *, bits: int = BITS, exactly: bool = False
) -> Option:
    """Data parallelism with gradients in some bits."""
    reduction = Mixed(parts=((bits, 1.0),), codecs=codecs)
    kind = _Kind(name=f"data, {bits} bits", bits=bits, reduction=reduction, least=2, said=codecs.remark)
    return _best(demand, site, kind, exactly)


def automatic(demand: Demand, site: Site, codecs: Codecs, *, exactly: bool = False) -> Option:
    """Data parallelism with bits chosen layer by layer, or fp32 where that is faster."""
    reduction = mixed(demand.profile, codecs)
    if reduction is None:
        return _refused(demand, "data, auto", "the model has no weights whose gradients could be compressed")
    kinds = [
        _Kind(
            name="data, auto",
            bits="auto",
            reduction=reduction,
            least=2,
            feedback=True,
            said=(_ASSUMED, *codecs.remark),
        ),
        _Kind(name="data, auto", bits=None, reduction=Ring(), least=2, feedback=True, said=(_DECLINED,)),
    ]
    options = [_best(demand, site, kind, exactly) for kind in kinds]
    return min(options, key=lambda option: option.step_ms if option.step_ms is not None else np.inf)


_ASSUMED = "bits are those of gradients that are alike in all blocks; a run chooses by its own"
_DECLINED = "fp32 is faster here, so auto leaves gradients uncompressed"


@dataclass(frozen=True, kw_only=True)
class _Kind:
    name: str
    bits: Bits
    reduction: Reduction
    least: int
    """Devices."""
    feedback: bool = False
    said: tuple[str, ...] = ()


def data_bytes(demand: Demand, count: int, *, feedback: bool = False) -> int:
    """What the device with the largest share holds, of so many: DDP copies gradients into its buckets."""
    rows = demand.micro_rows(-(-demand.batch // count))
    return demand.held_bytes(rows, copies=2 + (count > 1) + feedback)


def _best(demand: Demand, site: Site, kind: _Kind, exactly: bool) -> Option:
    """The option with the number of devices that makes the step shortest, or hardly longer with fewer."""
    profile, batch = demand.profile, demand.batch
    known = [len(site)] if exactly else candidates(len(profile.blocks), len(site), batch)
    counts = [count for count in known if kind.least <= count <= batch]
    if not counts:
        least = len(site) if exactly else kind.least
        return _refused(
            demand,
            kind.name,
            f"it takes {least} devices and rows, and there are {len(site)} and {batch}",
            works=f"{least} devices and rows",
        )
    fitting = [count for count in counts if _fits(demand, site, count, kind)]
    if not fitting:
        return _too_small(demand, site, kind, counts)
    table = _Table(demand, fitting)
    found: list[Option] = []
    unknown: UsageError | None = None
    for count in fitting:
        try:
            found.append(_option(demand, site, kind, table, count))
        except UsageError as error:  # nothing is known of a link: fewer devices may do without it
            unknown = error
    if not found:
        assert unknown is not None, "each is found or refused"
        raise unknown
    best = Option.preferred(found)
    return best if unknown is None else replace(best, remarks=(*best.remarks, unknown.what))


def _fits(demand: Demand, site: Site, count: int, kind: _Kind) -> bool:
    return data_bytes(demand, count, feedback=kind.feedback) <= min(site.budgets[:count])


class _Table:
    """Forward and backward of every block at the shares that there may be, [block, rows]."""

    def __init__(self, demand: Demand, counts: Sequence[int]) -> None:
        shares = {size for count in counts for size in (demand.batch // count, -(-demand.batch // count))}
        sizes = sorted({rows for share in shares for rows in demand.micro_batches(share)})
        self._places = {rows: place for place, rows in enumerate(sizes)}
        self._demand = demand
        self._forward = at(demand.profile, sizes, "forward")
        self._backward = at(demand.profile, sizes, "backward")

    def before_ms(self, share: int) -> float:
        """Of a share of rows, all that comes before the last backward: gradients are reduced in that one."""
        places = [self._places[rows] for rows in self._demand.micro_batches(share)]
        return float(self._forward[:, places].sum() + self._backward[:, places[:-1]].sum())

    def last(self, share: int) -> Floats:
        """By block, when the last backward of a share has come through it."""
        backward = self._backward[:, self._places[self._demand.micro_batches(share)[-1]]]
        found: Floats = np.cumsum(backward[::-1])[::-1]
        return found


def _option(demand: Demand, site: Site, kind: _Kind, table: _Table, count: int) -> Option:
    profile = demand.profile
    plan = DataPlan(devices=count, batch=demand.batch, bits=kind.bits, accumulate=demand.accumulate)
    kinds = dict.fromkeys(zip(plan.rows, site.speeds[:count], strict=True))
    before_ms = max(table.before_ms(rows) / speed for rows, speed in kinds)
    # Devices need not be equally fast: a bucket is reduced when the last of them has it ready.
    ends = [(table.before_ms(rows) + table.last(rows)) / speed - before_ms for rows, speed in kinds]
    ready: Floats = np.max(ends, axis=0)
    done = _overlap(profile, plan, site, kind.reduction, ready)
    optimizer_ms = sum(b.optimizer_milliseconds for b in profile.blocks) / site.slowest(count)
    step_ms = before_ms + done.end_ms + optimizer_ms
    sizes = [bucket.gradient_bytes for bucket in buckets(plan, profile)] if count > 1 else []
    wire = count * sum(kind.reduction.wire_bytes(size, count) for size in sizes)
    busy_ms = sum(kind.reduction.busy_ms(size, count) for size in sizes if size) / site.slowest(count)
    idle_ms = max(0.0, done.wait_ms - (busy_ms - done.slowed_ms))
    rows = [demand.micro_rows(share) for share in plan.rows]
    return Option(
        strategy="data",
        name=kind.name,
        batch=demand.batch,
        step_ms=step_ms,
        memory_bytes={
            name: demand.held_bytes(size, copies=2 + (count > 1) + kind.feedback)
            for name, size in zip(site.names, rows, strict=False)
        },
        budget_bytes=dict(zip(site.names[:count], site.budgets, strict=False)),
        wire_bytes=wire,
        parts_ms={
            "compute": before_ms + float(ready[0]),
            "codec": done.slowed_ms,
            "wire": done.wait_ms,
            "optimizer": optimizer_ms,
        },
        idle_ms={name: idle_ms if i < count else step_ms for i, name in enumerate(site.names)},
        plan=plan,
        collective=kind.reduction,
        bits=kind.bits,
        remarks=(*kind.said, *covering(profile, [min(rows), max(rows)])),
    )


def _overlap(profile: Profile, plan: DataPlan, site: Site, reduction: Reduction, ready: Floats) -> Overlap:
    """Backward and what its buckets take; ``ready`` is when each block's backward has ended."""
    pieces, before_ms = [], 0.0
    link = ring_link(site.cluster, site.names[: plan.devices]) if plan.devices > 1 else None
    for bucket in buckets(plan, profile):
        compute_ms = float(ready[bucket.first]) - before_ms
        before_ms = float(ready[bucket.first])
        size = bucket.gradient_bytes
        if link is None or not size:
            pieces.append(Piece(compute_ms))
            continue
        busy_ms = reduction.busy_ms(size, plan.devices) / site.slowest(plan.devices)
        sync_ms = max(busy_ms, reduction.estimate_ms(size, plan.devices, link))
        pieces.append(Piece(compute_ms, sync_ms, busy_ms))
    return overlap(pieces)


def _too_small(demand: Demand, site: Site, kind: _Kind, counts: Sequence[int]) -> Option:
    """The count that lacks least."""

    def lacks(count: int) -> int:
        return data_bytes(demand, count, feedback=kind.feedback) - min(site.budgets[:count])

    count = min(counts, key=lacks)
    budget = min(site.budgets[:count])
    need, rows = lacks(count) + budget, demand.micro_rows(-(-demand.batch // count))
    weights = sum(block.parameter_bytes for block in demand.profile.blocks)
    return _refused(
        demand,
        kind.name,
        f"a device would hold {format_bytes(need)} for {rows} rows on {count} "
        f"device{'s' * (count > 1)}, and may hold {format_bytes(budget)}; the weights alone are "
        f"{format_bytes(weights)}, and they are there with gradients and optimizer state on each device",
        works=f"{enough(need)} of memory a device",
    )


def _refused(demand: Demand, name: str, why: str, works: str | None = None) -> Option:
    return Option(strategy="data", name=name, batch=demand.batch, why_not=why, works=works)


# --- auto ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _layer(count: int, name: str, widths: tuple[int, ...]) -> LayerError:
    codecs = [codec_of(bits) for bits in widths]
    made = [codec.estimate(count) for codec in codecs]
    return LayerError(
        name=name,
        count=count,
        widths=widths,
        squared_error=tuple(count * one.relative_squared_error for one in made),
        payload_bytes=tuple(one.payload_bytes for one in made),
        exact_bytes=4 * count,
        squared_norm=float(count),
    )


def allocation(profile: Profile) -> Allocation | None:
    """The bits of blocks whose gradients are alike, as auto would choose them; None without weights."""
    adaptation = Adaptation()
    layers = [
        _layer(-(-block.parameter_bytes // 4), block.name, adaptation.widths)
        for block in profile.blocks
        if block.parameter_bytes
    ]
    if not layers:
        return None
    alpha = adaptation.alpha * (1 - adaptation.margin)
    return allocate(layers, alpha, reference_bits=adaptation.reference_bits, states=256)


def mixed(profile: Profile, codecs: Codecs) -> Mixed | None:
    """What sends gradients in the bits that auto would choose; None without weights."""
    chosen = allocation(profile)
    if chosen is None:
        return None
    counts: Counter[int] = Counter()
    for block in profile.blocks:
        if block.parameter_bytes:
            bits = chosen.bits[block.name]
            counts[_TINY_BITS if bits is None else bits] += block.parameter_bytes
    total = sum(counts.values())
    parts = tuple((bits, size / total) for bits, size in sorted(counts.items()))
    return Mixed(parts=parts, codecs=codecs)
