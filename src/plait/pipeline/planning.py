"""The best plan for a profiled chain on devices and links that are known: where to cut, and what to run.

For every number of micro-batches the chain is balanced for their size, and all orders that fit the memory
are predicted; the plan with the shortest step is taken, of those within 1% the one with the least memory.
Weights that several stages hold count on each of them, and the sum of their gradients at the end of a step
(:mod:`plait.pipeline.sharing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.pipeline.balance import Balance, balance, each_limit
from plait.pipeline.candidate import Candidate
from plait.pipeline.memory import fits, too_small
from plait.pipeline.network import Network
from plait.pipeline.orders import Family, one_f_one_b
from plait.pipeline.outlook import Outlook, Times
from plait.pipeline.placement import Size, unless_given
from plait.pipeline.plan import Forecast, PipelinePlan, Stage
from plait.pipeline.search import search
from plait.pipeline.sharing import copies_bytes, sharings, summed_ms, with_copies
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
    counts = [count for count in counts if n <= count <= global_batch]
    if not counts:  # the schedule needs a micro-batch for each stage
        raise UsageError(
            f"a batch of {global_batch} rows in {micro_batches or n} micro-batches for {n} stages",
            setting="micro_batches, global_batch",
            works=f"{n} micro-batches or more, and as many rows",
        )
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
            cut = cut_to_fit(
                profile, n, rows=rows, micro_batches=count, speeds=speeds, limits=limits, network=network
            )
        except UsageError as error:
            refused = error
            continue
        ends = (0, *cut.cuts, len(profile.blocks))
        shared = sharings(profile.blocks, ends)
        times = Times()
        times.observe(rows, [load.forward_ms for load in cut.loads], [load.backward_ms for load in cut.loads])
        outlook = Outlook(times, network, cut.memories, limits)
        for candidate in search(outlook, n, global_batch, [count], families):
            prediction = outlook.prediction(candidate)
            ends_ms = [actions[-1][3] for actions in prediction.actions]
            forecast = Forecast(
                step_ms=summed_ms(ends_ms, shared, network),
                busy_ms=prediction.busy_ms,
                peak_bytes=outlook.peak_bytes(candidate),
            )
            stages = tuple(Stage(first=a, end=b) for a, b in pairwise(ends))
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


def cut_to_fit(
    profile: Profile,
    n: int,
    *,
    rows: int,
    micro_batches: int,
    limits: Sequence[float],
    speeds: Sequence[float] | None = None,
    network: Network | None = None,
) -> Balance:
    """The stages of a chain for 1F1B, whose memory has room for copies of weights that they share.

    Where copies make a stage too large, the chain is cut anew with as much of its device left free.
    """
    candidate = Candidate(order=one_f_one_b(n, micro_batches), global_batch=rows * micro_batches)
    free = [0] * n
    refused: UsageError | None = None
    while True:
        room = [max(1.0, limit - kept) for limit, kept in zip(limits, free, strict=True)]
        try:
            cut = balance(
                profile,
                n,
                rows=rows,
                micro_batches=micro_batches,
                speeds=speeds,
                memory_bytes=room,
                network=network,
            )
        except UsageError as error:
            raise refused or error from None
        ends = (0, *cut.cuts, len(profile.blocks))
        cut = replace(cut, memories=with_copies(cut.memories, profile.blocks, ends))
        if fits(candidate, cut.memories, limits):
            return cut
        lacking = too_small([candidate], cut.memories, limits)
        refused = UsageError(lacking.what, setting="memory_bytes", works=lacking.works)
        copies = [copies_bytes(profile.blocks, *between) for between in pairwise(ends)]
        more = [max(one, other) for one, other in zip(free, copies, strict=True)]
        if more == free:
            raise refused
        free = more
