"""The best plan for a profiled chain on devices and links that are known: where to cut, and what to run.

For every number of micro-batches the chain is balanced for their size, and all orders that fit the memory
are predicted; the plan with the shortest step is taken, of those within 1% the one with the least memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.pipeline.balance import balance, each_limit
from plait.pipeline.network import Network
from plait.pipeline.orders import Family
from plait.pipeline.outlook import Outlook, Times
from plait.pipeline.placement import Size, unless_given
from plait.pipeline.plan import Forecast, PipelinePlan, Stage
from plait.pipeline.search import search
from plait.profile import Profile
from plait.units import parse_whole

_NEAR = 1.01


def plan(
    profile: Profile,
    n: int,
    *,
    global_batch: int,
    micro_batches: Sequence[int] | None = None,
    families: Sequence[Family] = ("kfkb", "depth", "capped"),
    speeds: Sequence[float] | None = None,
    memory_bytes: Size | Sequence[Size] | None = None,
    network: Network | None = None,
    cluster: Cluster | None = None,
) -> PipelinePlan:
    """Cut a chain into ``n`` stages and choose what they run; what is not given is as for ``balance``.

    ``micro_batches`` are the numbers to choose from, by default n, 2n, 4n and 8n where the batch has so many
    rows.
    """
    n, global_batch = parse_whole(n, setting="n"), parse_whole(global_batch, setting="global_batch")
    counts = [n, 2 * n, 4 * n, 8 * n]
    if micro_batches is not None:
        given = micro_batches if isinstance(micro_batches, Sequence) else [micro_batches]
        counts = [parse_whole(count, setting="micro_batches") for count in given]
    counts = [count for count in counts if count <= global_batch] or [global_batch]
    speeds, memory_bytes, network = unless_given(
        cluster, n, speeds=speeds, memory_bytes=memory_bytes, network=network
    )
    limits = each_limit(memory_bytes, n)
    network = Network.uniform(n) if network is None else network
    plans: list[PipelinePlan] = []
    refused: UsageError | None = None
    for count in counts:
        rows = -(-global_batch // count)
        try:
            cut = balance(
                profile,
                n,
                rows=rows,
                micro_batches=count,
                speeds=speeds,
                memory_bytes=memory_bytes,
                network=network,
            )
        except UsageError as error:
            refused = error
            continue
        times = Times()
        times.observe(rows, [load.forward_ms for load in cut.loads], [load.backward_ms for load in cut.loads])
        outlook = Outlook(times, network, cut.memories, limits)
        for candidate in search(outlook, n, global_batch, [count], families):
            prediction = outlook.prediction(candidate)
            forecast = Forecast(
                step_ms=prediction.step_ms,
                busy_ms=prediction.busy_ms,
                peak_bytes=outlook.peak_bytes(candidate),
            )
            stages = tuple(Stage(first=a, end=b) for a, b in pairwise([0, *cut.cuts, len(profile.blocks)]))
            plans.append(
                PipelinePlan(
                    stages=stages, order=candidate.order, global_batch=global_batch, forecast=forecast
                )
            )
    if not plans:
        assert refused is not None, "a balance that fits has 1F1B as a candidate"
        raise refused
    best_ms = min(one.forecast.step_ms for one in plans)
    close = [one for one in plans if one.forecast.step_ms <= _NEAR * best_ms]
    return min(close, key=lambda one: (sum(one.forecast.peak_bytes), one.forecast.step_ms))
