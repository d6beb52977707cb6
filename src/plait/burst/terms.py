"""What a plan, a chain, a batch and the ranks must have in common before anything runs."""

from __future__ import annotations

from typing import Any

from plait.burst.burst_plan import BurstPlan
from plait.chain import Chain
from plait.errors import UsageError
from plait.units import parse_whole


def facts(plan: BurstPlan) -> dict[str, Any]:
    """What all ranks must agree on."""
    widths = dict(zip(plan.blocks, plan.widths, strict=True))
    return {"blocks": len(plan.blocks), "batch": plan.batch, "width of block": widths}


def check_plan(plan: BurstPlan, chain: Chain, world: int) -> None:
    """Refuse a plan of another chain, or for more devices than there are ranks."""
    names = [block.name for block in chain]
    pairs = enumerate(zip(plan.blocks, names, strict=False))
    other = next(
        (f"block {i} is {a!r} in the plan and {b!r} in the chain" for i, (a, b) in pairs if a != b), None
    )
    if len(plan.blocks) != len(names):
        other = f"the plan has {len(plan.blocks)} blocks and the chain {len(names)}"
    if other is not None:
        raise UsageError(other, setting="plan", works="a plan of a profile of this chain")
    if plan.width > world:
        raise UsageError(
            f"the plan's widest block is on {plan.width} devices, and there are {world} ranks",
            setting="plan",
            works=f"plan(..., devices={world}), or {plan.width} ranks",
        )


def check_rows(plan: BurstPlan, rows: int, micro_batches: int) -> None:
    """Refuse a batch that leaves a rank without a row."""
    parse_whole(micro_batches, setting="micro_batches")
    if rows // micro_batches < plan.width:
        parts = "" if micro_batches == 1 else f" in {micro_batches} micro-batches"
        raise UsageError(
            f"{rows} rows{parts} are too few for the widest block, which is on {plan.width} ranks",
            setting="batch",
            works=f"{plan.width * micro_batches} rows or more, so drop what is left over at the data's end",
        )
