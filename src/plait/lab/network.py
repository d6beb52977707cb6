"""The wires of a lab: a namespace a host, a switch in a namespace of its own, every port shaped both ways.

        host 0                 switch                 host 1
    +------------+       +-----------------+       +------------+
    | lab0 [htb] |=======| port0     port1 |=======| [htb] lab0 |
    +------------+  veth | [htb]     [htb] | veth  +------------+
                         |     bridge      |
                         +-----------------+

A queueing discipline acts where packets leave a device, so a host's sending is shaped at its own end of the
veth pair and its receiving at the switch's end: full duplex, as a port of a real switch. Nothing appears in
the machine's own network namespace.

htb rather than tbf: a packet that is larger than the bucket passes it on credit, while tbf would never let it
go, and a link whose rate is lowered under traffic would be dead from then on.

The rate is that of Ethernet frames. Of 1514 bytes in a full frame TCP carries 1448, so the most that an
application can see is 95.6% of the rate.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from plait.errors import LabError, UsageError
from plait.lab.label import Label
from plait.units import parse_rate

INTERFACE = "lab0"
"""The name of a host's network device, inside the host."""
NAMESPACES = Path("/run/netns")
MOST_HOSTS = 250
_LEAST_RATE = 1_000.0
"""Bytes per second; below it the kernel's arithmetic of a bucket overflows, and nobody could wait for it."""
_MOST_RATE = 125e9
"""1 Tbit/s; some way above, tc rounds a bucket down to nothing, and from 2**64 bit/s on it wraps around."""
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21


def missing() -> str | None:
    """What this process lacks to make namespaces and shape links, or None when it has it all."""
    if os.geteuid() != 0:
        return "root"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} (Debian package iproute2)"
    status = Path("/proc/self/status").read_text()
    effective = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
    names = {_CAP_NET_ADMIN: "CAP_NET_ADMIN", _CAP_SYS_ADMIN: "CAP_SYS_ADMIN"}
    absent = [name for bit, name in names.items() if not effective >> bit & 1]
    return " and ".join(absent) or None


def address(host: int) -> str:
    """A host's address, from the range that RFC 2544 sets aside for measuring networks."""
    return f"198.18.0.{host + 1}"


@dataclass(frozen=True, kw_only=True)
class Door:
    """What a process needs to know to enter a host."""

    namespace: Path
    hostname: str
    hosts_file: str
    """What ``/etc/hosts`` says inside."""


def parse_link_rate(rate: str | float | None, *, setting: str = "rate") -> float | None:
    """Read a link's rate in bytes per second; None means that the link is not shaped."""
    if rate is None:
        return None
    value = parse_rate(rate, setting=setting)
    if not _LEAST_RATE <= value <= _MOST_RATE:
        raise UsageError(f"a link cannot run at {rate!r}", setting=setting, works="8kbit to 1tbit, or none")
    return value


def burst_bytes(rate: float) -> int:
    """How much a link may send at once after a pause: half a millisecond's worth, from 8 to 640 KiB.

    A real wire has no burst: each byte of it makes a short transfer look faster than it is. But on a busy
    machine the timer that refills the bucket is late, and a bucket that is full meanwhile loses what it could
    not hold: a burst of one frame cost 5% of 1 Gbit/s here, and more of 10.
    """
    return int(min(max(rate / 2000, 8 * 2**10), 640 * 2**10))


def segment_bytes(rate: float) -> int:
    """The largest packet that a new connection hands to a host's link: a burst, 64 KiB at most.

    A packet of many frames costs the processors a tenth of what its frames would. At a low rate it would hold
    up the others for milliseconds, so packets are smaller there.
    """
    return min(burst_bytes(rate), 65536)


def queue_bytes(rate: float) -> int:
    """How much a port holds before it drops: 20 ms of its rate, between 128 KiB and 16 MiB."""
    return int(min(max(rate / 50, 128 * 2**10), 16 * 2**20))


def _shape(device: str, before: float | None, rate: float | None) -> list[str]:
    """The lines for tc that take a device from one rate to another; what waits in its queue stays there."""
    if rate is None:
        return [f"qdisc del dev {device} root"]
    first = [f"qdisc add dev {device} root handle 1: htb default 1"] if before is None else []
    bits, burst = f"{round(rate * 8)}bit", burst_bytes(rate)
    bucket = f"rate {bits} ceil {bits} burst {burst} cburst {burst} quantum 65536"
    return [
        *first,
        f"class replace dev {device} parent 1: classid 1:1 htb {bucket}",
        f"qdisc replace dev {device} parent 1:1 handle 10: bfifo limit {queue_bytes(rate)}",
    ]


def _batch(tool: str, lines: list[str], *, namespace: str | None = None) -> None:
    inside = [] if namespace is None else ["-n", namespace]
    _call([tool, *inside, "-batch", "-"], "".join(line + "\n" for line in lines))


def _call(command: list[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(
            f"`{' '.join(command)}` failed: {said}",
            setting="loopback",
            works="a loopback lab, on this machine as it is",
        )
    return done.stdout


class Network:
    """The namespaces and links of one lab, from ``build`` until what carries the label is removed."""

    def __init__(self, label: Label, hosts: int) -> None:
        self._switch = f"{label}-switch"
        self._hosts = [f"{label}-host{i}" for i in range(hosts)]
        self._rates: list[float | None] = [None] * hosts
        self._lock = threading.Lock()

    def door(self, host: int) -> Door:
        """How to enter a host; inside, the others are known as host0, host1 and so on."""
        names = ["127.0.0.1 localhost"]
        for i in range(len(self._hosts)):
            # The second form is how a socket that speaks both IPs (torch's stores) sees the address.
            names += [f"{address(i)} host{i}", f"::ffff:{address(i)} host{i}"]
        return Door(
            namespace=NAMESPACES / self._hosts[host],
            hostname=f"host{host}",
            hosts_file="".join(name + "\n" for name in names),
        )

    def rate(self, host: int) -> float | None:
        """The rate that a host's link has now, in bytes per second."""
        return self._rates[host]

    def build(self, rate: float | None) -> None:
        """Make hosts, switch and links, all at one rate."""
        _batch("ip", [f"netns add {name}" for name in (self._switch, *self._hosts)])
        lines = ["link add switch0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0"]
        lines += ["link set switch0 addrgenmode none up"]
        for i, name in enumerate(self._hosts):
            lines += [
                f"link add port{i} type veth peer name {INTERFACE} netns {name}",
                f"link set port{i} master switch0 addrgenmode none up",
            ]
        _batch("ip", lines, namespace=self._switch)
        # One congestion control everywhere: the machine's own default would make labs incomparable.
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        control = "congctl cubic" if "cubic" in known else ""
        for i, name in enumerate(self._hosts):
            lines = [
                "link set lo up",
                f"link set {INTERFACE} addrgenmode none up",
                f"addr add {address(i)}/24 dev {INTERFACE}",
                f"route replace 198.18.0.0/24 dev {INTERFACE} src {address(i)} {control}",
            ]
            _batch("ip", lines, namespace=name)
        if rate is not None:
            self.set_rate(rate, range(len(self._hosts)))

    def set_rate(self, rate: float | None, hosts: Iterable[int]) -> None:
        """Shape the links of some hosts, both directions, from now on."""
        with self._lock:
            changed = [host for host in hosts if self._rates[host] != rate]
            for host in changed:
                self._shape_host(host, rate)
            lines = [_shape(f"port{host}", self._rates[host], rate) for host in changed]
            _batch("tc", [line for one in lines for line in one], namespace=self._switch)
            for host in changed:
                self._rates[host] = rate

    def _shape_host(self, host: int, rate: float | None) -> None:
        name = self._hosts[host]
        largest = 65536 if rate is None else segment_bytes(rate)
        _call(["ip", "-n", name, "link", "set", INTERFACE, "gso_max_size", str(largest)])
        _batch("tc", _shape(INTERFACE, self._rates[host], rate), namespace=name)

    def set_link(self, host: int, *, up: bool) -> None:
        """Plug a host's port into the switch, or out of it.

        The port itself stays up: taking it down would take the kernel up to a second to undo.
        """
        plug = ["master", "switch0"] if up else ["nomaster"]
        _call(["ip", "-n", self._switch, "link", "set", f"port{host}", *plug])

    def traffic(self, host: int) -> tuple[int, int]:
        """Bytes that a host has sent to and received from its link, as the kernel counts them."""
        said = _call(["ip", "-n", self._hosts[host], "-s", "-j", "link", "show", INTERFACE])
        counts = json.loads(said)[0]["stats64"]
        return counts["tx"]["bytes"], counts["rx"]["bytes"]
