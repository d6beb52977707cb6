"""What a plan, a chain, a batch and the ranks must have in common before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from plait.burst.burst_plan import BurstPlan
from plait.chain import Chain
from plait.compat import tree_leaves
from plait.errors import UsageError, WorkerError
from plait.units import parse_whole

if TYPE_CHECKING:
    from plait.burst.sync import Trained

_PLAN = ("plan", "the same plan on every rank: save it once, and load it everywhere")
_BATCH = ("batch", "the whole batch, the same on every rank")
_MODEL = ("model", "the same model on every rank, with the same dtypes and requires_grad")
_SETTINGS = {
    "blocks": _PLAN,
    "batch": _PLAN,
    "width of block": _PLAN,
    "trained parameters": _MODEL,
    "trained parameter": _MODEL,
    "step": ("step", "the same calls on every rank"),
    "rows": _BATCH,
    "form of the batch": _BATCH,
}
"""By fact, the setting that it depends on, and what works; others are settings themselves."""


def facts(plan: BurstPlan) -> dict[str, Any]:
    """What all ranks must agree on."""
    widths = dict(zip(plan.blocks, plan.widths, strict=True))
    return {"blocks": len(plan.blocks), "batch": plan.batch, "width of block": widths}


def parameters(trained: Sequence[Trained]) -> dict[str, Any]:
    """What all ranks must agree on of each parameter."""
    some = {each.name: f"{str(each.dtype).removeprefix('torch.')}, {each.bytes} bytes" for each in trained}
    return {"trained parameter": some}


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


def check_learns(output: Any, chain: Chain) -> None:
    """Refuse a loss without a gradient where one was wanted: steps would pass, and nothing be learned."""
    if not torch.is_grad_enabled():
        return
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
        raise UsageError(
            "the loss does not follow from the output by steps that have a gradient",
            setting="loss",
            works="a loss of the output, computed with gradients enabled",
        )
    if any(parameter.requires_grad for _, parameter in chain.named_parameters()):
        raise UsageError(
            "the model's output does not follow from its parameters by steps that have a gradient",
            setting="model",
            works="an output that is not detached, computed with gradients enabled",
        )


def compare(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise where ranks do not hold the same facts, naming the first that differs; facts may be nested."""
    for rank, theirs in enumerate(everyone):
        compare_two(0, everyone[0], rank, theirs)


def compare_two(first: int, ours: Mapping[str, Any], second: int, theirs: Mapping[str, Any]) -> None:
    """Raise where two ranks do not hold the same facts."""
    found = _difference(ours, theirs, "")
    if found is not None:
        where, one, other = found
        fact = where.split(" '")[0]
        setting, works = _SETTINGS.get(fact, (fact, f"the same {fact} on every rank"))
        raise WorkerError(
            f"rank {second} has {where} {other!r}, and rank {first} has {one!r}", setting=setting, works=works
        )


def _difference(ours: Any, theirs: Any, where: str) -> tuple[str, Any, Any] | None:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for name in dict.fromkeys([*ours, *theirs]):
            found = _difference(ours.get(name), theirs.get(name), f"{where} {name!r}" if where else name)
            if found is not None:
                return found
        return None
    return None if ours == theirs else (where, ours, theirs)
