"""Whether all workers ask for the same, found out before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import WorkerError


def agree(facts: Mapping[str, Any], group: Any = None) -> None:
    """Raise on every worker of the group if their facts differ, naming the first that does."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(facts), group=group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    mine = everyone[0]
    for rank, theirs in zip(ranks, everyone, strict=True):
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name) or (name in mine) != (name in theirs):
                raise WorkerError(
                    f"rank {rank} has {name} {theirs.get(name, 'nowhere')} "
                    f"and rank {ranks[0]} has {mine.get(name, 'nowhere')}",
                    setting=name,
                    works="the same on every rank",
                )
