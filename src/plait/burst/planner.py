"""Plans how wide each block of a chain runs, from its profile: no model, no device and no torch is needed.

With the global batch fixed, more devices make every share of rows smaller, and many blocks stop getting
faster while their gradients still have to be synchronised. So each block gets a width of its own, at the
price of moving rows where widths differ, and the devices that a block leaves out are free for other work
meanwhile. What there is to choose from is a frontier: the faster the step, the more device time it takes.

The model of a step is in :mod:`plait.burst.costs`, the search in :mod:`plait.burst.search`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from plait.burst.burst_plan import BurstPlan, Forecast
from plait.burst.candidates import candidates, checked
from plait.burst.costs import Costs, Floats, Places
from plait.burst.frontier import Frontier
from plait.burst.memory import Memory
from plait.burst.network import Network
from plait.burst.search import find
from plait.collective import Collective
from plait.errors import UsageError
from plait.profile import Profile
from plait.units import parse_bytes, parse_whole

MOST_DEVICES = 2**16
"""Of each plan and device it is said how long it is idle: beyond, that takes more memory than it is worth."""


def plan(
    profile: Profile,
    *,
    devices: int,
    batch: int,
    bandwidth: Any,
    latency: Any = 0.0,
    memory: Any = None,
    collective: Collective | None = None,
    widths: Sequence[int] | None = None,
    limit: float | None = None,
    deadline_ms: float | None = None,
    background_value: float | None = None,
) -> Frontier:
    """The frontier of plans for a profile on so many devices.

    ``batch`` is the global batch, in rows. ``bandwidth`` and ``latency`` lie between any two devices, as one
    figure (``"1gbit"``, ``"40us"``; numbers are bytes/s and seconds) or as a row for each device; ``memory``
    is that of each device, as one figure or a list. Gradients are reduced by ``collective``, by default in a
    ring. ``widths`` are what may be chosen; see :func:`plait.burst.candidates.candidates` for what is taken
    without.

    One of the last three says what ``chosen`` will be: the fastest plan within ``limit`` times the device
    time of one device, the cheapest plan before a deadline, or the best total with background work of some
    value.
    """
    devices = parse_whole(devices, setting="devices")
    batch = parse_whole(batch, setting="batch")
    if devices > MOST_DEVICES:
        raise UsageError(f"a plan for {devices} devices", setting="devices", works=f"1 to {MOST_DEVICES}")
    asked = {"limit": limit, "deadline_ms": deadline_ms, "background_value": background_value}
    choices = {name: figure for name, figure in asked.items() if figure is not None}
    if len(choices) > 1:
        raise UsageError(
            f"{' and '.join(choices)} are given", setting=next(iter(choices)), works="one of them"
        )
    for name, figure in choices.items():
        if not isinstance(figure, Real):
            raise UsageError(f"{name} is {figure!r}, which is no number", setting=name, works="2.0")
    if limit is not None and not limit >= 1:
        raise UsageError(
            f"a limit of {limit} allows less device time than one device alone takes",
            setting="limit",
            works="1",
        )
    network = Network.of(bandwidth, latency, devices=devices)
    blocks = len(profile.blocks)
    allowed = candidates(blocks, devices, batch) if widths is None else checked(widths, devices, batch)
    costs = Costs(profile, allowed, batch=batch, network=network, collective=collective)
    found = find(costs, Memory(costs, _limits(memory, devices)))
    single_ms = profile.step_ms(batch)
    names = tuple(block.name for block in profile.blocks)
    idle = _idle(costs, found.places, found.step_ms, devices)
    plans = tuple(
        BurstPlan(
            blocks=names,
            widths=tuple(costs.widths[places].tolist()),
            devices=devices,
            batch=batch,
            forecast=Forecast(
                step_ms=step_ms,
                device_ms=device_ms,
                single_ms=single_ms,
                idle_ms=tuple(idle_ms),
                gap=found.gap,
            ),
        )
        for places, step_ms, device_ms, idle_ms in zip(
            found.places, found.step_ms.tolist(), found.device_ms.tolist(), idle.tolist(), strict=True
        )
    )
    frontier = Frontier(plans=plans, gap=found.gap, remarks=_remarks(profile, batch, plans))
    for name, figure in choices.items():
        frontier = frontier.choosing(name, figure)
    return frontier


def _limits(memory: Any, devices: int) -> list[float]:
    """The memory of each device in bytes."""
    if memory is None:
        return [np.inf] * devices
    if isinstance(memory, (str, int, float)):
        return [parse_bytes(memory, setting="memory")] * devices
    given = [parse_bytes(one, setting="memory") for one in memory] if isinstance(memory, Iterable) else []
    if len(given) != devices:
        raise UsageError(
            f"the memory of {len(given)} devices for {devices}",
            setting="memory",
            works=f"{devices} sizes, or one",
        )
    return [float(one) for one in given]


def _idle(costs: Costs, places: Places, step_ms: Floats, devices: int) -> Floats:
    """[plan, device]: how long no block, no moving of rows and no waiting for the wire is on a device."""
    every = np.arange(costs.blocks)
    widths = costs.widths[places]
    busy = costs.busy[every, places]
    moving = costs.reshard[every[1:], places[:, :-1], places[:, 1:]]
    wider = np.maximum(widths[:, :-1], widths[:, 1:])
    tail = costs.score(places).tail_ms
    spans = np.concatenate([busy, moving, tail[:, None]], axis=1)
    upto = np.concatenate([widths, wider, widths[:, :1]], axis=1)
    taken = np.zeros((len(places), devices + 1))
    plan = np.repeat(np.arange(len(places)), spans.shape[1]).reshape(spans.shape)
    np.add.at(taken, (plan, upto), spans)  # a span of width w is on devices 0 to w-1
    on = np.cumsum(taken[:, ::-1], axis=1)[:, ::-1][:, 1:]
    found: Floats = np.maximum(0.0, step_ms[:, None] - on)
    return found


def _remarks(profile: Profile, batch: int, plans: Sequence[BurstPlan]) -> tuple[str, ...]:
    """What the plans rest on that was not measured."""
    widths = {width for plan in plans for width in plan.widths}
    sizes = {batch} | {size for width in widths for size in (batch // width, -(-batch // width))}
    found = (profile.extrapolates(size) for size in (min(sizes), max(sizes)))
    return tuple(dict.fromkeys(remark for remark in found if remark is not None))
