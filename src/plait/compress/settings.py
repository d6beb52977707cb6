"""How compressed collectives run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from plait.compress.given import NUMBER, expect
from plait.compress.topology import Topology
from plait.errors import UsageError
from plait.units import parse_whole

Algorithm = Literal["auto", "scatter", "ring", "hierarchical"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The same on all workers of a group."""

    algorithm: Algorithm = "auto"
    """``hierarchical`` where several workers share a host and there are several hosts, else ``scatter``."""
    leaders: bool = False
    """Whether one worker of each host alone speaks to other hosts; otherwise they all share the wire."""
    inner_exact: bool = True
    """Whether numbers stay uncompressed on their way within a host, in the hierarchical algorithm."""
    chunk_bytes: int = 512 << 10
    """The size of a compressed message, at most about; 4 times that where nothing is compressed."""
    timeout_s: float = 60.0
    """How long nothing may happen before an operation ends with an error."""
    shared_memory: bool = True
    """Whether workers on one host exchange messages through memory that they share, rather than TCP."""
    verify: bool = False
    """Whether to check, after each operation, that all workers have the same bits."""

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            raise UsageError(
                f"there is no algorithm {self.algorithm!r}",
                setting="algorithm",
                works=", ".join(get_args(Algorithm)),
            )
        parse_whole(self.chunk_bytes, setting="chunk_bytes")
        for name in ("leaders", "inner_exact", "shared_memory", "verify"):
            expect(getattr(self, name), bool, setting=name, works="True or False")
        expect(self.timeout_s, NUMBER, setting="timeout_s", works="60")
        if not 0 < self.timeout_s < 1e9:
            raise UsageError(f"a timeout of {self.timeout_s} s", setting="timeout_s", works="60")

    def topology(self, hosts: tuple[tuple[int, ...], ...], *, everyone: bool = False) -> Topology | None:
        """Who works with whom; None for a ring. With ``everyone``, worker i owns share i."""
        world = sum(len(host) for host in hosts)
        if self.algorithm == "ring":
            return None
        levels = self.algorithm == "hierarchical" or (self.algorithm == "auto" and 1 < len(hosts) < world)
        lanes = min(len(host) for host in hosts)
        if not levels or (everyone and lanes * len(hosts) < world):
            return Topology.flat(world)
        return Topology(hosts, 1 if self.leaders and not everyone else lanes)
