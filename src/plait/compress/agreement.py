"""Whether all workers are there and ask for the same, found out before anything is sent.

Why not a collective of torch's alone: where a worker does not come, the others wait in it for the group's own
timeout (half an hour with gloo), and then nobody is named.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from plait.errors import WorkerError

_MET = "met"
_LONGEST_PAUSE_S = 0.1
"""Between two looks at whether the others have come."""


def agree(facts: Mapping[str, Any], group: Any = None, *, timeout_s: float = 60.0) -> None:
    """Raise on every worker of the group if their facts differ, naming the first that does."""
    import torch.distributed as dist

    everyone = gather(dict(facts), group, purpose="compare what it asks for", timeout_s=timeout_s)
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


def gather(mine: object, group: Any, *, purpose: str, timeout_s: float) -> list[Any]:
    """What each worker of the group has brought, once all have come for the same purpose."""
    import torch.distributed as dist

    meet(group, purpose=purpose, timeout_s=timeout_s)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def meet(group: Any, *, purpose: str, timeout_s: float) -> None:
    """Wait until all workers of the group have come; if one does not, raise on all that do, naming it.

    They meet at the store through which torch made the group, which also counts each worker's meetings. A
    meeting has one outcome, written once: by the last to come, or by the first to lose patience. So one
    that comes too late learns that the others have gone, and does not wait for them.
    """
    import torch.distributed as dist

    group = group or dist.group.WORLD
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    if len(ranks) == 1:
        return
    try:
        store, place = group.get_group_store(), f"plait, to {purpose}"
        number = store.add(f"{place}: meetings of {rank}", 1)
        outcome = f"{place}: outcome of {number}"
        if store.add(f"{place}: present at {number}", 1) == len(ranks):
            store.compare_set(outcome, "", _MET)
        elif not _appears(store, outcome, timeout_s):
            missing = [other for other in ranks if store.add(f"{place}: meetings of {other}", 0) < number]
            complaint = f"{named(missing)} did not come to {purpose}: rank {rank} waited {timeout_s:g} s"
            store.compare_set(outcome, "", complaint if missing else _MET)
        found = store.get(outcome).decode()
    except dist.DistError as error:
        raise WorkerError(f"rank {rank} lost the store of its process group: {error}") from None
    if found != _MET:
        raise WorkerError(
            found, setting="timeout_s", works=f"the same calls on every rank, or more than {timeout_s:g}"
        )


def _appears(store: Any, key: str, timeout_s: float) -> bool:
    """Whether a key is set in time.

    Asked again and again, as ``store.wait`` would keep other threads from the store, and signals from us.
    """
    begun = time.monotonic()
    while not store.check([key]):
        waited = time.monotonic() - begun
        if waited >= timeout_s:
            return False
        time.sleep(min(max(waited / 10, 0.0005), _LONGEST_PAUSE_S, timeout_s - waited))
    return True


def named(ranks: Sequence[int]) -> str:
    """Ranks, for people."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
