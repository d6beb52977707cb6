"""Who a worker is: the torchrun contract, read from and written to the environment.

The variables that ``torchrun`` sets are the only way a worker learns its place, so torchrun, Ray,
Slurm, Kubernetes and the lab can all start one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from plait.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Place:
    """One worker's place in its world."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = "127.0.0.1"
    port: int = 29500

    def __post_init__(self) -> None:
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise UsageError(
                f"rank {self.rank} is not in a world of {self.world}",
                setting="RANK, WORLD_SIZE",
                works=f"RANK from 0 to {max(self.world, 1) - 1}",
            )
        if not 0 <= self.port < 2**16:
            raise UsageError(f"{self.port} is not a port", setting="MASTER_PORT", works="29500")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Place:
        """Read the contract; a process that nobody launched is rank 0 of 1."""
        env = os.environ if environment is None else environment

        def number(name: str, default: int) -> int:
            text = env.get(name, str(default))
            try:
                return int(text)
            except ValueError:
                raise UsageError(f"{name}={text!r} is not a whole number", setting=name, works="0") from None

        return cls(
            rank=number("RANK", 0),
            world=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_world=number("LOCAL_WORLD_SIZE", 1),
            address=env.get("MASTER_ADDR", "127.0.0.1"),
            port=number("MASTER_PORT", 29500),
        )

    def environment(self) -> dict[str, str]:
        """The variables that tell a new process its place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago on this machine."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
