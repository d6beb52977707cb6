"""The workers that train one job together: who they are, what they agree on, what they add up."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from plait.errors import WorkerError
from plait.worker import Place

PATIENCE = timedelta(minutes=10)
"""How long a collective may take before its rank gives up."""
_JOINS = itertools.count(1)
"""The meetings of this process; all workers of a job have the same ones."""


@dataclass(frozen=True, kw_only=True)
class World:
    """All workers of a job, seen from one of them."""

    place: Place
    device: torch.device
    """Where this worker's tensors are."""

    @property
    def rank(self) -> int:
        """Which worker this is."""
        return self.place.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.place.world

    @classmethod
    @contextmanager
    def join(cls, device: torch.device | str | None = None) -> Iterator[World]:
        """Meet the others as the torchrun contract says, unless the caller already has; leave at the end.

        The device is this worker's GPU where none is given, or the CPU where there is none.
        """
        place = Place.from_environment()
        if device is None:
            device = f"cuda:{place.local_rank}" if torch.cuda.is_available() else "cpu"
        where = torch.device(device)
        # What torch sends for Python objects goes over the current GPU, not that of any tensor.
        with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
            if dist.is_initialized():
                place = replace(place, rank=dist.get_rank(), world=dist.get_world_size())
                yield cls(place=place, device=where)
            elif place.world == 1:
                yield cls(place=place, device=where)
            else:
                backend = "nccl" if where.type == "cuda" else "gloo"
                dist.init_process_group(backend, timeout=PATIENCE, **_own_store(place, next(_JOINS)))
                try:
                    yield cls(place=place, device=where)
                finally:
                    dist.destroy_process_group()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value added up over all workers, in float64; every worker gets the same bits."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return sums.tolist()

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise on every worker if they do not hold the same facts, naming the first that differs."""
        if self.size == 1:
            return
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, dict(facts))
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs[name] != value:
                    raise WorkerError(
                        f"rank {rank} has {name} {theirs[name]} and rank 0 has {value}",
                        setting=name,
                        works="the same for every worker",
                    )

    def take_from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite the tensors with those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)


def _own_store(place: Place, join: int) -> dict[str, Any]:
    """Where workers meet that may have met before, as arguments of ``init_process_group``.

    torchrun's agent keeps one store for all that its workers do (torch 2.13), in which they may still find
    addresses of an earlier group of theirs, or of workers that died and were started again; so each attempt
    and each meeting gets keys of its own. Agents on several hosts count attempts differently, so these do
    not count there: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes a new store each time.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if place.local_world < place.world:
        attempt = "0"
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not kept or (attempt == "0" and join == 1):
        return {}
    torch_distributed: Any = dist  # whose stub does not export its stores
    agent = torch_distributed.TCPStore(place.address, place.port, is_master=False, timeout=PATIENCE)
    store = torch_distributed.PrefixStore(f"attempt_{attempt}_meeting_{join}", agent)
    return {"store": store, "rank": place.rank, "world_size": place.world}
