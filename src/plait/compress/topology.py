"""Who works with whom: which workers share a host, who adds up a share, and who stands in for it elsewhere.

    hosts = ((0, 1), (2, 3)), lanes = 2          hosts = ((0, 1), (2, 3)), lanes = 1 (one leader a host)

        host 0    host 1                             host 0    host 1
        0 ------- 2   lane 0: shares 0, 2            0 ------- 2   lane 0: shares 0, 2
        1 ------- 3   lane 1: shares 1, 3            1         3   send to, and hear from, their leader

Workers of a lane speak to each other across hosts, one on each. The owner of a share is in one lane; on
every other host its deputy is the worker of the same lane. Workers that are beyond the lanes own nothing.
With every worker a host of its own there is one lane, and everyone owns a share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from plait.errors import UsageError


@dataclass(frozen=True)
class Topology:
    """Workers (by position in their group) on hosts."""

    hosts: tuple[tuple[int, ...], ...]
    """The workers of each host, in order."""
    lanes: int = 1
    """How many workers of each host speak across hosts."""

    def __post_init__(self) -> None:
        seen = sorted(worker for host in self.hosts for worker in host)
        if seen != list(range(len(seen))) or not all(self.hosts) or not seen:
            raise UsageError(
                f"hosts {self.hosts} do not hold workers 0 to {max(len(seen), 1) - 1} once each",
                setting="hosts",
                works="((0, 1), (2, 3))",
            )
        most = min(len(host) for host in self.hosts)
        if not 1 <= self.lanes <= most:
            raise UsageError(
                f"{self.lanes} lanes where the smallest host has {most} workers",
                setting="lanes",
                works=f"1 to {most}",
            )

    @classmethod
    def flat(cls, world: int) -> Topology:
        """Every worker a host of its own."""
        return cls(tuple((worker,) for worker in range(world)))

    @property
    def world(self) -> int:
        """How many workers there are."""
        return sum(len(host) for host in self.hosts)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Who adds up each share: share i is ``owners[i]``'s."""
        return tuple(sorted(host[lane] for host in self.hosts for lane in range(self.lanes)))

    @cached_property
    def _seats(self) -> dict[int, tuple[int, int]]:
        return {worker: (h, lane) for h, host in enumerate(self.hosts) for lane, worker in enumerate(host)}

    def host(self, worker: int) -> tuple[int, ...]:
        """The workers on a worker's host, itself among them."""
        return self.hosts[self._seats[worker][0]]

    def deputy(self, worker: int, owner: int) -> int:
        """Who, on the worker's host, collects what is for the owner; the owner itself on its own host."""
        return self.host(worker)[self._seats[owner][1]]

    def lane(self, owner: int) -> tuple[int, ...]:
        """The owner and its deputies, one on each host, in the order of hosts."""
        return tuple(host[self._seats[owner][1]] for host in self.hosts)
