"""A host of a lab, as its user sees it: where it is, what passed its link, what its processes took."""

from __future__ import annotations

from plait.errors import LabError
from plait.lab.memory import MemoryGroup
from plait.lab.network import Network, address


class Host:
    """One host of a lab that has been entered."""

    def __init__(
        self, index: int, network: Network | None, memory: MemoryGroup | None, cores: tuple[int, ...] | None
    ) -> None:
        self.index = index
        self.cores = cores
        """The cores its processes run on; None: all."""
        self.memory = memory
        """The memory group of its processes, with all that is measured; None in a lab without a limit."""
        self._network = network

    @property
    def address(self) -> str:
        """Where other hosts reach it."""
        return "127.0.0.1" if self._network is None else address(self.index)

    @property
    def rate_bytes_per_second(self) -> float | None:
        """What its link is shaped to now, each way; None when it is not."""
        return None if self._network is None else self._network.rate(self.index)

    @property
    def sent_bytes(self) -> int:
        """What it has put on its link, as the kernel counts.

        The headers of a packet that is cut into frames later count once, so between payload and 4% more.
        """
        return self._wire().traffic(self.index)[0]

    @property
    def received_bytes(self) -> int:
        """What has arrived from its link, counted as `sent_bytes` is."""
        return self._wire().traffic(self.index)[1]

    @property
    def memory_peak_bytes(self) -> int | None:
        """The most anonymous plus shared memory its processes held; None in a lab without a memory limit.

        Read 20 times a second; page cache is left out, as it is given back when memory is needed.
        """
        return None if self.memory is None else self.memory.peak_resident_bytes

    @property
    def oom_kills(self) -> int | None:
        """How many of its processes were killed at the memory limit; None in a lab without one."""
        return None if self.memory is None else self.memory.oom_kills

    def _wire(self) -> Network:
        if self._network is None:
            raise LabError(
                "a loopback lab has no links of its own", setting="loopback", works="root, with iproute2"
            )
        return self._network
