"""A pipeline as an option: the fastest plan of :mod:`plait.pipeline.planning` over numbers of stages.

Every number of stages is planned with 1F1B, which takes little to predict and holds least; for the two that
are fastest so, all orders are looked at, with half, as many and twice as many micro-batches.

A stage updates its weights when it has its gradients, while stages before it still go back; only the first
one's update follows on all. So a step is the plan's forecast and the first stage's update, unless another's
is so long that the next step waits for it. What of that comes out, the simulator says, which plays the plans
among which the last choice is made. What a stage holds is that of :mod:`plait.pipeline.memory`: its weights,
gradients and optimizer state, copies of weights that it shares, the activations of the micro-batches in
flight, what is being received and sent, and the largest transient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.pipeline.balance import wire_bytes_per_row
from plait.pipeline.orders import Family
from plait.pipeline.plan import PipelinePlan
from plait.pipeline.planning import plan as planned
from plait.pipeline.search import ladder
from plait.profile import Profile
from plait.sim.pipeline import play_pipeline
from plait.sim.staging import Staging
from plait.strategy.demand import Demand
from plait.strategy.figure import readable
from plait.strategy.option import Option
from plait.strategy.site import Site, covering

MOST_STAGES = 64
"""Longer pipelines are not looked at."""
_REFINED = 2
_ORDERS: tuple[Family, ...] = ("kfkb", "depth", "capped")
_SETTLED = 8
"""Steps after which they are all alike."""
_MANY_PASSES = 256
"""With more stages times micro-batches, of all orders kFkB alone is looked at: the others take minutes."""


def pipelined(demand: Demand, site: Site, *, exactly: bool = False) -> Option:
    """The fastest pipeline on the first devices, of two stages or more; ``exactly``: on all of them."""
    most = min(len(site), len(demand.profile.blocks), demand.batch, MOST_STAGES)
    if most < 2 or (exactly and most < len(site)):
        least = len(site) if exactly and len(site) > 1 else 2
        return Option(
            strategy="pipeline",
            name="pipeline",
            batch=demand.batch,
            why_not=f"{least} stages need {least} devices, blocks and rows, and there are {len(site)}, "
            f"{len(demand.profile.blocks)} and {demand.batch}",
            works=f"{least} of each",
        )
    found: dict[int, Option] = {}
    refused: UsageError | None = None
    for stages in [most] if exactly else stages_worth_trying(most):
        try:
            found[stages] = _option(demand, site, _planned(demand, site, stages))
        except UsageError as error:
            refused = error
    if not found:
        assert refused is not None, "a number of stages was tried"
        return Option(
            strategy="pipeline",
            name="pipeline",
            batch=demand.batch,
            why_not=refused.what,
            works=readable(refused.works),
        )
    best = sorted(found, key=lambda stages: _step_ms(found[stages]))[:_REFINED]
    options = [found[best[0]], *(_refined(demand, site, found[stages]) for stages in best)]
    plans = dict.fromkeys(option.plan for option in options)
    played = [_option(demand, site, plan, play=True) for plan in plans if isinstance(plan, PipelinePlan)]
    return min(played, key=_step_ms)


def _step_ms(option: Option) -> float:
    assert option.step_ms is not None, "what was planned has a step"
    return option.step_ms


def _refined(demand: Demand, site: Site, option: Option) -> Option:
    """The best order for the number of stages of a plan, near its number of micro-batches."""
    plan = option.plan
    assert isinstance(plan, PipelinePlan), "an option of this strategy"
    stages, count = len(plan.stages), plan.order.micro_batches
    counts = sorted({max(stages, count // 2), count, min(2 * count, demand.batch)})
    large = stages * counts[-1] > _MANY_PASSES
    families = _ORDERS[:1] if large else _ORDERS
    return _option(demand, site, _planned(demand, site, stages, counts, families))


def stages_worth_trying(most: int) -> list[int]:
    """2, 3, 4, 6, 8, 12, 16 ... and the most."""
    return [stages for stages in ladder(most) if stages > 1]


def _planned(
    demand: Demand,
    site: Site,
    stages: int,
    micro_batches: Sequence[int] | None = None,
    families: Sequence[Family] = (),
) -> PipelinePlan:
    return planned(
        demand.profile,
        stages,
        global_batch=demand.batch,
        micro_batches=micro_batches,
        families=families,
        cluster=site.cluster,
        speeds=site.speeds[:stages],
        memory_bytes=site.budgets[:stages],
    )


def _steady_ms(plan: PipelinePlan, profile: Profile, cluster: Cluster) -> float:
    """A step among many: where an update holds up the next step, the first ones are shorter."""
    first_ms, second_ms = play_pipeline(plan, profile, cluster, steps=2, spans=1).steps_ms["job"]
    if math.isclose(first_ms, second_ms):
        return second_ms
    return play_pipeline(plan, profile, cluster, steps=_SETTLED, spans=1).steps_ms["job"][-1]


def _option(demand: Demand, site: Site, plan: PipelinePlan, *, play: bool = False) -> Option:
    staging, stages = Staging.of(plan, demand.profile), len(plan.stages)
    updates_ms = [ms / speed for ms, speed in zip(staging.optimizer_ms, site.speeds, strict=False)]
    forecast = plan.forecast
    step_ms = forecast.step_ms + updates_ms[0]
    if play:
        step_ms = _steady_ms(plan, demand.profile, site.cluster)
    crossing = wire_bytes_per_row(demand.profile.blocks)
    sent = 2.0 * demand.batch * sum(crossing[cut] for cut in plan.cuts)
    sent += sum(each.wire_bytes for each in staging.shared)
    free_ms = [
        max(0.0, step_ms - busy_ms - update_ms)
        for busy_ms, update_ms in zip(forecast.busy_ms, updates_ms, strict=True)
    ]
    busiest = min(range(stages), key=lambda stage: free_ms[stage])
    least, more = divmod(demand.batch, plan.order.micro_batches)
    return Option(
        strategy="pipeline",
        name="pipeline",
        batch=demand.batch,
        step_ms=step_ms,
        memory_bytes=dict(zip(site.names, forecast.peak_bytes, strict=False)),
        budget_bytes=dict(zip(site.names[:stages], site.budgets, strict=False)),
        wire_bytes=sent,
        parts_ms={
            "compute": forecast.busy_ms[busiest],
            "waiting": free_ms[busiest],
            "optimizer": updates_ms[busiest],
        },
        idle_ms={
            name: free_ms[place] if place < stages else step_ms for place, name in enumerate(site.names)
        },
        plan=plan,
        remarks=(
            *covering(demand.profile, [least or 1, least + bool(more)]),
            *(each.remark for each in staging.shared),
        ),
    )
